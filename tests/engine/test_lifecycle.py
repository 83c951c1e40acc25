"""The life of an engine: evaluation between steps, exceptions, its start and its end."""

from __future__ import annotations

import gc
import os
import time
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
from onecopy.errors import CommunicationError, ModelError, ReleasedParameterError
from tests.engine.small_net import WIDTH, Net, data, one_loss, start, step, wanted
from tests.reference import assert_weights, configuration, full_masters, plain_weights, residue_of
from tests.worlds import World


# -------------------------------------------------------------------------------------------------- between training steps
def evaluate_in_between(stage: int, mode: str) -> None:
    engine = start(stage)
    rank = engine.global_rank
    engine.eval()
    with torch.no_grad():
        engine(data(9, rank))  # before the first step
    engine.train()
    for number in range(3):
        step(engine, number)
        if mode == "eval":
            engine.eval()
            with torch.no_grad():
                for path in ((0, 2, 4), (4, 3, 2, 1, 0), (0, 1, 2, 3, 4)):
                    engine(data(9, rank), path)
            engine.train()
        elif mode == "inference":
            with torch.inference_mode():
                x = data(9, rank)
                for _ in range(3):
                    x = torch.cat([x, engine(x)[-1:]])
        elif mode == "gradients on":
            engine(data(9, rank), (1, 0))  # an evaluation whose author forgot no_grad
        elif mode == "child in eval":
            engine.module.layers[2].eval()
        if mode != "gradients on":
            assert not residue_of(engine), residue_of(engine)
    assert_weights(engine, wanted(3))
    engine.destroy()


@pytest.mark.parametrize("mode", ["eval", "inference", "gradients on", "child in eval"])
def test_evaluation_between_steps_changes_nothing(world2: World, mode: str) -> None:
    """Other paths, growing inputs, forgotten no_grad, a child in eval mode: training goes on as if nothing had been."""
    for stage in (0, 1, 3):
        world2.run(evaluate_in_between, stage, mode)


def changing_paths(stage: int) -> None:
    paths = [(0, 1, 2, 3, 4), (0, 2, 4), (4, 3, 2, 1, 0), (1, 1, 1), (0, 1, 2, 3, 4)]

    def losses(model: Any, number: int, rank: int) -> Any:
        yield model(data(number, rank), paths[number]).square().mean()

    engine = start(stage)
    for number in range(5):
        engine.backward(next(losses(engine, number, engine.global_rank)))
        engine.step()
    assert_weights(engine, plain_weights(Net, losses, dist.get_world_size(), 5))
    engine.destroy()


@pytest.mark.parametrize("stage", range(4))
def test_a_path_that_changes_on_all_ranks(world2: World, stage: int) -> None:
    """The recorded order is given up and recorded anew, and the numbers are right."""
    world2.run(changing_paths, stage)


def different_paths(stage: int, kind: str) -> None:
    engine = start(stage, onecopy={"timeout_seconds": 8})
    rank = engine.global_rank
    try:
        for number in range(3):
            path = ((0, 1, 2, 3, 4), (0, 3, 4))[rank] if kind == "path" else (0,) * (1 + 2 * rank) + (1, 2)
            engine.backward(engine(data(number, rank), path).square().mean())
            engine.step()
    finally:
        engine.destroy()


def test_paths_that_differ_between_ranks_never_hang(world2: World) -> None:
    """Whole parameters: right. Sharded ones: an error on every rank that names the waits, long before a timeout of minutes."""
    world2.run(different_paths, 2, "path")
    world2.run(different_paths, 2, "count")
    with pytest.raises(CommunicationError, match="rank") as caught:
        world2.run(different_paths, 3, "path", stray_groups=True, timeout=60)
    assert any("CommunicationError" in note for note in caught.value.__notes__)


