"""A measured machine as the TOML table that `onecopy plan --hardware` reads, with the rates of the time model fitted to it."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence

import torch

from onecopy.plan.hardware import Gpu, known_like
from onecopy.plan.measuring import Measured

MOST_BEYOND = 1.1  # a fitted limit is at most so many times the best product measured


def machine_table(measured: Measured, name: str | None = None) -> str:
    """The TOML text. Peaks come from data sheets where the GPU is a known one, else the best measured stands for the peak."""
    known = known_like(measured.device)
    best = measured.best("bf16")
    reached, half = fit_matmuls(measured.matmuls["bf16"])
    flops = known.flops if known is not None and known.flops >= best else max(best, reached)
    bandwidth = known.bandwidth if known is not None and known.bandwidth >= measured.bandwidth else measured.bandwidth
    date = datetime.date.today().isoformat()
    peak = f"data sheet of {known.name}" if known is not None and flops == known.flops else "the limit of the measured"
    lines = [
        f"# Measured by `onecopy measure-hardware` on {date}: {measured.ranks} rank(s), torch {torch.__version__}.",
        f"[{_key(name or measured.device)}]",
        f"memory = {measured.memory}  # bytes a rank",
        f"flops = {flops:.6g}  # FLOP/s in bf16, {peak}",
        f"matmul_fraction = {min(1.0, best / flops):.4g}",
        f"bandwidth = {bandwidth:.6g}  # bytes/s; a large copy reached {measured.bandwidth:.4g}",
        *_links(measured, known),
    ]
    if measured.context is not None:
        lines.append(f"context = {measured.context}  # bytes in use on the device beyond the allocator's")
    if measured.communication is not None:
        lines.append(f"communication = {measured.communication}  # bytes that collectives added")
    lines += [
        f"gather = {_points(measured.gathers)}  # [ranks, bytes of the whole buffer, bytes/s of bus bandwidth]",
        f"reduce = {_points(measured.reduces)}",
        "",
        f"[{_key(name or measured.device)}.rates]  # of the time model, see docs/planning.md",
        f"matmul = {min(1.0, reached / flops):.4g}",
        f"half = {half:.4g}",
        f"attention = {min(1.0, measured.attention / flops):.4g}",
        f"traffic = {min(1.0, measured.bandwidth / bandwidth):.4g}",
        f"launch = {measured.launch:.4g}  # seconds",
        "",
        f"[{_key(name or measured.device)}.measured]  # for people; a plan does not read it",
    ]
    for dtype, found in measured.matmuls.items():
        lines.append(f"matmul_{dtype} = {_points(found)}  # [width, FLOP/s]")
    lines.append(f"copy = {_points(measured.copies)}  # [bytes of the buffer, bytes/s read and written]")
    return "\n".join(lines) + "\n"


def fit_matmuls(found: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(rate, half): FLOP/s is `rate * width / (width + half)`, by least squares of the relative error.

    1 / FLOP/s is a straight line over 1 / width, so no search is needed.
    """
    best = max(rate for _, rate in found)
    if len(found) < 2:
        return best, 0.0
    rows = torch.tensor([[rate, rate / width] for width, rate in found], dtype=torch.float64)
    inverse, slope = (
        torch.linalg.lstsq(rows, torch.ones(len(found), 1, dtype=torch.float64)).solution.flatten().tolist()
    )
    if slope <= 0:
        return best, 0.0
    if inverse > 0 and 1 / inverse <= MOST_BEYOND * best:
        return 1 / inverse, slope / inverse
    # The widths measured are all on the slope: the limit is not known, so it is set and the slope fitted to it.
    limit = MOST_BEYOND * best
    slopes = [(rate / width / limit, 1 - rate / limit) for width, rate in found]
    return limit, sum(a * b for a, b in slopes) / sum(a * a for a, _ in slopes)


def _links(measured: Measured, known: Gpu | None) -> list[str]:
    if not measured.gathers:
        link = known.link if known is not None else 0
        said = (
            f"data sheet of {known.name}"
            if known is not None
            else "measure with --nproc 2 or more to plan for several ranks"
        )
        return [f"link = {link:.6g}  # bytes/s; not measured on one rank: {said}"]
    rate = max(rate for _, _, rate in measured.gathers)
    network = known.node_network if known is not None else 0
    return [
        f"link = {rate:.6g}  # bytes/s, the best gather",
        "link_fraction = 1.0",
        f"node_network = {network:.6g}  # bytes/s of all network cards of one node; not measured here",
    ]


def _key(name: str) -> str:
    word = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")
    return word or "GPU"


def _points(points: Sequence[Sequence[float]]) -> str:
    return (
        "["
        + ", ".join(
            "[" + ", ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in p) + "]"
            for p in points
        )
        + "]"
    )
