"""What a run shows: notes and warnings, phase times, progress lines, monitors and a trace of one step."""

from onecopy.observe.log import SkippedSteps, log_once, note, rank_zero, warn
from onecopy.observe.monitor import Monitor, monitors_from
from onecopy.observe.progress import Progress, format_bytes, format_count, memory_line
from onecopy.observe.timers import NO_TIMERS, PHASES, NoTimers, Timers, timers_for
from onecopy.observe.trace import StepTracer, label, trace_step

__all__ = [
    "NO_TIMERS",
    "PHASES",
    "Monitor",
    "NoTimers",
    "Progress",
    "SkippedSteps",
    "StepTracer",
    "Timers",
    "format_bytes",
    "format_count",
    "label",
    "log_once",
    "memory_line",
    "monitors_from",
    "note",
    "rank_zero",
    "timers_for",
    "trace_step",
    "warn",
]
