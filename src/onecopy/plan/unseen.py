"""What the ledger cannot see, by name: each with a guess, an upper bound, its source and the flag that overrides it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GIB = 2**30
LEVELS = ("allocated", "reserved", "device")
_CONTEXT_AT_MOST = {"A100": 0.92 * GIB}  # of kinds of GPU that several people measured; on others 1.1


@dataclass(frozen=True)
class Unseen:
    """One thing that takes GPU memory outside the ledger; guess and bound in bytes.

    Attributes:
        level: where it first shows: in what torch allocated, in what its allocator reserved, or only on the device.
    """

    name: str
    guess: int
    bound: int
    source: str
    flag: str
    level: str


@dataclass(frozen=True)
class Interval:
    """A best guess and an upper bound, in bytes."""

    guess: int
    bound: int


def unseen(
    allocated: int,
    world_size: int,
    context: float | None = None,
    communication: float | None = None,
    fragmentation: float | None = None,
    gpu: str = "",
) -> list[Unseen]:
    """The list for a run whose ledger peaks at `allocated` bytes on a GPU of the name `gpu`.

    `context`, `communication` (bytes) and `fragmentation` (a share) take the place of defaults.
    """
    context_bound = _CONTEXT_AT_MOST.get(gpu.split("-")[0], 1.1 * GIB)
    nccl = 0 if world_size == 1 else 1.0 * GIB
    nccl_bound = 0 if world_size == 1 else 2.0 * GIB
    rounding = 512 * 2000
    return [
        Unseen("attention's side tensors", 0, int(0.01 * allocated),
            "flash kernels keep 4 bytes a query and head beside the CPU's: under 1 % of a block (torch)", "-", "allocated"),
        Unseen("cuBLAS and cuDNN workspaces", int(0.03 * GIB), int(0.3 * GIB),
            "8-32 MiB a handle and stream on Hopper (torch)", "-", "allocated"),
        Unseen("allocator rounding", rounding, 4 * rounding,
            "512 bytes a tensor, 2 MiB a segment (torch's caching allocator)", "-", "allocated"),
        Unseen(
            "fragmentation", int(_or(fragmentation, 0.03) * allocated), int(_or(fragmentation, 0.09) * allocated),
            "torchtitan 8 to 128 GPUs: +7-10 % over 16 bytes a parameter; far more without expandable_segments", "--fragmentation",
            "reserved",
        ),
        Unseen("CUDA context and kernels", int(_or(context, 0.7 * GIB)), int(_or(context, context_bound)),
            "0.47-0.92 GiB on A100, 1.1 on V100 (ml-engineering, BigScience)", "--context-gib", "device"),
        Unseen("NCCL buffers", int(_or(communication, nccl)), int(_or(communication, nccl_bound)),
            "+1-2 GiB after the first collectives (ml-engineering, nccl#864)", "--nccl-gib", "device"),
    ]  # fmt: skip


def intervals(ledger: int, parts: Sequence[Unseen]) -> dict[str, Interval]:
    """What torch allocates, what its allocator reserves, and what the device holds, each with guess and bound."""
    found, guess, bound = {}, ledger, ledger
    for level in LEVELS:
        guess += sum(part.guess for part in parts if part.level == level)
        bound += sum(part.bound for part in parts if part.level == level)
        found[level] = Interval(guess, bound)
    return found


NOT_IN_NUMBERS = (
    "A model that branches on data (a mask that is all ones, say) may take another path with real values.",
    "Compiled graphs (torch.compile) keep fewer activations: 7-15 % less at the peak in published runs.",
)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
