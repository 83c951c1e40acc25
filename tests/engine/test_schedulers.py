"""A schedule moves exactly once an update, whoever made it and whoever steps it, and not at all for a skipped one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from tests.reference import configuration
from tests.worlds import World

WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 10, "warmup_type": "linear"}}


def batches(engine: Any, count: int, poison: int = -1) -> list[list[float]]:
    """Rates of all groups after each update of `count` micro-batches; micro-batch `poison` is inf on the last rank."""
    rates = []
    for number in range(count):
        before = engine.global_steps
        x = torch.ones(2, 4)
        if number == poison and engine.global_rank == engine.world_size - 1:
            x[0, 0] = float("inf")
        engine.backward(engine(x).square().mean())
        engine.step()
        if engine.global_steps > before:
            rates.append(list(engine.get_lr()))
    return rates


def halves(step: int) -> float:
    return 0.5**step


def make(who: str, stage: int, steps: int, **more: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    config = configuration(
        stage, gradient_accumulation_steps=steps, optimizer={"type": "SGD", "params": {"lr": 1.0}}, **more
    )
    if who == "config":
        config["scheduler"] = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
        engine, _, _, scheduler = onecopy.initialize(model=model, config=config)
    elif who == "object on the inner optimizer":
        config.pop("optimizer")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        given = torch.optim.lr_scheduler.LambdaLR(optimizer, halves)
        engine, _, _, scheduler = onecopy.initialize(
            model=model, optimizer=optimizer, lr_scheduler=given, config=config
        )
        assert scheduler is given
    elif who == "function":
        engine, _, _, scheduler = onecopy.initialize(
            model=model, config=config, lr_scheduler=lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, halves)
        )
    else:
        engine, optimizer, _, scheduler = onecopy.initialize(model=model, config=config)
        assert scheduler is None
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, halves)
    return engine, scheduler


def rates_of(who: str, stage: int, steps: int) -> list[float]:
    engine, scheduler = make(who, stage, steps)
    rates = [rate for (rate,) in batches(engine, 4 * steps)]
    assert list(scheduler.get_last_lr()) == engine.get_lr()
    engine.destroy()
    return rates


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("who", ["config", "object on the inner optimizer", "function"])
def test_the_engine_steps_its_schedule_once_an_update(world: Any, size: int, who: str) -> None:
    """Whatever the number of ranks and the window's length."""
    for stage, steps in ((0, 1), (3, 4)):
        assert world(size).run(rates_of, who, stage, steps) == [[0.5, 0.25, 0.125, 0.0625]] * size


def rates_by_hand(stage: int) -> list[float]:
    engine, scheduler = make("caller", stage, 1)
    rates = []
    for _ in range(3):
        batches(engine, 1)
        rates.append(engine.get_lr()[0])
        scheduler.step()
    engine.destroy()
    return rates


@pytest.mark.parametrize("stage", [0, 3])
def test_a_schedule_that_was_not_given_to_the_engine_is_the_callers(world2: World, stage: int) -> None:
    """It works on the returned optimizer, and nobody else steps it."""
    assert world2.run(rates_by_hand, stage) == [[1.0, 0.5, 0.25]] * 2


def skipping(who: str, stage: int, precision: str) -> tuple[list[float], int, bool]:
    more: dict[str, Any] = {}
    if precision == "fp16":
        more["fp16"] = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "auto_cast": True}
    elif precision == "bf16":
        more["bf16"] = {"enabled": True}
    engine, _ = make(who, stage, 1, **more)
    if precision == "bf16":
        engine.module.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    rates = [rate for (rate,) in batches(engine, 4, poison=1)]
    answer = rates, engine.skipped_steps, engine.was_step_applied()
    assert engine.global_steps == 4
    engine.destroy()
    return answer


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("who", ["config", "function", "object on the inner optimizer"])
def test_a_skipped_update_skips_the_schedule(world2: World, precision: str, who: str) -> None:
    """inf in the gradients of one rank in step 2: all ranks keep the rate of step 1 for one update more."""
    for stage in (0, 2, 3):
        ranks = world2.run(skipping, who, stage, precision)
        assert ranks == [([0.5, 0.5, 0.25, 0.125], 1, True)] * 2, stage


def deepspeed_schedule() -> list[float]:
    torch.manual_seed(0)
    engine, _, _, scheduler = onecopy.initialize(
        model=nn.Linear(4, 1),
        config=configuration(2, optimizer={"type": "SGD", "params": {"lr": 1.0}}, scheduler=WARMUP),
    )
    rates = [rate for (rate,) in batches(engine, 5)]
    assert scheduler.get_last_lr() == [rates[-1]]
    engine.destroy()
    return rates


def test_a_deepspeed_schedule_of_the_configuration(world2: World) -> None:
    """WarmupLR, linear: a tenth more at each update."""
    for rates in world2.run(deepspeed_schedule):
        steps = [b - a for a, b in pairwise(rates)]
        assert steps == pytest.approx([0.1] * 4)


def transformers_schedule(stage: int) -> list[float]:
    transformers = pytest.importorskip("transformers")
    engine, _ = make("caller", stage, 1)
    scheduler = transformers.get_linear_schedule_with_warmup(engine.optimizer, num_warmup_steps=2, num_training_steps=6)
    rates = []
    for _ in range(5):
        batches(engine, 1)
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    engine.destroy()
    return rates


@pytest.mark.parametrize("stage", [0, 3])
def test_a_schedule_of_transformers_on_the_returned_optimizer(world2: World, stage: int) -> None:
    """Two steps of warmup and a linear end."""
    for rates in world2.run(transformers_schedule, stage):
        assert rates == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25])


def rates_of_an_empty_group() -> tuple[list[list[float]], int]:
    model = nn.Linear(4, 1, bias=False)
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [], "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, halves)
    engine, _, _, _ = onecopy.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=configuration(3)
    )
    rates = batches(engine, 2)
    engine.destroy()
    return rates, len(optimizer.param_groups)


def test_a_group_without_parameters_keeps_its_place_in_the_schedule(world2: World) -> None:
    """Trainers make one of what takes no weight decay, and with LoRA nothing is in it."""
    assert world2.run(rates_of_an_empty_group) == [([[0.5, 0.5], [0.25, 0.25]], 2)] * 2


def with_arguments() -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []

    class Recording:
        def step(self, **keywords: Any) -> None:
            seen.append(keywords)

    engine, _, _, _ = onecopy.initialize(model=nn.Linear(4, 1), config=configuration(1), lr_scheduler=Recording())
    engine.backward(engine(torch.ones(2, 4)).mean())
    engine.step(lr_kwargs={"epoch": 3})
    engine.destroy()
    return seen


def test_arguments_for_the_schedule_are_passed_on(world2: World) -> None:
    """`step(lr_kwargs=...)`."""
    assert world2.run(with_arguments) == [[{"epoch": 3}]] * 2
