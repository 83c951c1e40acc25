"""Random programs: whatever a training script does between two steps, the weights are those of plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import onecopy
from onecopy.optim import Lamb
from tests.reference import ADAMW, assert_weights, configuration
from tests.worlds import world

WIDTH, BLOCKS = 7, 4
TRAINING = ("backward", "plain", "two losses", "teacher", "checkpointed", "path", "siamese", "no_sync")
BETWEEN = ("evaluate", "fail", "zero_grad", "rate", "freeze", "thaw", "gather")
Program = list[tuple[str, int]]


class Net(nn.Module):
    """Blocks, and a parameter of the model's own that is as large as they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def run(self, x: torch.Tensor, path: list[int]) -> torch.Tensor:
        for place in path:
            x = x + torch.tanh(self.blocks[place](x))
        return x

    def forward(self, x: torch.Tensor, path: list[int], mode: str = "") -> torch.Tensor:
        x = x @ self.own
        if mode == "fail":
            self.run(x, path[:1])
            raise KeyError("bad batch")
        x = checkpoint(self.run, x, path, use_reentrant=True) if mode == "checkpointed" else self.run(x, path)
        return x + x @ self.own


def data(number: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank)).requires_grad_(True)


ALL = list(range(BLOCKS))


def losses_of(model: Any, action: str, number: int, rank: int) -> Iterator[torch.Tensor]:
    """The losses of one micro-batch, for the engine and the reference alike."""
    x = data(number, rank)
    path = [(number + k) % BLOCKS for k in range(2)] if action == "path" else ALL
    output = model(x, path, action)
    if action == "teacher":
        with torch.no_grad():
            target = model(data(number + 500, rank), ALL)
        yield (output - target).square().mean()
    elif action == "siamese":
        yield (output * model(data(number + 500, rank), path)).mean()
    else:
        yield output.square().mean()
    if action == "two losses":
        yield output.abs().mean()


class Plain:
    """The reference: all ranks' micro-batches in one process, gradients as the mean over the window."""

    def __init__(self, size: int, kind: str, frozen: bool) -> None:
        self.model, self.size, self.count = Net(), size, 0
        freeze_at_the_start(self.model, frozen)
        parameters = self.model.parameters()
        if kind == "Lamb":
            self.optimizer: torch.optim.Optimizer = Lamb(parameters, **ADAMW["params"])
        else:
            self.optimizer = torch.optim.AdamW(parameters, **ADAMW["params"], foreach=False)

    def micro_batch(self, action: str, number: int) -> None:
        self.count += 1
        for rank in range(self.size):
            for loss in losses_of(self.model, action, number, rank):
                (loss / self.size).backward(retain_graph=True)

    def update(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= max(1, self.count)
        self.optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.count = 0


def train(engine: Any, action: str, number: int) -> None:
    for loss in losses_of(engine, action, number, engine.global_rank):
        if action == "plain":
            loss.backward()
        elif action == "no_sync":
            with engine.no_sync():
                engine.backward(loss)
        else:
            engine.backward(loss, retain_graph=action == "two losses")
    engine.step()


def between(engine: Any, plain: Plain, action: str, number: int) -> None:
    """Do something that is no micro-batch, to both."""
    rank, block = engine.global_rank, number % BLOCKS
    if action == "evaluate":
        with torch.no_grad():
            torch.testing.assert_close(
                engine(data(number, rank), ALL[::-1]), plain.model(data(number, rank), ALL[::-1])
            )
    elif action == "fail":
        with pytest.raises(KeyError):
            engine(data(number, rank), ALL, "fail")
    elif action == "zero_grad":
        engine.zero_grad()
        plain.zero_grad()
    elif action == "rate":
        for optimizer in (engine.optimizer, plain.optimizer):
            optimizer.param_groups[0]["lr"] *= 0.9
    elif action in ("freeze", "thaw"):
        for model in (engine.module, plain.model):
            model.blocks[block].requires_grad_(action == "thaw")
    elif action == "gather":
        with onecopy.zero.GatheredParameters(list(engine.module.blocks[block].parameters())):
            seen = engine.module.blocks[block].weight.detach().clone()
        torch.testing.assert_close(seen, plain.model.blocks[block].weight.detach(), rtol=2e-5, atol=2e-6)


def freeze_at_the_start(model: Net, frozen: bool) -> None:
    """Two blocks, which the program may thaw."""
    model.blocks[1:3].requires_grad_(not frozen)


def run_programs(programs: list[tuple[Program, int, str, bool]], stages: tuple[int, ...]) -> None:
    for program, window, kind, frozen in programs:
        for stage in stages:
            try:
                # In the middle of a window what is thawed waits for the next one; torch would train it at once.
                run_program(program, window, stage, kind, frozen and window == 1)
            except Exception as error:
                error.add_note(f"stage {stage}, windows of {window}, {kind}, frozen {frozen}: {program}")
                raise


def run_program(program: Program, window: int, stage: int, kind: str, frozen: bool) -> None:
    model = Net()
    freeze_at_the_start(model, frozen)
    config = configuration(
        stage,
        gradient_accumulation_steps=window,
        managed_gradient_accumulation=True,
        optimizer={"type": kind, "params": ADAMW["params"]},
    )
    engine, _, _, _ = onecopy.initialize(model=model, config=config)
    plain, calls = Plain(engine.world_size, kind, frozen), 0
    for action, number in program:
        if action in TRAINING:
            calls += 1
            assert engine.is_gradient_accumulation_boundary() == (calls % window == 0)
            train(engine, action, number)
            plain.micro_batch(action, number)
            if calls % window == 0:
                plain.update()
        else:
            between(engine, plain, action, number)
    assert_weights(engine, {name: p.detach() for name, p in plain.model.named_parameters()})
    assert engine.global_steps == calls // window and engine.skipped_steps == 0
    engine.destroy()


ACTIONS = st.tuples(st.sampled_from(TRAINING + TRAINING + BETWEEN), st.integers(0, 50))
PROGRAMS = st.tuples(
    st.lists(ACTIONS, min_size=4, max_size=12),
    st.sampled_from([1, 1, 2, 3]),
    st.sampled_from(["AdamW", "AdamW", "Lamb"]),
    st.booleans(),
)
SETTINGS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
    "phases": [Phase.generate],
}


@settings(max_examples=5, derandomize=True, **SETTINGS)
@given(st.lists(PROGRAMS, min_size=4, max_size=4))
def test_random_programs_train_as_plain_torch(programs: list[tuple[Program, int, str, bool]]) -> None:
    """Forwards, backwards, failures, evaluations and edits in any order, at every stage, with blocks frozen at the start."""
    world(2).run(run_programs, programs, (0, 1, 2, 3), timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_many_more_random_programs(size: int) -> None:
    """The same on new programs every time."""

    @settings(max_examples=60, **SETTINGS)
    @given(PROGRAMS)
    def check(program: tuple[Program, int, str, bool]) -> None:
        world(size).run(run_programs, [program], (0, 1, 2, 3), timeout=120)

    check()
