"""Promise 8: one inf or nan on one rank leaves everything as it was, is counted and is said; loss scales follow the rules."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from onecopy.optim.loss_scale import LossScaleError
from tests.reference import assert_weights, configuration, full_masters
from tests.worlds import World

WIDTH = 6


class Net(nn.Module):
    """Blocks whose gradients are not finite when the input is not; takes float32, computes in its weights' dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x.to(layer.weight.dtype)).float())
        return x


def loss_of(engine: Any, number: int, poison: float | None = None, rank: int | None = None) -> torch.Tensor:
    rank = engine.global_rank if rank is None else rank
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
    loss = engine(x).square().mean()
    return loss * poison if poison is not None and rank == engine.world_size - 1 else loss


def everything(engine: Any) -> dict[str, Any]:
    """All state that a skipped step must not change: masters, moments, step counts, rates."""
    state: dict[str, Any] = dict(full_masters(engine))
    for place, run in enumerate(engine.masters.runs):
        for key, value in engine.masters.optimizer.state.get(run.master, {}).items():
            state[f"{key} {place}"] = value.clone() if isinstance(value, torch.Tensor) else value
    state["rates"] = engine.get_lr()
    return state


def assert_same(before: dict[str, Any], after: dict[str, Any], first: bool) -> None:
    for key, value in after.items():
        if key not in before:  # a skipped first step may make the moments it would have filled: zeros
            assert first and not torch.as_tensor(value).any(), key
        elif isinstance(value, torch.Tensor):
            assert torch.equal(before[key], value), key
        else:
            assert before[key] == value, key


OPTIMIZERS = {
    "AdamW": {"lr": 0.05, "weight_decay": 0.5},
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5},
    "Adagrad": {"lr": 0.1, "weight_decay": 0.5},
    "RMSprop": {"lr": 0.1, "weight_decay": 0.5},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}},
    "fp16 static": {"fp16": {"enabled": True, "loss_scale": 8.0}},
}


def poisoned(stages: tuple[int, ...], optimizer: str, precision: str, poison: float, windows: int) -> None:
    for stage in stages:
        engine, _, _, _ = onecopy.initialize(
            model=Net(),
            config=configuration(
                stage,
                gradient_accumulation_steps=windows,
                gradient_clipping=1.0,
                optimizer={"type": optimizer, "params": OPTIMIZERS[optimizer]},
                scheduler={"type": "StepLR", "params": {"step_size": 1, "gamma": 0.9}},
                **PRECISIONS[precision],
            ),
        )
        for number in range(4):
            bad = number in (0, 2)
            before, scale = everything(engine), engine.loss_scale()
            for micro_batch in range(windows):
                at = poison if bad and micro_batch == 0 else None
                engine.backward(loss_of(engine, number * windows + micro_batch, at))
                engine.step()
            after = everything(engine)
            assert engine.was_step_applied() is not bad
            if bad:
                assert_same(before, after, first=number == 0)
                assert engine.get_global_grad_norm() == float("inf")
                assert engine.loss_scale() == (scale / 2 if precision == "fp16" else scale)
            else:
                assert not torch.equal(before["layers.0.weight"], after["layers.0.weight"])
                assert engine.loss_scale() == scale
        assert engine.skipped_steps == 2 and engine.global_steps == 4
        assert engine.get_lr()[0] == pytest.approx(OPTIMIZERS[optimizer]["lr"] * 0.9**2)
        engine.destroy()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_bad_gradient_on_one_rank_changes_nothing(world2: World, optimizer: str, precision: str) -> None:
    """Weights, moments, step counts and rates stay on all ranks; the skip is counted, and training goes on."""
    world2.run(poisoned, (0, 1, 2, 3), optimizer, precision, float("nan"), 1)


@pytest.mark.parametrize("poison", [float("inf"), float("-inf"), 1e39])
def test_infinities_in_one_micro_batch_of_a_window(world2: World, poison: float) -> None:
    """One poisoned micro-batch of three skips the window."""
    world2.run(poisoned, (0, 1, 2, 3), "AdamW", "fp32", poison, 3)


def skipped_log(steps: int, precision: str, every: int) -> tuple[list[str], int]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onecopy").addHandler(handler)
    engine, _, _, _ = onecopy.initialize(model=Net(), config=configuration(2, **PRECISIONS[precision]))
    for number in range(steps):
        engine.backward(loss_of(engine, number, float("nan") if every and number % every == 0 else None))
        engine.step()
    with torch.no_grad():
        loss_of(engine, 0)
    skipped = engine.skipped_steps
    logging.getLogger("onecopy").removeHandler(handler)
    engine.destroy()
    return records, skipped


def test_steps_that_never_update_are_not_silent(world2: World) -> None:
    """bf16 with NaN on one rank for ever: said at the first skip on rank 0, not at every one, and counted."""
    (first, skipped), (second, _) = world2.run(skipped_log, 20, "bf16", 1)
    said = [text for text in first if "skipped" in text]
    assert skipped == 20 and 1 <= len(said) <= 3 and "not finite" in said[0]
    assert not second


def test_a_healthy_run_says_next_to_nothing(world2: World) -> None:
    """A hundred steps and an evaluation with the default settings: a handful of lines on rank 0, none on the others."""
    (first, skipped), (second, _) = world2.run(skipped_log, 100, "fp32", 0)
    assert skipped == 0 and len(first) <= 5 and not second


