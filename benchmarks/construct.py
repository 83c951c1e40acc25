"""Time and host memory of getting a model's weights onto ranks: plainly, sharded, and streamed from files.

    python -m benchmarks.construct                      # a 135M model in bfloat16 files, two ranks
    python -m benchmarks.construct --nproc 4 --dtype fp32

Each way runs in a launch of its own. Memory is the growth of a rank's peak (VmHWM) from just before; the fp32 masters of
the engine are part of it where the way builds one. Time is given as wall time and as CPU time of the process, which other work
on the machine disturbs less. Files are in the page cache. Needs transformers.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.launch import on_ranks, table

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
    parser.add_argument("--way", default="", help="only this one")
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    from transformers import LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        model = LlamaForCausalLM(settings(DTYPES[arguments.dtype])).to(DTYPES[arguments.dtype])
        model.save_pretrained(folder, max_shard_size="100MB")
        elements = sum(parameter.numel() for parameter in model.parameters())
        largest = max(parameter.numel() for parameter in model.parameters())
        del model
        options = ["--folder", folder, "--dtype", arguments.dtype, "--rounds", str(arguments.rounds)]
        ways = [arguments.way] if arguments.way else WAYS
        records = [
            r for way in ways for r in on_ranks("benchmarks.construct", arguments.nproc, [*options, "--way", way])
        ]
    size = DTYPES[arguments.dtype].itemsize
    print(
        f"{elements / 1e6:.1f}M elements, {elements * size / 2**20:.0f} MiB; shard {elements * size / arguments.nproc / 2**20:.0f} MiB, "
        f"largest tensor {largest * size / 2**20:.0f} MiB; {arguments.nproc} ranks\n"
    )
    rows = [
        [r["way"], f"{r['seconds']:.2f}", f"{r['cpu']:.2f}", f"{r['peak'] / 2**20:.0f}", f"{r['kept'] / 2**20:.0f}"]
        for r in records
    ]
    print(table(["way", "seconds (best)", "CPU seconds (best)", "peak MiB a rank", "of it kept"], rows))


def worker(arguments: argparse.Namespace) -> None:
    """One way on this rank; rank 0 prints the slowest rank's time and the largest memory."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    way = way_of(arguments.way, Path(arguments.folder), DTYPES[arguments.dtype])
    times, cpu, peaks, kept = [], [], [], []
    for _ in range(arguments.rounds):
        gc.collect()
        dist.barrier()
        before, began, worked = host_memory("VmHWM", reset=True), time.perf_counter(), time.process_time()
        held = way()
        times.append(time.perf_counter() - began)
        cpu.append(time.process_time() - worked)
        peaks.append(host_memory("VmHWM") - before)
        kept.append(host_memory("VmRSS") - before)
        release = getattr(held, "destroy", None)
        if release is not None:
            release()
        del held, release
    everyone: list[Any] = [None] * dist.get_world_size()
    # Memory is the first round's: later ones find memory that the C library has kept. Time is the best round's.
    dist.all_gather_object(everyone, (min(times), min(cpu), peaks[0], kept[0]))
    if dist.get_rank() == 0:
        seconds, busy, peak, stays = (max(column) for column in zip(*everyone, strict=True))
        record = {"way": arguments.way, "seconds": seconds, "cpu": busy, "peak": peak, "kept": stays}
        print(json.dumps(record), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def way_of(name: str, folder: Path, dtype: torch.dtype) -> Callable[[], Any]:
    """What is measured, with everything imported that it needs."""
    from transformers import LlamaForCausalLM

    import onecopy
    from onecopy import zero

    document = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": dtype is torch.bfloat16},
    }

    def on_meta() -> Any:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            model = LlamaForCausalLM(settings(dtype))
        torch.set_default_dtype(torch.float32)
        return model

    def model_from_files() -> Any:
        model = on_meta()
        onecopy.load_pretrained(model, folder)
        return model

    def engine_from_files() -> Any:
        engine, *_ = onecopy.initialize(model=on_meta(), config=document)
        onecopy.load_pretrained(engine, folder)
        return engine

    def plain() -> Any:
        return LlamaForCausalLM.from_pretrained(folder, dtype=dtype)

    def read() -> Any:
        """from_pretrained maps the files: their bytes are read, and count as memory, when they are used first."""
        model = plain()
        for parameter in model.parameters():
            parameter.view(-1).view(torch.uint8)[::4096].sum()
        return model

    def build(sharded: bool) -> Any:
        torch.set_default_dtype(dtype)
        with zero.Init(enabled=sharded):
            model = LlamaForCausalLM(settings(dtype))
        torch.set_default_dtype(torch.float32)
        return model

    ways: dict[str, Callable[[], Any]] = {
        "from_pretrained, read": read,
        "from_pretrained, initialize": lambda: onecopy.initialize(model=plain(), config=document)[0],
        "load_pretrained(model)": model_from_files,
        "initialize, load_pretrained": engine_from_files,
        "build plainly": lambda: build(False),
        "build under zero.Init": lambda: build(True),
    }
    on_meta()  # what is imported and connected once does not count
    onecopy.initialize(model=torch.nn.Linear(8, 8), config=document)[0].destroy()
    return ways[name]


def host_memory(what: str, reset: bool = False) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))


if __name__ == "__main__":
    main()
