"""Blocks compiled one by one: the same losses, one graph for like blocks and all steps, in whatever order one compiles."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

import onecopy
from onecopy.activations.compiled import graph_count
from onecopy.errors import ModelError
from tests.activations.small_lm import WIDTH, LanguageModel, document, result, steps
from tests.worlds import World

GetWorld = Callable[[int], World]


def whole(model: nn.Module, backend: str) -> nn.Module:
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


def each(model: LanguageModel, backend: str) -> nn.Module:
    for place, block in enumerate(list(model.layers)):
        model.layers[place] = torch.compile(block, backend=backend)  # type: ignore[assignment]
    return model


def in_place(model: LanguageModel, backend: str) -> nn.Module:
    for block in model.layers:
        block.compile(backend=backend)
    return model


BEFORE: dict[str, Any] = {"whole": whole, "each": each, "in place": in_place}


def train(stage: int, way: str, backend: str, how: str = "none", blocks: int = 4, count: int = 3) -> Any:
    """(result, number of graphs, graph breaks, names of weights) of a run compiled in this way ("" is not at all)."""
    torch._dynamo.reset()
    counters.clear()
    model: Any = LanguageModel(blocks, dropout=0.0)
    if way in BEFORE:
        model = BEFORE[way](model, backend)
    engine = onecopy.initialize(model=model, config=document(stage))[0]
    engine.checkpoint_activations(how)
    if way == "engine":
        engine.compile(backend=backend)
    assert engine.is_compiled == bool(way)
    found = result(engine, steps(engine, count))
    names = [name for name, _ in engine.module.named_parameters()]
    engine.destroy()
    return found, counters["stats"]["unique_graphs"], dict(counters["graph_break"]), names


def every_way(stages: tuple[int, ...], backend: str) -> list[str]:
    """What is not as without a compiler."""
    wrong = []
    for stage in stages:
        plain, _, _, names = train(stage, "", backend)
        for way in ("engine", *BEFORE):
            found, graphs, breaks, found_names = train(stage, way, backend)
            if found != plain or graphs != 1 or breaks or found_names != names:
                wrong.append(f"stage {stage}, {way}: {graphs} graphs, breaks {breaks}, {found[0]} for {plain[0]}")
        for how in ("full", "selective"):
            found, graphs, breaks, _ = train(stage, "engine", backend, how)
            if found != plain or graphs != 1 or breaks:
                wrong.append(f"stage {stage}, {how}: {graphs} graphs, breaks {breaks}, {found[0]} for {plain[0]}")
    return wrong


def test_compiled_in_any_order_it_trains_to_the_same_bits(world1: World) -> None:
    assert world1.run(every_way, (0, 3), "aot_eager") == [[]]


def test_two_ranks_too(world2: World) -> None:
    assert world2.run(every_way, (3,), "eager") == [[], []]


def graph_counts() -> list[int]:
    return [train(3, "engine", "eager", blocks=blocks, count=count)[1] for blocks, count in ((2, 1), (9, 1), (2, 6))]


def test_graphs_do_not_grow_with_blocks_or_steps(world1: World) -> None:
    """A weight lies in another slot at the next call, and its gradient buffers move: neither is in a graph."""
    assert world1.run(graph_counts) == [[1, 1, 1]]


class Odd(nn.Module):
    """Reads a value on the host in the middle: the compiler has to leave its graph there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(y)


def odd(fullgraph: bool, use: bool) -> tuple[list[float], str]:
    import logging

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onecopy").addHandler(handler)
    torch._dynamo.reset()
    torch.manual_seed(0)
    engine = onecopy.initialize(model=nn.Sequential(Odd(), Odd()), config=document(3))[0]
    if use:
        engine.compile(backend="eager", compile_kwargs={"fullgraph": fullgraph})
    losses = []
    for number in range(2):
        loss = engine(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number))).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    logging.getLogger("onecopy").removeHandler(handler)
    return losses, "\n".join(said)


def test_what_cannot_be_compiled_is_said_and_runs_anyway(world1: World) -> None:
    plain, _ = world1.run(odd, False, False)[0]
    losses, said = world1.run(odd, False, True)[0]
    assert losses == plain and "compiled in pieces" in said
    losses, said = world1.run(odd, True, True)[0]
    assert losses == plain and "block '0' cannot be compiled and runs as it is" in said


def refused() -> list[str]:
    said = []
    engine = onecopy.initialize(model=LanguageModel(), config=document(3))[0]
    for ask in (
        lambda: engine.compile(backend="eager", schedule=[]),
        lambda: engine.compile(compile_kwargs={"mode": "reduce-overhead"}),
    ):
        try:
            ask()
        except ModelError as error:
            said.append(str(error))
    engine.destroy()
    return said


def test_what_is_refused(world2: World) -> None:
    schedule, graphs = world2.run(refused)[0]
    assert "schedule" in schedule and "CUDA graphs" in graphs


def without_blocks(stage: int, compiled: bool) -> tuple[list[float], int]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    engine = onecopy.initialize(model=model, config=document(stage))[0]
    if compiled:
        engine.compile(backend="eager")
    graphs, losses = graph_count(), []
    for number in range(3):
        loss = engine(torch.randn(3, 3, generator=torch.Generator().manual_seed(number))).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert engine.is_compiled == compiled
    with pytest.raises(ModelError, match="no repeated block"):  # the layers that are compiled are no blocks
        engine.checkpoint_activations("full")
    engine.destroy()
    return losses, graph_count() - graphs


def test_a_model_without_blocks_is_compiled_layer_by_layer(world2: World) -> None:
    for stage in (1, 3):
        (plain, _), (compiled, graphs) = (world2.run(without_blocks, stage, way)[0] for way in (False, True))
        assert compiled == plain and graphs == 2


def with_inductor(stage: int, how: str) -> Any:
    return train(stage, "engine", "inductor", how), train(stage, "", "inductor")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")
@pytest.mark.parametrize("how", ["none", "full", "selective"])
def test_inductor_trains_alike(world1: World, how: str) -> None:
    (found, graphs, breaks, _), (plain, *_) = world1.run(with_inductor, 3, how, timeout=600)[0]
    assert found[0] == pytest.approx(plain[0], rel=1e-4) and graphs == 1 and not breaks