# --------------------------------------------------------------------------------------------------------------- exceptions
def after_an_exception(stage: int, where: str, micros: int) -> None:
    engine = start(stage, gradient_accumulation_steps=micros)
    rank = engine.global_rank

    def fail() -> None:
        if where == "forward":
            with pytest.raises(KeyError):
                engine(data(9, rank), fail=True)
        elif where == "evaluation":
            with pytest.raises(KeyError), torch.no_grad():
                engine(data(9, rank), fail=True)
        else:
            output = engine(data(9, rank))
            output.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.backward(output.square().mean())

    def losses(model: Any, number: int, rank: int) -> Any:
        yield model(data(number, rank)).square().mean()

    for number in range(3):
        for micro in range(micros):
            fail()
            engine.backward(next(losses(engine, micros * number + micro, rank)))
            engine.step()
        fail()
        if where != "backward":
            assert not [left for left in residue_of(engine) if "gradient" in left]
    assert_weights(engine, plain_weights(Net, losses, dist.get_world_size(), 3, micros))
    engine.destroy()


@pytest.mark.parametrize("where", ["forward", "evaluation", "backward"])
def test_training_goes_on_after_an_exception(world2: World, where: str) -> None:
    """The same exception on all ranks, caught: the next batches train as if the failed one had not been."""
    for stage in (0, 1, 2, 3):
        world2.run(after_an_exception, stage, where, 1)
    if where != "backward":
        world2.run(after_an_exception, 1, where, 2)
        world2.run(after_an_exception, 3, where, 2)


def one_rank_raises() -> None:
    engine = start(3, onecopy={"timeout_seconds": 6})
    for number in range(3):
        x = data(number, engine.global_rank)
        engine.backward(engine(x, fail=number == 1 and engine.global_rank == 1).square().mean())
        engine.step()


def test_one_rank_that_raises_ends_the_others_too(world2: World) -> None:
    """Its own error on that rank, and an error in words on the others within the timeout."""
    with pytest.raises((KeyError, CommunicationError)) as caught:
        world2.run(one_rank_raises, stray_groups=True, timeout=60)
    text = str(caught.value) + "".join(caught.value.__notes__)
    assert "no such token" in text


