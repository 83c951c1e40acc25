"""Time and host memory of getting a model's weights onto ranks: plainly, sharded, and streamed from files.

    python -m benchmarks.construct                      # a 135M model in bfloat16 files, two ranks
    python -m benchmarks.construct --nproc 4 --dtype fp32
    python -m benchmarks.construct --against --folder runs/smollm2    # one process, a folder that is there

With `--against`, `load_pretrained` and `from_pretrained` take turns in one process, in a world of one rank, where both
give an ordinary model. Otherwise each way runs in a launch of its own. Memory is the growth of a rank's peak (VmHWM)
from just before; the fp32 masters of the engine are part of it where the way builds one. Time is given as wall time and as
CPU time of the process, which other work on the machine disturbs less. Files are in the page cache. Needs transformers.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.launch import on_ranks, table

AGAINST = ("from_pretrained", "load_pretrained(model)")
WAYS = (
    "from_pretrained, read",
    "load_pretrained(model)",
    "from_pretrained, initialize",
    "initialize, load_pretrained",
    "build plainly",
    "build under zero.Init",
)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def settings(dtype: torch.dtype) -> Any:
    """A Llama of the size of SmolLM 135M: 30 layers of width 576, tied embedding of 49152 tokens."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        dtype=dtype,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2, help="ranks")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES, help="of files and model")
    parser.add_argument("--way", action="append", help="only this one; may be given again")
    parser.add_argument(
        "--against", action="store_true", help="load_pretrained and from_pretrained in turn, in one process"
    )
    parser.add_argument(
        "--folder", default="", help="of a causal language model; default: one that is made for the occasion"
    )
    parser.add_argument("--rounds", type=int, help="default 3, and 15 with --against")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (15 if arguments.against else 3)
    if arguments.worker:
        worker(arguments)
        return
    with tempfile.TemporaryDirectory() as made:
        if not arguments.folder:
            make_folder(Path(made), DTYPES[arguments.dtype])
        options = ["--folder", arguments.folder or made, "--dtype", arguments.dtype, "--rounds", str(arguments.rounds)]
        ranks = 1 if arguments.against else arguments.nproc
        launches = [AGAINST] if arguments.against else [(way,) for way in arguments.way or WAYS]
        records = [
            record
            for ways in launches
            for record in on_ranks("benchmarks.construct", ranks, options + [f"--way={way}" for way in ways])
        ]
    say(records, ranks)


def make_folder(folder: Path, dtype: torch.dtype) -> None:
    """A model of the size of SmolLM2 with random weights, in three files."""
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM(settings(dtype))
    model.to(dtype).save_pretrained(folder, max_shard_size="100MB")


def say(records: list[dict[str, Any]], ranks: int) -> None:
    """Print what the ways took, and the ratio of the last one to the first where they took turns."""
    size = records[0]["bytes"]
    print(f"{size / 2**20:.0f} MiB of parameters, largest {records[0]['largest'] / 2**20:.0f} MiB; {ranks} ranks\n")
    rows = [
        [r["way"], f"{r['seconds']:.3f}", f"{r['cpu']:.3f}", f"{r['peak'] / 2**20:.0f}", f"{r['kept'] / 2**20:.0f}"]
        for r in records
    ]
    print(table(["way", "seconds (median)", "CPU seconds (median)", "peak MiB a rank", "of it kept"], rows))
    if [r["way"] for r in records] == list(AGAINST):
        theirs, ours = records
        print(
            f"\nload_pretrained / from_pretrained: {ours['seconds'] / theirs['seconds']:.2f} of the time, "
            f"{ours['cpu'] / theirs['cpu']:.2f} of the CPU time"
        )


def worker(arguments: argparse.Namespace) -> None:
    """The ways in turn on this rank; rank 0 prints the slowest rank's time and the largest memory of each."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    ways = ways_of(Path(arguments.folder), DTYPES[arguments.dtype])
    found: dict[str, list[tuple[float, float, int, int]]] = {name: [] for name in arguments.way}
    for _ in range(arguments.rounds):
        for name, taken in found.items():
            taken.append(measure(ways[name]))
    for name, taken in found.items():
        everyone: list[Any] = [None] * dist.get_world_size()
        # Memory is the first round's: later ones find memory that the C library has kept.
        mine = (*(statistics.median(column) for column in list(zip(*taken, strict=True))[:2]), *taken[0][2:])
        dist.all_gather_object(everyone, mine)
        if dist.get_rank() == 0:
            seconds, busy, peak, stays = (max(column) for column in zip(*everyone, strict=True))
            record = {"way": name, "seconds": seconds, "cpu": busy, "peak": peak, "kept": stays}
            print(json.dumps(record | sizes_in(Path(arguments.folder), DTYPES[arguments.dtype])), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure(way: Callable[[], Any]) -> tuple[float, float, int, int]:
    """Seconds, CPU seconds, bytes by which the peak grew, and bytes of it that stay. Collective."""
    gc.collect()
    dist.barrier()
    before, began, worked = host_memory("VmHWM", reset=True), time.perf_counter(), time.process_time()
    held = way()
    taken = time.perf_counter() - began, time.process_time() - worked
    grown = host_memory("VmHWM") - before, host_memory("VmRSS") - before
    release = getattr(held, "destroy", None)
    if release is not None:
        release()
    return *taken, *grown


def on_meta(folder: Path, dtype: torch.dtype) -> Any:
    """The folder's model without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)


def sizes_in(folder: Path, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of all parameters, and of the largest."""
    sizes = [parameter.nbytes for parameter in on_meta(folder, dtype).parameters()]
    return {"bytes": sum(sizes), "largest": max(sizes)}


def ways_of(folder: Path, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """What is measured, with everything imported that it needs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import onecopy
    from onecopy import zero

    document = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": dtype is torch.bfloat16},
    }

    def model_from_files() -> Any:
        model = on_meta(folder, dtype)
        onecopy.load_pretrained(model, folder)
        return model

    def engine_from_files() -> Any:
        engine, *_ = onecopy.initialize(model=on_meta(folder, dtype), config=document)
        onecopy.load_pretrained(engine, folder)
        return engine

    def plain() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    def read() -> Any:
        """from_pretrained maps the files: their bytes are read, and count as memory, when they are used first."""
        model = plain()
        for parameter in model.parameters():
            parameter.view(-1).view(torch.uint8)[::4096].sum()
        return model

    def build(sharded: bool) -> Any:
        with zero.Init(enabled=sharded):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)

    ways: dict[str, Callable[[], Any]] = {
        "from_pretrained": plain,
        "from_pretrained, read": read,
        "from_pretrained, initialize": lambda: onecopy.initialize(model=plain(), config=document)[0],
        "load_pretrained(model)": model_from_files,
        "initialize, load_pretrained": engine_from_files,
        "build plainly": lambda: build(False),
        "build under zero.Init": lambda: build(True),
    }
    on_meta(folder, dtype)  # what is imported and connected once does not count
    onecopy.initialize(model=torch.nn.Linear(8, 8), config=document)[0].destroy()
    return ways


def host_memory(what: str, reset: bool = False) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))


if __name__ == "__main__":
    main()
