"""What the ledger cannot see, by name: each with a guess, an upper bound, its source and the flag that overrides it."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Unseen:
    """One thing that takes GPU memory outside the ledger; guess and bound in bytes."""

    name: str
    guess: int
    bound: int
    source: str
    flag: str


def unseen(
    allocated: int,
    world_size: int,
    context: float | None = None,
    communication: float | None = None,
    fragmentation: float | None = None,
) -> list[Unseen]:
    """The list for a run whose ledger peaks at `allocated` bytes; the last three arguments override defaults (bytes, bytes, a share)."""
    nccl = 0 if world_size == 1 else 1.0 * GIB
    nccl_bound = 0 if world_size == 1 else 2.0 * GIB
    rounding = 512 * 2000
    return [
        Unseen("CUDA context and kernels", int(_or(context, 0.7 * GIB)), int(_or(context, 1.1 * GIB)),
            "0.47-0.92 GiB on A100, 1.1 on V100 (ml-engineering, BigScience)", "--context-gib"),
        Unseen("NCCL buffers", int(_or(communication, nccl)), int(_or(communication, nccl_bound)),
            "+1-2 GiB after the first collectives (ml-engineering, nccl#864)", "--nccl-gib"),
        Unseen("allocator rounding", rounding, 4 * rounding, "512 bytes a tensor, 2 MiB a segment (torch's caching allocator)", "-"),
        Unseen("cuBLAS and cuDNN workspaces", int(0.03 * GIB), int(0.3 * GIB), "8-32 MiB a handle and stream on Hopper (torch)", "-"),
        Unseen(
            "fragmentation", int(_or(fragmentation, 0.03) * allocated), int(_or(fragmentation, 0.09) * allocated),
            "torchtitan 8 to 128 GPUs: +7-10 % over 16 bytes a parameter; far more without expandable_segments", "--fragmentation",
        ),
    ]  # fmt: skip


NOT_IN_NUMBERS = (
    "Attention kernels on GPUs keep other side tensors than the CPU's (a few bytes a query).",
    "A model that branches on data (a mask that is all ones, say) may take another path with real values.",
    "Compiled graphs (torch.compile) keep fewer activations: 7-15 % less at the peak in published runs.",
)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
