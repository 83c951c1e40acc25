"""Several engines in one process, models that share parameters, and copies of a model an engine holds."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
from onecopy.errors import ModelError, ReleasedParameterError
from tests.engine.small_net import WIDTH, Net, data, start, step, wanted
from tests.reference import assert_weights, configuration, residue_of
from tests.worlds import World


def two_engines(stages: tuple[int, int]) -> None:
    """Two engines of different stages, used in turn and under one loss; an evaluated third one next to them."""
    first, second = (start(stage) for stage in stages)
    frozen = Net()
    third = onecopy.initialize(model=frozen, config={**configuration(3), "optimizer": None})[0]
    for number in range(3):
        x = data(number, first.global_rank)
        with torch.no_grad():
            target = third(x)
        for engine in (first, second):
            engine.backward(engine(x).square().mean())
        first.step()
        second.step()
        assert target.shape == x.shape and not residue_of(third)
    assert_weights(first, wanted(3))
    assert_weights(second, wanted(3))
    assert_weights(third, {name: p.detach() for name, p in Net().named_parameters()}, 0.0, 0.0)
    for engine in (first, second, third):
        engine.destroy()


@pytest.mark.parametrize("stages", [(3, 3), (0, 3), (1, 2)])
def test_several_engines_in_one_process(world2: World, stages: tuple[int, int]) -> None:
    """Each trains as if it were alone."""
    world2.run(two_engines, stages)


def adversaries(stage: int) -> None:
    """A loss through two engines: gradients flow through both, each steps its own weights."""
    size = dist.get_world_size()
    generator, critic = start(stage, Net(1)), start(stage, Net(2))
    plain = [Net(1), Net(2)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02, weight_decay=0.1, eps=0.1) for m in plain]
    for number in range(3):
        loss = critic(generator(data(number, generator.global_rank))).square().mean()
        generator.backward(loss)
        generator.step()
        if number % 2:
            critic.step()
        else:
            critic.zero_grad()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank in range(size):
            (plain[1](plain[0](data(number, rank))).square().mean() / size).backward()
        optimizers[0].step()
        if number % 2:
            optimizers[1].step()
    for engine, model in zip((generator, critic), plain, strict=True):
        assert_weights(engine, {name: p.detach() for name, p in model.named_parameters()})
        engine.destroy()


@pytest.mark.parametrize("stage", range(4))
def test_one_loss_through_two_engines(world2: World, stage: int) -> None:
    """As adversarial training does it, with `zero_grad` for the one that does not step."""
    world2.run(adversaries, stage)


class Both(nn.Module):
    """A head of its own on a trunk that is given."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))  # type: ignore[no-any-return]


def shared_trunk(stage: int, frozen: bool) -> None:
    trunk = Net()
    trunk.requires_grad_(not frozen)
    first = start(stage, Both(trunk))
    try:
        second = start(stage, Both(trunk))
        for engine in (first, second):
            step(engine, 0)
        second.destroy()
    finally:
        first.destroy()


@pytest.mark.parametrize("stage", range(4))
def test_one_trunk_cannot_be_trained_by_two_engines(world2: World, stage: int) -> None:
    """The second `initialize` names the parameter and both owners; nothing is updated twice."""
    with pytest.raises(ModelError, match=r"trunk\.layers\.0\.weight.*another engine.*trunk\.layers\.0\.weight"):
        world2.run(shared_trunk, stage, False)


def test_a_frozen_trunk_may_be_shared_while_it_is_whole(world2: World) -> None:
    """Read-only sharing works where parameters stay whole, and is refused where the first engine shards them."""
    world2.run(shared_trunk, 2, True)
    with pytest.raises(ModelError, match="another engine"):
        world2.run(shared_trunk, 3, True)


def reference_model(stage: int) -> None:
    """A module that was never given to an engine but holds a sharded parameter of one."""
    model = Net()
    engine = start(stage, model)
    try:
        model.layers[1](torch.zeros(1, WIDTH))  # a unit called on its own gathers itself
        stranger = nn.Linear(WIDTH, WIDTH)
        stranger.weight = model.layers[0].weight
        stranger(torch.zeros(1, WIDTH))
    finally:
        engine.destroy()


def test_a_sharded_parameter_in_a_foreign_module_says_so(world2: World) -> None:
    """No "must be 2-D": the error names the parameter and the remedy."""
    world2.run(reference_model, 1)
    with pytest.raises(ReleasedParameterError, match=r"layers\.0\.weight.*sharded"):
        world2.run(reference_model, 3)


def copies(stage: int) -> None:
    model = Net()
    before = copy.deepcopy(model)
    engine = start(stage, model)
    step(engine, 0)
    with pytest.raises(ModelError, match="save_16bit_model"):
        torch.save(model, io.BytesIO())
    try:
        made = copy.deepcopy(model)
        with torch.no_grad():  # a copy that was made is right and independent
            torch.testing.assert_close(made(data(0, 0)), engine(data(0, 0)))
        step(engine, 1)
        other = start(stage, made)
        other.destroy()
    except (ModelError, ReleasedParameterError) as error:
        assert "copy" in str(error) or "sharded" in str(error)
    finally:
        engine.destroy()
    third = start(stage, before)
    step(third, 0)
    third.destroy()


@pytest.mark.parametrize("stage", range(4))
def test_deep_copies_are_right_or_refused(world2: World, stage: int) -> None:
    """A copy made before is a model of its own; one made while the engine lives is right or an error in words."""
    world2.run(copies, stage)
