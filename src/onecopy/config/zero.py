"""The `zero_optimization` block: which training state is sharded, and the limits on what is whole at a time."""

# ruff: noqa: RUF009  # `key` and `block` return dataclass fields
from __future__ import annotations

import sys
from dataclasses import dataclass

from onecopy.config.keys import above, block, cases, key, when
from onecopy.config.keys import given as if_given
from onecopy.config.kinds import Anything, Choice, Integer, Names, Number, StageNumber, Switch, Text

NO_OFFLOAD = (
    "onecopy keeps every state on the training device and does not offload; "
    'remove the block or write "device": "none", and use stage 3 or more ranks if memory is short'
)
ELEMENTS = "elements"
STAGES = (
    (0, "every rank keeps all parameters, gradients and optimizer states"),
    (1, "masters and moments are sharded over the ranks"),
    (2, "gradients, masters and moments are sharded over the ranks"),
    (3, "parameters, gradients, masters and moments are sharded over the ranks"),
)


@dataclass(frozen=True, slots=True)
class OffloadParamConfig:
    """`offload_param`: parsed, and refused unless its device is "none"."""

    device: str = key("none", Choice(("none", "cpu", "nvme")), "where released parameters go", verdict="implied")
    nvme_path: str | None = key(None, Text(), "folder on a local disk", verdict="ignored")
    buffer_count: int = key(5, Integer(1), "buffers of the disk", verdict="ignored")
    buffer_size: int = key(100_000_000, Integer(1, unit=ELEMENTS), "size of one such buffer", verdict="ignored")
    max_in_cpu: int = key(1_000_000_000, Integer(0, unit=ELEMENTS), "kept in host memory", verdict="ignored")
    pin_memory: bool = key(True, Switch(), "page-locked host memory", verdict="ignored")


@dataclass(frozen=True, slots=True)
class OffloadOptimizerConfig:
    """`offload_optimizer`: parsed, and refused unless its device is "none"."""

    device: str = key("none", Choice(("none", "cpu", "nvme")), "where masters and moments go", verdict="implied")
    nvme_path: str | None = key(None, Text(), "folder on a local disk", verdict="ignored")
    buffer_count: int = key(4, Integer(1), "buffers of the disk", verdict="ignored")
    pin_memory: bool = key(True, Switch(), "page-locked host memory", verdict="ignored")
    pipeline_read: bool = key(False, Switch(), "read ahead from disk", verdict="ignored")
    pipeline_write: bool = key(False, Switch(), "write behind to disk", verdict="ignored")
    fast_init: bool = key(False, Switch(), "fast start from disk", verdict="ignored")
    ratio: float = key(1.0, Number(0, 1), "part of the step done on the host", verdict="ignored")
    super_offload: bool = key(False, Switch(), "offload for linked processors", verdict="ignored")
    cpuadam_cores_perc: float = key(0.8, Number(0, 1), "part of the cores for the host's step", verdict="ignored")


@dataclass(frozen=True, slots=True)
class LeafModuleConfig:
    """`leaf_module`: modules whose parameters form one unit with all their children's."""

    classes: tuple[str, ...] = key((), Names(), "a module of a class named here is one unit")
    names: tuple[str, ...] = key((), Names(), "a module with a path named here is one unit")
    name_suffixes: tuple[str, ...] = key((), Names(), "a module whose path ends so is one unit")


