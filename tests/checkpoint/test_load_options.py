"""Loading a part, loading into engines that are not new, and what a load must never do."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from onecopy.checkpoint.manifest import Manifest
from onecopy.errors import CheckpointError
from tests.checkpoint import small


def held(engine: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    return {key: value for key, value in small.masters_of(engine).items() if key.startswith(prefix)}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[key]) for key, value in first.items())


def parts(folder: str, stage: int) -> None:
    """Everything about partial loads, in one engine that has stepped."""
    engine = small.make_engine(stage, "bf16")
    small.train(engine, 0, 1)
    engine.save_checkpoint(folder, "one")
    one = held(engine)
    small.train(engine, 1, 2)
    engine.save_checkpoint(folder, "two")
    expected = small.train(engine, 2, 4)
    before, counters, rate = held(engine, "optimizer"), engine.global_steps, engine.get_lr()

    path, _ = engine.load_checkpoint(folder, "one", load_module_only=True)
    assert path == f"{folder}/one" and same(
        held(engine, "model"), {k: v for k, v in one.items() if k.startswith("model")}
    )
    assert same(held(engine, "optimizer"), before) and engine.global_steps == counters and engine.get_lr() == rate

    engine.load_checkpoint(folder, "two", load_optimizer_states=False)
    assert same(held(engine, "optimizer"), before) and engine.global_steps == 2

    small.train(engine, 2, 3)
    iteration = engine.lr_scheduler.last_batch_iteration
    engine.load_checkpoint(folder, "two", load_lr_scheduler_states=False)
    assert engine.lr_scheduler.last_batch_iteration == iteration

    groups, scheduler = engine.optimizer.param_groups, engine.lr_scheduler
    dictionaries = [id(group) for group in groups]
    loss = engine(small.batch(9))  # a window is under way: the load forgets it
    engine.backward(loss)
    engine.load_checkpoint(folder, "two")
    assert engine.runtime.micro_batches == 0
    assert engine.lr_scheduler is scheduler and [id(group) for group in engine.optimizer.param_groups] == dictionaries
    assert small.train(engine, 2, 4) == expected
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parts_into_a_live_engine(world2, tmp_path: Path, stage: int) -> None:
    world2.run(parts, str(tmp_path), stage)


def infer(folder: str, stage: int) -> list[float]:
    model = small.make_model(4)
    settings = {"train_batch_size": 12, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    engine = onecopy.initialize(model=model, config=settings)[0]
    assert engine.optimizer is None
    engine.load_checkpoint(folder)
    with torch.no_grad():
        losses = [engine(small.batch(step)).item() for step in (3, 4)]
    engine.save_checkpoint(folder, "weights only", save_latest=False)
    engine.destroy()
    other = small.make_engine(3, "bf16", seed=6)
    other.load_checkpoint(folder, "weights only")
    with torch.no_grad():
        assert [other(small.batch(step)).item() for step in (3, 4)] == losses
    other.destroy()
    return losses


@pytest.mark.parametrize("stage", [1, 3])
def test_inference_engine(world2, tmp_path: Path, stage: int) -> None:
    saved = world2.run(small.run_and_save, str(tmp_path), 3, "bf16")
    losses = world2.run(infer, str(tmp_path), stage)
    assert sum(loss[0] for loss in losses) / 2 == pytest.approx(saved[0]["losses"][0], rel=1e-6)


def wrong_models(folder: str, stage: int) -> list[str]:
    engine = small.make_engine(stage)
    small.train(engine, 0, 1)
    engine.save_checkpoint(folder)
    engine.destroy()
    messages = []

    def bigger() -> nn.Module:
        model = small.make_model()
        model.extra = nn.Linear(3, 3)
        return model

    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 1e-2}}}
    engine = onecopy.initialize(model=small.make_model(), config=small.config(stage, world=2) | sgd)[0]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        engine.load_checkpoint(folder)
    assert bool(said.getvalue()) == (engine.global_rank == 0)
    messages.append(said.getvalue())
    small.train(engine, 1, 2)
    engine.destroy()
    odd = small.make_model()
    odd.blocks[1].up = nn.Linear(small.WIDTH, 38)
    for model, strict in ((bigger(), True), (odd, False), (bigger(), False)):
        engine = onecopy.initialize(model=model, config=small.config(stage, world=2))[0]
        before = held(engine)
        try:
            engine.load_checkpoint(folder, load_module_strict=strict)
        except CheckpointError as error:
            messages.append(str(error))
            assert same(held(engine), before) and engine.global_steps == 0
        engine.destroy()
    return messages


@pytest.mark.parametrize("stage", [2, 3])
def test_models_that_do_not_fit_change_nothing(world2, tmp_path: Path, stage: int) -> None:
    for said, strict, shape in world2.run(wrong_models, str(tmp_path), stage):
        assert "lacks 'extra.weight', 'extra.bias'" in strict and "load_module_strict=False" in strict
        assert "'blocks.1.up.weight' is [37, 24] in the checkpoint and [38, 24] in the model" in shape
        assert not said or ("saved by AdamW" in said and "loaded into SGD (dampening, momentum, nesterov)" in said)


def groups(model: nn.Module, turned: bool) -> list[dict[str, Any]]:
    """Two interleaved groups, in either order."""
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.numel()]
    first = {"params": [p for n, p in trained if p.dim() > 1], "weight_decay": 0.1, "lr": 0.01}
    second = {"params": [p for n, p in reversed(trained) if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.02}
    return [second, first] if turned else [first, second]


def with_groups(folder: str, turned: bool, load: bool, one: bool = False) -> Any:
    model = small.make_model()
    settings = small.config(3, world=2)
    del settings["scheduler"]
    optimizer = torch.optim.AdamW(
        groups(model, turned) if not one else [p for p in model.parameters() if p.requires_grad]
    )
    engine = onecopy.initialize(model=model, optimizer=optimizer, config=settings)[0]
    if load:
        engine.load_checkpoint(folder)
    else:
        small.train(engine, 0, 2)
        engine.save_checkpoint(folder)
    rates = engine.get_lr()
    result = small.train(engine, 2, 5), rates, held(engine)
    engine.destroy()
    return result


def test_moments_go_by_name_not_by_place(world2, tmp_path: Path) -> None:
    saved = world2.run(with_groups, str(tmp_path), False, False)
    loaded = world2.run(with_groups, str(tmp_path), True, True)
    assert loaded[0][0] == pytest.approx(saved[0][0], rel=1e-5)
    assert saved[0][1] == [0.01, 0.02] and loaded[0][1] == [0.02, 0.01]
    with pytest.raises(CheckpointError, match=r"group 0 .* holds parameters of groups \[0, 1\].*lr: 0.01 and 0.02"):
        world2.run(with_groups, str(tmp_path), True, True, True)


class Sometimes(nn.Module):
    """`b` is used at even steps only, so its own step count falls behind."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.b = nn.Linear(7, 11)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        y = self.a(x)
        return (self.b(y) if use else y).square().mean()


