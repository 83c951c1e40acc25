"""The blocks around training: activation checkpointing, monitors, checkpoints, and onecopy's own."""

from __future__ import annotations

from dataclasses import dataclass

from onecopy.config.keys import cases, key, when
from onecopy.config.kinds import Anything, Choice, ChoiceOrInteger, Integer, Names, Number, Switch, Text


@dataclass(frozen=True, slots=True)
class ActivationCheckpointingConfig:
    """`activation_checkpointing`: where inputs of checkpointed functions wait (`onecopy.checkpointing`, wrapped blocks)."""

    partition_activations: bool = key(
        False,
        Switch(),
        "every rank keeps the inputs whole",
        judge=when(
            True,
            "honoured",
            "each model-parallel rank of the mpu given to initialize keeps a part of the inputs; "
            "without such a group there is nothing to partition",
        ),
    )
    contiguous_memory_optimization: bool = key(
        False,
        Switch(),
        "inputs stay where they were made",
        judge=when(True, "honoured", "inputs are copied into one buffer a size, made once"),
    )
    cpu_checkpointing: bool = key(
        False,
        Switch(),
        "inputs wait on the device",
        judge=when(True, "honoured", "inputs wait in pinned host memory; on the CPU they are there already"),
    )
    number_checkpoints: int | None = key(
        None,
        Integer(1),
        "checkpoints that are alive at a time: the size of the contiguous buffers",
        default_word="none",
    )
    synchronize_checkpoint_boundary: bool = key(
        False,
        Switch(),
        "off",
        judge=when(True, "honoured", "the host waits for the device before and after each checkpointed function"),
    )
    profile: bool = key(
        False,
        Switch(),
        "off",
        judge=when(
            True, "honoured", "a line a pass: calls and seconds, forward and again in backward, and stored bytes"
        ),
    )


@dataclass(frozen=True, slots=True)
class MonitorConfig:
    """`tensorboard` and `csv_monitor`: where learning rate, loss and loss scale are written."""

    enabled: bool = key(False, Switch(), "off", judge=when(True, "honoured", "rank 0 writes its events"), auto=False)
    output_path: str = key(
        "", Text(), "folder of the events", nullable=True, default_word="a folder in the home folder"
    )
    job_name: str = key("DeepSpeedJobName", Text(), "sub-folder of the events")


@dataclass(frozen=True, slots=True)
class WandbConfig:
    """`wandb`: parsed; onecopy itself writes to TensorBoard and CSV."""

    enabled: bool = key(False, Switch(), "off", verdict="ignored", auto=False)
    group: str | None = key(None, Text(), "group of runs", verdict="ignored")
    team: str | None = key(None, Text(), "team of the run", verdict="ignored")
    project: str = key("deepspeed", Text(), "project of the run", verdict="ignored")


@dataclass(frozen=True, slots=True)
class CometConfig:
    """`comet`: parsed; onecopy itself writes to TensorBoard and CSV."""

    enabled: bool = key(False, Switch(), "off", verdict="ignored", auto=False)
    samples_log_interval: int = key(100, Integer(1, unit="samples"), "distance of the events", verdict="ignored")
    project: str | None = key(None, Text(), "project of the run", verdict="ignored")
    workspace: str | None = key(None, Text(), "workspace of the run", verdict="ignored")
    api_key: str | None = key(None, Text(), "access key", verdict="ignored")
    experiment_name: str | None = key(None, Text(), "name of the run", verdict="ignored")
    experiment_key: str | None = key(None, Text(), "key of the run", verdict="ignored")
    online: bool | None = key(None, Switch(), "send at once", verdict="ignored")
    mode: str | None = key(None, Text(), "new run or old one", verdict="ignored")


@dataclass(frozen=True, slots=True)
class FlopsProfilerConfig:
    """`flops_profiler`: operations, parameters and time of one training forward, module by module."""

    enabled: bool = key(
        False,
        Switch(),
        "off",
        judge=when(True, "honoured", "rank 0 counts one forward and reports it with the step's times"),
        auto=False,
    )
    recompute_fwd_factor: float = key(
        0.0, Number(0), "forwards that activation checkpointing computes again; counted as backward"
    )
    profile_step: int = key(1, Integer(0), "the step after so many is counted: 1 is the second")
    module_depth: int = key(-1, Integer(-1), "depth of the tables; -1 for all")
    top_modules: int = key(1, Integer(0), "classes of modules named at each depth")
    detailed: bool = key(
        True,
        Switch(),
        "the module tree is printed too",
        judge=when(False, "honoured", "totals and tables only"),
    )
    output_file: str | None = key(None, Text(), "file of the report", default_word="the log")


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """`checkpoint`: how checkpoints are written; what follows `writer` is onecopy's own."""

    tag_validation: str = key(
        "Warn", Choice(("Ignore", "Warn", "Fail")), "what happens when ranks save under different tags"
    )
    load_universal: bool = key(False, Switch(), "every checkpoint loads at any stage and world size", verdict="implied")
    use_node_local_storage: bool = key(
        False,
        Switch(),
        "off",
        judge=when(True, "honoured", "every node writes its ranks' files on a disk of its own"),
    )
    parallel_write: object = key(None, Anything(), "every rank writes its own shards", verdict="implied")
    checkpoint_serialization: bool = key(True, Switch(), "the format is onecopy's own", verdict="ignored")
    writer: object = key(None, Anything(), "onecopy has one writer", verdict="ignored")
    async_save: bool = key(
        False,
        Switch(),
        "a save returns when the checkpoint is complete",
        name="async",
        judge=when(
            True, "honoured", "a save returns when the shards are copied; the next save or the exit waits for it"
        ),
    )
    keep_last: int | None = key(None, Integer(1), "older checkpoints beyond so many are deleted", default_word="all")
    verify_after_save: bool = key(
        False, Switch(), "true reads every byte of a checkpoint back before it takes its place"
    )
    export_format: str = key(
        "torch", Choice(("torch", "safetensors")), "file format of save_16bit_model when the name does not say it"
    )


@dataclass(frozen=True, slots=True)
class OneCopyConfig:
    """`onecopy`: keys that DeepSpeed does not have; DeepSpeed itself ignores the block."""

    slots: int = key(2, Integer(1), "parameter slots of stage 3: units that are whole at a time")
    unit_classes: tuple[str, ...] = key(
        (), Names(), "modules of these classes are units", default_word="repeated blocks"
    )
    checkpoint_activations: str | int = key(
        "none",
        ChoiceOrInteger(("none", "full", "selective")),
        "every so many blocks, one keeps its inputs only and is computed again in backward",
        judge=cases(
            (
                ("none", "blocks keep their activations, unless the model checkpoints by itself"),
                ("full", "every block keeps its inputs only and is computed again in backward"),
                ("selective", "as full, but results of matrix products and attention are kept"),
            )
        ),
    )
    timeout_seconds: float | None = key(
        None,
        Number(0, open_minimum=True, unit="seconds"),
        "a rank that waits longer for another raises, naming the call",
        default_word="torch.distributed's own",
    )
    trace_step: int | None = key(
        None, Integer(1), "a chrome trace of this optimizer step is written", default_word="none"
    )
    trace_path: str = key("onecopy_trace.json", Text(empty=False), "file of that trace")
    record: str | None = key(
        None,
        Text(empty=False),
        "folder for the run's record, a line a step, which `onecopy report` reads",
        default_word="none",
    )
    record_step: int = key(3, Integer(0), "the record has this step's memory storage by storage; 0 for none")
