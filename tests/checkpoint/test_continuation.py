"""The same bits after a resume, where state hides: in the middle of a window, in buffers, in optimizers of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
from tests.checkpoint import small


class Noisy(nn.Module):
    """Draws random numbers, and has running statistics that every rank makes of its own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.norm = nn.BatchNorm1d(9)
        self.dropout = nn.Dropout(0.3)
        self.second = nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.dropout(self.norm(self.first(x)))).square().mean()


def samples(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(4, 6, generator=generator) + dist.get_rank()


def noisy(folder: str, load: bool, saves: tuple[int, ...] = (1, 7)) -> Any:
    """Windows of three micro-batches, saved in the middle of the first and the third; what follows each save."""
    torch.manual_seed(0)
    config = small.config(2, train_batch_size=24, train_micro_batch_size_per_gpu=4)
    engine = onecopy.initialize(model=Noisy(), config=config)[0]
    found = {}
    for save in saves:
        begin = 0
        if load:
            torch.manual_seed(5)
            engine.load_checkpoint(folder, f"at {save}")
            begin = save // 3 * 3
            assert engine.micro_steps == begin
        losses = []
        for micro in range(begin, 12):
            loss = engine(samples(micro))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if micro in saves and not load:
                engine.save_checkpoint(folder, f"at {micro}")
        statistics = {name: buffer.tolist() for name, buffer in engine.module.named_buffers()}
        found[save] = losses[save // 3 * 3 - begin :], statistics
    engine.destroy()
    return found


def test_a_save_in_mid_window_goes_back_to_its_boundary(world1, world2, tmp_path: Path) -> None:
    saved = world2.run(noisy, str(tmp_path), False, (7,)), world2.run(noisy, str(tmp_path), False, (1,))
    loaded = world2.run(noisy, str(tmp_path), True)
    for rank in range(2):
        assert loaded[rank] == saved[1][rank] | saved[0][rank]
    own = world2.run(statistics, str(tmp_path))
    assert own[0] != own[1]  # every rank has its own running statistics
    assert world1.run(statistics, str(tmp_path)) == own[:1]  # elsewhere all of them are one rank's


def statistics(folder: str) -> Any:
    engine = onecopy.initialize(model=Noisy(), config=small.config(1, world=dist.get_world_size()))[0]
    engine.load_checkpoint(folder, "at 7")
    found = {name: buffer.tolist() for name, buffer in engine.module.named_buffers()}
    engine.destroy()
    return found


class Odd(torch.optim.Optimizer):
    """A first step of its own kind, and state of several dtypes and shapes."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            if state:
                state["average"].mul_(0.9).add_(parameter.grad)
            else:
                state["average"] = parameter.grad.to(torch.bfloat16)
                state["signs"] = torch.zeros_like(parameter, dtype=torch.int32)
                state["count"] = torch.zeros(1)
                state["calls"] = 0
            state["signs"] += parameter.grad > 0
            state["count"][0] += 1
            state["calls"] += 1
            size = 0.01 * (1 + state["signs"]) / (state["count"][0] + state["calls"])
            parameter.sub_(size * state["average"].float())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "odd": Odd,
    "damped": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
}


class Halves(nn.Module):
    """`late` is used from step 3 on: until then the optimizer has no state for it, and its neighbour has."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Parameter(torch.randn(6, 7))
        self.late = nn.Parameter(torch.randn(7, 7))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        y = torch.tanh(x @ self.early)
        return (y @ self.late if both else y).square().mean()


def with_optimizer(folder: str, kind: str, stage: int, load: bool) -> Any:
    torch.manual_seed(0)
    config = small.config(stage, world=dist.get_world_size())
    del config["optimizer"], config["scheduler"]
    model = Halves()
    engine = onecopy.initialize(model=model, optimizer=OPTIMIZERS[kind](model.parameters()), config=config)[0]

    def steps(first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            x = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
            loss = engine(x.chunk(dist.get_world_size())[dist.get_rank()], step >= 3)
            engine.backward(loss)
            engine.step()
            losses.append(engine.communicator.sum_vector(loss.detach().double().view(1), "loss").item())
        return losses

    if load:
        steps(8, 9)
        engine.load_checkpoint(folder)
    else:
        steps(0, 2)
        engine.save_checkpoint(folder)
    losses = steps(2, 6)
    kinds = sorted(
        {(k, str(v.dtype), v.dim()) for s in engine.optimizer.state.values() for k, v in s.items() if k != "calls"}
    )
    engine.destroy()
    return [loss / dist.get_world_size() for loss in losses], kinds


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_of_every_kind(world, tmp_path: Path, kind: str) -> None:
    """A state keeps dtype and shape, and a parameter that had none yet makes it as it would have."""
    saved = world(2).run(with_optimizer, str(tmp_path), kind, 3, False)
    assert world(2).run(with_optimizer, str(tmp_path), kind, 3, True) == saved
    assert world(1).run(with_optimizer, str(tmp_path), kind, 0, True)[0][0] == pytest.approx(saved[0][0], rel=1e-4)


def half_a_load(folder: str) -> tuple[list[float], list[str]]:
    """What is said of, and done with, a schedule without optimizer state and a parameter that is frozen for now."""
    import logging

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onecopy").addHandler(handler)
    config = small.config(1)
    del config["scheduler"]
    rates = []
    for load in (False, True):
        model = Halves()
        model.early.requires_grad = False
        engine = onecopy.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=config,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
        )[0]
        if load:
            engine.load_checkpoint(folder)
            engine.load_checkpoint(folder, load_optimizer_states=False)
        for step in range(4):
            if step == 1 and not load:
                model.early.requires_grad_(True)
            if step == 2 and not load:
                engine.save_checkpoint(folder)
            if step >= 2:
                rates += engine.get_lr()
            if step >= 2 or not load:
                engine.backward(engine(torch.ones(2, 6), True))
                engine.step()
        engine.destroy()
    logging.getLogger("onecopy").removeHandler(handler)
    return rates, messages


def before_the_first_step(folder: str) -> list[Any]:
    """Every schedule saved when it has not stepped, as after first steps that all overflowed, and loaded."""
    found = []
    for kind, params in SCHEDULES.items():
        rates = []
        for load in (False, True):
            config = small.config(1, scheduler={"type": kind, "params": params})
            engine = onecopy.initialize(model=Halves(), config=config)[0]
            if load:
                engine.load_checkpoint(folder, kind)
            else:
                engine.save_checkpoint(folder, kind)
            for _ in range(3):
                rates += engine.get_lr()
                engine.backward(engine(torch.ones(2, 6), True))
                engine.step()
            engine.destroy()
        found.append(rates)
    return found


SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 4},
    "WarmupDecayLR": {"warmup_num_steps": 2, "total_num_steps": 9},
    "WarmupCosineLR": {"warmup_num_steps": 2, "total_num_steps": 9},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4},
    "LRRangeTest": {},
    "StepLR": {"step_size": 2},
}


def test_schedules_that_have_not_stepped(world1, tmp_path: Path) -> None:
    for rates in world1.run(before_the_first_step, str(tmp_path))[0]:
        assert rates[:3] == rates[3:]


def test_a_schedule_alone_and_what_is_frozen_for_now(world1, tmp_path: Path) -> None:
    ((rates, messages),) = world1.run(half_a_load, str(tmp_path))
    assert rates[:2] == rates[2:]
    (message,) = [message for message in messages if "frozen here" in message]
    assert "trained early, frozen" in message and "before load_checkpoint" in message
