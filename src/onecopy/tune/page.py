"""What a search found, as a table for the terminal and as one page with a plot: no network, no script."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable

from onecopy.tune.space import SHORT
from onecopy.tune.study import Study, line_of
from onecopy.tune.trial import Trial

_STYLE = """
:root { color-scheme: light dark; --ground: #fcfcfa; --card: #fff; --ink: #1d1f21; --soft: #63686e; --line: #dcdcd6; --measured: #4269d0;
  --best: #1b7f4d; --slow: #9498a0; --failed: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ground: #16181b; --card: #1e2125; --ink: #e8e8e4; --soft: #a0a6ad; --line: #363a40;
  --measured: #97bbf5; --best: #5fc794; --failed: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin: 0 0 8px; } .soft { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 16px; margin-top: 16px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 9px; border-bottom: 1px solid var(--line); white-space: nowrap; } th { color: var(--soft); }
td.text { text-align: left; white-space: normal; overflow-wrap: anywhere; }
tr.best td { background: color-mix(in srgb, var(--best) 14%, transparent); }
svg { display: block; width: 100%; min-width: 600px; height: auto; } svg text { fill: var(--soft); font-size: 12px; }
pre { overflow-x: auto; margin: 0; font-size: .84rem; }
"""


def table(study: Study) -> str:
    """Every trial, fastest first, for the terminal; reasons stand below."""
    ranked = sorted(study.trials, key=lambda trial: -(trial.samples_per_second or 0.0))
    first = next((t.samples_per_second for t in study.trials if not t.choices and t.samples_per_second), None)
    gain = (
        f", {study.best.samples_per_second / first - 1:+.1%} beside the configuration as given"
        if first and study.best.samples_per_second
        else ""
    )
    names = _searched(study)
    rows = [[*_HEADS, *(SHORT[name] for name in names)], *([*_cells(trial, names)] for trial in ranked)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    reasons = [f"trial {trial.number}: {trial.status}: {trial.detail}" for trial in study.trials if trial.detail]
    return "\n".join(["", *lines, *reasons, *study.notes, f"fastest: trial {study.best.number}{gain}"])


def page(study: Study, name: str) -> str:
    """The page's HTML."""
    title = html.escape(f"{name} on {study.ranks} ranks")
    best = study.best
    names = _searched(study)
    rows = "".join(_row(trial, names, trial is best) for trial in study.trials)
    head = "".join(f"<th>{html.escape(head)}</th>" for head in (*_HEADS, *(SHORT[name] for name in names)))
    notes = "".join(f"<p class=soft>{html.escape(note)}</p>" for note in study.notes)
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{title}</title><style>{_STYLE}</style></head><body><main><h1>{title}</h1>"
        f"<p class=soft>{len(study.trials)} trials of {study.limits.steps} measured steps; trial {best.number} is the fastest, "
        f"{best.samples_per_second:,.2f} samples/s.</p>{notes}"
        f"<section><h2>Samples a second by trial</h2>{plot(study)}</section>"
        f"<section><h2>Trials</h2><div class=scroll><table><tr>{head}</tr>{rows}</table></div></section>"
        f"<section><h2>Best configuration</h2><pre>{html.escape(json.dumps(study.config(), indent=2))}</pre></section>"
        "</main></body></html>\n"
    )


def plot(study: Study) -> str:
    """A dot a trial, and a line that says the best so far."""
    width, height, left, bottom = 960, 300, 60, 44
    most = max(trial.samples_per_second or 0.0 for trial in study.trials)
    tick = _round_tick(most / 4)
    top = tick * max(1, math.ceil(most / tick))
    step = (width - left - 20) / max(1, len(study.trials))
    place_of: Callable[[float], float] = lambda rate: height - bottom - (height - bottom - 10) * rate / top  # noqa: E731
    best, line, dots = 0.0, "", []
    for place, trial in enumerate(study.trials):
        x, rate = left + step * (place + 0.5), trial.samples_per_second or 0.0
        kind = "best" if trial is study.best else {"measured": "measured", "slow": "slow"}.get(trial.status, "failed")
        dots.append(
            f"<circle cx='{x:.1f}' cy='{place_of(rate):.1f}' r=6 fill='var(--{kind})'><title>{html.escape(line_of(trial))}</title></circle>"
        )
        dots.append(f"<text x='{x:.1f}' y='{height - 26}' text-anchor=middle>{trial.number}</text>")
        if trial.status == "measured":
            best = max(best, rate)
        line += f"{'H' if line else 'M'}{x:.1f}{f'V{place_of(best):.1f}' if line else f' {place_of(best):.1f}'}"
    grid = ""
    for part in range(round(top / tick) + 1):
        y = place_of(part * tick)
        grid += f"<line x1={left} x2={width} y1='{y:.1f}' y2='{y:.1f}' stroke='var(--line)'/>"
        grid += f"<text x={left - 8} y='{y + 4:.1f}' text-anchor=end>{part * tick:g}</text>"
    grid += f"<text x='{(left + width) / 2:.0f}' y='{height - 6}' text-anchor=middle>trial</text>"
    return (
        f"<div class=scroll><svg viewBox='0 0 {width} {height}' role=img aria-label='samples a second by trial'>{grid}"
        f"<path d='{line}' fill=none stroke='var(--best)' stroke-width=2 />{''.join(dots)}</svg></div>"
        "<p class=soft>Green: the best so far. Blue: measured; grey: ended early as too slow; red: failed, hung or out of memory.</p>"
    )


def _round_tick(size: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(size)) if size > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= size)


_HEADS = ("trial", "outcome", "samples/s", "step", "peak")


def _searched(study: Study) -> list[str]:
    """The keys that any trial changed, in the table's order."""
    return [name for name in SHORT if any(name in trial.choices for trial in study.trials)]


def _cells(trial: Trial, names: list[str]) -> list[str]:
    rate = "" if trial.samples_per_second is None else f"{trial.samples_per_second:,.2f}"
    step = "" if trial.step_seconds is None else f"{trial.step_seconds:.4f} s"
    peak = "" if trial.peak_bytes is None else f"{trial.peak_bytes / 2**20:,.1f} MiB"
    chosen = [f"{trial.choices[name]:,}" if name in trial.choices else "as given" for name in names]
    return [str(trial.number), trial.status, rate, step, peak, *chosen]


def _row(trial: Trial, names: list[str], best: bool) -> str:
    """A line of the page's table; why a trial failed stands below it, over the whole width."""
    number, *rest = _cells(trial, names)
    cells = "".join(f"<td>{html.escape(value)}</td>" for value in (number, *rest))
    row = f"<tr{' class=best' if best else ''}>{cells}</tr>"
    if trial.detail:
        row += f"<tr><td></td><td class='text soft' colspan={len(rest)}>{html.escape(trial.detail)}</td></tr>"
    return row
