"""A program that writes into the model between steps, moves it or exchanges its parts: what it did counts, or is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onecopy import zero
from onecopy.errors import ModelError, ReleasedParameterError
from onecopy.utils import safe_get_full_fp32_param
from tests.engine.small_net import Net, data, start
from tests.worlds import World

LOW = {"fp32": torch.float32, "bf16": torch.bfloat16}


def train(engine: Any, number: int, dtype: torch.dtype) -> None:
    engine.backward(engine(data(number, engine.global_rank).to(dtype)).float().square().mean())
    engine.step()


def copy_all(model: nn.Module, new: nn.Module, function: Callable[[Any, Any], None]) -> None:
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), new.parameters(), strict=True):
            function(mine, theirs)


def other_memory(mine: Any, theirs: Any) -> None:
    mine.data = theirs.detach().to(mine.dtype)


EDITS: dict[str, Callable[[nn.Module, nn.Module], Any]] = {
    "copy_": lambda model, new: copy_all(model, new, lambda mine, theirs: mine.copy_(theirs)),
    "data =": lambda model, new: copy_all(model, new, other_memory),
    "load_state_dict": lambda model, new: model.load_state_dict(new.state_dict()),
    "a child's": lambda model, new: [a.load_state_dict(b.state_dict()) for a, b in zip(model.layers, new.layers)],
}


def edited(stage: int, precision: str, kind: str) -> None:
    """With a rate of zero nothing changes what was written, and with another one it is trained on."""
    low = LOW[precision]
    engine = start(stage, bf16={"enabled": precision == "bf16"}, optimizer={"type": "SGD", "params": {"lr": 0.0}})
    train(engine, 0, low)
    new = Net(seed=5)
    if stage < 3:
        EDITS[kind](engine.module, new)
    else:  # sharded weights are written where they are whole
        with pytest.raises(ReleasedParameterError, match=r"layers\.\d\.weight"):
            EDITS[kind](engine.module, new)
        with zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            EDITS[kind](engine.module, new)
    for number in range(2):
        train(engine, number, low)
    wanted = [parameter.detach().to(low).float() for parameter in new.parameters()]
    for rate in (0.0, 0.5):
        engine.optimizer.param_groups[0]["lr"] = rate
        train(engine, 3, low)
        masters = [safe_get_full_fp32_param(parameter) for parameter in engine.module.parameters()]
        with zero.GatheredParameters(list(engine.module.parameters())):
            live = [parameter.detach().float() for parameter in engine.module.parameters()]
        for master, weight, value in zip(masters, live, wanted, strict=True):
            assert torch.equal(master.to(low), weight.to(low))  # type: ignore[union-attr]
            assert torch.equal(master.to(low).float(), value) == (rate == 0.0)  # type: ignore[union-attr]
    engine.destroy()


def every_edit(stage: int) -> None:
    for precision in LOW:
        for kind in EDITS:
            try:
                edited(stage, precision, kind)
            except BaseException as error:
                error.add_note(f"{precision}, {kind}")
                raise


@pytest.mark.parametrize("stage", range(4))
def test_what_is_written_into_the_weights_is_trained_on(world2: World, stage: int) -> None:
    world2.run(every_edit, stage)


def cast_and_moved(stage: int) -> None:
    """`model.half()`, `model.to(...)` and the like change nothing while the engine lives, and work again after it."""
    model = Net()
    engine = start(stage, model)
    plain = start(stage)
    for number in range(3):
        for move in (model.half, model.cpu, engine.double, lambda: model.to("cpu"), lambda: model.to("meta")):
            move()
        for each in (engine, plain):
            train(each, number, torch.float32)
    for mine, theirs in zip(engine.module.parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(safe_get_full_fp32_param(mine), safe_get_full_fp32_param(theirs))  # type: ignore[arg-type]
    engine.destroy()
    plain.destroy()
    if stage < 3:
        assert next(model.half().parameters()).dtype == torch.float16


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_casting_and_moving_leave_the_weights_where_they_are(world2: World, stage: int) -> None:
    world2.run(cast_and_moved, stage)


class Wrapper(nn.Module):
    """A module around another one, as checkpoint wrappers are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def exchanged(stage: int, folder: str) -> list[str]:
    said = []

    def parameter(model: Any) -> None:
        model.layers[1].weight = nn.Parameter(torch.zeros(8, 8))

    def module(model: Any) -> None:
        model.layers[2] = nn.Linear(8, 8)

    def wrapped(model: Any) -> None:
        model.layers[2] = Wrapper(model.layers[2])
        model.extra = nn.Linear(2, 2)

    for change in (parameter, module, wrapped):
        engine = start(stage)
        train(engine, 0, torch.float32)
        change(engine.module)
        for save in (False, True):
            try:
                engine.save_checkpoint(folder, "last") if save else train(engine, 1, torch.float32)
                said.append("")
            except ModelError as error:
                said.append(str(error))
        engine.destroy()
    engine = start(stage)
    engine.load_checkpoint(folder, "last", load_module_strict=False)  # by the names of initialize; `extra` is new
    train(engine, 2, torch.float32)
    engine.destroy()
    return said


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_exchanged_parameter_is_named_and_a_wrapped_one_is_not(world2: World, tmp_path: Path, stage: int) -> None:
    """The step and the save would go on with the old one, unseen."""
    for said in world2.run(exchanged, stage, str(tmp_path)):
        assert ["'layers.1.weight' is another object" in text for text in said[:2]] == [True, True]
        assert ["'layers.2.weight' is another object" in text for text in said[2:4]] == [True, True]
        assert said[4:] == ["", ""]
