"""Rules that join several keys: precision modes, the scope of the stage, old forms of a block."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from onecopy.config.diagnosis import Diagnosis
from onecopy.config.document import Config
from onecopy.config.features import warn_if_observing
from onecopy.config.keys import keys_of
from onecopy.config.zero import NO_OFFLOAD, STAGES, ZeroConfig


def settle_auto_precision(plain: dict[Any, Any], diagnosis: Diagnosis) -> None:
    """Replace an "auto" of `fp16.enabled` or `bf16.enabled` by false where the other is true; else it is refused later.

    `plain` is this module's own copy of the document's top level; the user's blocks are copied before they change.
    """
    names = {"fp16": ("fp16",), "bf16": ("bf16", "bfloat16")}
    found = {mode: next((name for name in spelled if name in plain), spelled[0]) for mode, spelled in names.items()}
    enabled = {mode: _enabled(plain.get(name)) for mode, name in found.items()}
    for mode, other in (("fp16", "bf16"), ("bf16", "fp16")):
        if enabled[mode] == "auto" and enabled[other] is True:
            name = found[mode]
            plain[name] = {**plain[name], "enabled": False}
            diagnosis.note(f"{name}.enabled", "auto", f'"auto" is false, since {found[other]}.enabled is true')


def _enabled(block: Any) -> Any:
    return block.get("enabled") if isinstance(block, Mapping) else None


def old_forms(name: str, value: Any, plain: Mapping[Any, Any], diagnosis: Diagnosis) -> Any:
    """The present form of a block's value that may be written in an old one: `zero_optimization: true`."""
    if name != "zero_optimization" or not isinstance(value, bool):
        return value
    block: dict[str, Any] = {"stage": int(value)}
    if value and "allgather_size" in plain:
        block["allgather_bucket_size"] = plain["allgather_size"]
    diagnosis.note(name, value, f'is an old form; write "zero_optimization": {{"stage": {int(value)}}}')
    return block


def with_given(zero: ZeroConfig, written: Any) -> ZeroConfig:
    """The block with the short names of the keys that were written."""
    if not isinstance(written, Mapping):
        return zero
    spelled = {spelling: one.name for one, key in keys_of(ZeroConfig) for spelling in key.spellings()}
    given = frozenset(spelled[name] for name, value in written.items() if name in spelled and value is not None)
    return dataclasses.replace(zero, given=given)


def apply(config: Config, diagnosis: Diagnosis) -> Config:
    """The configuration after all joint rules; problems and changed verdicts are recorded."""
    _precision_modes(config, diagnosis)
    _loss_scale(config, diagnosis)
    _param_dtype(config, diagnosis)
    _offload(config.zero, diagnosis)
    _switched_off_blocks(config, diagnosis)
    _scope_of_stage(config.zero, diagnosis)
    _averaging(config, diagnosis)
    _activation_checkpointing(config, diagnosis)
    _observers(config, diagnosis)
    _defaults_worth_saying(config, diagnosis)
    if config.zero.allgather_sequential and config.zero.stage == 3:
        config = dataclasses.replace(config, zero=dataclasses.replace(config.zero, prefetch_bucket_size=0))
        diagnosis.amend(
            "zero_optimization.stage3_prefetch_bucket_size", "ignored", "stage3_allgather_sequential is true"
        )
        diagnosis.amend("zero_optimization.prefetch_bucket_size", "ignored", "stage3_allgather_sequential is true")
    return config


def _bf16_path(diagnosis: Diagnosis) -> str:
    return "bfloat16" if "bfloat16.enabled" in diagnosis.verdicts else "bf16"


def _precision_modes(config: Config, diagnosis: Diagnosis) -> None:
    if config.fp16.enabled and config.bf16.enabled:
        path = f"{_bf16_path(diagnosis)}.enabled"
        diagnosis.refuse(path, True, "fp16.enabled is true as well; write false for one of the two")
    elif config.torch_autocast.enabled and (config.fp16.enabled or config.bf16.enabled):
        mode = "fp16" if config.fp16.enabled else _bf16_path(diagnosis)
        text = f"parameters are in {mode} already; remove the {mode} block to keep them in fp32 under autocast"
        diagnosis.note("torch_autocast.enabled", True, text)


def _loss_scale(config: Config, diagnosis: Diagnosis) -> None:
    fp16, scale = config.fp16, config.fp16.initial_loss_scale
    if scale is not None:
        path = "fp16.initial_loss_scale"
        if "fp16.initial_scale_power" in diagnosis.verdicts:
            diagnosis.refuse(path, scale, "says the same as initial_scale_power; keep one of the two")
        else:
            text = (
                f'is read as a scale, not a power; DeepSpeed\'s own key is "initial_scale_power": {round_log2(scale)}'
            )
            diagnosis.note(path, scale, text)
    if not fp16.enabled:
        return
    if not fp16.dynamic:
        for name in (
            "initial_scale_power",
            "initial_loss_scale",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
        ):
            diagnosis.amend(f"fp16.{name}", "ignored", f"the loss scale is constant, {fp16.loss_scale:g}")
        return
    if fp16.min_loss_scale == 0:
        diagnosis.refuse("fp16.min_loss_scale", 0, "must be greater than 0 when the loss scale is dynamic; write 1")
    elif fp16.min_loss_scale > fp16.initial_scale:
        start = f"{fp16.initial_scale:g}"
        text = f"is above the first loss scale, {start}; write at most {start}"
        diagnosis.refuse("fp16.min_loss_scale", fp16.min_loss_scale, text)


