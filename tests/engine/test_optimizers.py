"""Optimizers on flat shards step as they would on the parameters: groups, states, step counts, edits in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from onecopy.errors import ModelError
from tests.reference import assert_weights, configuration
from tests.worlds import World

WIDTH = 7
RATES = {"lr": 0.05}


class Net(nn.Module):
    """Blocks of odd sizes; the block `sometimes` is used in even steps only, `frozen` is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = self.frozen(x)
        return self.sometimes(x) if step % 2 == 0 else x


def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x, step).square().mean()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, size: int) -> None:
    optimizer.zero_grad()
    for rank in range(size):
        (loss_of(model, step, rank) / size).backward()
    optimizer.step()


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-2},
    "AdamW amsgrad": {"lr": 0.05, "amsgrad": True, "eps": 1e-2},
    "AdamW foreach": {"lr": 0.05, "foreach": True, "eps": 1e-2},
    "AdamW fused": {"lr": 0.05, "fused": True, "eps": 1e-2},
    "AdamW fused=False": {"lr": 0.05, "fused": False, "eps": 1e-2},
    "Adam": {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-2},
    "SGD": {"lr": 0.1},
    "SGD momentum": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    "SGD dampening": {"lr": 0.1, "momentum": 0.9, "dampening": 0.3},
    "SGD maximize": {"lr": 0.01, "maximize": True},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.1},
    "RMSprop": {"lr": 0.02, "momentum": 0.5, "centered": True, "eps": 1e-2},
    "NAdam": {"lr": 0.02, "eps": 1e-2},
    "RAdam": {"lr": 0.02, "eps": 1e-2},
    "Adadelta": {"lr": 0.5, "eps": 1e-2},
    "Adamax": {"lr": 0.02, "eps": 1e-2},
    "ASGD": {"lr": 0.05},
    "Rprop": {"lr": 0.01},
}


def make(kind: str, parameters: Any) -> torch.optim.Optimizer:
    return getattr(torch.optim, kind.split()[0])(parameters, **OPTIMIZERS[kind])  # type: ignore[no-any-return]


def run_optimizer(kind: str, before: int, stages: tuple[int, ...]) -> None:
    """`before` plain steps, then five steps of the engine with the same optimizer object."""
    size = torch.distributed.get_world_size()
    reference = Net()
    plain = make(kind, trained(reference))
    for step in range(before + 5):
        plain_step(reference, plain, step, size)
    wanted = {name: p.detach() for name, p in reference.named_parameters()}
    for stage in stages:
        model = Net()
        optimizer = make(kind, trained(model))
        for step in range(before):
            plain_step(model, optimizer, step, size)
        config = {key: value for key, value in configuration(stage).items() if key != "optimizer"}
        engine, returned, _, _ = onecopy.initialize(model=model, optimizer=optimizer, config=config)
        assert isinstance(returned, torch.optim.Optimizer) and engine.basic_optimizer is optimizer
        for step in range(before, before + 5):
            engine.backward(loss_of(engine, step, engine.global_rank))
            engine.step()
        # Rprop steps by the sign alone: a gradient that rounds across zero is not comparable
        assert_weights(engine, wanted, *((2e-2, 5e-3) if kind == "Rprop" else (2e-5, 2e-6)))
        engine.destroy()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_client_optimizers_step_as_on_whole_parameters(world2: World, kind: str) -> None:
    """Every elementwise optimizer of torch, in every implementation, with a parameter that has gradients in even steps only."""
    world2.run(run_optimizer, kind, 0, (0, 2, 3))


@pytest.mark.parametrize("kind", ["AdamW", "AdamW amsgrad", "SGD momentum", "Adagrad", "RMSprop", "NAdam", "ASGD"])
def test_the_state_an_optimizer_brings_is_kept(world2: World, kind: str) -> None:
    """An optimizer that has stepped before keeps its moments and each parameter's own step count."""
    world2.run(run_optimizer, kind, 3, (0, 1, 3))


