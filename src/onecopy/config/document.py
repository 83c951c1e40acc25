"""`Config`: the whole document, resolved, with what every key of it does."""

# ruff: noqa: RUF009  # `key` and `block` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onecopy.config.batch import EFFECTS, MICRO, TRAIN, WINDOW
from onecopy.config.diagnosis import Finding
from onecopy.config.keys import above, block, key, when
from onecopy.config.kinds import Choice, DType, Integer, Number, Switch
from onecopy.config.precision import Bf16Config, DataTypesConfig, Fp16Config, TorchAutocastConfig
from onecopy.config.services import (
    ActivationCheckpointingConfig,
    CheckpointConfig,
    CometConfig,
    FlopsProfilerConfig,
    MonitorConfig,
    OneCopyConfig,
    WandbConfig,
)
from onecopy.config.training import OptimizerConfig, SchedulerConfig
from onecopy.config.zero import ZeroConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration as `load` returns it; a field has its JSON key's name unless said otherwise.

    `source` is the document as a dict, the user's own when one was given. `findings` holds a verdict for each key that
    was written or worked out, then the notes. The three batch sizes are samples, samples and micro-batches.
    """

    source: dict[str, Any]
    world_size: int
    world_size_source: str
    train_batch_size: int = key(None, Integer(1, unit="samples"), EFFECTS[TRAIN], default_word="micro x steps x ranks")
    train_micro_batch_size_per_gpu: int = key(
        None, Integer(1, unit="samples"), EFFECTS[MICRO], default_word="train_batch_size / steps / ranks"
    )
    gradient_accumulation_steps: int = key(
        None, Integer(1, unit="micro-batches"), EFFECTS[WINDOW], default_word="1, or from the other two"
    )
    managed_gradient_accumulation: bool | None = key(
        None,
        Switch(),
        "every gradient_accumulation_steps-th step() updates",
        judge=when(False, "honoured", "every step() updates"),
        default_word="as true, but a step() after a whole window updates too",
    )
    gradient_clipping: float = key(
        1.0,
        Number(0),
        "gradients are scaled down to this global L2 norm; 0 switches clipping off",
        judge=when(0.0, "honoured", "gradients are not clipped"),
    )
    steps_per_print: int | None = key(
        None,
        Integer(1, unit="steps", infinity=True),
        "a progress line is printed every so many steps",
        default_word="no progress line",
    )
    wall_clock_breakdown: bool = key(
        False, Switch(), "off", judge=when(True, "honoured", "times of the phases of a step are printed")
    )
    memory_breakdown: bool = key(False, Switch(), "off", judge=when(True, "honoured", "bytes by category are printed"))
    dump_state: bool = key(False, Switch(), "off", judge=when(True, "honoured", "this table is printed by initialize"))
    prescale_gradients: bool = key(
        False,
        Switch(),
        "gradients are divided after the sum, which their owner forms in fp32",
        verdict="implied",
        judge=when(True, "ignored", "the owner forms the sum in fp32, so that dividing before it gains nothing"),
    )
    gradient_predivide_factor: float = key(
        1.0,
        Number(0, open_minimum=True),
        "the owner forms the sum in fp32, so that dividing in two parts gains nothing",
        verdict="ignored",
    )
    gradient_allreduce_op: str = key(
        "mean",
        Choice(("mean", "sum")),
        "gradients are averaged over the ranks",
        judge=when("sum", "honoured", "gradients are summed over the ranks, not averaged"),
    )
    communication_data_type: torch.dtype | None = key(
        None, DType(), "gradients are sent in this type", default_word="the gradients' own type"
    )
    dataloader_drop_last: bool = key(
        False,
        Switch(),
        "an incomplete last batch is used",
        judge=when(True, "honoured", "an incomplete last batch is dropped"),
    )
    zero_allow_untested_optimizer: bool = key(
        False,
        Switch(),
        "every elementwise optimizer works; those that are wrong on shards are refused by name",
        verdict="implied",
    )
    sequence_parallel_size: int = key(
        1,
        Integer(1, unit="ranks"),
        "no sequence parallelism",
        verdict="implied",
        judge=above(1, "refused", "onecopy has no sequence parallelism; write 1 or remove the key"),
    )
    data_parallel_size: int | None = key(
        None, Integer(1, unit="ranks"), "all ranks are data-parallel", verdict="implied", default_word="the world size"
    )
    allgather_size: int = key(
        500_000_000,
        Integer(1, unit="elements"),
        'allgather_bucket_size of the old form "zero_optimization": true',
        verdict="ignored",
    )
    zero: ZeroConfig = block(ZeroConfig, "ZeRO stage and limits", name="zero_optimization")
    fp16: Fp16Config = block(Fp16Config, "float16 with a loss scale")
    bf16: Bf16Config = block(Bf16Config, "bfloat16", aliases=("bfloat16",))
    data_types: DataTypesConfig = block(DataTypesConfig, "types that differ from the compute dtype")
    torch_autocast: TorchAutocastConfig = block(TorchAutocastConfig, "torch's autocast around the forward")
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    activation_checkpointing: ActivationCheckpointingConfig = block(
        ActivationCheckpointingConfig, "options of activation checkpointing"
    )
    tensorboard: MonitorConfig = block(MonitorConfig, "events for TensorBoard")
    csv_monitor: MonitorConfig = block(MonitorConfig, "events as CSV files")
    flops_profiler: FlopsProfilerConfig = block(FlopsProfilerConfig, "operations of one forward, counted")
    wandb: WandbConfig = block(WandbConfig, "parsed only")
    comet: CometConfig = block(CometConfig, "parsed only")
    checkpoint: CheckpointConfig = block(CheckpointConfig, "how checkpoints are written")
    onecopy: OneCopyConfig = block(OneCopyConfig, "onecopy's own keys")
    findings: tuple[Finding, ...] = field(default=(), repr=False)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type the model's parameters have in forward: float16, bfloat16 or float32."""
        import torch  # here, because `onecopy check` must not wait for torch

        if self.fp16.enabled:
            return torch.float16
        return torch.bfloat16 if self.bf16.enabled else torch.float32

    def report(self, every_default: bool = False) -> str:
        """The effective configuration as a table, then its notes; with `every_default` also the keys left out."""
        from onecopy.config.report import report

        return report(self.findings, self if every_default else None)
