"""Ranks that use different parameters: experts without tokens, branches by rank, and parameters nobody uses.

The note "canonical order" of `sharding/gradients.py`: these hang if a rank may leave a buffer's reduction out.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from tests.reference import check_loop, configuration, full_masters
from tests.worlds import World

WIDTH = 6


class Experts(nn.Module):
    """Four experts, of which a rank uses one by a rule; `kind` is where they live."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        for place, expert in enumerate(self.experts):
            if place not in chosen:
                continue  # no tokens here
            x = x + torch.tanh(expert(x))
        return x


class Net(nn.Module):
    """Experts inside the blocks of a stack, or (`bare`) directly at the root; one layer is never used."""

    def __init__(self, bare: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = Experts() if bare else nn.ModuleList(Experts() for _ in range(2))
        self.never = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        x = self.first(x)
        for block in [self.blocks] if isinstance(self.blocks, Experts) else self.blocks:
            x = block(x, chosen)
        return self.last(x)  # type: ignore[no-any-return]


def routed(model: Any, number: int, rank: int) -> Any:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
    chosen = [(number + rank) % 4] if number % 3 else []  # every third micro-batch uses no expert at all
    yield model(x, chosen).square().mean()


def inside_blocks() -> nn.Module:
    return Net()


def bare() -> nn.Module:
    return Net(bare=True)


def check(stages: tuple[int, ...], build: Any, micros: int, **more: Any) -> None:
    for stage in stages:
        for overlap in (True, False):
            zero = {"overlap_comm": overlap, "reduce_bucket_size": 40, **more.get("zero", {})}
            check_loop(build, routed, stage, steps=4, micros=micros, **{**more, "zero": zero})


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("micros", [1, 3])
def test_experts_without_tokens_on_some_ranks(world: Any, size: int, micros: int) -> None:
    """Missing gradients are zeros in the fixed order; an expert that nobody used in the window is left alone."""
    world(size).run(check, (0, 1, 2, 3), inside_blocks, micros)


def test_bare_experts_as_one_leaf(world2: World) -> None:
    """Experts at the root of the model: `leaf_module` makes them one unit, so that stage 3 gathers them together."""
    world2.run(check, (2,), bare, 1)
    for leaf in ({"classes": ["Experts"]}, {"names": ["blocks.experts"]}):  # a list has no forward: the root owns it
        world2.run(check, (3,), bare, 1, zero={"leaf_module": leaf})


def untouched(stage: int) -> None:
    """What never has a gradient keeps weight, moments and step count, decay included."""
    model = Net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = configuration(stage, optimizer={"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.5}})
    engine, _, _, _ = onecopy.initialize(model=model, config=config)
    for number in range(3):
        engine.backward(next(routed(engine, 3 * number, engine.global_rank)))
        engine.step()
    after = full_masters(engine)
    for name, weight in before.items():
        used = name.startswith(("first", "last"))
        assert torch.equal(after[name], weight) is not used, name
    states = engine.masters.optimizer.state
    for run in engine.masters.runs:
        names = [
            n for n, r in zip(run.flat.names, run.flat.layout.ranges, strict=True) if r.overlap(run.start, run.stop)
        ]
        if names and not any(name.startswith(("first", "last")) for name in names):
            assert not states.get(run.master), names
    engine.destroy()


@pytest.mark.parametrize("stage", range(4))
def test_never_used_parameters_are_left_alone(world2: World, stage: int) -> None:
    world2.run(untouched, stage)


def norms(kinds: tuple[tuple[int, bool], ...]) -> list[float]:
    """Gradient norms, by stage and fp16, of a window of two in whose first micro-batch rank 0 alone uses an expert."""
    found = []
    for stage, fp16 in kinds:
        precision = {"enabled": fp16, "loss_scale": 8.0}
        engine, _, _, _ = onecopy.initialize(
            model=Net(), config=configuration(stage, gradient_accumulation_steps=2, fp16=precision)
        )
        for number in range(2):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number))
            chosen = [0] if number or engine.global_rank == 0 else []
            engine.backward(engine(x.half() if fp16 else x, chosen).float().square().mean())
            engine.step()
        found.append(float(engine.get_global_grad_norm()))
        engine.destroy()
    return found


def test_ranks_that_kept_different_gradients_divide_by_the_same_for_an_fp16_wire(world2: World) -> None:
    for wide, narrow in world2.run(norms, ((1, False), (1, True))):
        assert narrow == pytest.approx(wide, rel=2e-3)


def test_a_block_that_gives_back_its_input_on_one_rank(world2: World) -> None:
    """Both blocks of rank 1 do: what comes before them must not leave before its own gradient, and then again with it."""
    for whole, sharded in world2.run(norms, ((1, False), (2, False))):
        assert sharded == pytest.approx(whole, rel=1e-5)
