"""What recomputing activations saves and costs: peak bytes of a forward and backward, and time of a step, by way.

    python -m benchmarks.activations [--stage 3] [--ways none,full,selective,2,compile] [--layers 8] [--sequence 128]

Ways run in turn in one launch, round by round, on the yardstick model. "Kept" are the live tensor bytes that a forward
leaves for its backward; the peak is that of live bytes in forward and backward, with the loss's own temporary results,
which no way of recomputing makes smaller. Both are beyond what was alive before, on the second micro-batch of a window: the
first one's backward has left the gradient shards, which are no activations and grow while those shrink. Time is that of
windows of one micro-batch, as wall time and as CPU time of the process, which other work on the machine disturbs less.
"""

from __future__ import annotations

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

from benchmarks import engines, workload
from benchmarks.launch import on_ranks, table

WAYS = "none,full,selective,2"
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    workload.add_arguments(parser)
    parser.add_argument(
        "--ways", default=WAYS, help='"none", "full", "selective", a number n (every n-th block), "compile"'
    )
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    options = [f"--{name.replace('_', '-')}={value}" for name, value in vars(arguments).items() if name != "worker"]
    show(on_ranks("benchmarks.activations", arguments.ranks, options))


def worker(arguments: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    found: dict[str, dict[str, Any]] = {way: {"way": way, "wall": [], "cpu": []} for way in arguments.ways.split(",")}
    for turn in range(arguments.rounds):
        for way, record in found.items():
            one_round(way, record, arguments, measure_peak=turn == 0)
    if dist.get_rank() == 0:
        for record in found.values():
            print(json.dumps(record), flush=True)
    dist.destroy_process_group()


def one_round(way: str, record: dict[str, Any], arguments: argparse.Namespace, measure_peak: bool) -> None:
    """Build an engine, warm it up, time some steps, and (once) follow the bytes of another one's micro-batch."""
    trainer = trainer_of(way, arguments)
    data = workload.batches(arguments, dist.get_rank(), arguments.accumulation)
    for step in range(WARM_UP + arguments.steps):
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        loss = trainer.step(data)
        if step >= WARM_UP:
            record["wall"].append(time.perf_counter() - wall)
            record["cpu"].append(time.process_time() - cpu)
    record["loss"] = float(loss)
    trainer.engine.destroy()
    if measure_peak:
        record["kept"], record["peak"] = bytes_of_a_micro_batch(way, arguments)
    gc.collect()


def trainer_of(way: str, arguments: argparse.Namespace) -> engines.Configured:
    trainer = engines.Configured("onecopy", arguments.stage, arguments)
    if way == "compile":
        trainer.engine.compile()
    elif way != "none":
        trainer.engine.checkpoint_activations(int(way) if way.isdigit() else way)
    return trainer


def bytes_of_a_micro_batch(way: str, arguments: argparse.Namespace) -> tuple[int, int]:
    """Live tensor bytes after a forward, and at most in it and its backward, beyond those alive before."""
    from torch.profiler import ProfilerActivity, profile

    trainer = trainer_of(way, argparse.Namespace(**{**vars(arguments), "accumulation": 2}))
    engine, data = trainer.engine, workload.batches(arguments, dist.get_rank(), 2)
    trainer.step(data)
    engine.backward(engine(input_ids=data[0], labels=data[0]).loss)
    engine.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward:
        loss = engine(input_ids=data[1], labels=data[1]).loss
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as backward:
        engine.backward(loss)
    engine.step()
    engine.destroy()
    kept, peak = live_bytes(forward)
    return kept, max(peak, kept + live_bytes(backward)[1])


def live_bytes(profiler: Any) -> tuple[int, int]:
    """(at the end, at most) of a profile, beyond the beginning."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        with open(file.name) as handle:
            events = [event for event in json.load(handle)["traceEvents"] if event.get("name") == "[memory]"]
    live = highest = 0
    for event in sorted((e for e in events if e["args"].get("Device Type") == 0), key=lambda e: e["ts"]):
        live += event["args"]["Bytes"]
        highest = max(highest, live)
    return live, highest


def show(records: list[dict[str, Any]]) -> None:
    plain = records[0]
    rows = []
    for record in records:
        wall, cpu = (statistics.median(record[kind]) for kind in ("wall", "cpu"))
        rows.append(
            [
                record["way"],
                f"{record['kept'] / 2**20:.1f}",
                f"{record['kept'] / plain['kept']:.2f}",
                f"{record['peak'] / 2**20:.1f}",
                f"{record['peak'] / plain['peak']:.2f}",
                f"{wall:.3f}",
                f"{wall / statistics.median(plain['wall']):.2f}",
                f"{cpu:.3f}",
                f"{cpu / statistics.median(plain['cpu']):.2f}",
                f"{record['loss']:.6f}",
            ]
        )
    first = plain["way"]
    print(
        table(
            [
                "way",
                "kept MiB",
                f"/ {first}",
                "peak MiB",
                f"/ {first}",
                "wall s",
                f"/ {first}",
                "CPU s",
                f"/ {first}",
                "loss",
            ],
            rows,
        )
    )


if __name__ == "__main__":
    main()