@dataclass(frozen=True, slots=True)
class ZeroConfig:
    """The ZeRO stage and its limits; sizes are in elements, never bytes.

    `given` holds the short names of the keys that were written.
    """

    stage: int = key(
        0,
        StageNumber(),
        "which states are sharded over the ranks",
        auto=False,
        judge=cases(STAGES),
    )
    contiguous_gradients: bool = key(
        True,
        Switch(),
        "gradients always go to a flat buffer",
        verdict="implied",
        judge=when(False, "ignored", "gradients go to a flat buffer whatever this says; the results are the same"),
    )
    reduce_scatter: bool = key(
        True,
        Switch(),
        "gradients are reduce-scattered to the owner of each shard",
        verdict="implied",
        judge=when(
            False, "ignored", "gradients are reduced to the owner only, which sends less; the results are the same"
        ),
    )
    reduce_bucket_size: int = key(
        500_000_000,
        Integer(1, unit=ELEMENTS),
        "caps the elements of one flat buffer, which is what one reduction carries",
    )
    use_multi_rank_bucket_allreduce: bool = key(
        True,
        Switch(),
        "every rank owns an equal part of every flat buffer, so one reduction serves all owners",
        verdict="implied",
    )
    allgather_partitions: bool = key(
        True,
        Switch(),
        "whole parameters are refreshed by all-gathers, since every rank owns a part of every flat buffer",
        verdict="implied",
    )
    allgather_bucket_size: int = key(
        500_000_000,
        Integer(1, unit=ELEMENTS),
        "caps the elements of one flat buffer, which is what one refresh carries; the smaller of it and "
        "reduce_bucket_size counts",
        stages=(0, 1, 2),
    )
    overlap_comm: bool = key(
        True,
        Switch(),
        "gathers and reductions run beside the computation",
        judge=when(False, "honoured", "every gather and reduction is waited for at once"),
    )
    compute_grad_norm: bool = key(
        True,
        Switch(),
        "the gradient norm is part of the check for non-finite gradients and costs no pass of its own",
        verdict="implied",
        judge=when(False, "ignored", "the norm is computed anyway, with the check for non-finite gradients"),
    )
    load_from_fp32_weights: bool = key(
        True,
        Switch(),
        "masters are restored from the fp32 values of a checkpoint",
        verdict="implied",
        judge=when(False, "ignored", "masters are restored from a checkpoint's fp32 values whenever it has them"),
    )
    elastic_checkpoint: bool = key(
        False, Switch(), "checkpoints are independent of the number of ranks", verdict="implied"
    )
    offload_param: OffloadParamConfig | None = block(
        OffloadParamConfig, "refused unless its device is none", optional=True, auto=True
    )
    offload_optimizer: OffloadOptimizerConfig | None = block(
        OffloadOptimizerConfig, "refused unless its device is none", optional=True, auto=True
    )
    zenflow: None = key(
        None,
        Anything(),
        "off",
        verdict="ignored",
        judge=if_given("refused", "onecopy has no ZenFlow (asynchronous selective updates); remove the block"),
    )
    sub_group_size: int = key(
        1_000_000_000,
        Integer(0, unit=ELEMENTS),
        "the optimizer is stepped flat buffer by flat buffer, none of which is larger than the bucket sizes",
        verdict="implied",
    )
    prefetch_bucket_size: int = key(
        50_000_000,
        Integer(0, unit=ELEMENTS),
        "bounds how far gathering runs ahead of the computation (the next unit always does); 0 gathers each unit when it is needed",
        name="stage3_prefetch_bucket_size",
        aliases=("prefetch_bucket_size",),
        stages=(3,),
    )
    param_persistence_threshold: int = key(
        100_000,
        Integer(0, unit=ELEMENTS),
        "parameters smaller than this stay whole on every rank; their optimizer states are sharded",
        name="stage3_param_persistence_threshold",
        aliases=("param_persistence_threshold",),
        stages=(3,),
    )
    model_persistence_threshold: int = key(
        sys.maxsize,
        Integer(0, unit=ELEMENTS),
        "bounds the total of the parameters that stay whole",
        name="stage3_model_persistence_threshold",
        aliases=("model_persistence_threshold",),
        stages=(3,),
        default_word="1% of the model, or unlimited if stage3_param_persistence_threshold is written",
    )
    max_live_parameters: int = key(
        1_000_000_000,
        Integer(0, unit=ELEMENTS),
        "bounds the parameters gathered at a time, that is the total of the slots",
        name="stage3_max_live_parameters",
        aliases=("max_live_parameters",),
        stages=(3,),
        default_word="onecopy.slots of the largest unit",
    )
    max_reuse_distance: int = key(
        1_000_000_000,
        Integer(0, unit=ELEMENTS),
        "a unit used again within this many elements keeps its slot, if one is free to be kept",
        name="stage3_max_reuse_distance",
        aliases=("max_reuse_distance",),
        stages=(3,),
    )
    gather_16bit_weights_on_model_save: bool = key(
        False,
        Switch(),
        "save_16bit_model may gather the whole weights",
        name="stage3_gather_16bit_weights_on_model_save",
        aliases=("gather_16bit_weights_on_model_save",),
        deprecated=("stage3_gather_fp16_weights_on_model_save", "gather_fp16_weights_on_model_save"),
        stages=(3,),
    )
    module_granularity_threshold: int = key(
        0,
        Integer(0, unit="elements a module"),
        "a module with fewer elements for each of its modules forms one unit with all its children; 0 is off",
        name="stage3_module_granularity_threshold",
        aliases=("module_granularity_threshold",),
    )
    use_all_reduce_for_fetch_params: bool = key(
        False,
        Switch(),
        "parameters are fetched by all-gathers, which send half as much",
        verdict="ignored",
        name="stage3_use_all_reduce_for_fetch_params",
        aliases=("use_all_reduce_for_fetch_params",),
        stages=(3,),
    )
    allgather_sequential: bool = key(
        False,
        Switch(),
        "units are gathered ahead within the prefetch bucket",
        judge=when(True, "honoured", "no unit is gathered ahead: the prefetch bucket counts as 0"),
        name="stage3_allgather_sequential",
        aliases=("allgather_sequential",),
        stages=(3,),
    )
    ignore_unused_parameters: bool = key(
        True,
        Switch(),
        "a parameter without a gradient on every rank is left untouched by the step",
        judge=when(False, "honoured", "the step raises, naming the parameters that got no gradient"),
    )
    legacy_stage1: bool = key(
        False,
        Switch(),
        "off",
        verdict="ignored",
        judge=when(True, "refused", "the legacy stage 1 does not exist any more; remove the key"),
    )
    round_robin_gradients: bool = key(
        False,
        Switch(),
        "every rank owns an equal part of every flat buffer, so the work of a step is even already",
        verdict="implied",
    )
    parameter_alignment: bool = key(
        False, Switch(), "every parameter starts at a multiple of 64 elements of its flat buffer", verdict="implied"
    )
    zero_hpz_partition_size: int = key(
        1,
        Integer(0, unit="ranks"),
        "0 or 1: no secondary shards",
        verdict="implied",
        judge=above(
            1, "refused", "onecopy has no secondary shards in groups of ranks (hpZ); write 1 or remove the key"
        ),
    )
    zero_quantized_weights: bool = key(
        False,
        Switch(),
        "weights are sent in the compute dtype",
        verdict="implied",
        judge=when(True, "refused", "onecopy does not send quantized weights (qwZ); write false or remove the key"),
    )
    zero_quantized_nontrainable_weights: bool = key(
        False,
        Switch(),
        "frozen weights are sent in the compute dtype",
        verdict="implied",
        judge=when(True, "refused", "onecopy does not send quantized weights (qwZ); write false or remove the key"),
    )
    zero_quantized_gradients: bool = key(
        False,
        Switch(),
        "gradients are sent in communication_data_type",
        verdict="implied",
        judge=when(
            True,
            "refused",
            'onecopy does not send quantized gradients (qgZ); write false, and "communication_data_type": "bf16"',
        ),
    )
    memory_efficient_linear: bool = key(
        True,
        Switch(),
        "no linear layer keeps a copy of its whole weight, and torch's own linear function is left in place",
        verdict="implied",
    )
    pipeline_loading_checkpoint: bool = key(
        False, Switch(), "checkpoints are read straight into shards", verdict="ignored"
    )
    override_module_apply: bool = key(
        True, Switch(), "Module.apply inside zero.Init sees whole parameters", verdict="implied"
    )
    log_trace_cache_warnings: bool = key(
        False, Switch(), "a change of the recorded order is handled without a warning", verdict="ignored"
    )
    enable_sanity_checks: bool = key(
        False, Switch(), "the order of the collectives is always checked", verdict="implied"
    )
    save_muon_momentum_buffer_in_memory: bool = key(False, Switch(), "concerns Muon only", verdict="ignored")
    leaf_module: LeafModuleConfig = block(LeafModuleConfig, "decides where one unit ends and the next begins")
    given: frozenset[str] = frozenset()


REPLACED = {
    "cpu_offload": ("offload_optimizer", '"offload_optimizer": {"device": "cpu"}'),
    "cpu_offload_param": ("offload_param", '"offload_param": {"device": "cpu"}'),
}
