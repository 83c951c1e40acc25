"""Counts of a `FlopProfile` as text: numbers with units, a table of the largest modules, the module tree."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from onecopy.observe.flops import Counts, FlopProfile, parameters_of

_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """1234567 as "1.23 M"; `units` is one of T, G, M, K, "", m, u, by default what fits."""
    if units is None:
        units = next((unit for unit, size in _UNITS.items() if abs(num) >= size), "u") if num else ""
    elif units == "B":
        return f"{round(num / 1e9, precision):g} B"
    return f"{round(num / _UNITS[units], precision):g} {units}"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    return f"{number_to_string(flops, units, precision)}FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    return f"{number_to_string(macs, units, precision)}MACs"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    return (
        number_to_string(params_num, units.replace("B", "G") if units else units, precision).replace("G", "B").strip()
    )


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    return f"{number_to_string(duration, units, precision)}s"


@dataclass(frozen=True)
class StepTimes:
    """What else a report of a training step says: seconds, and what the engine knows of the batch.

    Attributes:
        backward: seconds of the backward, the loss's own forward included; step: of the update.
        samples: of one micro-batch on all ranks.
        backward_factor: operations of the backward for one of the forward: 2, and more where a forward is computed again.
    """

    backward: float
    step: float
    samples: int
    ranks: int
    backward_factor: float


def profile_text(
    profile: FlopProfile, step: int, depth: int, top: int, detailed: bool, times: StepTimes | None = None
) -> str:
    """The report: totals, the `top` modules of each depth, and with `detailed` the module tree down to `depth`."""
    total = profile.total
    rows = [
        ("parameters a rank trains with", params_to_string(parameters_of(profile.model))),
        ("forward MACs", macs_to_string(total.macs)),
        ("forward flops", number_to_string(total.flops)),
        ("forward latency", duration_to_string(total.duration)),
        ("forward FLOPS", _rate(total.flops, total.duration)),
        *(_rows_of_step(total, times) if times is not None else ()),
    ]
    lines = [f"Flops profile at step {step}", *(f"{name:<40}{value}" for name, value in rows)]
    lines += aggregated_lines(profile, depth, top)
    if detailed:
        lines += _tree(profile, profile.model, type(profile.model).__name__, 0, depth)
    return "\n".join(lines)


def _rows_of_step(total: Counts, times: StepTimes) -> list[tuple[str, str]]:
    both = total.duration + times.backward
    whole = both + times.step
    return [
        ("backward latency", duration_to_string(times.backward)),
        ("backward FLOPS", _rate(times.backward_factor * total.flops, times.backward)),
        ("forward and backward FLOPS", _rate((1 + times.backward_factor) * total.flops, both)),
        ("step latency", duration_to_string(times.step)),
        ("micro-batch and step latency", duration_to_string(whole)),
        ("FLOPS a rank", _rate((1 + times.backward_factor) * total.flops, whole)),
        ("samples a second", f"{times.samples / whole:.2f}" if whole else "0"),
        ("ranks", str(times.ranks)),
    ]


def _rate(flops: float, seconds: float) -> str:
    return flops_to_string(flops / seconds if seconds else 0)


def write_profile(text: str, file: str) -> None:
    """Write a report into a file; its folder is made."""
    path = Path(file).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def aggregated_lines(profile: FlopProfile, depth: int, top: int) -> list[str]:
    """For each depth (or the one given) the classes of modules with the most parameters, MACs and time."""
    levels: list[dict[str, list[float]]] = []
    _add_up(profile, profile.model, 0, levels)
    chosen = range(len(levels)) if depth < 0 else [min(depth, len(levels) - 1)]
    lines = []
    for level in chosen:
        lines.append(f"depth {level}:")
        for place, (label, text) in enumerate(
            (("params", params_to_string), ("MACs", macs_to_string), ("fwd latency", duration_to_string))
        ):
            ranked = sorted(levels[level].items(), key=lambda entry: entry[1][place], reverse=True)[:top]
            lines.append(f"    {label:<12}- " + ", ".join(f"{name}: {text(sums[place])}" for name, sums in ranked))
    return lines


def _add_up(profile: FlopProfile, module: nn.Module, level: int, levels: list[dict[str, list[float]]]) -> None:
    if level == len(levels):
        levels.append({})
    sums = levels[level].setdefault(type(module).__name__, [0.0, 0.0, 0.0])
    counts = profile.counts(module)
    for place, value in enumerate((parameters_of(module), counts.macs, counts.duration)):
        sums[place] += value
    for child in module.children():
        _add_up(profile, child, level + 1, levels)


def _tree(profile: FlopProfile, module: nn.Module, label: str, level: int, depth: int) -> list[str]:
    counts, total = profile.counts(module), profile.total
    share = f"{counts.macs / total.macs:.1%}" if total.macs else "0%"
    line = (
        f"{'  ' * level}{label}: {params_to_string(parameters_of(module))} params, {macs_to_string(counts.macs)} ({share}), "
        f"{duration_to_string(counts.duration)}"
    )
    if 0 <= depth <= level:
        return [line]
    children = [
        _tree(profile, child, f"({name}) {type(child).__name__}", level + 1, depth)
        for name, child in module.named_children()
    ]
    return [line, *(inner for child in children for inner in child)]
