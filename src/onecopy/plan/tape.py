"""The tape: what one training step asks of the compute lane and of the two communication lanes, in the engine's order.

Operators are entered as their FLOPs and bytes; gathers and reduces where the engine starts them and where it waits for
them. No time is on the tape: `timing.py` plays it on a machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from onecopy.comm.collective import Collective
from onecopy.comm.wire import Wire
from onecopy.plan.fusing import Fusing


@dataclass(slots=True)
class Compute:
    """Operators between two communication events.

    Attributes:
        matmuls: (FLOPs, bytes moved, smallest of the three sizes) of each matrix multiplication.
        attention: FLOPs inside fused attention kernels.
        traffic: bytes read and written by pointwise operators and copies.
        reduced: the same of all other operators: normalisations, softmax, sums, lookups and their backwards.
        operators: how many kernels are launched.
        fused: bytes that remain of `traffic` and `reduced` where units are compiled (see `Fusing`).
        kernels: how many kernels remain of `operators`.
    """

    phase: str
    module: str
    matmuls: list[tuple[int, int, int]] = field(default_factory=list)
    attention: int = 0
    traffic: int = 0
    operators: int = 0
    fused: int = 0
    kernels: int = 0
    reduced: int = 0


@dataclass(slots=True)
class Transfer:
    """A collective starts: its lane ("gather" or "reduce"), whole buffer's bytes and number."""

    lane: str
    nbytes: int
    number: int
    label: str


@dataclass(slots=True)
class Await:
    """The compute lane waits for transfer `number`."""

    number: int


Event = Compute | Transfer | Await


