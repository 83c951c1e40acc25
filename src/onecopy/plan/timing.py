"""Play a tape on a machine: one compute lane, one gather lane, one reduce lane, and what waits for what.

operator     a matrix multiplication takes the longer of FLOPs / (peak x fraction) and bytes / bandwidth, others bytes
transfer     starts when its lane is free and the compute lane has reached it; see `Machine.transfer_seconds`
wait         the compute lane stands until the transfer has arrived: exposed communication
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from onecopy.errors import PlanError
from onecopy.plan.hardware import Gpu, Machine
from onecopy.plan.tape import Await, Compute, Event, Transfer


@dataclass(frozen=True)
class Rates:
    """What operators reach of a GPU's peaks; calibrated on published runs by `benchmarks/plan.py`.

    Attributes:
        matmul: share of the peak FLOP/s of large matrix multiplications in training (less than in a benchmark of one).
        attention: the same inside fused attention kernels.
        traffic: share of the memory bandwidth of all other operators.
        half: the smallest of a matrix multiplication's three sizes at which it reaches half of `matmul`.
        launch: seconds an operator takes at least.
        overlap: how much longer compute takes while a transfer runs at the full rate of the links inside a node (they share
            memory bandwidth and processors); beside a slower one, in proportion to its rate.
    """

    matmul: float = 0.70
    half: float = 0.0
    attention: float = 0.35
    traffic: float = 0.75
    launch: float = 4e-6
    overlap: float = 1.0


# Fitted on MPT-350m, 3b and 70b of llm-foundry's page by `benchmarks/plan.py --fit`; 125m, 760m and 13b were held out.
CALIBRATED: dict[str, Rates] = {
    "H100": Rates(matmul=0.611, half=5.03, attention=0.184, traffic=0.357, launch=2.45e-5, overlap=1.179),
    "A100": Rates(matmul=0.761, half=5.32, attention=0.317, traffic=0.318, launch=1.21e-5, overlap=1.291),
}


def rates_for(gpu: Gpu) -> Rates:
    """The rates of a GPU: its own where they were measured, by its name where runs are published, else the defaults."""
    if gpu.rates is not None:
        try:
            return Rates(**gpu.rates)
        except TypeError:
            known = ", ".join(one.name for one in fields(Rates))
            raise PlanError(f"{gpu.source}: [{gpu.name}.rates] has {', '.join(gpu.rates)}; known are {known}") from None
    kind = gpu.name.split("-")[0]
    return CALIBRATED.get("H100" if kind == "H200" else kind, Rates())


@dataclass
class Played:
    """One step on the clock, in seconds.

    Attributes:
        bars: (lane, start, end, label) for a timeline.
        exposed: seconds that the compute lane stood waiting.
        flops: of all matrix multiplications and attention, recomputation included.
    """

    seconds: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    flops: float = 0.0
    by_phase: dict[str, float] = field(default_factory=dict)
    bars: list[tuple[str, float, float, str]] = field(default_factory=list)


def compute_seconds(event: Compute, machine: Machine, rates: Rates, compiled: bool = False) -> float:
    """Seconds of the operators of one stretch; in the optimizer's step nothing is compiled."""
    gpu = machine.gpu
    seconds = 0.0
    for flops, nbytes, smallest in event.matmuls:
        reached = rates.matmul * smallest / (smallest + rates.half)
        seconds += max(flops / (gpu.flops * reached), nbytes / (gpu.bandwidth * rates.traffic), rates.launch)
    seconds += event.attention / (gpu.flops * rates.attention)
    fused = compiled and event.phase != "step"
    traffic, kernels = (event.fused, event.kernels) if fused else (event.traffic, event.operators)
    others = kernels - len(event.matmuls)
    return seconds + max(traffic / (gpu.bandwidth * rates.traffic), others * rates.launch)


def play(events: list[Event], machine: Machine, rates: Rates, compiled: bool = False) -> Played:
    """Let the three lanes run; `compiled`: operators between matrix products are one kernel."""
    played = Played()
    now = 0.0
    free = {"gather": 0.0, "reduce": 0.0}
    share = {"gather": 0.0, "reduce": 0.0}  # of the links' rate that the lane's last transfer takes
    arrives: dict[int, float] = {}
    for event in events:
        if isinstance(event, Compute):
            seconds = compute_seconds(event, machine, rates, compiled)
            beside = max(share[lane] * min(seconds, max(0.0, free[lane] - now)) for lane in free)
            seconds += (rates.overlap - 1) * beside
            played.bars.append(("compute", now, now + seconds, f"{event.phase} {event.module}".strip()))
            played.by_phase[event.phase] = played.by_phase.get(event.phase, 0.0) + seconds
            played.flops += sum(flops for flops, _, _ in event.matmuls) + event.attention
            played.compute += seconds
            now += seconds
        elif isinstance(event, Transfer):
            seconds = machine.transfer_seconds(event.nbytes, event.lane)
            start = max(now, free[event.lane])
            share[event.lane] = machine.share_of_link(event.nbytes, seconds)
            free[event.lane] = arrives[event.number] = start + seconds
            setattr(played, event.lane, getattr(played, event.lane) + seconds)
            played.bars.append((event.lane, start, start + seconds, event.label))
        elif isinstance(event, Await):
            arrival = arrives.get(event.number, 0.0)
            if arrival > now:
                played.exposed += arrival - now
                now = arrival
    # What is still under way at the end (refreshed weights) arrives during the next step's forward.
    late = max(0.0, max(free.values()) - now - played.by_phase.get("forward", 0.0))
    played.exposed += late
    played.seconds = now + late
    return played


def chrome_trace(played: Played) -> dict[str, object]:
    """The timeline in the format of chrome://tracing and Perfetto; times in microseconds."""
    lanes = {"compute": 0, "gather": 1, "reduce": 2}
    return {
        "traceEvents": [
            {
                "name": label,
                "cat": lane,
                "ph": "X",
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
                "pid": 0,
                "tid": lanes[lane],
            }
            for lane, start, end, label in played.bars
        ]
    }
