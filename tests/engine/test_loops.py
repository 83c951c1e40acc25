"""Ways of computing losses that engines get wrong: checkpointing, reuse, several losses, gradients of inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import onecopy
from onecopy.errors import ModelError
from tests.reference import check_loop, configuration
from tests.worlds import World, world

WIDTH = 16
STAGES = range(4)


class Block(nn.Module):
    """Two layers around a residual; `frozen` leaves only the second to be trained, as adapters do."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.second(torch.relu(self.first(x))))


class Stack(nn.Module):
    """Five blocks and parameters at the root as large as a block; `mode` says how activations are checkpointed.

    "each": every block on its own; "segment": all blocks as one segment, more units than there are slots.
    """

    def __init__(self, mode: str = "", reentrant: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mode, self.reentrant = mode, reentrant
        self.layers = nn.ModuleList(Block(frozen) for _ in range(5))
        self.up = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 4)

    def blocks(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(x @ self.up) @ self.down
        if self.mode == "each":
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        elif self.mode == "segment":
            x = checkpoint(self.blocks, x, use_reentrant=self.reentrant)
        else:
            x = self.blocks(x)
        return x + torch.tanh(x @ self.up) @ self.down


class Make:
    """A model with these arguments, made anew at each call; a top-level class, so that it can be sent to ranks."""

    def __init__(self, kind: type[nn.Module], *arguments: Any) -> None:
        self.kind, self.arguments = kind, arguments

    def __call__(self) -> nn.Module:
        torch.manual_seed(0)
        return self.kind(*self.arguments)


def data(micro_batch: int, rank: int, part: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * part + 10 * micro_batch + rank)
    return torch.randn(4, WIDTH, generator=generator).requires_grad_(True)


def one_loss(model: Any, micro_batch: int, rank: int) -> Iterator[torch.Tensor]:
    yield model(data(micro_batch, rank)).square().mean()


def every_stage(build: Callable[[], nn.Module], losses: Any, stages: tuple[int, ...], **more: Any) -> None:
    """On a rank: compare with plain torch at every stage, for `engine.backward` and for `loss.backward` in longer windows."""
    for stage in stages:
        for backward, micros in (("engine", 1), ("plain", 2)):
            try:
                check_loop(build, losses, stage, backward=backward, micros=micros, **more)
            except Exception as error:
                error.add_note(f"stage {stage}, {backward} backward, {micros} micro-batches a window")
                raise


def everywhere(build: Callable[[], nn.Module], losses: Any, stages: Any = STAGES, size: int = 2, **more: Any) -> None:
    world(size).run(every_stage, build, losses, tuple(stages), **more)


# ------------------------------------------------------------------------------------------- activation checkpointing
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("mode", ["each", "segment"])
@pytest.mark.parametrize("frozen", [True, False])
def test_checkpointed_blocks_train_the_same(mode: str, reentrant: bool, frozen: bool) -> None:
    """Activation checkpointing with frozen parameters: recomputing must find weights, also when a segment is many units."""
    everywhere(Make(Stack, mode, reentrant, frozen), one_loss, stages=(1, 3))


def two_halves(model: Any, micro_batch: int, rank: int) -> Iterator[torch.Tensor]:
    first, second = model(data(micro_batch, rank)), model(data(micro_batch, rank, 1))
    yield (1 - nn.functional.cosine_similarity(first, second)).mean() + first.square().mean()


@pytest.mark.parametrize(("mode", "reentrant"), [("", False), ("each", False), ("each", True), ("segment", True)])
def test_siamese_networks_use_weights_twice(mode: str, reentrant: bool) -> None:
    """Shared weights with checkpointing: inner backwards bring a gradient once a use, and all of them count once."""
    everywhere(Make(Stack, mode, reentrant), two_halves, stages=(2, 3))


def nonscalar(engine: Any, steps: int) -> None:
    for step in range(steps):
        output = engine(data(step, engine.communicator.rank))
        output.backward(gradient=torch.ones_like(output) / output.numel())
        engine.step()


def train_nonscalar(stages: tuple[int, ...]) -> None:
    for stage in stages:
        engine, _, _, _ = onecopy.initialize(model=Make(Stack, "each", True)(), config=configuration(stage))
        nonscalar(engine, 2)
        assert engine.global_steps == 2 and engine.get_global_grad_norm() > 0
        engine.destroy()


def test_backward_of_a_non_scalar_with_reentrant_checkpointing() -> None:
    """Checkpointing and `output.backward(gradient=...)`: the second step finds nothing stale from the first."""
    world(2).run(train_nonscalar, (1, 3))


# ------------------------------------------------------------------------------------------ losses and their gradients
def several_losses(model: Any, micro_batch: int, rank: int) -> Iterator[torch.Tensor]:
    output = model(data(micro_batch, rank))
    yield output.square().mean()
    yield output.abs().mean()
    yield output.mean() * 0.5


def test_several_losses_of_one_forward_are_one_micro_batch() -> None:
    """Several backwards of one graph: their gradients add up, and count as one micro-batch."""
    everywhere(Make(Stack), several_losses, keep_graph=True)


def forward_without_gradients_in_between(model: Any, micro_batch: int, rank: int) -> Iterator[torch.Tensor]:
    output = model(data(micro_batch, rank))
    with torch.no_grad():
        target = model(data(micro_batch, rank, 1))
    yield (output - target).square().mean()


def test_a_forward_without_gradients_between_forward_and_backward() -> None:
    """A teacher's forward with the same model must not take away weights that a waiting backward needs."""
    everywhere(Make(Stack), forward_without_gradients_in_between)


def failing_forward_in_between(model: Any, micro_batch: int, rank: int) -> Iterator[torch.Tensor]:
    output = model(data(micro_batch, rank))
    with pytest.raises(RuntimeError):
        model(torch.randn(3, WIDTH + 1))
    yield output.square().mean()


def test_a_failing_forward_between_forward_and_backward() -> None:
    """An exception in a forward that was caught leaves an earlier forward's backward right."""
    everywhere(Make(Stack), failing_forward_in_between)


def through_itself(model: Any, micro_batch: int, rank: int) -> Iterator[torch.Tensor]:
    yield model(model(data(micro_batch, rank))).square().mean()


def test_the_models_output_is_its_own_input() -> None:
    """Recurrent use: every unit is used twice in one graph."""
    everywhere(Make(Stack), through_itself)


def gradient_of_the_input(model: Any, micro_batch: int, rank: int) -> Iterator[torch.Tensor]:
    x = data(micro_batch, rank)
    output = model(x)
    (gradient,) = torch.autograd.grad(output.square().mean(), x, retain_graph=True)
    yield (output * gradient.detach()).sum() + output.square().mean()


def test_gradients_with_respect_to_inputs_only() -> None:
    """`autograd.grad` on inputs between forward and backward is no micro-batch and leaves no gradient behind."""
    everywhere(Make(Stack), gradient_of_the_input)


def gradient_by_transform(model: Any, micro_batch: int, rank: int) -> Iterator[torch.Tensor]:
    x = data(micro_batch, rank).detach()
    gradient = torch.func.grad(lambda value: model(value).square().mean())(x)
    yield (model(x) * gradient).sum() + torch.func.vmap(model)(x).square().mean()


def transformed(stage: int) -> None:
    engine, _, _, _ = onecopy.initialize(model=Make(Stack)(), config=configuration(stage))
    try:
        next(gradient_by_transform(engine, 0, engine.communicator.rank))
    finally:
        engine.destroy()


def test_functional_transforms_are_right_or_refused() -> None:
    """`torch.func` through whole weights is torch's; through sharded ones it is an error in words."""
    everywhere(Make(Stack), gradient_by_transform, stages=(0, 2))
    with pytest.raises(ModelError, match="torch.func"):
        world(2).run(transformed, 3)


def gradient_penalty(model: Any, micro_batch: int, rank: int) -> Iterator[torch.Tensor]:
    x = data(micro_batch, rank)
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    yield output.square().mean() + gradient.square().mean()


def test_a_gradient_penalty_differentiates_twice() -> None:
    """Double backward at every stage; sharded weights need a slot for every unit."""
    everywhere(Make(Stack), gradient_penalty, stages=(0, 1, 2))
    everywhere(Make(Stack), gradient_penalty, stages=(3,), onecopy={"slots": 6})


def penalised_with_two_slots() -> None:
    engine, _, _, _ = onecopy.initialize(model=Make(Stack)(), config=configuration(3))
    try:
        next(gradient_penalty(engine, 0, engine.communicator.rank))
    finally:
        engine.destroy()


def test_a_gradient_penalty_without_enough_slots_says_what_to_do() -> None:
    with pytest.raises(ModelError, match=r'"slots": 6'):
        world(2).run(penalised_with_two_slots)


class Holder:
    """An output of a class that neither torch nor dataclasses know."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class HoldingBlock(Block):
    def forward(self, x: Any) -> Any:
        return Holder(super().forward(x.value if isinstance(x, Holder) else x))


class HoldingStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(HoldingBlock() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held: Any = x
        for layer in self.layers:
            held = layer(held)
        return held.value  # type: ignore[no-any-return]


def test_outputs_inside_objects_are_found() -> None:
    """A block that returns an object of the user's own class still finds its weights in backward."""
    everywhere(Make(HoldingStack), one_loss, stages=(2, 3))


# ----------------------------------------------------------------------------------- parameters used outside their module
class Outside(nn.Module):
    """Reads parameters of its children itself: in its own forward, and one child's from another child's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.layers[2].first.bias
        return nn.functional.linear(x, self.scale.weight) + self.layers[0].second.bias + self.scale.weight.mean()


def test_parameters_used_outside_their_module() -> None:
    """A released parameter read by another module is fetched, gradients flow, and nothing broadcasts a placeholder."""
    everywhere(Make(Outside), one_loss)


def touch_outside(stage: int) -> None:
    engine, _, _, _ = onecopy.initialize(model=Make(Outside)(), config=configuration(stage))
    try:
        engine.module.layers[1].first.weight * torch.ones(1)
    finally:
        engine.destroy()


def test_a_released_parameter_read_outside_any_forward_names_itself() -> None:
    """No silent broadcast of a stand-in: the error names the parameter and what to do."""
    with pytest.raises(onecopy.errors.ReleasedParameterError, match=r"layers\.1\.first\.weight.*GatheredParameters"):
        world(2).run(touch_outside, 3)


def test_three_ranks_and_one(world: Callable[[int], World]) -> None:
    """The loops above on other numbers of ranks."""
    for size in (1, 3):
        for losses in (two_halves, forward_without_gradients_in_between):
            everywhere(Make(Stack, "segment", True), losses, stages=(3,), size=size)
