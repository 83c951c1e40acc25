"""Checkpoints measured against torch.save, torch's DCP with FSDP2, and DeepSpeed, all in one run on one machine.

    python -m benchmarks.checkpoint [--layers 30] [--rounds 2] [--passes 2] [--folder DIR] [--json FILE]

A Llama of 135 million parameters (fp32 training state with AdamW, 1.6 GB) on two CPU ranks. Contenders take turns, pass
after pass, so that a noisy machine is noisy for all; the table gives the best round of each and the ratios. DeepSpeed is
left out where it is not installed. onecopy, DCP and the row that says so are forced to the disk (`fsync`); DeepSpeed and the
other torch.save leave it to the kernel. Every load and conversion finds its files in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parents[1])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.checkpoint_table import disk_of, report  # noqa: E402

VOCABULARY, WIDTH, INNER = 49152, 576, 1536
_ENOUGH_SECONDS = 270.0  # after so long nothing is measured a second time


def make_model(layers: int) -> nn.Module:
    """The shape of SmolLM2-135M, with tied embeddings and random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=layers,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def settings(world: int, stage: int = 3, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": world,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def step_of(engine: Any) -> None:
    tokens = torch.randint(0, VOCABULARY, (1, 16))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


def timed(work: Callable[[], Any]) -> float:
    """Seconds from a barrier until all ranks are done."""
    if dist.is_initialized():
        dist.barrier()
    started = time.perf_counter()
    work()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - started


def peak_of(work: Callable[[], Any]) -> int:
    """Bytes of this process's resident memory at its highest while `work` ran."""
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return _status("VmHWM")


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def fresh(folder: Path, name: str) -> Path:
    """A new folder; what the round before left there is gone on every rank."""
    path = folder / name
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        os.sync()
    dist.barrier()
    return path


def warm(path: Path) -> None:
    """Read all files once, so that every contender finds its own in the page cache, however they were written."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        for file in path.rglob("*"):
            if file.is_file():
                with open(file, "rb", buffering=0) as stream:
                    while stream.read(8 << 20):
                        pass


# ----------------------------------------------------------------------------------------------------------- contenders
def ours(folder: Path, layers: int, rounds: int) -> dict[str, list[float]]:
    import onecopy

    engine = onecopy.initialize(model=make_model(layers), config=settings(2))[0]
    step_of(engine)
    found: dict[str, list[float]] = {
        "save": [],
        "save, CPU": [],
        "load": [],
        "copy": [],
        "torch.save, CPU": [],
        "async": [],
        "torch.save": [],
        "torch.save, no fsync": [],
    }
    found["bytes"] = [_bytes_of(engine)]
    for _ in range(rounds):
        path = fresh(folder, "plain")
        found["torch.save, no fsync"].append(timed(partial(_plain_save, engine, path, sync=False)))
        path = fresh(folder, "plain")
        used = time.process_time()
        found["torch.save"].append(timed(partial(_plain_save, engine, path, sync=True)))
        found["torch.save, CPU"].append(time.process_time() - used)
        path = fresh(folder, "ours")
        used = time.process_time()
        found["save"].append(timed(partial(engine.save_checkpoint, path)))
        found["save, CPU"].append(time.process_time() - used)
        warm(path)
        found["load"].append(timed(partial(engine.load_checkpoint, path)))
    shutil.rmtree(folder / "plain", ignore_errors=True)
    engine.configuration = _asynchronous(engine.configuration)
    for _ in range(rounds):
        path = fresh(folder, "asynchronous")
        pieces = [value for _, value in _pieces(engine)]
        found["copy"].append(timed(partial(_copies, pieces)))
        found["async"].append(timed(partial(engine.save_checkpoint, path)))
        engine.wait_for_checkpoint()
    shutil.rmtree(folder / "asynchronous", ignore_errors=True)
    engine.destroy()
    return found


def _copies(pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    return [piece.clone() for piece in pieces]


def _asynchronous(configuration: Any) -> Any:
    import dataclasses

    changed = dataclasses.replace(configuration.checkpoint, async_save=True)
    return dataclasses.replace(configuration, checkpoint=changed)


def _pieces(engine: Any) -> list[tuple[str, torch.Tensor]]:
    from onecopy.checkpoint.pieces import model_pieces, optimizer_pieces

    return [(f"{p.key}/{p.start}", p.data) for p in (*model_pieces(engine), *optimizer_pieces(engine)[0])]


def _bytes_of(engine: Any) -> float:
    return float(sum(value.nbytes for _, value in _pieces(engine)))


def _plain_save(engine: Any, path: Path, sync: bool) -> None:
    """The same bytes in one `torch.save` a process: whole flat tensors, which suits it best."""
    flats = [flat.master for unit in engine.units for flat in unit.buffers]
    states = [value for state in engine.basic_optimizer.state.values() for value in state.values()]
    file = path / f"rank{dist.get_rank()}.pt"
    torch.save([flats, states], file)
    if sync:
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())


def torch_dcp(folder: Path, layers: int, rounds: int) -> dict[str, list[float]]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    model = make_model(layers)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, VOCABULARY, (1, 16))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    found: dict[str, list[float]] = {"save": [], "load": []}
    for _ in range(rounds):
        path = fresh(folder, "dcp")

        def save(path: Path = path) -> None:
            weights, states = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)

        def load(path: Path = path) -> None:
            weights, states = get_state_dict(model, optimizer)
            dcp.load({"model": weights, "optimizer": states}, checkpoint_id=path)

        found["save"].append(timed(save))
        warm(path)
        found["load"].append(timed(load))
    shutil.rmtree(folder / "dcp", ignore_errors=True)
    return found


def deepspeed(folder: Path, layers: int, rounds: int) -> dict[str, list[float]]:
    import deepspeed as theirs  # type: ignore[import-not-found]

    theirs.init_distributed("gloo")
    model = make_model(layers)
    engine, *_ = theirs.initialize(model=model, model_parameters=model.parameters(), config=settings(2))
    step_of(engine)
    found: dict[str, list[float]] = {"save": [], "load": []}
    for _ in range(rounds):
        path = fresh(folder, "deepspeed")
        found["save"].append(timed(partial(engine.save_checkpoint, str(path))))
        warm(path)
        found["load"].append(timed(partial(engine.load_checkpoint, str(path))))
    return found


def elsewhere(folder: Path, layers: int, rounds: int) -> dict[str, list[float]]:
    """Three ranks resume what two saved: peak memory of the load, and of a training step."""
    import onecopy

    engine = onecopy.initialize(model=make_model(layers), config=settings(3))[0]
    training = peak_of(lambda: step_of(engine))
    training = max(training, peak_of(lambda: step_of(engine)))
    loading = peak_of(lambda: engine.load_checkpoint(folder / "ours"))
    engine.destroy()
    return {"training peak": [float(training)], "load peak": [float(loading)]}


def export_ours(folder: Path, layers: int, rounds: int) -> dict[str, list[float]]:
    from onecopy.checkpoint import convert_zero_checkpoint_to_fp32_state_dict as convert

    warm(folder / "ours")
    return _conversion(lambda: convert(folder / "ours", folder / "out", max_shard_size=None), folder)


def export_deepspeed(folder: Path, layers: int, rounds: int) -> dict[str, list[float]]:
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert

    warm(folder / "deepspeed")
    return _conversion(lambda: convert(str(folder / "deepspeed"), str(folder / "out"), max_shard_size=None), folder)


def _conversion(work: Callable[[], Any], folder: Path) -> dict[str, list[float]]:
    """Seconds, and bytes of the peak above what the process held before."""
    before = _status("VmRSS")
    started = time.perf_counter()
    peak = peak_of(work)
    seconds = time.perf_counter() - started
    shutil.rmtree(folder / "out", ignore_errors=True)
    return {"seconds": [seconds], "peak": [float(peak - before)]}


# -------------------------------------------------------------------------------------------------------------- driving
CONTENDERS = {"ours": (ours, 2), "dcp": (torch_dcp, 2), "deepspeed": (deepspeed, 2), "elsewhere": (elsewhere, 3)}
CONVERTERS = {"export ours": export_ours, "export deepspeed": export_deepspeed}


def rank_main(name: str, folder: Path, layers: int, rounds: int) -> None:
    """What a rank (or a converter, alone) does; rank 0 prints what it measured."""
    torch.set_num_threads(1)
    if name in CONVERTERS:
        print("RESULT", json.dumps(CONVERTERS[name](folder, layers, rounds)))
        return
    dist.init_process_group("gloo")
    result = CONTENDERS[name][0](folder, layers, rounds)
    if dist.get_rank() == 0:
        print("RESULT", json.dumps(result))
    os._exit(0)


def start(name: str, options: argparse.Namespace, folder: Path) -> dict[str, list[float]] | None:
    """Run a contender's ranks and return what its first rank measured."""
    world = CONTENDERS[name][1] if name in CONTENDERS else 1
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        __file__,
        "--as",
        name,
        "--folder",
        str(folder),
        "--layers",
        str(options.layers),
        "--rounds",
        str(options.rounds),
    ]
    ranks = []
    for rank in range(world):
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        environment = {**os.environ, **{key: str(value) for key, value in place.items()}}
        # A session of their own: DeepSpeed's ranks would be stopped for touching the terminal otherwise.
        ranks.append(
            subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, start_new_session=True,
            )
        )  # fmt: skip
    texts = [""] * world
    limit = threading.Timer(200, lambda: [rank.kill() for rank in ranks])
    limit.start()
    readers = [
        threading.Thread(target=lambda r=r: texts.__setitem__(r, ranks[r].communicate()[0])) for r in range(world)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    limit.cancel()
    lines = [line for line in texts[0].splitlines() if line.startswith("RESULT ")]
    if not lines:
        print(f"{name} failed, or took longer than 200 s:\n{texts[0][-3000:]}", file=sys.stderr)
        return None
    return json.loads(lines[-1].removeprefix("RESULT "))  # type: ignore[no-any-return]


def turns(passes: int) -> list[str]:
    """Who runs in which order: all savers in every pass, then who reads what the last pass left."""
    savers = [name for name in CONTENDERS if name != "elsewhere"]
    readers = ["elsewhere"] + [name for _ in range(passes) for name in CONVERTERS]
    return savers * passes + readers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as", dest="name", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.name:
        rank_main(options.name, options.folder, options.layers, options.rounds)
        return
    found: dict[str, dict[str, list[float]]] = {}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        for contender in turns(options.passes):
            if contender in found and time.perf_counter() - started > _ENOUGH_SECONDS:
                continue  # one pass has to do on a slow machine
            result = start(contender, options, folder)
            for key, values in (result or {}).items():
                found.setdefault(contender, {}).setdefault(key, []).extend(values)
            print(f"{contender}: done after {time.perf_counter() - started:.0f} s", file=sys.stderr)
        print(
            f"Files on {disk_of(folder)}; torch {torch.__version__}, {os.cpu_count()} CPU cores; "
            f"at most {options.passes} passes of {options.rounds} rounds"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    print("\n".join(report(found)))


if __name__ == "__main__":
    main()