def round_log2(scale: float) -> int:
    """The integer power of two nearest to a positive scale."""
    import math

    return round(math.log2(scale))


def _param_dtype(config: Config, diagnosis: Diagnosis) -> None:
    wanted = config.data_types.param_dtype
    if wanted is not None and wanted != config.compute_dtype:
        mode = {"torch.float16": '"fp16": {"enabled": true}', "torch.bfloat16": '"bf16": {"enabled": true}'}
        fix = mode.get(str(wanted), "false for fp16.enabled and bf16.enabled")
        text = f"disagrees with the fp16 and bf16 blocks, which say {str(config.compute_dtype)[6:]}; write {fix}"
        diagnosis.refuse("data_types.param_dtype", str(wanted)[6:], f"{text}, or remove the key")


def _offload(zero: ZeroConfig, diagnosis: Diagnosis) -> None:
    for name, block in (("offload_param", zero.offload_param), ("offload_optimizer", zero.offload_optimizer)):
        path = f"zero_optimization.{name}"
        if block is not None and block.device != "none":
            diagnosis.refuse(f"{path}.device", block.device, NO_OFFLOAD)
        elif block is not None:
            for key_path in [one for one in diagnosis.verdicts if one.startswith(f"{path}.")]:
                diagnosis.amend(key_path, "ignored", "nothing is offloaded")
            diagnosis.amend(f"{path}.device", "honoured", "every state stays on the training device")


def _switched_off_blocks(config: Config, diagnosis: Diagnosis) -> None:
    bf16 = _bf16_path(diagnosis)
    blocks = {
        "fp16": config.fp16,
        bf16: config.bf16,
        "torch_autocast": config.torch_autocast,
        "tensorboard": config.tensorboard,
        "csv_monitor": config.csv_monitor,
        "flops_profiler": config.flops_profiler,
        "wandb": config.wandb,
        "comet": config.comet,
    }
    for name, block in blocks.items():
        if block.enabled:  # type: ignore[attr-defined]
            continue
        for path in [one for one in diagnosis.verdicts if one.startswith(f"{name}.") and one != f"{name}.enabled"]:
            diagnosis.amend(path, "ignored", f"{name} is not enabled")


def _scope_of_stage(zero: ZeroConfig, diagnosis: Diagnosis) -> None:
    for _, key in keys_of(ZeroConfig):
        if zero.stage not in key.stages:
            for spelling in key.spellings():
                text = f"concerns stage {', '.join(map(str, key.stages))} only; the stage is {zero.stage}"
                diagnosis.amend(f"zero_optimization.{spelling}", "ignored", text)


def _averaging(config: Config, diagnosis: Diagnosis) -> None:
    if config.gradient_allreduce_op == "sum" and config.zero.stage == 3:
        text = 'is not possible at stage 3; write "mean", or stage 2'
        diagnosis.refuse("gradient_allreduce_op", config.gradient_allreduce_op, text)
    if config.data_parallel_size is not None and config.data_parallel_size != config.world_size:
        text = f"all {config.world_size} ranks ({config.world_size_source}) are data-parallel; remove the key"
        diagnosis.refuse("data_parallel_size", config.data_parallel_size, text)


def _activation_checkpointing(config: Config, diagnosis: Diagnosis) -> None:
    block = config.activation_checkpointing
    path = "activation_checkpointing.contiguous_memory_optimization"
    if block.contiguous_memory_optimization and block.number_checkpoints is None:
        diagnosis.amend(path, "ignored", "number_checkpoints is not written, and the buffers' size depends on it")
    if block.number_checkpoints is not None and not block.contiguous_memory_optimization:
        text = "sizes contiguous buffers, and contiguous_memory_optimization is not on"
        diagnosis.amend("activation_checkpointing.number_checkpoints", "ignored", text)


def _observers(config: Config, diagnosis: Diagnosis) -> None:
    for name in ("wandb", "comet"):
        if getattr(config, name).enabled:
            warn_if_observing(name, True, f"{name}.enabled", diagnosis)


def _defaults_worth_saying(config: Config, diagnosis: Diagnosis) -> None:
    """Give a verdict on the defaults that change the numbers and that few people know."""
    if "gradient_clipping" not in diagnosis.verdicts:
        text = "gradients are scaled down to this global L2 norm, DeepSpeed's default too; 0 switches clipping off"
        diagnosis.judge("gradient_clipping", config.gradient_clipping, "honoured", text, "default")
    if "zero_optimization.stage" not in diagnosis.verdicts:
        text = dict(STAGES)[config.zero.stage]
        diagnosis.judge("zero_optimization.stage", config.zero.stage, "honoured", text, "default")
