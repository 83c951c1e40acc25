"""The plan as one page: no network, no libraries; the template is `data/report.html`, the numbers are put in as JSON."""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import Any

from onecopy.observe.ledger import CATEGORIES
from onecopy.plan.planning import Plan
from onecopy.plan.unseen import NOT_IN_NUMBERS

_MOST_BARS = 3000


def page(plan: Plan) -> str:
    """The page's HTML."""
    window = plan.rehearsal.windows[-1]
    data = {
        "plan": plan.as_dict(),
        "categories": list(CATEGORIES),
        "timeline": plan.rehearsal.timeline(),
        "marks": [(at, text) for at, text in plan.rehearsal.ledger.marks if window.start <= at <= window.stop],
        "bars": merged(plan.played.bars),
        "notes": list(NOT_IN_NUMBERS),
    }
    return filled(f"{plan.subject.name} on {plan.machine}", data)


def filled(title: str, data: dict[str, Any]) -> str:
    """The template with a title and its numbers."""
    template = resources.files("onecopy.plan").joinpath("data/report.html").read_text(encoding="utf-8")
    # "</" would end the script element inside a module's name.
    return template.replace("__TITLE__", html.escape(title)).replace("__DATA__", json.dumps(data).replace("</", "<\\/"))


def merged(bars: list[tuple[str, float, float, str]]) -> list[tuple[str, float, float, str]]:
    """Bars of one name that touch become one, and the shortest are left out where there are too many to see."""
    joined: list[tuple[str, float, float, str]] = []
    last: dict[str, int] = {}
    for lane, start, end, label in bars:
        place = last.get(lane)
        if place is not None and joined[place][3] == label and start - joined[place][2] < 1e-9:
            joined[place] = (lane, joined[place][1], end, label)
        else:
            last[lane] = len(joined)
            joined.append((lane, start, end, label))
    if len(joined) > _MOST_BARS:
        shortest = sorted((end - start for _, start, end, _ in joined), reverse=True)[_MOST_BARS]
        joined = [bar for bar in joined if bar[2] - bar[1] > shortest]
    return joined
