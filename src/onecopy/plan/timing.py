"""Play a tape on a machine: one compute lane, one gather lane, one reduce lane, and what waits for what.

operator     a matrix multiplication takes the longer of FLOPs / (peak x fraction) and bytes / bandwidth, others bytes
host         runs ahead of the lanes and takes a time for each operator; a step is as long as the longer of the two
transfer     starts when its lane is free and the compute lane has reached it; see `Machine.transfer_seconds`
wait         the compute lane stands until the transfer has arrived: exposed communication
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from onecopy.errors import PlanError
from onecopy.plan.hardware import Gpu, Machine
from onecopy.plan.tape import Await, Compute, Event, Transfer


@dataclass(frozen=True)
class Rates:
    """What operators reach of a GPU's peaks; calibrated on published runs by `benchmarks/plan.py`.

    Attributes:
        matmul: share of the peak FLOP/s of large matrix multiplications in training (less than in a benchmark of one).
        attention: the same inside fused attention kernels.
        traffic: share of the memory bandwidth of pointwise operators and copies; `reduced`: of all others.
        half: the smallest of a matrix multiplication's three sizes at which it reaches half of `matmul`.
        launch: seconds an operator takes at least on the compute lane.
        host: seconds the host takes to start one.
        overlap: how much longer compute takes while a transfer runs at the full rate of the links inside a node (they share
            memory bandwidth and processors); beside a slower one, in proportion to its rate.
    """

    matmul: float = 0.70
    half: float = 0.0
    attention: float = 0.35
    traffic: float = 0.8
    reduced: float = 0.4
    launch: float = 4e-6
    host: float = 2.5e-5
    overlap: float = 1.0


# Fitted on MPT-350m, 3b and 70b of llm-foundry's page by `benchmarks/plan.py --fit`; 125m, 760m and 13b were held out.
CALIBRATED: dict[str, Rates] = {
    "H100": Rates(matmul=0.600, half=5.03, attention=0.186, reduced=0.124, overlap=1.295),
    "A100": Rates(matmul=0.720, half=5.42, attention=0.317, reduced=0.149, overlap=1.293),
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
        lanes: until the last lane is done; `host` until the host has started the last operator.
        bars: (lane, start, end, label) for a timeline.
        exposed: seconds that the compute lane stood waiting.
        flops: of all matrix multiplications and attention, recomputation included.
    """

    lanes: float = 0.0
    host: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    flops: float = 0.0
    by_phase: dict[str, float] = field(default_factory=dict)
    bars: list[tuple[str, float, float, str]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The step: the host needs not wait for the lanes, so step after step the slower of the two sets the pace."""
        return max(self.lanes, self.host)


def as_compiled(event: Compute) -> Compute:
    """The same stretch where units are compiled; the optimizer's step is not."""
    if event.phase == "step":
        return event
    return replace(event, traffic=event.fused, reduced=0, operators=event.kernels)


def compute_seconds(event: Compute, machine: Machine, rates: Rates) -> float:
    """Seconds of the operators of one stretch."""
    gpu = machine.gpu
    seconds = 0.0
    for flops, nbytes, smallest in event.matmuls:
        reached = rates.matmul * smallest / (smallest + rates.half)
        seconds += max(flops / (gpu.flops * reached), nbytes / (gpu.bandwidth * rates.traffic), rates.launch)
    seconds += event.attention / (gpu.flops * rates.attention)
    moving = (event.traffic / rates.traffic + event.reduced / rates.reduced) / gpu.bandwidth
    return seconds + max(moving, (event.operators - len(event.matmuls)) * rates.launch)


def play(events: list[Event], machine: Machine, rates: Rates, compiled: bool = False) -> Played:
    """Let the three lanes run; `compiled`: operators between matrix products are one kernel."""
    played = Played()
    now = 0.0
    free = {"gather": 0.0, "reduce": 0.0}
    share = {"gather": 0.0, "reduce": 0.0}  # of the links' rate that the lane's last transfer takes
    arrives: dict[int, float] = {}
    for event in events:
        if isinstance(event, Compute):
            event = as_compiled(event) if compiled else event
            seconds = compute_seconds(event, machine, rates)
            beside = max(share[lane] * min(seconds, max(0.0, free[lane] - now)) for lane in free)
            seconds += (rates.overlap - 1) * beside
            played.bars.append(("compute", now, now + seconds, f"{event.phase} {event.module}".strip()))
            played.by_phase[event.phase] = played.by_phase.get(event.phase, 0.0) + seconds
            played.flops += sum(flops for flops, _, _ in event.matmuls) + event.attention
            played.compute += seconds
            played.host += rates.host * event.operators
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
    played.lanes = now + late
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