# -------------------------------------------------------------------------------------------------------------- loss scale
def scales(block: dict[str, Any], bad: list[int], steps: int) -> list[float]:
    engine, _, _, _ = onecopy.initialize(model=Net(), config=configuration(3, fp16={"enabled": True, **block}))
    seen = []
    for number in range(steps):
        engine.backward(loss_of(engine, number, float("inf") if number in bad else None))
        engine.step()
        seen.append(engine.loss_scale())
    engine.destroy()
    return seen


def test_the_dynamic_loss_scale_follows_window_and_hysteresis(world2: World) -> None:
    """Halved at the second overflow with hysteresis 2, doubled after two clean steps."""
    block = {"initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 2}
    ranks = world2.run(scales, block, [0, 1], 7)
    assert ranks[0] == ranks[1] == [16, 8, 8, 8, 16, 16, 32]


def always_overflowing(minimum: float) -> None:
    engine, _, _, _ = onecopy.initialize(
        model=Net(),
        config=configuration(
            3, fp16={"enabled": True, "initial_scale_power": 2, "hysteresis": 1, "min_loss_scale": minimum}
        ),
    )
    try:
        for number in range(10):
            engine.backward(loss_of(engine, number, float("inf")))
            engine.step()
    finally:
        engine.destroy()


def test_at_the_minimum_the_error_says_what_to_try(world2: World) -> None:
    """The same error on all ranks, with bf16 as the first advice and a word about which parameters."""
    with pytest.raises(LossScaleError, match=r"already at minimum.*bf16") as caught:
        world2.run(always_overflowing, 1)
    assert "layers" in str(caught.value) or any("layers" in note for note in caught.value.__notes__)


def scaled_loops(how: str, stages: tuple[int, ...], block: dict[str, Any]) -> None:
    """Three fp16 steps with plain backward, `engine.scale` or `engine.backward`; the same norm and weights at all."""
    for stage in stages:
        results = []
        for way in ("engine", how):
            engine, _, _, _ = onecopy.initialize(
                model=Net(), config=configuration(stage, fp16={"enabled": True, **block})
            )
            norms = []
            for number in range(3):
                loss = loss_of(engine, number)
                if way == "engine":
                    engine.backward(loss)
                elif way == "scale":
                    engine.scale(loss).backward()
                else:
                    loss.backward()
                engine.step()
                norms.append(engine.get_global_grad_norm())
            assert engine.skipped_steps == 0
            results.append((norms, full_masters(engine), engine))
        assert results[0][0] == pytest.approx(results[1][0], rel=2e-3), (stage, how)
        assert_weights(results[1][2], results[0][1], 5e-3, 1e-3)
        for _, _, engine in results:
            engine.destroy()


@pytest.mark.parametrize("block", [{"loss_scale": 256.0}, {"initial_scale_power": 10}])
@pytest.mark.parametrize("how", ["plain", "scale"])
def test_fp16_with_a_backward_of_ones_own(world2: World, how: str, block: dict[str, Any]) -> None:
    """`loss.backward()` without `engine.scale` is scaled at the model's output, with it not twice."""
    world2.run(scaled_loops, how, (0, 1, 3), block)


def recurrent() -> None:
    results = []
    for way in ("engine", "plain"):
        engine, _, _, _ = onecopy.initialize(
            model=Net(), config=configuration(2, fp16={"enabled": True, "loss_scale": 64.0})
        )
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(engine.global_rank))
        loss = engine(engine(x)).square().mean()
        if way == "engine":
            engine.backward(loss)
        else:
            loss.backward()
        engine.step()
        results.append(engine.get_global_grad_norm())
        engine.destroy()
    assert results[0] == pytest.approx(results[1], rel=5e-3)


def test_fp16_when_the_output_is_an_input_again(world2: World) -> None:
    """A recurrent use with plain backward: gradients that pass the model's outputs twice are scaled once."""
    world2.run(recurrent)


def input_gradients(way: str) -> None:
    engine, _, _, _ = onecopy.initialize(
        model=Net(), config=configuration(2, fp16={"enabled": True, "loss_scale": 64.0})
    )
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
    (found,) = torch.autograd.grad(engine(x).square().mean(), x)
    model = Net().half()
    (wanted,) = torch.autograd.grad(model(x).square().mean(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)
    engine.destroy()


def test_fp16_gradients_of_inputs_are_not_scaled(world2: World) -> None:
    """`autograd.grad` on an input gives the gradient itself, not a multiple of it."""
    world2.run(input_gradients, "grad")


def joint(scale: float) -> None:
    """Two engines with different loss scales under one loss."""
    engines = []
    for power in (scale, 16.0):
        model = Net()
        engines.append(
            onecopy.initialize(model=model, config=configuration(2, fp16={"enabled": True, "loss_scale": power}))[0]
        )
    first, second = engines
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(first.global_rank))
    loss = first(x).square().mean() + second(x).square().mean()
    first.backward(loss)
    for engine in engines:
        engine.step()
    assert first.get_global_grad_norm() == pytest.approx(second.get_global_grad_norm(), rel=5e-3)
    for engine in engines:
        engine.destroy()


def test_fp16_two_engines_under_one_loss(world2: World) -> None:
    """A joint loss handed to one engine: the other one's gradients are of the right size too."""
    world2.run(joint, 256.0)
