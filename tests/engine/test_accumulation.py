"""When a window ends and what its update is made of: counting, tails, natural loops, zero_grad, no_sync, batch sizes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from onecopy.observe.log import forget_said
from onecopy.utils import safe_get_full_grad
from tests.reference import Case, assert_like, assert_weights, configuration, expected, train_all
from tests.worlds import World, world
from tests.zoo import Shape

SGD = {"type": "SGD", "params": {"lr": 0.5}}


class Net(nn.Module):
    """Three small blocks; the output is [rows]."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float().sum(dim=-1)


def rows(first: int, count: int) -> torch.Tensor:
    """Samples `first` to `first + count`, each a function of its number alone; [count, 6]."""
    samples = [torch.randn(6, generator=torch.Generator().manual_seed(n)) for n in range(first, first + count)]
    return torch.stack(samples)


def start(stage: int, steps: int, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    forget_said()
    config = configuration(stage, gradient_accumulation_steps=steps, **{"optimizer": SGD, **more})
    return onecopy.initialize(model=Net(dtype), config=config)[0]


def loss_on(engine: Any, micro_batch: int, count: int = 2) -> torch.Tensor:
    """The loss of this rank's part of a micro-batch."""
    size, rank = getattr(engine, "dp_world_size", 1), getattr(engine, "global_rank", 0)
    return engine(rows((micro_batch * size + rank) * count, count)).square().mean()


def gradients_of(
    micro_batches: range, size: int, count: int = 2, model: nn.Module | None = None
) -> dict[str, torch.Tensor]:
    """The mean gradient over micro-batches and ranks, by plain torch."""
    model = model if model is not None else Net()
    samples = rows(micro_batches.start * size * count, len(micro_batches) * size * count)
    model(samples).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def stepped(weights: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight - 0.5 * gradients[name] for name, weight in weights.items()}


def weights_after(*windows: range, size: int = 2) -> dict[str, torch.Tensor]:
    """Plain SGD, one update a window of micro-batches."""
    model = Net()
    for window in windows:
        model.zero_grad()
        gradients = gradients_of(window, size, model=model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 0.5 * gradients[name]
    return {name: p.detach() for name, p in model.named_parameters()}


# ---------------------------------------------------------------------------------------------------------- the gradient
def full_gradients(stage: int, low: bool, accumulate: str | None) -> dict[str, torch.Tensor]:
    more: dict[str, Any] = {"bf16": {"enabled": low}}
    if accumulate:
        more["data_types"] = {"grad_accum_dtype": accumulate}
    engine = start(stage, 4, **more)
    for micro_batch in range(4):
        engine.backward(loss_on(engine, micro_batch))
        if micro_batch < 3:
            engine.step()
    found = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
    engine.destroy()
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(("low", "accumulate"), [(False, None), (True, None), (True, "fp32"), (True, "bf16")])
def test_the_last_micro_batch_is_reduced_like_the_others(world2: World, low: bool, accumulate: str | None) -> None:
    """Local gradients must not leak past the last micro-batch: before the step all ranks hold the mean over all of them."""
    wanted = gradients_of(range(4), 2)
    for stage in range(4):
        ranks = world2.run(full_gradients, stage, low, accumulate)
        for name, gradient in wanted.items():
            assert torch.equal(ranks[0][name], ranks[1][name]), (stage, name)
            tolerance = {"rtol": 3e-2, "atol": 4e-3} if low else {"rtol": 2e-5, "atol": 1e-6}
            torch.testing.assert_close(ranks[0][name].float(), gradient, **tolerance)


def one_update(stage: int, count: int, steps: int) -> tuple[float, float, dict[str, torch.Tensor]]:
    """The same eight samples a rank, cut into micro-batches of `count`; the returned losses' sum, the norm, the weights."""
    engine = start(stage, steps)
    rank, total, returned = engine.global_rank, 0.0, 0.0
    for micro_batch in range(steps):
        loss = engine(rows(8 * rank + micro_batch * count, count)).square().mean()
        returned += float(engine.backward(loss))
        total += float(loss.detach()) / steps
        engine.step()
    norm = engine.get_global_grad_norm()
    assert returned == pytest.approx(total, rel=1e-5)  # backward gives the loss divided once by the window's length
    weights = {name: p for name, p in weights_of(engine).items()}
    engine.destroy()
    return total, norm, weights


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    from tests.reference import full_masters

    return full_masters(engine)


@pytest.mark.parametrize("stage", range(4))
def test_the_division_by_the_window_happens_once(world2: World, stage: int) -> None:
    """Norm and update do not depend on how the same samples are cut into micro-batches."""
    results = [world2.run(one_update, stage, count, 8 // count)[0] for count in (8, 4, 2, 1)]
    model = Net()
    model(rows(0, 16)).square().mean().backward()
    norm = float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm())
    for total, got, weights in results:
        assert got == pytest.approx(norm, rel=1e-5)
        assert total == pytest.approx(results[0][0], rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, results[0][2][name], rtol=1e-5, atol=1e-6)


def divided_by_the_caller(stage: int) -> None:
    engine = start(stage, 3)
    for micro_batch in range(3):
        loss = loss_on(engine, micro_batch) / 3
        assert engine.backward(loss, scale_wrt_gas=False) is loss
        engine.step()
    assert_weights(engine, weights_after(range(3)))
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_that_the_caller_divided_is_not_divided_again(world2: World, stage: int) -> None:
    """`scale_wrt_gas=False`: the division is the caller's, and the very loss comes back."""
    world2.run(divided_by_the_caller, stage)


# ------------------------------------------------------------------------------------------------------ ends of windows
def test_a_tail_is_averaged_over_what_it_has(world2: World) -> None:
    """Seven micro-batches with windows of four, twice: the windows of three are means over three."""
    cases = [Case(Shape(), stage=stage, windows=(4, 3, 4, 3), clip=0.5) for stage in range(4)]
    runs = world2.run(train_all, cases)[0]
    wanted = expected(cases[0], 2)
    for case, run in zip(cases, runs, strict=True):
        assert_like(run, wanted, case)


def natural_loop(stage: int, first: int, managed: bool | None, zero: bool) -> tuple[int, list[str]]:
    """`if i % steps == 0: step()` over nine micro-batches, `first` being the number of the first."""
    more = {} if managed is None else {"managed_gradient_accumulation": managed}
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onecopy").addHandler(handler)
    engine = start(stage, 4, **more)
    for number in range(first, first + 9):
        engine.backward(loss_on(engine, number - first))
        if number % 4 == 0:
            engine.step()
            if zero:
                engine.zero_grad()
    steps = engine.global_steps
    if first == 1 and managed is not True:
        assert_weights(engine, weights_after(range(4), range(4, 8)))
    logging.getLogger("onecopy").removeHandler(handler)
    engine.destroy()
    return steps, records


@pytest.mark.parametrize("stage", [0, 3])
def test_the_natural_loop_trains_as_its_author_meant(world2: World, stage: int) -> None:
    """Stepping once a window: unset means an update each time and one word about it, true means counting calls."""
    for managed, wanted in ((None, 2), (False, 2), (True, 0)):
        ranks = world2.run(natural_loop, stage, 1, managed, False)
        assert [steps for steps, _ in ranks] == [wanted] * 2
        said = [text for text in ranks[0][1] if "managed_gradient_accumulation" in text]
        assert len(said) == (managed is None) and not ranks[1][1], "said once, on rank 0 only"


def test_the_tutorials_loop_with_zero_grad(world2: World) -> None:
    """`if i % steps == 0: step(); zero_grad()` from i = 0: the first call is no boundary, the later ones are."""
    for steps, records in world2.run(natural_loop, 3, 0, None, True)[:1]:
        assert steps == 2
        assert any("zero_grad() discarded" in text for text in records)


def long_window(stage: int, steps: int, managed: bool | None) -> list[str]:
    """Twice as many forward/backward pairs as a window has before each step()."""
    engine = start(stage, steps, **({} if managed is None else {"managed_gradient_accumulation": managed}))
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onecopy").addHandler(handler)
    for number in range(4 * steps):
        engine.backward(loss_on(engine, number))
        if (number + 1) % (2 * steps) == 0:
            engine.step()
    assert engine.global_steps == 2
    assert_weights(engine, weights_after(range(2 * steps), range(2 * steps, 4 * steps)))
    logging.getLogger("onecopy").removeHandler(handler)
    engine.destroy()
    return records


@pytest.mark.parametrize(("stage", "steps"), [(0, 1), (1, 2), (2, 1), (3, 1)])
def test_two_pairs_before_one_step_count_as_their_mean(world2: World, stage: int, steps: int) -> None:
    """Short windows and long ones are means over their micro-batches, where plain torch would add; said once."""
    said = world2.run(long_window, stage, steps, None)
    assert len([text for text in said[0] if "mean" in text]) == (steps == 1) and not said[1]
    assert not world2.run(long_window, stage, steps, False)[0]


def boundary_by_hand(stage: int) -> None:
    engine = start(stage, 2)
    ends = [3, 4, 8]
    for micro_batch in range(9):
        engine.set_gradient_accumulation_boundary(micro_batch in ends)
        assert engine.is_gradient_accumulation_boundary() == (micro_batch in ends)
        engine.backward(loss_on(engine, micro_batch))
        engine.step()
    assert engine.global_steps == 3
    assert_weights(engine, weights_after(range(4), range(4, 5), range(5, 9)))
    engine.destroy()


@pytest.mark.parametrize("stage", range(4))
def test_boundaries_set_by_hand(world2: World, stage: int) -> None:
    """`set_gradient_accumulation_boundary` overrules the counter, and each update is the mean over its own window."""
    world2.run(boundary_by_hand, stage)


def new_batch_size(stage: int) -> None:
    engine = start(stage, 4)
    size = engine.dp_world_size
    micro_batch = 0
    for steps in (4, 3, 2):
        engine.set_train_batch_size(steps * size)
        assert engine.gradient_accumulation_steps() == steps and engine.train_batch_size() == steps * size
        assert engine.get_batch_info() == (steps * size, 1, steps)
        for place in range(steps):
            assert engine.is_gradient_accumulation_boundary() == (place == steps - 1), (steps, place)
            engine.backward(loss_on(engine, micro_batch))
            engine.step()
            micro_batch += 1
    assert engine.global_steps == 3 and engine.global_samples == 9 * size
    assert_weights(engine, weights_after(range(4), range(4, 7), range(7, 9)))
    with pytest.raises(ValueError, match="no multiple of 2"):
        engine.set_train_batch_size(2 * size + 1)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_the_batch_size_changes_between_windows(world2: World, stage: int) -> None:
    """`set_train_batch_size` changes the window's length from the next window on, whatever was counted before."""
    world2.run(new_batch_size, stage)


# ------------------------------------------------------------------------------------------------------------- zero_grad
def zeroed(stage: int, how: str, when: str) -> int:
    engine = start(stage, 3)
    optimizer = engine.optimizer
    zero = {
        "engine": engine.zero_grad,
        "optimizer": optimizer.zero_grad,
        "none": lambda: optimizer.zero_grad(set_to_none=True),
        "zeros": lambda: optimizer.zero_grad(set_to_none=False),
    }[how]
    for micro_batch in range(6):
        if when == "window" and micro_batch % 3 == 0:
            zero()
        if when == "micro":
            zero()
        engine.backward(loss_on(engine, micro_batch))
        engine.step()
    if when == "window":
        assert_weights(engine, weights_after(range(3), range(3, 6)))
    else:  # only what came after the last zero_grad of each window
        assert_weights(engine, weights_after(range(2, 3), range(5, 6)))
    steps = engine.global_steps
    engine.destroy()
    return steps


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_all_forms_of_zero_grad_discard_and_nothing_else(world2: World, stage: int) -> None:
    """Four spellings, one meaning at every stage: gradients of the window so far are forgotten, the count goes on."""
    for how in ("engine", "optimizer", "none", "zeros"):
        for when in ("window", "micro"):
            assert world2.run(zeroed, stage, how, when) == [2, 2], (how, when)


def optimizer_stepped(stage: int) -> None:
    engine = start(stage, 1)
    for micro_batch in range(2):
        loss_on(engine, micro_batch).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert_weights(engine, weights_after(range(1), range(1, 2)))
    assert engine.global_steps == 0
    engine.optimizer.step()  # without gradients nothing moves, as in torch
    assert_weights(engine, weights_after(range(1), range(1, 2)))
    engine.destroy()


@pytest.mark.parametrize("stage", range(4))
def test_backward_and_optimizer_step_without_the_engine(world2: World, stage: int) -> None:
    """`loss.backward(); optimizer.step(); optimizer.zero_grad()` updates weights like torch's own loop."""
    world2.run(optimizer_stepped, stage)


# ------------------------------------------------------------------------------------------------- communication, no_sync
def reductions(stage: int, no_sync: bool) -> list[int]:
    """How many reductions each of four micro-batches starts."""
    engine = start(stage, 4)
    counts = []
    for micro_batch in range(4):
        before = engine.communicator.counters.collectives["reduce"]
        if no_sync and micro_batch < 3:
            with engine.no_sync():
                engine.backward(loss_on(engine, micro_batch))
        else:
            engine.backward(loss_on(engine, micro_batch))
        counts.append(engine.communicator.counters.collectives["reduce"] - before)
        engine.step()
    assert_weights(engine, weights_after(range(4)))
    engine.destroy()
    return counts


@pytest.mark.parametrize("no_sync", [False, True])
def test_how_often_gradients_are_reduced(world2: World, no_sync: bool) -> None:
    """Whole gradients are reduced once a window, sharded ones at every micro-batch; `no_sync` never raises nor changes it."""
    for stage, wanted in ((0, [0, 0, 0, 3]), (1, [0, 0, 0, 3]), (2, [3, 3, 3, 3]), (3, [3, 3, 3, 3])):
        assert world2.run(reductions, stage, no_sync) == [wanted] * 2, stage


def all_inside_no_sync(stage: int) -> None:
    engine = start(stage, 2)
    with engine.no_sync():
        for micro_batch in range(2):
            engine.backward(loss_on(engine, micro_batch))
            engine.step()
    assert_weights(engine, weights_after(range(2)))
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_inside_no_sync_reduces(world2: World, stage: int) -> None:
    """A boundary reduces whatever was left whole."""
    world2.run(all_inside_no_sync, stage)


def test_weights_after_is_plain_sgd() -> None:
    """The yardstick of this file itself."""
    weights = stepped({n: p.detach() for n, p in Net().named_parameters()}, gradients_of(range(2), 2))
    for name, weight in weights_after(range(2)).items():
        assert torch.equal(weight, weights[name])
    assert world(1).size == 1


def long_sums(stages: tuple[int, ...]) -> list[tuple[int, float]]:
    """(skipped steps, norm) of a window of six at each stage, with a loss scale at which one gradient just fits fp16."""
    found = []
    for stage in stages:
        engine = start(stage, 6, fp16={"enabled": True, "loss_scale": 2.0**15}, gradient_clipping=0.0)
        for micro_batch in range(6):
            engine.backward(loss_on(engine, micro_batch))
            engine.step()
        found.append((engine.skipped_steps, engine.get_global_grad_norm()))
        engine.destroy()
    return found


def test_a_windows_sum_may_be_too_large_for_fp16(world2: World) -> None:
    """Stages 0 and 1 send the sum of a window, 2 and 3 every micro-batch: neither overflows before a single gradient does."""
    for found in world2.run(long_sums, (0, 1, 2, 3)):
        assert [skipped for skipped, _ in found] == [0, 0, 0, 0]
        assert [norm for _, norm in found] == pytest.approx([found[3][1]] * 4, rel=1e-3)