def step_counts(stage: int, bucket: int) -> dict[str, float]:
    """Adam's step count of every parameter after five steps."""
    zero = {"sub_group_size": 8, "reduce_bucket_size": bucket}
    engine, _, _, _ = onecopy.initialize(model=Net(), config=configuration(stage, zero=zero))
    for step in range(5):
        engine.backward(loss_of(engine, step, engine.global_rank))
        engine.step()
    counts: dict[str, float] = {}
    for run in engine.masters.runs:
        state = engine.masters.optimizer.state[run.master]
        for name, place in zip(run.flat.names, run.flat.layout.ranges, strict=True):
            if place.overlap(run.start, run.stop):
                counts[name] = float(state["step"])
    engine.destroy()
    return counts


@pytest.mark.parametrize("bucket", [8, 1_000_000])
def test_step_counts_are_each_parameters_own(world2: World, bucket: int) -> None:
    """Bias correction: a parameter counts the steps in which it had a gradient, whatever buckets and sub-groups."""
    for stage in (1, 3):
        both = world2.run(step_counts, stage, bucket)
        counts = {**both[0], **both[1]}
        assert set(counts) == {name for name, p in Net().named_parameters() if p.requires_grad}
        for name, count in counts.items():
            assert count == (3 if name.startswith("sometimes") else 5), (stage, name)


# ------------------------------------------------------------------------------------------------------------------ groups
def grouped(model: nn.Module, kind: str) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    if kind == "interleaved":
        return [
            {"params": [p for _, p in named[start::2]], "lr": lr, "tag": start} for start, lr in ((0, 0.1), (1, 0.01))
        ]
    if kind == "each":
        return [{"params": [p], "lr": 0.01 * (1 + place % 5)} for place, (_, p) in enumerate(named)]
    assert kind == "frozen group"
    frozen = [p for n, p in named if n.startswith("frozen")]
    return [{"params": frozen, "lr": 9.0}, {"params": [p for n, p in named if not n.startswith("frozen")], "lr": 0.1}]


def run_groups(kind: str, stages: tuple[int, ...]) -> None:
    size = torch.distributed.get_world_size()
    options = {"weight_decay": 0.2, "eps": 1e-2}
    reference = Net()
    plain = torch.optim.AdamW(grouped(reference, kind), **options)
    for step in range(4):
        for group in plain.param_groups:
            group["lr"] *= 0.9
        plain_step(reference, plain, step, size)
    wanted = {name: p.detach() for name, p in reference.named_parameters()}
    for stage in stages:
        model = Net()
        config = configuration(stage, optimizer={"type": "AdamW", "params": {"lr": 0.5, **options}})
        engine, optimizer, _, _ = onecopy.initialize(model=model, model_parameters=grouped(model, kind), config=config)
        assert len(optimizer.param_groups) == len(plain.param_groups)
        for step in range(4):
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            engine.backward(loss_of(engine, step, engine.global_rank))
            engine.step()
        assert engine.get_lr() == pytest.approx([group["lr"] for group in plain.param_groups])
        assert [group.get("tag") for group in optimizer.param_groups] == [g.get("tag") for g in plain.param_groups]
        assert_weights(engine, wanted)
        engine.destroy()


@pytest.mark.parametrize("kind", ["interleaved", "each", "frozen group"])
def test_groups_keep_their_parameters_and_rates(world2: World, kind: str) -> None:
    """Interleaved groups, a group a parameter, a group of frozen ones: rates edited in flight reach the right parameters."""
    world2.run(run_groups, kind, (0, 1, 3))


def run_factory(stage: int) -> None:
    size = torch.distributed.get_world_size()
    reference = Net()
    plain = torch.optim.SGD(trained(reference), **RATES)
    for step in range(2):
        plain_step(reference, plain, step, size)
    config = {key: value for key, value in configuration(stage).items() if key != "optimizer"}
    engine, optimizer, _, _ = onecopy.initialize(
        model=Net(), optimizer=lambda parameters: torch.optim.SGD(parameters, **RATES), config=config
    )
    for step in range(2):
        engine.backward(loss_of(engine, step, engine.global_rank))
        engine.step()
    assert optimizer.param_groups[0]["lr"] == RATES["lr"]
    assert_weights(engine, {name: p.detach() for name, p in reference.named_parameters()})
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_made_by_a_function(world2: World, stage: int) -> None:
    """A callable gets the trained parameters and gives the optimizer."""
    world2.run(run_factory, stage)