def sometimes(folder: str, stage: int, load: bool) -> Any:
    torch.manual_seed(0)
    engine = onecopy.initialize(
        model=Sometimes(), config=small.config(stage, world=torch.distributed.get_world_size())
    )[0]

    def steps(first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            loss = engine(torch.randn(3, 5, generator=torch.Generator().manual_seed(step)), step % 2 == 0)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    if load:
        engine.load_checkpoint(folder)
    else:
        steps(0, 5)
        engine.save_checkpoint(folder)
    losses = steps(5, 9)
    engine.destroy()
    return losses


@pytest.mark.parametrize(("origin", "target"), [((3, 2), (3, 2)), ((3, 2), (0, 1)), ((0, 1), (3, 3)), ((2, 3), (1, 2))])
def test_every_parameter_keeps_its_own_step_count(world, tmp_path: Path, origin: Any, target: Any) -> None:
    saved = world(origin[1]).run(sometimes, str(tmp_path), origin[0], False)
    loaded = world(target[1]).run(sometimes, str(tmp_path), target[0], True)
    assert loaded[0] == pytest.approx(saved[0], rel=1e-5)
    (path,) = tmp_path.glob("*/manifest.json")
    from onecopy.checkpoint.reader import RangeReader

    manifest = Manifest.read(path.parent)
    with RangeReader(path.parent, manifest) as reader:
        assert [reader.whole(f"optimizer.state.{name}.step").item() for name in ("a.weight", "b.weight", "b.bias")] == [
            5,
            3,
            3,
        ]


def in_mid_window(folder: str, stage: int, save: bool) -> list[float]:
    engine = small.make_engine(stage, train_batch_size=36, train_micro_batch_size_per_gpu=6)
    losses = []
    for step in range(9):
        loss = engine(small.batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if save and step == 4:
            engine.save_checkpoint(folder, "mid")
    engine.load_checkpoint(folder, "mid")
    assert (engine.global_steps, engine.micro_steps) == (1, 3)
    again = []
    for step in range(3, 9):
        loss = engine(small.batch(step))
        engine.backward(loss)
        engine.step()
        again.append(loss.item())
    assert again == losses[3:]
    engine.destroy()
    return losses


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_save_in_mid_window_disturbs_nothing(world2, tmp_path: Path, stage: int) -> None:
    saved = world2.run(in_mid_window, str(tmp_path), stage, True)
    assert world2.run(in_mid_window, str(tmp_path), stage, False) == saved


def with_scheduler(folder: str, kind: str, load: bool) -> list[float]:
    model = small.make_model()
    settings = small.config(2, world=2)
    del settings["scheduler"]
    makers = {
        "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        "steps": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4], 0.5),
        "one": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        "chain": lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.CosineAnnealingLR(o, 9)],
            [2],
        ),
    }
    engine = onecopy.initialize(model=model, config=settings, lr_scheduler=makers[kind])[0]
    if load:
        engine.load_checkpoint(folder)
    else:
        small.train(engine, 0, 3)
        engine.save_checkpoint(folder)
    rates = []
    for step in range(3, 7):
        rates += engine.get_lr()
        small.train(engine, step, step + 1)
    engine.destroy()
    return rates


