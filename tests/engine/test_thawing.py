"""Unfreezing after `initialize`: what begins to require gradients is trained from the next window on, as in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from onecopy.errors import ModelError
from onecopy.optim import Lamb, Lion
from tests.reference import assert_weights, configuration
from tests.worlds import World, world

WIDTH = 9


class Net(nn.Module):
    """Three blocks and a scalar; the first two blocks, the scalar and an empty parameter are frozen to begin with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.2), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, WIDTH), requires_grad=False)
        self.layers[:2].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x * self.scale + nn.functional.linear(x, self.empty).sum()


def loss_of(model: Any, number: int, rank: int) -> torch.Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
    return model(x).square().mean()


def thaw(model: Any, step: int) -> None:
    """A schedule of unfreezing: a bias, then the whole block, then the rest; and one is frozen again."""
    if step == 1:
        model.layers[1].bias.requires_grad_(True)
    elif step == 2:
        model.layers[1].requires_grad_(True)
    elif step == 4:
        model.requires_grad_(True)
    elif step == 6:
        model.layers[1].requires_grad_(False)


ADAMW = {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-2}


def run(stage: int, micros: int, kind: str, given: str, **more: Any) -> None:
    size = torch.distributed.get_world_size()
    reference, model = Net(), Net()
    classes = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "Lamb": Lamb, "Lion": Lion}
    params = {
        "AdamW": ADAMW,
        "SGD": {"lr": 0.05, "momentum": 0.9},
        "Lamb": {"lr": 0.05, "eps": 1e-3},
        "Lion": {"lr": 0.002},
    }

    def groups(net: Net) -> list[dict[str, Any]]:
        named = list(net.named_parameters())
        if given == "groups":
            return [
                {"params": [p for n, p in named if "bias" in n], "lr": 0.03},
                {"params": [p for n, p in named if "bias" not in n]},
            ]
        return [{"params": [p for _, p in named]}]

    plain = classes[kind](groups(reference), **params[kind])
    arguments: dict[str, Any] = {} if given == "nothing" else {"model_parameters": groups(model)}
    config = configuration(
        stage, optimizer={"type": kind, "params": params[kind]}, gradient_accumulation_steps=micros, **more
    )
    engine, optimizer, _, _ = onecopy.initialize(model=model, config=config, **arguments)
    held = [group for group in optimizer.param_groups]
    for step in range(8):
        thaw(reference, step)
        thaw(model, step)
        plain.zero_grad()
        for micro in range(micros):
            for rank in range(size):
                (loss_of(reference, step * micros + micro, rank) / size / micros).backward()
            engine.backward(loss_of(engine, step * micros + micro, engine.global_rank))
            engine.step()
        plain.step()
        if step == 0:
            assert engine.memory()["moments"] <= 3 * 4 * 2 * (WIDTH * WIDTH + 64 * size)
    assert all(group is one for group, one in zip(optimizer.param_groups, held, strict=True))
    assert_weights(engine, {name: p.detach() for name, p in reference.named_parameters()}, 5e-5, 1e-5)
    assert all(p.grad is None for p in model.parameters())
    engine.destroy()


@pytest.mark.parametrize("stage", range(4))
def test_what_is_unfrozen_is_trained_from_the_next_window_on(world2: World, stage: int) -> None:
    """With the configuration's optimizer frozen parameters wait in its group; rates, decay and step counts are torch's."""
    world2.run(run, stage, 1, "AdamW", "nothing")
    world2.run(run, stage, 2, "SGD", "groups")


@pytest.mark.parametrize(
    ("size", "kind"), [(1, "AdamW"), (2, "Lamb"), (3, "AdamW"), pytest.param(3, "Lion", marks=pytest.mark.slow)]
)
def test_other_worlds_and_optimizers(size: int, kind: str) -> None:
    """Uneven shards, one rank, and optimizers that look across shards; small buckets too."""
    world(size).run(run, 3, 1, kind, "groups", zero={"reduce_bucket_size": 100})
    world(size).run(run, 2, 1, kind, "groups", zero={"ignore_unused_parameters": False})


def resume(folder: str, stage: int) -> None:
    """Unfreeze, save, and go on in an engine whose model was unfrozen before the load."""
    config = configuration(stage, optimizer={"type": "AdamW", "params": ADAMW})
    engines = []
    for _ in range(2):
        model = Net()
        engines.append(onecopy.initialize(model=model, config=config)[0])
    first, second = engines
    for number in range(4):
        if number == 2:
            first.module.requires_grad_(True)
        first.backward(loss_of(first, number, first.global_rank))
        first.step()
    first.save_checkpoint(folder)
    second.module.requires_grad_(True)
    second.load_checkpoint(folder)
    for engine in engines:
        engine.backward(loss_of(engine, 9, engine.global_rank))
        engine.step()
    mine, its = first.masters.runs, second.masters.runs
    weights = {name: p for name, p in [*_masters(mine)]}
    for name, other in _masters(its):
        assert torch.equal(weights[name], other), name
    for engine in engines:
        engine.destroy()


def _masters(runs: Any) -> list[tuple[str, torch.Tensor]]:
    found = []
    for run in runs:
        for name, place in zip(run.flat.names, run.flat.layout.ranges, strict=True):
            part = place.overlap(run.start, run.stop)
            if part is not None:
                start = place.start - run.start
                found.append((f"{name} {part}", run.master.detach()[start + part[0] : start + part[1]]))
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_moments_of_thawed_parameters_are_saved_and_loaded(world2: World, stage: int, tmp_path: Any) -> None:
    world2.run(resume, str(tmp_path), stage)


def refuse(kind: str) -> None:
    model = Net()
    given = [p for p in model.parameters() if p.requires_grad] if kind == "not given" else None
    engine = onecopy.initialize(model=model, model_parameters=given, config=configuration(3))[0]
    if kind == "not given" or engine.global_rank == 0:
        model.layers[0].weight.requires_grad_(True)
    if kind == "differ":
        model.layers[1].requires_grad_(True)
    try:
        for number in range(2):
            engine.backward(loss_of(engine, number, engine.global_rank))
            engine.step()
    finally:
        engine.destroy()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("not given", r"layers\.0\.weight.*not given to the optimizer; pass frozen parameters"),
        ("differ", r"layers\.0\.weight.*some ranks only"),
    ],
)
def test_what_cannot_be_trained_is_named(world2: World, kind: str, words: str) -> None:
    """No optimizer group, or ranks that unfreeze different parameters: one error on every rank."""
    with pytest.raises(ModelError, match=words):
        world2.run(refuse, kind)


def shared() -> None:
    """A frozen module that two engines share stays free while neither trains it."""
    common = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    engines = []
    for _ in range(2):
        model = Net()
        model.common = common
        engines.append(onecopy.initialize(model=model, config=configuration(1))[0])
    for engine in engines:
        engine.backward(loss_of(engine, 0, engine.global_rank))
        engine.step()
        engine.destroy()


def test_a_frozen_part_of_two_engines_is_nobodys(world2: World) -> None:
    world2.run(shared)
