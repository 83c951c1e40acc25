"""`onecopy.checkpointing.checkpoint`: any arguments, the same random numbers, inputs stored as configured and left alone."""

from __future__ import annotations

import collections
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from onecopy import checkpointing
from onecopy.activations import settings
from onecopy.activations.random_states import TRACKER
from onecopy.config import load
from onecopy.errors import ConfigError, ModelError

Pair = collections.namedtuple("Pair", "first second")

STORAGES: dict[str, dict[str, Any]] = {
    "kept": {},
    "host": {"checkpoint_in_cpu": True},
    "contiguous": {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 2},
    "timed": {"profile": True, "synchronize": True},
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    settings._current = settings.Settings()
    TRACKER.reset()


class Many(nn.Module):
    """Takes and gives what models do: keywords, nested containers, flags; appends to a list of the caller's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, flag: bool, *, more: dict[str, Any], pair: Pair, mask: torch.Tensor) -> Any:
        y = self.dropout(torch.tanh(self.linear(x))) * more["a"][0] + pair.first
        y = y.masked_fill(mask, 0.0)
        more["seen"].append(y)
        return (y, {"twice": 2 * y, "word": "yes"}) if flag else y


def train(call: Any, needs_gradient: bool, uses: int = 2) -> list[torch.Tensor]:
    """Gradients of a model that uses `Many` several times, and its random number afterwards."""
    model = Many()
    x = torch.randn(4, 6).t().contiguous().t()  # not in the usual order of memory
    x.requires_grad_(needs_gradient)
    more = {"a": [torch.full((6,), 0.5)], "seen": []}
    given = [x.detach().clone(), more["a"][0].clone()]
    y, mask = x, torch.zeros(4, 6, dtype=torch.bool)
    for _ in range(uses):
        y, rest = call(model, y, True, more=more, pair=Pair(torch.ones(6), None), mask=mask)
        y = y + rest["twice"]
    assert len(more["seen"]) == uses and rest["word"] == "yes"
    y.square().sum().backward()
    assert len(more["seen"]) == uses, "the caller's list was appended to again in backward"
    assert torch.equal(given[0], x) and torch.equal(given[1], more["a"][0]) and x.stride() == (1, 4)
    found = [model.linear.weight.grad, model.linear.bias.grad, torch.rand(3)]
    return [*found, x.grad] if needs_gradient else found


@pytest.mark.parametrize("storage", list(STORAGES))
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_any_arguments_give_the_same_gradients(storage: str, needs_gradient: bool) -> None:
    wanted = train(lambda function, *args, **kwargs: function(*args, **kwargs), needs_gradient)
    checkpointing.configure(None, **STORAGES[storage])
    found = train(checkpointing.checkpoint, needs_gradient)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    gc.collect()
    assert settings.current().storage.held.now == 0


def test_nested_checkpoints_and_second_backward() -> None:
    checkpointing.configure(None, **STORAGES["contiguous"])
    layers = [nn.Linear(3, 3) for _ in range(3)]

    def inner(x: torch.Tensor) -> torch.Tensor:
        return checkpointing.checkpoint(lambda y: torch.tanh(layers[1](y)), torch.tanh(layers[0](x)))

    x = torch.randn(2, 3)
    plain = torch.autograd.grad(layers[2](torch.tanh(layers[1](torch.tanh(layers[0](x))))).sum(), layers[0].weight)
    loss = layers[2](checkpointing.checkpoint(inner, x)).sum()
    for keep in (True, False):
        assert torch.equal(torch.autograd.grad(loss, layers[0].weight, retain_graph=keep)[0], plain[0])


def test_contiguous_buffers_are_made_once_and_used_again(caplog: pytest.LogCaptureFixture) -> None:
    checkpointing.configure(None, **STORAGES["contiguous"])
    layer, x = nn.Linear(4, 4), torch.randn(5, 4)

    def once(uses: int) -> None:
        y = x
        for _ in range(uses):
            y = checkpointing.checkpoint(lambda v: torch.tanh(layer(v)), y)
        y.sum().backward()

    once(2)
    buffers = settings.current().storage.buffers
    assert buffers is not None and buffers.nbytes == 2 * 20 * 4
    once(2)
    assert buffers.nbytes == 2 * 20 * 4
    with caplog.at_level("WARNING", logger="onecopy"):
        once(3)  # one more than there are places
    assert "number_checkpoints" in caplog.text
    checkpointing.reset()
    assert settings.current().storage.buffers is not buffers and checkpointing.is_configured()


def test_an_input_changed_after_the_call_is_an_error() -> None:
    """Hooks on saved tensors switch torch's own check off."""
    checkpointing.configure(None, **STORAGES["host"])
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    y = checkpointing.checkpoint(lambda v: torch.tanh(layer(v)), x)
    x.zero_()
    with pytest.raises(ModelError, match="in place"):
        y.sum().backward()


def test_without_gradients_it_is_a_call() -> None:
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        assert not checkpointing.checkpoint(layer, torch.randn(2, 3)).requires_grad


def test_named_random_states_are_repeated() -> None:
    """Dropout of model-parallel layers draws from a state of the tracker."""
    checkpointing.model_parallel_cuda_manual_seed(3)
    tracker = checkpointing.get_cuda_rng_tracker()
    layer = nn.Linear(8, 8)

    def part(x: torch.Tensor) -> torch.Tensor:
        y = layer(nn.functional.dropout(x, 0.5))
        with tracker.fork():
            return nn.functional.dropout(torch.tanh(y), 0.5)

    def gradient(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
        checkpointing.model_parallel_cuda_manual_seed(3)
        y = torch.ones(2, 8)
        for _ in range(2):
            y = call(part, y)
        found = torch.autograd.grad(y.sum(), layer.weight)[0]
        with tracker.fork():
            return found, torch.rand(2)

    for plain, again in zip(gradient(lambda f, *a: f(*a)), gradient(checkpointing.checkpoint), strict=True):
        assert torch.equal(plain, again)
    with tracker.fork():
        before = torch.rand(2)
    checkpointing.model_parallel_reconfigure_tp_seed(3)
    with tracker.fork():
        assert not torch.equal(before, torch.rand(2))
    with pytest.raises(Exception, match="already exists"):
        tracker.add("model-parallel-rng", 99)
    with pytest.raises(Exception, match="is not added"), tracker.fork("other"):
        pass


def test_explicit_arguments_override_the_document() -> None:
    block = {"partition_activations": True, "cpu_checkpointing": True, "number_checkpoints": 4, "profile": True}
    checkpointing.configure(None, deepspeed_config={"train_batch_size": "auto", "activation_checkpointing": block})
    assert settings.current().block.cpu_checkpointing and settings.current().block.number_checkpoints == 4
    checkpointing.configure(None, {"activation_checkpointing": block}, checkpoint_in_cpu=False, num_checkpoints=5)
    assert not settings.current().block.cpu_checkpointing and settings.current().block.number_checkpoints == 5
    for wrong in ({"contiguous_checkpointing": True, "num_checkpoints": 2},
                  {"contiguous_checkpointing": True, "partition_activations": True}):  # fmt: skip
        with pytest.raises(AssertionError, match="contiguous_checkpointing needs") as caught:
            checkpointing.configure(None, **wrong)
        assert isinstance(caught.value, ConfigError)
    checkpointing.set_num_layers(9)
    checkpointing.partition_activations_in_checkpoint(False)
    assert settings.current().block.number_checkpoints == 9 and not settings.current().block.partition_activations


def test_the_report_says_what_each_key_does() -> None:
    block = {
        "contiguous_memory_optimization": True,
        "partition_activations": True,
        "synchronize_checkpoint_boundary": True,
    }
    findings = {one.key_path: one for one in load({"train_batch_size": 1, "activation_checkpointing": block}).findings}
    contiguous = findings["activation_checkpointing.contiguous_memory_optimization"]
    assert contiguous.verdict == "ignored" and "number_checkpoints" in contiguous.message
    assert findings["activation_checkpointing.synchronize_checkpoint_boundary"].verdict == "honoured"
    assert "nothing to partition" in findings["activation_checkpointing.partition_activations"].message


def test_the_profile_says_a_line_a_pass(caplog: pytest.LogCaptureFixture) -> None:
    checkpointing.configure(None, profile=True)
    layer = nn.Linear(3, 3)
    with caplog.at_level("INFO", logger="onecopy"):
        for _ in range(2):
            checkpointing.checkpoint(layer, checkpointing.checkpoint(layer, torch.randn(2, 3))).sum().backward()
    assert "2 calls" in caplog.text and "2 again in backward" in caplog.text