# ------------------------------------------------------------------------------------------------------ the start, the end
def different_start(stage: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(100 + dist.get_rank())
    model = Net(seed=100 + dist.get_rank())
    nn.init.orthogonal_(model.layers[0].weight)
    model.register_buffer("noise", torch.randn(3))
    engine = start(stage, model)
    found = {**full_masters(engine), "noise": model.noise.clone()}
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", range(4))
def test_ranks_that_start_with_different_weights_get_those_of_rank_0(world3: World, stage: int) -> None:
    """Per-rank seeds: whole weights and buffers are rank 0's draw everywhere, orthogonal ones still orthogonal."""
    ranks = world3.run(different_start, stage)
    for other in ranks[1:]:
        for name, tensor in ranks[0].items():
            assert torch.equal(tensor, other[name]), name
    square = ranks[0]["layers.0.weight"] @ ranks[0]["layers.0.weight"].T
    torch.testing.assert_close(square, torch.eye(WIDTH), rtol=0, atol=1e-5)
    torch.manual_seed(100)
    expected = Net(seed=100)
    nn.init.orthogonal_(expected.layers[0].weight)
    assert torch.equal(ranks[0]["layers.3.weight"], expected.layers[3].weight.detach())


def first_loss(stage: int) -> float:
    model = Net(seed=3)
    model.load_state_dict(Net(seed=7).state_dict())
    engine = start(stage, model)
    with torch.no_grad():
        loss = float(engine(data(0, 0)).square().mean())
    engine.destroy()
    return loss


def test_weights_loaded_before_are_the_weights_used(world2: World) -> None:
    """The first loss is the plain model's, at every stage."""
    with torch.no_grad():
        expected = float(Net(seed=7)(data(0, 0)).square().mean())
    for stage in range(4):
        assert world2.run(first_loss, stage) == pytest.approx([expected] * 2, rel=1e-6)


def single_rank(stage: int) -> None:
    engine = start(stage)
    for number in range(3):
        step(engine, number)
    assert engine.communication()["bytes_sent"] == 0
    assert_weights(engine, wanted(3))
    engine.destroy()


@pytest.mark.parametrize("stage", range(4))
def test_one_rank(world1: World, stage: int) -> None:
    """A world of one trains as plain torch and sends nothing."""
    world1.run(single_rank, stage)


def group_of_one(stage: int) -> dict[str, torch.Tensor]:
    """Every rank alone in its group (`mpu`): replicas that nobody keeps equal."""

    class Alone:
        def get_data_parallel_group(self) -> Any:
            groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
            return groups[dist.get_rank()]

    engine, _, _, _ = onecopy.initialize(model=Net(), config=configuration(stage), mpu=Alone())
    step(engine, 0)
    found = full_masters(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_a_shard_group_is_the_one_that_was_given(world2: World, stage: int) -> None:
    """`mpu.get_data_parallel_group()` of one rank each: the user's own choice, each rank trains on its own data."""
    first, second = world2.run(group_of_one, stage, stray_groups=True)
    model, optimizer = Net(), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1, eps=0.1)
    next(one_loss(model, 0, 0)).backward()
    optimizer.step()
    torch.testing.assert_close(first["layers.0.weight"], model.layers[0].weight.detach(), rtol=2e-5, atol=2e-6)
    assert not torch.equal(first["layers.0.weight"], second["layers.0.weight"])


def ended(stage: int) -> None:
    start(stage).destroy()  # what a process has once is there from now on
    gc.collect()
    time.sleep(0.1)  # a thread that was told to end does so soon
    groups, threads, files = len(dist.distributed_c10d._world.pg_map), in_use("task"), in_use("fd")
    model = Net()
    hooks_before = count_hooks(model)
    engine = start(stage, model)
    assert count_hooks(model) > hooks_before
    for number in range(2):
        step(engine, number)
    assert in_use("task") > threads
    memories = [weakref.ref(slot.memory) for slot in engine.runtime.slots.slots]
    if stage > 0:  # at stage 0 in fp32 the weights are the masters
        memories += [weakref.ref(flat.master) for unit in engine.units for flat in unit.buffers]
    engine.destroy()
    engine.destroy()  # a second time is harmless
    for method in (engine.save_checkpoint, engine.load_checkpoint, engine.save_16bit_model):
        with pytest.raises(ModelError, match="destroyed"):
            method("anywhere")
    assert count_hooks(model) == hooks_before
    assert len(dist.distributed_c10d._world.pg_map) == groups
    if stage < 3:  # whole parameters outlive the engine
        assert_usable(model)
    else:
        with pytest.raises(ReleasedParameterError, match="destroyed"):
            model(data(0, 0))
    gc.collect()
    assert not [ref for ref in memories if ref() is not None], "buffers outlive the engine"
    del engine
    gc.collect()
    time.sleep(0.1)
    maps = len({p.untyped_storage()._cdata for p in model.parameters()}) if stage in (1, 2) else 0  # of whole weights
    assert (in_use("task"), in_use("fd") - maps) == (threads, files), "threads or files outlive the engine"


def in_use(kind: str) -> int:
    """How many threads ("task") or open files ("fd") this process has."""
    return len(os.listdir(f"/proc/self/{kind}"))


def assert_usable(model: nn.Module) -> None:
    with torch.no_grad():
        model(data(0, 0))
    for name, weight in wanted(2).items():
        torch.testing.assert_close(model.get_parameter(name).detach(), weight, rtol=2e-5, atol=2e-6)


def count_hooks(model: nn.Module) -> int:
    modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return modules + sum(len(getattr(p, "_post_accumulate_grad_hooks", None) or ()) for p in model.parameters())


@pytest.mark.parametrize("stage", range(4))
def test_nothing_is_left_after_destroy(world2: World, stage: int) -> None:
    """No hook, no buffer, no process group; whole weights stay usable."""
    world2.run(ended, stage)


def import_is_quiet() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = start(3)
        step(engine, 0)
        engine.destroy()
    return [str(warning.message) for warning in caught]


def test_a_training_step_gives_no_warnings(world2: World) -> None:
    """Neither torch nor onecopy warns in a healthy step."""
    assert world2.run(import_is_quiet) == [[], []]
