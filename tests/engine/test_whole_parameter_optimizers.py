"""Lion, LAMB and Muon on shards step as they do on whole parameters in one process; their states go with the parameters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from onecopy.errors import ConfigError, ModelError
from onecopy.optim import Lamb, Lion, Muon
from tests.reference import assert_weights, configuration, full_masters
from tests.worlds import World, world

WIDTH = 11


class Net(nn.Module):
    """Odd sizes, an embedding, vectors, a stack of matrices, a tall and a wide matrix; `sometimes` is used in even steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.wide, self.tall = nn.Linear(WIDTH, 37), nn.Linear(37, WIDTH, bias=False)
        self.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH)
        self.filters = nn.Conv2d(1, 3, (3, 1), padding=(1, 0))
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = x + self.tall(torch.relu(self.wide(x))) + x @ self.experts[0] + x @ self.experts[1]
        x = x + self.filters(x.view(len(x), 1, WIDTH, 1)).mean(dim=1).view(x.shape)
        return self.scale * (self.sometimes(x) if step % 2 == 0 else x)


def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
    tokens = torch.randint(0, 13, (6,), generator=torch.Generator().manual_seed(10 * step + rank))
    return model(tokens, step).square().mean()


# --------------------------------------------------------------------------------------------------- plain references
class PlainLion:
    """The paper's pseudo-code."""

    def __init__(self, model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        self.model, self.lr, self.betas, self.decay = model, lr, betas, weight_decay
        self.averages: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                average = self.averages.setdefault(name, torch.zeros_like(p))
                update = torch.sign(self.betas[0] * average + (1 - self.betas[0]) * p.grad)
                p -= self.lr * (update + self.decay * p)
                average.copy_(self.betas[1] * average + (1 - self.betas[1]) * p.grad)


class PlainLamb:
    """Line by line what DeepSpeed's kernel computes for a parameter."""

    def __init__(self, model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        self.model, self.lr, self.betas, self.decay = model, lr, betas, weight_decay
        self.states: dict[str, list[Any]] = {}

    @torch.no_grad()
    def step(self) -> None:
        first, second = self.betas
        for name, p in self.model.named_parameters():
            if p.grad is None:
                continue
            state = self.states.setdefault(name, [0, torch.zeros_like(p), torch.zeros_like(p)])
            state[0] += 1
            state[1] = first * state[1] + (1 - first) * p.grad
            state[2] = second * state[2] + (1 - second) * p.grad**2
            update = state[1] / (state[2].sqrt() + 1e-3) + self.decay * p
            ratio = 1.0
            if p.norm() != 0 and update.norm() != 0:
                ratio = min(max(float(p.norm() / update.norm()), 0.01), 10.0)
            size = self.lr * math.sqrt(1 - second ** state[0]) / (1 - first ** state[0])
            p -= size * ratio * update


class PlainMuon:
    """Torch's own Muon on matrices (stacks taken apart, filters laid flat) and torch's AdamW on the rest."""

    def __init__(self, model: nn.Module, lr: float, weight_decay: float, adam_lr: float) -> None:
        self.model = model
        named = dict(model.named_parameters())
        matrices = {n: p for n, p in named.items() if p.dim() >= 2 and not n.startswith("embed")}
        self.views: list[tuple[nn.Parameter, nn.Parameter, int | None]] = []
        for p in matrices.values():
            if p.dim() == 3:
                self.views += [(nn.Parameter(p.data[k]), p, k) for k in range(len(p))]
            else:
                self.views.append((nn.Parameter(p.data.view(len(p), -1)), p, None))
        self.muon = torch.optim.Muon([v for v, _, _ in self.views], lr=lr, weight_decay=weight_decay, momentum=0.9)
        rest = [p for n, p in named.items() if n not in matrices]
        self.adam = torch.optim.AdamW(rest, lr=adam_lr, weight_decay=weight_decay, betas=(0.9, 0.95), eps=1e-2)

    def step(self) -> None:
        for view, p, place in self.views:
            view.grad = None if p.grad is None else (p.grad if place is None else p.grad[place]).reshape(view.shape)
        self.muon.step()
        self.adam.step()


KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    # the reference, its arguments, the configuration's params
    "Lion": (PlainLion, {"lr": 0.003, "betas": (0.9, 0.95), "weight_decay": 0.1}, {}),
    "Lamb": (PlainLamb, {"lr": 0.03, "betas": (0.9, 0.95), "weight_decay": 0.1}, {"eps": 1e-3}),
    "Muon": (
        PlainMuon,
        {"lr": 0.02, "weight_decay": 0.1, "adam_lr": 0.01},
        {"momentum": 0.9, "eps": 1e-2, "betas": [0.9, 0.95]},
    ),
}
TOLERANCE = {"Lion": (2e-5, 2e-6), "Lamb": (2e-5, 5e-6), "Muon": (1e-3, 1e-3)}  # Muon rounds its update to bf16


def plain(kind: str, steps: int, size: int) -> dict[str, torch.Tensor]:
    """The weights after training in one process on all ranks' batches."""
    make, arguments, _ = KINDS[kind]
    model = Net()
    optimizer = make(model, **arguments)
    for step in range(steps):
        for p in model.parameters():
            p.grad = None
        for rank in range(size):
            (loss_of(model, step, rank) / size).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def engine_for(kind: str, stage: int, **more: Any) -> Any:
    _, arguments, params = KINDS[kind]
    params = {**{k: list(v) if isinstance(v, tuple) else v for k, v in arguments.items()}, **params}
    config = configuration(stage, optimizer={"type": kind.lower(), "params": params}, **more)
    return onecopy.initialize(model=Net(), config=config)[0]


def train(engine: Any, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(loss_of(engine, step, engine.global_rank))
        engine.step()


def run(kind: str, stages: tuple[int, ...], bucket: int) -> list[dict[str, torch.Tensor]]:
    """Five steps at every stage, held against the reference; each stage's weights."""
    wanted = plain(kind, 5, torch.distributed.get_world_size())
    found = []
    for stage in stages:
        engine = engine_for(kind, stage, zero={"reduce_bucket_size": bucket})
        train(engine, 0, 5)
        assert_weights(engine, wanted, *TOLERANCE[kind])
        found.append(full_masters(engine))
        engine.destroy()
    return found


@pytest.mark.parametrize(
    ("kind", "size"),
    [("Lion", 2), *(pytest.param("Lion", n, marks=pytest.mark.slow) for n in (1, 3))]
    + [(kind, size) for kind in ("Lamb", "Muon") for size in (1, 2, 3)],
)
def test_every_stage_and_world_steps_as_one_process_does(kind: str, size: int) -> None:
    """Norms and matrices that are cut anywhere, parameters without a gradient, scalars; the stages give the same bits."""
    for results in world(size).run(run, kind, (0, 1, 2, 3), 10**6):
        for other in results[1:]:
            for name, weight in results[0].items():
                assert torch.equal(weight, other[name]), name


@pytest.mark.parametrize("kind", ["Lamb", "Muon"])
def test_small_buckets_change_nothing(world2: World, kind: str) -> None:
    """A flat buffer a parameter: many ranks own no element of one."""
    world2.run(run, kind, (1, 3), 1)


# ------------------------------------------------------------------------------------------------------- checkpoints
def save_after(kind: str, folder: str, stage: int, steps: int) -> None:
    engine = engine_for(kind, stage)
    train(engine, 0, steps)
    engine.save_checkpoint(folder)
    engine.destroy()


def go_on(kind: str, folder: str, stage: int, steps: int, wanted: dict[str, torch.Tensor]) -> None:
    """Load on this number of ranks, train on with a batch that the number of ranks does not change."""
    engine = engine_for(kind, stage)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    for step in range(steps):
        engine.backward(loss_of(engine, 50 + step, 0))
        engine.step()
    assert_weights(engine, wanted, *TOLERANCE[kind])
    engine.destroy()


def train_through(kind: str, steps: int, more: int) -> dict[str, torch.Tensor]:
    engine = engine_for(kind, 2)
    train(engine, 0, steps)
    for step in range(more):
        engine.backward(loss_of(engine, 50 + step, 0))
        engine.step()
    weights = full_masters(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("kind", [pytest.param("Lion", marks=pytest.mark.slow), "Lamb", "Muon"])
def test_states_are_saved_by_parameter_and_load_at_any_world_size(kind: str, tmp_path: Path) -> None:
    """Save on two ranks in the middle, with step counts that differ among parameters; go on on one and on three."""
    wanted = world(2).run(train_through, kind, 3, 3)[0]
    world(2).run(save_after, kind, str(tmp_path), 3, 3)
    for size, stage in ((1, 0), (3, 3)):
        world(size).run(go_on, kind, str(tmp_path), stage, 3, wanted)


# --------------------------------------------------------------------------------------------- clients, skips, traffic
def client(kind: str, stage: int) -> None:
    """The caller's own instance, which has stepped before, in groups."""
    size = torch.distributed.get_world_size()
    model, reference = Net(), Net()

    def make(net: nn.Module) -> torch.optim.Optimizer:
        named = dict(net.named_parameters())
        if kind == "Muon":
            hidden = [p for n, p in named.items() if p.dim() >= 2 and not n.startswith("embed")]
            rest = [p for n, p in named.items() if p.dim() < 2 or n.startswith("embed")]
            return Muon([{"params": hidden, "use_muon": True}, {"params": rest, "eps": 1e-2, "weight_decay": 0.1}])
        groups = [{"params": [p for p in named.values() if p.dim() > 1]}]
        groups.append({"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.3, "lr": 0.004})
        return {"Lion": Lion, "Lamb": Lamb}[kind](groups, lr=0.002)

    own, plain_one = make(model), make(reference)
    for step in range(5):
        plain_one.zero_grad()
        for rank in range(size):
            (loss_of(reference, step, rank) / size).backward()
        plain_one.step()
        if step < 2:
            own.zero_grad()
            for rank in range(size):
                (loss_of(model, step, rank) / size).backward()
            own.step()
    config = {key: value for key, value in configuration(stage).items() if key != "optimizer"}
    engine = onecopy.initialize(model=model, optimizer=own, config=config)[0]
    train(engine, 2, 5)
    assert_weights(engine, {n: p.detach() for n, p in reference.named_parameters()}, *TOLERANCE[kind])
    engine.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_a_clients_instance_alone_and_in_the_engine(world2: World, kind: str) -> None:
    """They work without an engine too, and bring their state with them."""
    world2.run(client, kind, 3)


def poisoned(kind: str) -> None:
    engine = engine_for(kind, 3)
    train(engine, 0, 2)
    before = full_masters(engine)
    moments = [
        value.clone() for s in engine.optimizer.state.values() for value in s.values() if hasattr(value, "clone")
    ]
    loss = loss_of(engine, 2, engine.global_rank)
    engine.backward(loss * float("inf") if engine.global_rank == 1 else loss)
    engine.step()
    assert engine.skipped_steps == 1
    assert_weights(engine, before, 0.0, 0.0)
    after = [value for s in engine.optimizer.state.values() for value in s.values() if hasattr(value, "clone")]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    engine.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_touches_nothing(world2: World, kind: str) -> None:
    """One infinity on one rank: no rank steps, weights and moments keep their bits."""
    world2.run(poisoned, kind)


def traffic() -> list[tuple[int, int, int]]:
    found = []
    for kind in ("Lion", "Lamb", "Muon"):
        engine = engine_for(kind, 2)
        train(engine, 0, 1)
        sent = engine.communication()
        swapped = sent["bytes_by_kind"].get("swap", 0)
        found.append((sent["collectives"], swapped, sum(p.numel() for p in Net().parameters() if p.dim() > 1)))
        engine.destroy()
    return found


def test_lamb_adds_one_small_collective_and_muon_two_swaps_of_its_matrices(world2: World) -> None:
    """However many parameters there are."""
    lion, lamb, muon = world2.run(traffic)[0]
    assert lamb[0] == lion[0] + 1 and muon[0] == lion[0] + 2
    assert lion[1] == lamb[1] == 0 < muon[1] <= 2 * 2 * muon[2]  # bf16, there and back


# ------------------------------------------------------------------------------------------------------------ refusals
def test_classes_of_others_are_refused_with_ours_as_the_way() -> None:
    model = Net()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    config = {k: v for k, v in configuration(3).items() if k != "optimizer"}
    with pytest.raises(ModelError, match=r"Muon cannot step flat shards.*onecopy\.optim\.Muon"):
        world(1).run(refused_engine, "torch.optim.Muon", config)
    assert matrices
    with pytest.raises(ModelError, match=r"Lamb cannot step flat shards.*onecopy\.optim\.Lamb"):
        world(1).run(refused_engine, "Lamb", config)


def refused_engine(kind: str, config: dict[str, Any]) -> None:
    model = Net()
    if kind == "Lamb":
        optimizer = type("Lamb", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])
    onecopy.initialize(model=model, optimizer=optimizer, config=config)


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        ("Lion", {"eps": 1e-8}, "Lion"),
        ("Lamb", {"max_grad_norm": 1.0}, "gradient_clipping"),
        ("Lamb", {"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff"),
        ("Muon", {"ns_method": "fast"}, "ns_method"),
        ("Muon", {"per_head_muon": True}, "per_head_muon"),
        ("Muon", {"amsgrad": True}, "amsgrad is unknown to Muon"),
        ("Muon", {"muon_lr": "fast"}, "muon_lr"),
        ("MuAdam", {}, "mup"),
    ],
)
def test_bad_parameters_are_named(world1: World, kind: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        world1.run(refused_config, kind, params)


def refused_config(kind: str, params: dict[str, Any]) -> None:
    config = configuration(2, optimizer={"type": kind, "params": {"lr": 0.1, **params}})
    onecopy.initialize(model=Net(), config=config)
