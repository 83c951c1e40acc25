"""Measure a machine by what training does on it: matrix products, copies, attention, and the engine's own gathers and reduces.

Every rank works at the same time, as in training, and the slowest rank's time counts. Collectives go through
`onecopy.comm`, so what is measured is what the engine will get: NCCL on CUDA, point-to-point gloo on CPUs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from onecopy.comm.communicator import Communicator
from onecopy.comm.connect import connect

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MIB = 2**20


@dataclass(frozen=True)
class Effort:
    """How large and how long to measure; `quick` for tests.

    Attributes:
        rows: of the left matrix (the tokens of a micro-batch); widths: its columns, and the right matrix is square.
        copies, messages: bytes of one buffer.
        seconds: of repetitions a measurement.
    """

    rows: int
    widths: tuple[int, ...]
    copies: tuple[int, ...]
    messages: tuple[int, ...]
    seconds: float

    @classmethod
    def of(cls, device: torch.device, quick: bool = False) -> Effort:
        if quick:
            return cls(64, (32, 64), (MIB,), (MIB // 16, MIB), 0.005)
        if device.type == "cpu":
            sizes = tuple(MIB * 4**n // 16 for n in range(6))
            return cls(512, (64, 128, 256, 512, 1024, 2048), (16 * MIB, 256 * MIB), sizes, 0.2)
        sizes = tuple(MIB * 4**n // 4 for n in range(7))
        return cls(8192, (128, 256, 512, 1024, 2048, 4096, 8192), (64 * MIB, 1024 * MIB), sizes, 0.3)


@dataclass
class Measured:
    """What a machine reaches. Rates are per second and rank; bytes are bytes.

    Attributes:
        matmuls: (width, FLOP/s) by dtype; attention: FLOP/s forward and backward, causal; launch: seconds a small operator.
        copies: (bytes of the buffer, bytes read and written per second).
        gathers, reduces: (ranks, bytes of the whole buffer, bus bandwidth).
        context: bytes a process holds on the device beyond the allocator's; communication: more of them after collectives.
    """

    device: str
    ranks: int
    memory: int
    matmuls: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    attention: float = 0.0
    launch: float = 0.0
    copies: list[tuple[int, float]] = field(default_factory=list)
    gathers: list[tuple[int, int, float]] = field(default_factory=list)
    reduces: list[tuple[int, int, float]] = field(default_factory=list)
    context: int | None = None
    communication: int | None = None

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the largest copy."""
        return self.copies[-1][1]

    def best(self, dtype: str) -> float:
        """FLOP/s of the best width."""
        return max((rate for _, rate in self.matmuls.get(dtype, [])), default=0.0)


class Clock:
    """Times an operation on all ranks of the world at once; every rank gets the slowest rank's seconds. Collective."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
        self.seconds = seconds

    def of(self, operation: Callable[[], Any]) -> float:
        """Seconds of one call, the mean of as many as fit into `seconds`; the first two warm up."""
        operation()
        first = self._slowest(operation, 1)
        return self._slowest(operation, max(2, min(2000, int(self.seconds / max(first, 1e-7)))))

    def _slowest(self, operation: Callable[[], Any], repeats: int) -> float:
        self._synchronize()
        dist.barrier(device_ids=None if self.device.type == "cpu" else [self.device.index or 0])
        start = time.perf_counter()
        for _ in range(repeats):
            operation()
        self._synchronize()
        took = torch.tensor([(time.perf_counter() - start) / repeats], dtype=torch.float64, device=self.device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return float(took.item())

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def measure(device: torch.device, effort: Effort, say: Callable[[str], None] = lambda _: None) -> Measured:
    """Measure this rank's device, and the world's collectives. Collective over an initialised world."""
    ranks = dist.get_world_size()
    measured = Measured(device_name(device), ranks, memory_of(device, ranks))
    clock = Clock(device, effort.seconds)
    if device.type != "cpu":
        torch.empty(1, device=device)
        measured.context = _beyond_the_allocator()
    for name, dtype in DTYPES.items():
        measured.matmuls[name] = _matmuls(clock, effort, dtype)
        say(f"matrix products, {name}: best {measured.best(name) / 1e12:.4g} TFLOP/s")
    measured.attention = _attention(clock, effort)
    small = torch.ones(8, device=device)
    measured.launch = clock.of(lambda: small.add_(1.0))
    for nbytes in effort.copies:
        source, target = (torch.ones(nbytes // 4, device=device) for _ in range(2))
        measured.copies.append((nbytes, 2 * nbytes / clock.of(lambda s=source, t=target: t.copy_(s))))  # type: ignore[misc]
    say(f"memory: {measured.bandwidth / 1e9:.4g} GB/s; a small operator takes {measured.launch * 1e6:.3g} microseconds")
    if ranks > 1:
        _collectives(clock, effort, measured, say)
    return measured


def device_name(device: torch.device) -> str:
    """What the device calls itself, as one word."""
    if device.type == "cpu":
        return "CPU"
    name = torch.get_device_module(device).get_device_name(device)
    return "-".join(str(name).split())


def memory_of(device: torch.device, ranks: int) -> int:
    """Bytes a rank may use."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    return int(torch.accelerator.get_memory_info()[1])