@pytest.mark.parametrize("kind", ["lambda", "steps", "one", "chain"])
def test_schedules_go_on(world2, tmp_path: Path, kind: str) -> None:
    saved = world2.run(with_scheduler, str(tmp_path), kind, False)
    assert world2.run(with_scheduler, str(tmp_path), kind, True) == saved


def bytes_of_a_load(folder: str) -> tuple[int, int, int]:
    """(bytes of tensor data a rank read, bytes of its own state, bytes of all state)."""
    from onecopy.checkpoint import load, reader

    engine = small.make_engine(3)
    small.train(engine, 0, 1)
    engine.save_checkpoint(folder)
    readers = []

    class Counted(reader.RangeReader):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            readers.append(self)

    load.RangeReader, original = Counted, load.RangeReader
    try:
        engine.load_checkpoint(folder)
    finally:
        load.RangeReader = original
    own = sum(value.nbytes for value in held(engine).values())
    total = sum(entry.nbytes for entry in readers[0].manifest.tensors.values())
    engine.destroy()
    return readers[0].bytes_read, own, total


def test_a_rank_reads_what_it_owns(world4, tmp_path: Path) -> None:
    for read, own, total in world4.run(bytes_of_a_load, str(tmp_path)):
        assert read < 1.2 * own + 1000 and read < 0.4 * total


def asynchronous(folder: str) -> None:
    import onecopy.checkpoint.save as save

    engine = small.make_engine(3, checkpoint={"async": True})
    small.train(engine, 0, 1)
    expected = held(engine)
    inner, gate = save.write_pieces, __import__("threading").Event()

    def slow(*arguments: Any, **keywords: Any) -> None:
        gate.wait(20)
        inner(*arguments, **keywords)

    save.write_pieces = slow
    try:
        engine.save_checkpoint(folder, "first")  # returns with nothing written yet
        assert not Path(folder, "first").exists()
        small.train(engine, 1, 3)  # the weights move on
        gate.set()
        engine.save_checkpoint(folder, "second")  # waits for the one before
        assert Path(folder, "first", "manifest.json").exists()
        engine.load_checkpoint(folder, "first")
        assert same(held(engine), expected)
        save.write_pieces = broken
        engine.save_checkpoint(folder, "third")
        with pytest.raises(CheckpointError, match="asynchronous save before this call failed.*No space"):
            engine.save_checkpoint(folder, "fourth")
    finally:
        save.write_pieces = inner
    engine.save_checkpoint(folder, "fifth")
    engine.wait_for_checkpoint()
    engine.destroy()


def broken(*arguments: Any, **keywords: Any) -> None:
    raise OSError(28, "No space left on device")


def test_asynchronous_saves(world2, tmp_path: Path) -> None:
    world2.run(asynchronous, str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fifth", "first", "latest", "second"]


def unregistered(folder: str) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onecopy").addHandler(handler)
    engine = small.make_engine(1)
    engine.lr_scheduler = None
    torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1.0)
    engine.save_checkpoint(folder)
    engine.destroy()
    logging.getLogger("onecopy").removeHandler(handler)
    return messages


def test_a_scheduler_that_was_not_given_is_mentioned(world1, tmp_path: Path) -> None:
    (messages,) = world1.run(unregistered, str(tmp_path))
    assert any("was not given to initialize" in message for message in messages)


def test_the_end_of_the_program_waits_for_a_save(tmp_path: Path) -> None:
    """Ranks that save asynchronously and end at once, the one with the store first, leave a complete checkpoint."""
    program = (
        "import sys, torch; sys.path[:0] = sys.argv[2:]\n"
        "from onecopy.comm.connect import ensure_process_group\n"
        "from tests.checkpoint import small\n"
        "torch.set_num_threads(1); ensure_process_group('gloo')\n"
        "engine = small.make_engine(3, checkpoint={'async': True})\n"
        "engine.save_checkpoint(sys.argv[1], 'last')\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", program, str(tmp_path / "run"), *sys.path]
    ranks = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{key: str(value) for key, value in place.items()}}
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    assert Manifest.read(tmp_path / "run" / "last").problems(tmp_path / "run" / "last") == []
    assert not any("failed" in error for error in errors), errors