def memory_of(stage: int, frozen: bool) -> dict[str, int]:
    model = Net()
    if frozen:
        for layer in model.layers:
            layer.requires_grad_(False)
    engine, _, _, _ = onecopy.initialize(model=model, config=configuration(stage))
    for _ in range(2):
        engine.backward(loss_of(engine, 0, engine.global_rank))
        engine.step()
    memory = engine.memory()
    engine.destroy()
    return memory


@pytest.mark.parametrize("stage", range(4))
def test_frozen_parameters_cost_no_state(world2: World, stage: int) -> None:
    """Moments, masters and gradients exist for what is trained, also when the frozen ones were passed along."""
    whole, part = world2.run(memory_of, stage, False)[0], world2.run(memory_of, stage, True)[0]
    share = 1 / 4  # of the four trained layers one is left
    assert part["moments"] <= share * whole["moments"] + 64
    assert part["gradients"] < whole["gradients"]
    if stage > 0:
        assert part["masters"] <= share * whole["masters"] + 64


# ------------------------------------------------------------------------------------------------- freezing while training
def freeze_later(stage: int) -> None:
    size = torch.distributed.get_world_size()
    reference = Net()
    plain = torch.optim.AdamW(trained(reference), lr=0.05, eps=1e-2)
    model = Net()
    config = configuration(
        stage, optimizer={"type": "AdamW", "params": {"lr": 0.05, "eps": 1e-2, "weight_decay": 0.01}}
    )
    engine, _, _, _ = onecopy.initialize(model=model, config=config)
    for step in range(6):
        for each in (reference, model):
            each.layers[1].requires_grad_(step not in (2, 3))
        plain_step(reference, plain, step, size)
        engine.backward(loss_of(engine, step, engine.global_rank))
        engine.step()
    assert_weights(engine, {name: p.detach() for name, p in reference.named_parameters()})
    engine.destroy()


@pytest.mark.parametrize("stage", range(4))
def test_parameters_frozen_for_a_while(world2: World, stage: int) -> None:
    """Freezing a trained layer and thawing it again later is plain PyTorch, and works."""
    world2.run(freeze_later, stage)


# ---------------------------------------------------------------------------------------------------------------- refusals
class Lamb(torch.optim.SGD):
    """Named like an optimizer that needs a parameter's norm."""


def refuse(make_optimizer: str) -> None:
    model, other = Net(), Net()
    optimizers: dict[str, Any] = {
        "lamb": lambda: Lamb(trained(model), lr=0.1),
        "lbfgs": lambda: torch.optim.LBFGS(trained(model)),
        "adafactor": lambda: torch.optim.Adafactor(trained(model)),
        "other model": lambda: torch.optim.SGD(other.parameters(), lr=0.1),
        "all frozen": lambda: torch.optim.SGD(model.frozen.parameters(), lr=0.1),
        "no optimizer": lambda: 3,
        "several": lambda: [torch.optim.SGD([parameter], lr=0.1) for parameter in trained(model)],
    }
    config = {key: value for key, value in configuration(3).items() if key != "optimizer"}
    onecopy.initialize(model=model, optimizer=optimizers[make_optimizer](), config=config)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("lamb", "Lamb.*norm"),
        ("lbfgs", "LBFGS"),
        ("adafactor", "Adafactor.*rows"),
        ("other model", "no parameter of the model"),
        ("all frozen", "no parameter to train"),
        ("no optimizer", "optimizer is a int"),
        ("several", "optimizer is a list.*call initialize once for each part"),
    ],
)
def test_optimizers_that_would_be_wrong_are_refused(world2: World, kind: str, words: str) -> None:
    """Those that need a whole matrix or norm by name, those of another model, those with nothing to train."""
    with pytest.raises(ModelError, match=words):
        world2.run(refuse, kind)