def _beyond_the_allocator() -> int:
    """Bytes in use on the device that this process's allocator does not hold: the context, if nobody else is there."""
    free, total = torch.accelerator.get_memory_info()
    return int(total - free - torch.accelerator.memory_reserved())


def _matmuls(clock: Clock, effort: Effort, dtype: torch.dtype) -> list[tuple[int, float]]:
    """FLOP/s by width, as long as one product takes less than a second."""
    found = []
    for width in effort.widths:
        a = torch.randn(effort.rows, width, device=clock.device).to(dtype)
        b = torch.randn(width, width, device=clock.device).to(dtype)
        out = torch.empty(effort.rows, width, device=clock.device, dtype=dtype)
        seconds = clock.of(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))  # type: ignore[misc]
        found.append((width, 2 * effort.rows * width * width / seconds))
        if seconds > 0.5:
            break
    return found


def _attention(clock: Clock, effort: Effort) -> float:
    """FLOP/s of causal attention, forward and backward, in bf16."""
    batch, heads, length, width = (1, 4, effort.rows, 64) if clock.device.type == "cpu" else (4, 16, 4096, 128)
    shape = (batch, heads, length, width)
    q, k, v = (torch.randn(shape, device=clock.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, device=clock.device, dtype=torch.bfloat16)

    def both() -> None:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), gradient)

    return 7 * 2 * batch * heads * length * length * width / 2 / clock.of(both)


def _collectives(clock: Clock, effort: Effort, measured: Measured, say: Callable[[str], None]) -> None:
    device, ranks = clock.device, measured.ranks
    before = _beyond_the_allocator() if device.type != "cpu" else 0
    communicator = connect(None, device)
    try:
        for nbytes in effort.messages:
            moved = nbytes * (ranks - 1) / ranks
            gather, reduce = (moved / clock.of(call) for call in _calls(communicator, nbytes, ranks))
            measured.gathers.append((ranks, nbytes, gather))
            measured.reduces.append((ranks, nbytes, reduce))
            say(
                f"{nbytes / MIB:g} MiB over {ranks} ranks: gather {gather / 1e9:.4g} GB/s, reduce {reduce / 1e9:.4g} GB/s"
            )
        if device.type != "cpu":
            measured.communication = max(0, _beyond_the_allocator() - before)
    finally:
        communicator.close()


def _calls(communicator: Communicator, nbytes: int, ranks: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """A gather and a reduce of a whole buffer of `nbytes` in bf16, as the engine starts and finishes them."""
    device = communicator.device
    shard = max(64, nbytes // 2 // ranks)
    buffer = communicator.allocate(2 * shard * ranks).view(torch.bfloat16).fill_(1)
    scratch = (
        torch.empty(shard * (ranks - 1), dtype=torch.bfloat16, device=device) if communicator.needs_scratch else None
    )
    wire = communicator.wire(buffer, scratch)
    out = torch.empty(shard, dtype=torch.float32, device=device)

    def gather() -> None:
        pending = communicator.start_gather(wire, 1, "a measured buffer")
        pending.wait()
        pending.drain()

    def reduce() -> None:
        pending = communicator.start_reduce(wire, 2, "a measured buffer")
        pending.finish(out, accumulate=False)
        pending.drain()

    return gather, reduce
