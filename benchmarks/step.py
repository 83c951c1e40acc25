"""Step time, peak memory, bytes sent and Python overhead of onecopy beside its peers.

    python -m benchmarks.step                                    # time and bytes, two ranks; ratios with each peer
    python -m benchmarks.step --nproc 4 --engines ddp,fsdp2,onecopy3
    python -m benchmarks.step --measure peak [--layers 24 --sequence 512]
    python -m benchmarks.step --measure overhead

Engines are timed in turn, `--rounds` times over in one launch, so that a drift of the machine falls on all of them.
Needs transformers; engines `ds1..3` need deepspeed.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import engines, workload
from benchmarks.launch import on_ranks, table

PEERS = ("local", "ddp", "fsdp2", "fsdp2-z2", "ds1", "ds2", "ds3")
OURS = ("onecopy0", "onecopy1", "onecopy2", "onecopy3")
WARM_UP = 2  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    workload.add_arguments(parser)
    parser.add_argument("--nproc", type=int, default=2, help="ranks")
    parser.add_argument("--engines", default=",".join([*PEERS, *OURS]))
    parser.add_argument("--measure", default="time", choices=["time", "peak", "overhead"])
    parser.add_argument("--steps", type=int, default=6, help="timed steps a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    options = [
        text
        for name, value in vars(arguments).items()
        if name not in ("nproc", "worker", "engines")
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    if arguments.measure == "peak":  # one engine a launch: a peak is of a whole life
        names = [name for name in arguments.engines.split(",") if name not in ("local",)]
        records = [
            r for name in names for r in on_ranks("benchmarks.step", arguments.nproc, [*options, "--engines", name])
        ]
    else:
        ranks = 1 if arguments.measure == "overhead" else arguments.nproc
        records = on_ranks("benchmarks.step", ranks, [*options, "--engines", arguments.engines])
    {"time": show_times, "peak": show_peaks, "overhead": show_overhead}[arguments.measure](records)


# --------------------------------------------------------------------------------------------------------------- on a rank
def worker(arguments: argparse.Namespace) -> None:
    if arguments.measure == "overhead":  # torch's fake back end: the calls of two ranks, and no byte moves
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    else:
        dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    if arguments.measure == "overhead":
        records: list[dict[str, Any]] = [python_overhead()]
    elif arguments.measure == "peak":
        records = [peak(arguments.engines, arguments)]
    else:
        records = times(arguments.engines.split(","), arguments)
    if dist.get_rank() == 0:
        for record in records:
            print(json.dumps(record), flush=True)
    dist.destroy_process_group()


def times(names: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of every timed step by engine, the loss after the last, and the bytes onecopy says it sent."""
    found: dict[str, dict[str, Any]] = {name: {"engine": name, "seconds": []} for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            record = found[name]
            engine = engines.build(name, arguments)
            data = [workload.batches(arguments, dist.get_rank(), arguments.accumulation) for _ in range(2)]
            for step in range(WARM_UP + arguments.steps):
                dist.barrier()
                start = time.perf_counter()
                loss = engine.step(data[step % 2])
                if step >= WARM_UP:
                    record["seconds"].append(time.perf_counter() - start)
            record["loss"] = float(loss)
            if isinstance(engine, engines.Configured) and name.startswith("onecopy"):
                record["bytes_sent"] = engine.engine.communication()["bytes_sent"]
                engine.engine.destroy()
            del engine
            gc.collect()
    parameters = sum(p.numel() for p in workload.make_model(arguments).parameters())
    wire = workload.DTYPES[arguments.dtype].itemsize
    one_pass = parameters * wire * (dist.get_world_size() - 1) / dist.get_world_size()
    return [{**record, "one_pass": one_pass} for record in found.values()]


def peak(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Peak live tensor bytes of a whole life (construction and three steps), from the allocator's own events."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine = engines.build(name, arguments)
        data = workload.batches(arguments, dist.get_rank(), arguments.accumulation)
        for _ in range(3):
            engine.step(data)
    record: dict[str, Any] = {"engine": name, "peak": _peak_of(profiler)}
    if name.startswith("onecopy"):
        record["peak"] += engine.engine.communicator.unseen_bytes  # lives from construction on
        record["states"] = _states(engine)
        record["activations"] = activations_peak(arguments)
    return record


def _peak_of(profiler: Any) -> int:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        with open(file.name) as handle:
            events = [e for e in json.load(handle)["traceEvents"] if e.get("name") == "[memory]"]
    live = highest = 0
    for event in sorted((e for e in events if e["args"].get("Device Type") == 0), key=lambda e: e["ts"]):
        live += event["args"]["Bytes"]
        highest = max(highest, live)
    return highest


def _states(engine: Any) -> int:
    """Masters, moments, one window's gradient shards and all slots, in bytes."""
    inner = engine.engine
    shards = sum(m.master.numel() * 4 for m in inner.masters.runs)
    memory = inner.memory()
    return sum(memory[kind] for kind in ("parameters", "masters", "moments", "slots", "gradients")) + shards


def activations_peak(arguments: argparse.Namespace) -> int:
    """What one forward and backward of the bare low-precision model holds at most beyond its weights, in bytes.

    Gradients are dropped as they arrive, as an engine that reduces at once does.
    """
    from torch.profiler import ProfilerActivity, profile

    model = workload.make_model(arguments).to(workload.DTYPES[arguments.dtype])
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    tokens = workload.batches(arguments, dist.get_rank(), 1)[0]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model(input_ids=tokens, labels=tokens).loss.backward()
    return _peak_of(profiler)


class Nothing(nn.Module):
    """A unit whose compute is next to nothing: one parameter, added to a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def python_overhead(units: int = 200, steps: int = 10) -> dict[str, Any]:
    """Microseconds of this process's CPU time, a unit and step, that the engine adds to a model of tiny units."""
    import onecopy

    def seconds_of(step: Any) -> float:
        found = []
        for _ in range(steps):
            start = time.process_time()
            step()
            found.append(time.process_time() - start)
        return statistics.median(found[2:])

    x = torch.ones(1)
    plain = nn.Sequential(*[Nothing() for _ in range(units)])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.0, fused=True)

    def plain_step() -> None:
        plain(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    record: dict[str, Any] = {"ranks": dist.get_world_size(), "units": units}
    bare = seconds_of(plain_step)
    for stage in range(4):
        model = nn.Sequential(*[Nothing() for _ in range(units)])
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        engine, *_ = onecopy.initialize(model=model, config=config)

        def engine_step(engine: Any = engine) -> None:
            engine.backward(engine(x).sum())
            engine.step()

        record[f"stage {stage}"] = (seconds_of(engine_step) - bare) / units * 1e6
        engine.destroy()
    return record


# ------------------------------------------------------------------------------------------------------------------ tables
def show_times(records: list[dict[str, Any]]) -> None:
    median = {r["engine"]: statistics.median(r["seconds"]) for r in records}
    peers = [name for name in PEERS if name in median]
    rows = []
    for record in records:
        name = record["engine"]
        sent = f"{record['bytes_sent'] / record['one_pass']:.3f}" if "bytes_sent" in record else ""
        ratios = [f"{median[name] / median[peer]:.2f}" for peer in peers]
        rows.append(
            [name, f"{median[name]:.3f}", f"{min(record['seconds']):.3f}", f"{record['loss']:.4f}", sent, *ratios]
        )
    headings = ["engine", "median s", "least s", "loss", "bytes sent / one pass", *[f"/ {peer}" for peer in peers]]
    print(table(headings, rows))


def show_peaks(records: list[dict[str, Any]]) -> None:
    peaks = {r["engine"]: r["peak"] for r in records}
    rows = []
    for record in records:
        name, highest = record["engine"], record["peak"]
        of_parts = ""
        if "states" in record:
            of_parts = f"{highest / (record['states'] + record['activations']):.3f}"
        ratio = f"{highest / peaks['fsdp2']:.2f}" if "fsdp2" in peaks else ""
        rows.append([name, f"{highest / 2**20:.1f}", of_parts, ratio])
    print(table(["engine", "peak MiB", "peak / (states + slots + activations)", "/ fsdp2"], rows))


def show_overhead(records: list[dict[str, Any]]) -> None:
    (record,) = records
    stages = [name for name in record if name.startswith("stage")]
    print(
        table(["ranks", "units", *stages], [[record["ranks"], record["units"], *[f"{record[s]:.0f}" for s in stages]]])
    )
    print("microseconds of CPU time a unit and step beyond plain torch; two imagined ranks, so no byte moves")


if __name__ == "__main__":
    main()