class Tape:
    """Records operators (as a ledger's `operators`) and transfers."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.transfers = 0
        self.recording = False
        self.where: Any = None  # a ledger: its phase and module
        self._fusing = Fusing()

    def __call__(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if not self.recording:
            return
        name = func._schema.name
        if func.is_view or name in _NO_KERNEL or not name.startswith("aten::"):  # questions, transfers
            return
        segment = self._segment()
        segment.operators += 1
        cost = _MATMULS.get(name)
        attention = "scaled_dot_product" in name
        if cost is None and not attention:
            in_place = name.endswith("_")
            moved = _nbytes((args, kwargs)) + (0 if in_place else _nbytes(result))
            if torch.Tag.pointwise in func.tags or in_place or name in _STREAMED:
                segment.traffic += moved
            else:
                segment.reduced += moved
            segment.kernels += self._fusing.between
            segment.fused += self._fusing.operator((args, kwargs), result, in_place)
            return
        segment.fused += self._fusing.product((args, kwargs), result)
        segment.kernels += 1
        if cost is not None:
            segment.matmuls.append(cost(args, result))
        else:
            segment.attention += _attention_flops(name, args, kwargs)

    def _segment(self) -> Compute:
        last = self.events[-1] if self.events else None
        phase, module = self.where.phase, self.where.module.split(".")
        place = ".".join(module[: _depth(module)])
        if isinstance(last, Compute) and last.phase == phase and last.module == place:
            return last
        made = Compute(phase, place)
        self.events.append(made)
        return made

    def start(self, lane: str, nbytes: int, label: str) -> int:
        self.transfers += 1
        if self.recording:
            self.events.append(Transfer(lane, nbytes, self.transfers, label))
        return self.transfers

    def wait(self, number: int) -> None:
        if self.recording:
            self.events.append(Await(number))


def _depth(module: list[str]) -> int:
    return next((place + 1 for place, part in enumerate(module) if part.isdigit()), len(module))


class RecordingCollective(Collective):
    """A communicator of the virtual world that enters its collectives on a tape."""

    tape: Tape | None = None

    def start_gather(self, wire: Wire, key: int, label: str) -> Any:
        pending: Any = super().start_gather(wire, key, label)
        return (
            pending
            if self.tape is None
            else _Recorded(pending, self.tape, self.tape.start("gather", wire.buffer.nbytes, label))
        )

    def start_reduce(self, wire: Wire, key: int, label: str) -> Any:
        pending: Any = super().start_reduce(wire, key, label)
        return (
            pending
            if self.tape is None
            else _Recorded(pending, self.tape, self.tape.start("reduce", wire.buffer.nbytes, label))
        )


class _Recorded:
    def __init__(self, pending: Any, tape: Tape, number: int) -> None:
        self.pending, self.tape, self.number = pending, tape, number

    def wait(self) -> None:
        self.tape.wait(self.number)
        self.pending.wait()

    def drain(self) -> None:
        self.tape.wait(self.number)
        self.pending.drain()

    def finish(self, out: torch.Tensor, accumulate: bool) -> None:
        self.tape.wait(self.number)
        self.pending.finish(out, accumulate)


def between(one: list[Event], two: list[Event], batch: float) -> list[Event]:
    """The tape at another micro-batch: what grows from the first tape to the second grows on by as much a sample."""
    if len(one) != len(two):
        return one if batch == 1 else two
    more = batch - 1
    result: list[Event] = []
    for a, b in zip(one, two, strict=True):
        if isinstance(a, Compute) and isinstance(b, Compute) and len(a.matmuls) == len(b.matmuls):
            grow: Callable[[int, int], int] = lambda x, y: int(x + more * (y - x))  # noqa: E731
            matmuls = [(grow(x[0], y[0]), grow(x[1], y[1]), x[2]) for x, y in zip(a.matmuls, b.matmuls, strict=True)]
            result.append(
                Compute(
                    a.phase,
                    a.module,
                    matmuls,
                    grow(a.attention, b.attention),
                    grow(a.traffic, b.traffic),
                    a.operators,
                    grow(a.fused, b.fused),
                    a.kernels,
                    grow(a.reduced, b.reduced),
                )
            )
        else:
            result.append(b)
    return result


# ------------------------------------------------------------------------------------------------------------------ costs
_NO_KERNEL = {
    "aten::detach",
    "aten::_unsafe_view",
    "aten::alias",
    "aten::empty",
    "aten::empty_like",
    "aten::lift_fresh",
    "aten::empty_strided",
}


_STREAMED = {  # as fast as pointwise operators: copies, and norms of whole buffers
    "aten::_to_copy", "aten::cat", "aten::stack", "aten::constant_pad_nd", "aten::split_with_sizes_copy", "aten::linalg_vector_norm",
    "aten::_foreach_norm",
}  # fmt: skip


def _mm(a: torch.Tensor, b: torch.Tensor, result: torch.Tensor) -> tuple[int, int, int]:
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    batch = prod(a.shape[:-2])
    return 2 * batch * m * k * n, a.nbytes + b.nbytes + result.nbytes, min(m, k, n)


_MATMULS: dict[str, Any] = {
    "aten::mm": lambda args, result: _mm(args[0], args[1], result),
    "aten::bmm": lambda args, result: _mm(args[0], args[1], result),
    "aten::addmm": lambda args, result: _mm(args[1], args[2], result),
    "aten::baddbmm": lambda args, result: _mm(args[1], args[2], result),
    "aten::_grouped_mm": lambda args, result: (
        2 * prod(result.shape[:-1]) * args[0].shape[-1] * result.shape[-1], args[0].nbytes + args[1].nbytes + result.nbytes, 128,
    ),
}  # fmt: skip


def _attention_flops(name: str, args: Any, kwargs: Any) -> int:
    """Two multiplications forward, five backward; half of each when causal."""
    backward = "backward" in name
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    batch, heads, length, width = query.shape
    flops: int = 2 * batch * heads * length * key.shape[-2] * width * (5 if backward else 2)
    causal = any(isinstance(value, bool) and value for value in (*args, *kwargs.values()))
    return flops // 2 if causal else flops


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(value.numel()) * int(value.element_size())
    if isinstance(value, list | tuple):
        return sum(_nbytes(item) for item in value)
    if isinstance(value, dict):
        return sum(_nbytes(item) for item in value.values())
    return 0
