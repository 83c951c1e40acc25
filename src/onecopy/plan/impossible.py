"""Numbers that cannot be are refused, wherever they come from: a throughput above the peak, a memory below the states."""

from __future__ import annotations

from onecopy.errors import PlanError
from onecopy.plan.unseen import GIB


def utilisation(flops: float, seconds: float, peak: float, where: str) -> float:
    """MFU: the share of the peak that `flops` in `seconds` is. Raises PlanError when it is above 1."""
    share = flops / seconds / peak
    if share > 1:
        raise PlanError(
            f"{where} would compute {flops / seconds / 1e12:,.1f} TFLOP/s of a peak of {peak / 1e12:,.1f} (MFU {share:.0%}), which cannot "
            "be; correct flops and rates of the hardware file, or the time that was given"
        )
    return share


def at_least(nbytes: float, floor: float, where: str) -> None:
    """Raises PlanError when `nbytes` is less than the training state alone takes."""
    if nbytes < floor:
        raise PlanError(
            f"{where} would take {nbytes / GIB:.2f} GiB a GPU, less than its training state of {floor / GIB:.2f} GiB, which cannot be"
        )


def states_floor(
    parameters: float, stage: int, ranks: int, bytes_of: tuple[float, float, float] = (2.0, 2.0, 12.0)
) -> float:
    """Bytes a rank of mixed-precision Adam at least holds: weights, gradients, masters and moments, by what the stage shards."""
    sharded = (stage >= 3, stage >= 2, stage >= 1)
    return sum(parameters * size / (ranks if split else 1) for size, split in zip(bytes_of, sharded, strict=True))
