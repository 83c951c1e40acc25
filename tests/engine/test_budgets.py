"""Promises 5 and 6: bytes and collectives of a step, bytes at rest, and gathered parameters, all as computed beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from onecopy.layout import ALIGNMENT, round_up
from tests.reference import configuration, residue_of
from tests.worlds import World

WIDTH, BLOCKS = 24, 6
GetWorld = Callable[[int], World]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


def block_elements(size: int) -> int:
    """Elements of one block's flat buffer."""
    return round_up(round_up(WIDTH * WIDTH, ALIGNMENT) + round_up(WIDTH, ALIGNMENT), ALIGNMENT * size)


def train(stage: int, micros: int, low: bool, steps: int = 3, **more: Any) -> dict[str, Any]:
    config = configuration(
        stage,
        gradient_accumulation_steps=micros,
        bf16={"enabled": low},
        optimizer={"type": "AdamW", "params": {}},
        **more,
    )
    engine, _, _, _ = onecopy.initialize(model=Net(), config=config)
    at_start = engine.memory()
    for number in range(steps):
        for _ in range(micros):
            engine.backward(engine(torch.full((2, WIDTH), 0.1 * number)).float().mean())
            engine.step()
        assert not residue_of(engine)
    answer = {"sent": engine.communication(), "memory": engine.memory(), "start": at_start}
    answer["gathered"] = [unit.name for unit in engine.units if unit.slot is not None]
    engine.destroy()
    return answer


def expected_bytes(stage: int, size: int, micros: int, itemsize: int, slots: int = 2) -> dict[str, int]:
    """What one rank sends in one step, in bytes by kind."""
    shard = block_elements(size) // size * (size - 1)
    all_blocks = BLOCKS * shard * itemsize
    reduced = all_blocks * (1 if stage < 2 else micros)
    if stage == 0:  # the sums, in fp32, go back to every rank
        gathered = BLOCKS * shard * 4
    elif stage < 3:
        gathered = all_blocks
    else:  # forward, and backward but for the last units of forward, whose slots are still theirs
        gathered = micros * (2 * BLOCKS - slots) * shard * itemsize
    return {"reduce": reduced, "gather": gathered}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("stage", range(4))
def test_bytes_sent_in_a_step(world: GetWorld, stage: int, size: int) -> None:
    """To the byte, in bf16: stages 0-2 reduce and gather once, stage 3 gathers twice less what reuse saves."""
    for micros in (1, 3):
        ranks = world(size).run(train, stage, micros, True)
        for rank in ranks:
            by_kind = dict(rank["sent"]["bytes_by_kind"])
            agreed = by_kind.pop("agree")
            wanted = expected_bytes(stage, size, micros, 2)
            if stage == 3 and micros > 1:  # between micro-batches slots go on to the next forward: never more than this
                assert by_kind["reduce"] == wanted["reduce"]
                assert 0.8 * wanted["gather"] <= by_kind["gather"] <= micros * 2 * BLOCKS * block_elements(size) * 2
            else:
                assert by_kind == wanted, (micros, by_kind, wanted)
            assert agreed <= 8 * (size - 1) * (BLOCKS + 2 * BLOCKS + 8), "the agreement is one small vector"


@pytest.mark.parametrize("stage", range(4))
def test_collectives_in_a_step(world2: World, stage: int) -> None:
    """One reduce and one gather a unit (two at stage 3, less reuse), and one agreement."""
    found = world2.run(train, stage, 1, False)[0]["sent"]["collectives_by_kind"]
    gathers = BLOCKS if stage < 3 else 2 * BLOCKS - 2
    assert found == {"reduce": BLOCKS, "gather": gathers, "agree": 1}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("low", [False, True])
