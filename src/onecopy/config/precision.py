"""The precision blocks: which type the model computes in, and how small gradients survive it."""

# ruff: noqa: RUF009  # `key` and `block` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from onecopy.config.keys import key, when
from onecopy.config.kinds import DType, Integer, Names, Number, Switch

if TYPE_CHECKING:
    import torch

ALWAYS_FP32 = "onecopy always keeps fp32 masters, sharded from stage 1 on; write false or remove the key"


@dataclass(frozen=True, slots=True)
class Fp16Config:
    """`fp16`: float16 with a loss scale. A `loss_scale` of 0 is a dynamic one, which starts at `initial_scale`."""

    enabled: bool = key(
        False, Switch(), "off", auto=False, judge=when(True, "honoured", "the model computes in fp16; masters are fp32")
    )
    auto_cast: bool = key(
        False,
        Switch(),
        "the model's inputs are taken as they are",
        judge=when(True, "honoured", "floating-point inputs of the model are cast to fp16"),
    )
    loss_scale: float = key(
        0.0, Number(0), "the loss scale is constant", judge=when(0.0, "honoured", "the loss scale is dynamic")
    )
    initial_scale_power: int = key(16, Integer(0, 127), "the dynamic loss scale starts at 2 to this power")
    initial_loss_scale: float | None = key(
        None, Number(0, open_minimum=True), "the dynamic loss scale starts here: a scale, not a power"
    )
    loss_scale_window: int = key(
        1000, Integer(1, unit="steps"), "the dynamic loss scale doubles after so many steps without overflow"
    )
    hysteresis: int = key(2, Integer(1, unit="overflows"), "the dynamic loss scale halves at every so many overflows")
    consecutive_hysteresis: bool = key(
        False,
        Switch(),
        "hysteresis is refilled when the scale doubles",
        judge=when(True, "honoured", "hysteresis is refilled by every step without overflow"),
    )
    min_loss_scale: float = key(1.0, Number(0), "an overflow at this dynamic loss scale is an error")
    fp16_master_weights_and_grads: bool = key(
        False, Switch(), "masters are fp32", verdict="implied", judge=when(True, "refused", ALWAYS_FP32)
    )

    @property
    def initial_scale(self) -> float:
        """The dynamic loss scale of the first step."""
        return float(2**self.initial_scale_power) if self.initial_loss_scale is None else self.initial_loss_scale

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale is dynamic."""
        return self.loss_scale == 0


@dataclass(frozen=True, slots=True)
class Bf16Config:
    """`bf16`: bfloat16 without a loss scale."""

    enabled: bool = key(
        False, Switch(), "off", auto=False, judge=when(True, "honoured", "the model computes in bf16; masters are fp32")
    )
    immediate_grad_update: bool = key(
        False, Switch(), "gradients enter the flat buffer as soon as they exist", verdict="implied"
    )
    check_grad_overflow: bool = key(
        True,
        Switch(),
        "a step with a non-finite gradient on any rank is skipped by all ranks",
        verdict="implied",
        judge=when(
            False, "ignored", "a step with a non-finite gradient is skipped whatever this says; the check is free"
        ),
    )
    bf16_master_weights_and_grads: bool = key(
        False, Switch(), "masters are fp32", verdict="implied", judge=when(True, "refused", ALWAYS_FP32)
    )
    bf16_optimizer_states: bool = key(
        False,
        Switch(),
        "moments are fp32",
        verdict="implied",
        judge=when(
            True, "refused", "onecopy keeps fp32 moments, sharded from stage 1 on; write false or remove the key"
        ),
    )


@dataclass(frozen=True, slots=True)
class DataTypesConfig:
    """`data_types`: types that differ from the compute dtype; `None` leaves the choice to the engine."""

    grad_accum_dtype: torch.dtype | None = key(
        None, DType(), "gradients are added up in this type over the micro-batches of a window", default_word="fp32"
    )
    param_dtype: torch.dtype | None = key(
        None,
        DType(),
        "the compute dtype, which the fp16 or bf16 block decides; must agree with it",
        verdict="implied",
        default_word="the compute dtype",
    )
    buffer_dtype: torch.dtype | None = key(
        None,
        DType(),
        "floating-point buffers are cast to this type, rotary tables too",
        default_word="left as they are",
    )
    keep_in_fp32_modules: str | tuple[str, ...] = key(
        "auto",
        Names(("auto",)),
        "modules named here stay fp32; auto takes the names that the model itself lists, and batch norms with their statistics",
    )


@dataclass(frozen=True, slots=True)
class TorchAutocastConfig:
    """`torch_autocast`: fp32 parameters, and torch's autocast around the forward."""

    enabled: bool = key(
        False,
        Switch(),
        "off",
        auto=False,
        judge=when(True, "honoured", "the forward runs under torch.autocast; parameters stay in their own type"),
    )
    dtype: torch.dtype | None = key(None, DType(), "the type autocast computes in", default_word="bf16")
    lower_precision_safe_modules: tuple[str, ...] | None = key(
        None,
        Names(),
        "parameters of modules of these classes are gathered and reduced in autocast's type, in which they are used anyway",
        default_word="none",
    )
