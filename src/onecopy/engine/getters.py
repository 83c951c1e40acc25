"""What DeepSpeed's engine answers about its configuration: one method a question, no arguments."""

from typing import Any

import torch

from onecopy.comm import Communicator
from onecopy.comm.model_parallel import ModelParallel
from onecopy.config import Config


class ConfigGetters:
    """Reads `self.configuration` (the resolved `Config`); mixed into the engine."""

    configuration: Config
    communicator: Communicator
    model_parallel: ModelParallel | None

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.configuration.train_micro_batch_size_per_gpu

    def gradient_clipping(self) -> float:
        return self.configuration.gradient_clipping

    def gradient_predivide_factor(self) -> float:
        return self.configuration.gradient_predivide_factor

    def postscale_gradients(self) -> bool:
        return not self.configuration.prescale_gradients

    def steps_per_print(self) -> int | None:
        return self.configuration.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        return self.configuration.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        return self.configuration.memory_breakdown

    def dump_state(self) -> bool:
        return self.configuration.dump_state

    def fp16_enabled(self) -> bool:
        return self.configuration.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self.configuration.bf16.enabled

    def fp16_auto_cast(self) -> bool:
        return self.configuration.fp16.auto_cast

    def fp16_master_weights_and_gradients(self) -> bool:
        return False

    def bf16_master_weights_and_gradients(self) -> bool:
        return False

    def bf16_optimizer_states(self) -> bool:
        return False

    def torch_autocast_enabled(self) -> bool:
        return self.configuration.torch_autocast.enabled

    def torch_autocast_dtype(self) -> torch.dtype:
        return self.configuration.torch_autocast.dtype or torch.bfloat16

    def torch_autocast_lower_precision_safe_modules(self) -> list[str] | None:
        names = self.configuration.torch_autocast.lower_precision_safe_modules
        return None if names is None else list(names)

    def managed_gradient_accumulation(self) -> bool:
        """Whether `step()` counts; unset counts too, with the exception that docs/config.md describes."""
        return self.configuration.managed_gradient_accumulation is not False

    def curriculum_learning_enabled(self) -> bool:
        return False

    autotuning_enabled = data_efficiency_enabled = data_sampling_enabled = curriculum_learning_enabled
    random_ltd_enabled = is_deepcompile_enabled = curriculum_learning_enabled
    super_offload = optimizer_legacy_fusion = is_sanity_checks_enabled = curriculum_learning_enabled

    def flops_profiler_enabled(self) -> bool:
        return self.configuration.flops_profiler.enabled

    def flops_profiler_recompute_fwd_factor(self) -> float:
        return self.configuration.flops_profiler.recompute_fwd_factor

    def flops_profiler_profile_step(self) -> int:
        return self.configuration.flops_profiler.profile_step

    def flops_profiler_module_depth(self) -> int:
        return self.configuration.flops_profiler.module_depth

    def flops_profiler_top_modules(self) -> int:
        return self.configuration.flops_profiler.top_modules

    def flops_profiler_detailed(self) -> bool:
        return self.configuration.flops_profiler.detailed

    def flops_profiler_output_file(self) -> str | None:
        return self.configuration.flops_profiler.output_file

    def dynamic_loss_scale(self) -> bool:
        return self.configuration.fp16.enabled and self.configuration.fp16.loss_scale == 0

    def initial_dynamic_scale(self) -> float:
        return self.configuration.fp16.initial_scale

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        fp16 = self.configuration.fp16
        return {
            "init_scale": fp16.initial_scale,
            "scale_window": fp16.loss_scale_window,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
            "min_scale": fp16.min_loss_scale,
        }

    def optimizer_name(self) -> str | None:
        return self.configuration.optimizer.type if self.configuration.optimizer else None

    def optimizer_params(self) -> dict[str, Any] | None:
        return self.configuration.optimizer.params if self.configuration.optimizer else None

    def scheduler_name(self) -> str | None:
        return self.configuration.scheduler.type if self.configuration.scheduler else None

    def scheduler_params(self) -> dict[str, Any] | None:
        return self.configuration.scheduler.params if self.configuration.scheduler else None

    def dataloader_drop_last(self) -> bool:
        return self.configuration.dataloader_drop_last

    def use_node_local_storage(self) -> bool:
        return self.configuration.checkpoint.use_node_local_storage

    def load_universal_checkpoint(self) -> bool:
        return self.configuration.checkpoint.load_universal

    def checkpoint_tag_validation_enabled(self) -> bool:
        return self.configuration.checkpoint.tag_validation.lower() != "ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        return self.configuration.checkpoint.tag_validation.lower() == "fail"

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The compute dtype and the dtype gradients are accumulated in."""
        return self.configuration.compute_dtype, self.configuration.data_types.grad_accum_dtype or torch.float32

    @property
    def communication_data_type(self) -> torch.dtype:
        return self.configuration.communication_data_type or self.configuration.compute_dtype

    # ----------------------------------------------------------------------------------------------------------- groups
    def get_data_parallel_rank(self) -> int:
        """This rank's number in the shard group."""
        return self.communicator.rank

    def get_model_parallel_rank(self) -> int:
        return 0 if self.model_parallel is None else self.model_parallel.rank

    @property
    def mp_world_size(self) -> int:
        """Ranks that compute one model together: of the `mpu`'s model-parallel group, 1 without one."""
        return 1 if self.model_parallel is None else self.model_parallel.world_size

    @property
    def seq_dp_world_size(self) -> int:
        return self.communicator.world_size

    @property
    def data_parallel_group(self) -> Any:
        """The group of ranks that the training state is sharded over."""
        return self.communicator.group

    seq_data_parallel_group = data_parallel_group

    # ------------------------------------------------------------------------------------------------------------- zero
    def zero_optimization(self) -> bool:
        return self.configuration.zero.stage > 0

    def zero_optimization_stage(self) -> int:
        return self.configuration.zero.stage

    def zero_optimization_partition_gradients(self) -> bool:
        return self.configuration.zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.configuration.zero.stage >= 3

    def zero_cpu_offload(self) -> bool:
        return False

    zero_use_cpu_optimizer = zero_nvme_offload_optimizer = zero_cpu_offload

    def zero_partial_offload(self) -> float:
        return 1.0

    def zero_multi_rank_bucket_allreduce(self) -> bool:
        return self.configuration.zero.use_multi_rank_bucket_allreduce

    def zero_allow_untested_optimizer(self) -> bool:
        return self.configuration.zero_allow_untested_optimizer


def _zero_getter(key: str) -> Any:
    def getter(self: ConfigGetters) -> Any:
        zero = self.configuration.zero
        return getattr(zero, key) if hasattr(zero, key) else getattr(zero, f"zero_{key}")

    getter.__name__ = f"zero_{key}"
    getter.__doc__ = f"`zero_optimization.{key}`."
    return getter


for _key in (
    "allgather_bucket_size", "allgather_partitions", "allgather_sequential", "compute_grad_norm", "contiguous_gradients",
    "elastic_checkpoint", "gather_16bit_weights_on_model_save", "hpz_partition_size", "ignore_unused_parameters",
    "legacy_stage1", "load_from_fp32_weights", "log_trace_cache_warnings", "max_live_parameters", "max_reuse_distance",
    "model_persistence_threshold", "module_granularity_threshold", "offload_optimizer", "offload_param", "overlap_comm",
    "param_persistence_threshold", "parameter_alignment", "prefetch_bucket_size",
    "quantized_gradients", "quantized_nontrainable_weights", "quantized_weights", "reduce_bucket_size", "reduce_scatter",
    "round_robin_gradients", "sub_group_size",
):  # fmt: skip
    setattr(ConfigGetters, f"zero_{_key}", _zero_getter(_key))