def test_bytes_at_rest(world: GetWorld, size: int, low: bool) -> None:
    """Masters, moments, whole parameters and slots by category, for every stage."""
    itemsize = 2 if low else 4
    for stage in range(4):
        found = world(size).run(train, stage, 1, low)[0]
        memory = found["memory"]
        whole, shard = BLOCKS * block_elements(size), BLOCKS * block_elements(size) // size
        optimizer = whole if stage == 0 else shard
        steps = 4 * BLOCKS  # a step count a run
        assert 2 * 4 * optimizer <= memory["moments"] <= 2 * 4 * optimizer + steps
        apart = low or (stage > 0 and size > 1 and stage == 3)  # fp32 masters of whole weights are the weights
        assert memory["masters"] == (4 * optimizer if apart else 0), (stage, memory)
        sharded = stage == 3 and size > 1
        assert memory["parameters"] == (0 if sharded else itemsize * whole)
        slot = round_up(itemsize * block_elements(size), 256)
        assert memory["slots"] == (2 * slot if sharded else 0)


def test_stage_3_holds_less_than_stage_2(world2: World) -> None:
    """More sharding never costs memory, with the default sizes of buckets that are far larger than the model."""
    totals = [sum(world2.run(train, stage, 1, True)[0]["memory"].values()) for stage in range(4)]
    assert totals == sorted(totals, reverse=True), totals


def live_weights(stage: int) -> int:
    """The most blocks whose whole weights were here at once, seen from inside every block's forward."""
    model = Net()
    most = 0

    def look(module: nn.Module, args: Any) -> None:
        nonlocal most
        most = max(most, sum(1 for unit in engine.units if unit.slot is not None))

    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: look(module, args))
    engine, _, _, _ = onecopy.initialize(model=model, config=configuration(stage))
    for _ in range(2):
        engine.backward(engine(torch.ones(2, WIDTH)).mean())
        engine.step()
    engine.destroy()
    return most


def test_no_more_whole_weights_than_slots(world2: World) -> None:
    """Eight layers deep or eighty: two blocks' weights are here at a time."""
    assert world2.run(live_weights, 3) == [2, 2]


def persistent(threshold: int) -> list[str]:
    """What stays whole at stage 3."""
    config = configuration(
        3, zero={"stage3_param_persistence_threshold": threshold, "stage3_model_persistence_threshold": 10**9}
    )
    engine, _, _, _ = onecopy.initialize(model=Net(), config=config)
    whole = [name for unit in engine.units for flat in unit.whole for name in flat.names]
    marked = [name for name, p in engine.module.named_parameters() if p.ds_persist]
    assert sorted(whole) == sorted(marked)
    engine.backward(engine(torch.ones(2, WIDTH)).mean())
    engine.step()
    engine.destroy()
    return whole


def test_small_parameters_stay_whole_when_asked(world2: World) -> None:
    """`stage3_param_persistence_threshold` keeps biases whole, and only them."""
    assert world2.run(persistent, 0)[0] == []
    assert sorted(world2.run(persistent, WIDTH + 1)[0]) == [f"layers.{place}.bias" for place in range(BLOCKS)]


def limited(key: str, value: int) -> dict[str, int]:
    zero = {key: value}
    engine, _, _, _ = onecopy.initialize(model=Net(), config=configuration(3, zero=zero))
    for _ in range(3):
        engine.backward(engine(torch.ones(2, WIDTH)).mean())
        engine.step()
    answer = {"slots": engine.memory()["slots"], "gather": engine.communication()["collectives_by_kind"]["gather"]}
    answer["buffers"] = sum(len(unit.buffers) for unit in engine.units)
    engine.destroy()
    return answer


def test_limits_of_the_configuration_are_kept(world2: World) -> None:
    """Live parameters bound the slots, reuse distance the gathers, buckets the buffers."""
    block = round_up(4 * block_elements(2), 256)
    assert world2.run(limited, "stage3_max_live_parameters", 1)[0]["slots"] == block
    assert world2.run(limited, "stage3_max_live_parameters", 10**9)[0]["slots"] == 2 * block
    assert world2.run(limited, "stage3_max_reuse_distance", 0)[0]["gather"] >= 2 * BLOCKS - 1
    assert world2.run(limited, "stage3_max_reuse_distance", 10**9)[0]["gather"] == 2 * BLOCKS - 2
    assert world2.run(limited, "reduce_bucket_size", WIDTH)[0]["buffers"] == 2 * BLOCKS
    assert world2.run(limited, "reduce_bucket_size", 10**9)[0]["buffers"] == BLOCKS
