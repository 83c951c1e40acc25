"""The note "saved views": autograd keeps views of a weight in its slot, so a unit comes back to that slot, and units that
are in use together never share one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from tests.reference import check_loop, configuration
from tests.worlds import World

WIDTH = 10


class SavesView(torch.autograd.Function):
    """x @ w.t() whose backward uses the very view of the weight that forward saved."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor, block: Any) -> torch.Tensor:
        context.view = weight.detach().t()
        context.block = block
        context.save_for_backward(x)
        return x @ context.view

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        (x,) = context.saved_tensors
        context.block.places.append((context.view.data_ptr(), context.block.weight.data_ptr()))
        return gradient @ context.view.t(), gradient.t() @ x, None


class Block(nn.Module):
    """A block that reads its neighbour's weight too, when it is given one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.places: list[tuple[int, int]] = []  # of the weight in forward and in backward

    def forward(self, x: torch.Tensor, others: tuple[nn.Parameter, ...] = ()) -> torch.Tensor:
        y = SavesView.apply(x, self.weight, self)
        for weight in others:
            y = y + torch.tanh(x @ weight)
        return x + torch.tanh(y)


class Net(nn.Module):
    """Blocks; each reads the weights of `reach` other blocks as well, so that `reach + 1` units are in use together."""

    def __init__(self, reach: int, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.reach, self.again = reach, again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = list(range(6)) + ([2, 0, 5] if self.again else [])
        for place in order:
            others = tuple(self.blocks[(place + 1 + k) % 6].weight for k in range(self.reach))
            x = self.blocks[place](x, others)
        return x


class Build:
    def __init__(self, reach: int, again: bool) -> None:
        self.reach, self.again = reach, again

    def __call__(self) -> nn.Module:
        return Net(self.reach, self.again)


def one_loss(model: Any, number: int, rank: int) -> Any:
    yield model(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))).square().mean()


def check(reach: int, again: bool, slots: int) -> None:
    check_loop(Build(reach, again), one_loss, 3, steps=3, onecopy={"slots": slots})
    check_loop(
        Build(reach, again), one_loss, 3, steps=2, micros=2, onecopy={"slots": slots}, zero={"overlap_comm": False}
    )


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("reach", [0, 1, 2])
def test_saved_views_stay_right(world2: World, reach: int, slots: int) -> None:
    """Blocks used again, and blocks that read up to two others' weights, with one to three slots."""
    world2.run(check, reach, True, slots)


def slots_of_uses(slots: int) -> None:
    """Every backward finds the weight where forward had it, and there are no more slots than asked for."""
    engine, _, _, _ = onecopy.initialize(model=Net(0, False), config=configuration(3, onecopy={"slots": slots}))
    for number in range(3):
        places: list[tuple[int, int]] = []
        for block in engine.module.blocks:
            block.places = places
        engine.backward(next(one_loss(engine, number, engine.global_rank)))
        engine.step()
        assert len(places) == 6 and all(before == after for before, after in places), places
    assert len(engine.runtime.slots.slots) == slots
    engine.destroy()


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_backward_finds_the_forwards_slot(world2: World, slots: int) -> None:
    world2.run(slots_of_uses, slots)


def sizes() -> list[int]:
    """Bytes of the slots of a model with blocks, a large embedding and a head."""

    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(1000, 8)
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.head = nn.Linear(8, 1000, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embedding(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)  # type: ignore[no-any-return]

    engine, _, _, _ = onecopy.initialize(model=Sizes(), config=configuration(3))
    engine.backward(engine(torch.arange(4)).square().mean())
    engine.step()
    found = sorted(slot.memory.nbytes for slot in engine.runtime.slots.slots)
    engine.destroy()
    return found


def test_slots_come_in_size_classes(world2: World) -> None:
    """A large embedding does not make the blocks' slots large; it shares one with the head, which is as large."""
    small, large = 4 * 128, 4 * 8000
    found = world2.run(sizes)[0]
    assert len(found) == 3
    assert found[0] == found[1] <= small + 512 and large <= found[2] <= large + 512


class Reader(nn.Module):
    """A block that reads an embedding's weight, and leaves it out of its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) + torch.softmax(x @ weight.t(), dim=-1) @ weight


class Tokens(nn.Module):
    """An embedding that blocks and the model itself use as a matrix, as tied heads do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Reader() for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.embedding.weight)
        return nn.functional.linear(x, self.embedding.weight)


class InBlocksOnly(Tokens):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.embedding.weight)
        return x


def token_loss(model: Any, number: int, rank: int) -> Any:
    tokens = torch.randint(0, 50, (6,), generator=torch.Generator().manual_seed(10 * number + rank))
    yield model(tokens).square().mean()


def check_embedding(slots: int) -> None:
    for build in (Tokens, InBlocksOnly):
        check_loop(build, token_loss, 3, onecopy={"slots": slots})


@pytest.mark.parametrize("slots", [1, 2])
def test_an_embeddings_weight_read_by_others(world2: World, slots: int) -> None:
    """An embedding's own backward needs no weight, but whoever else read it does."""
    world2.run(check_embedding, slots)
