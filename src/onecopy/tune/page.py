"""What a search found, as a table for the terminal and as one page with a plot: no network, no script."""

from __future__ import annotations

import html
import json

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
td.text { text-align: left; } tr.best td { background: color-mix(in srgb, var(--best) 14%, transparent); }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 12px; }
pre { overflow-x: auto; margin: 0; font-size: .84rem; }
"""


def table(study: Study) -> str:
    """Every trial, fastest first, for the terminal."""
    ranked = sorted(study.trials, key=lambda trial: -(trial.samples_per_second or 0.0))
    first = next((t.samples_per_second for t in study.trials if not t.choices and t.samples_per_second), None)
    gain = (
        f", {study.best.samples_per_second / first - 1:+.1%} beside the configuration as given"
        if first and study.best.samples_per_second
        else ""
    )
    return "\n".join(["", *map(line_of, ranked), *study.notes, f"fastest: trial {study.best.number}{gain}"])


def page(study: Study, name: str) -> str:
    """The page's HTML."""
    title = html.escape(f"{name} on {study.ranks} ranks")
    best = study.best
    names = sorted({choice for trial in study.trials for choice in trial.choices})
    heads = ["trial", "samples/s", "step", "peak", *(name.split(".")[-1] for name in names), "steps", "outcome"]
    rows = "".join(
        f"<tr{' class=best' if trial is best else ''}>" + "".join(_cells(trial, names)) + "</tr>"
        for trial in study.trials
    )
    head = "".join(f"<th>{html.escape(head)}</th>" for head in heads)
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
    width, height, left, bottom = 960, 300, 60, 30
    top = max(trial.samples_per_second or 0.0 for trial in study.trials) * 1.05
    step = (width - left - 20) / max(1, len(study.trials))
    best, line, dots = 0.0, [], []
    for place, trial in enumerate(study.trials):
        x = left + step * (place + 0.5)
        y = height - bottom - (height - bottom - 10) * (trial.samples_per_second or 0.0) / top
        kind = "best" if trial is study.best else {"measured": "measured", "slow": "slow"}.get(trial.status, "failed")
        dots.append(
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r=6 fill='var(--{kind})'><title>{html.escape(line_of(trial))}</title></circle>"
        )
        dots.append(f"<text x='{x:.1f}' y='{height - 8}' text-anchor=middle>{trial.number}</text>")
        if trial.status == "measured":
            best = max(best, trial.samples_per_second or 0.0)
        line.append(f"{x:.1f},{height - bottom - (height - bottom - 10) * best / top:.1f}")
    grid = ""
    for part in range(5):
        y = height - bottom - (height - bottom - 10) * part / 4
        grid += f"<line x1={left} x2={width} y1='{y:.1f}' y2='{y:.1f}' stroke='var(--line)'/>"
        grid += f"<text x={left - 8} y='{y + 4:.1f}' text-anchor=end>{top * part / 4:.3g}</text>"
    return (
        f"<svg viewBox='0 0 {width} {height}' role=img aria-label='samples a second by trial'>{grid}"
        f"<polyline points='{' '.join(line)}' fill=none stroke='var(--best)' stroke-width=2 />{''.join(dots)}</svg>"
        "<p class=soft>Green: the best so far. Blue: measured; grey: ended early as too slow; red: failed, hung or out of memory.</p>"
    )


def _cells(trial: Trial, names: list[str]) -> list[str]:
    rate = "" if trial.samples_per_second is None else f"{trial.samples_per_second:,.2f}"
    step = "" if trial.step_seconds is None else f"{trial.step_seconds:.4f} s"
    peak = "" if trial.peak_bytes is None else f"{trial.peak_bytes / 2**20:,.1f} MiB"
    chosen = [f"{trial.choices[name]:,}" if name in trial.choices else "as given" for name in names]
    values = [str(trial.number), rate, step, peak, *chosen, str(trial.steps)]
    outcome = trial.status + (f": {trial.detail}" if trial.detail else "")
    return [*(f"<td>{html.escape(value)}</td>" for value in values), f"<td class=text>{html.escape(outcome)}</td>"]
