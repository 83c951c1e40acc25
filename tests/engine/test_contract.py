"""What DeepSpeed's engine has besides forward, backward and step: sizes, loaders, reductions, states moved away."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import TensorDataset

import onecopy
from onecopy.errors import ConfigError, ModelError
from onecopy.utils import safe_get_full_grad
from tests.engine.small_net import Net, data, start, step, wanted
from tests.reference import assert_weights, configuration
from tests.worlds import World


def sizes() -> list[Any]:
    engine = start(2, gradient_accumulation_steps=3)
    engine.set_train_micro_batch_size(5)
    found = [engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps(), engine.train_batch_size()]
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="micro_batch_size"):
            engine.set_train_micro_batch_size(wrong)
    engine.set_train_batch_size(20)
    found += [engine.gradient_accumulation_steps(), engine.managed_gradient_accumulation()]
    found += [
        engine.zero_multi_rank_bucket_allreduce(),
        engine.torch_autocast_enabled(),
        engine.zero_use_cpu_optimizer(),
    ]
    assert engine.get_sequence_parallel_group() is None and engine.loaded_checkpoint_dp_world_size is None
    engine.destroy()
    return found


def test_the_micro_batch_size_changes_in_flight(world2: World) -> None:
    """Accumulation stays, the batch size follows; `set_train_batch_size` then counts with the new size."""
    assert world2.run(sizes)[0] == [5, 3, 30, 2, True, True, False, False]


def loaders() -> tuple[list[int], list[int], int]:
    engine, _, training, _ = onecopy.initialize(
        model=Net(), training_data=TensorDataset(torch.arange(12)), config=configuration(1)
    )
    rank = engine.global_rank
    evaluation = engine.deepspeed_io(TensorDataset(torch.arange(10)), batch_size=2, route="eval")
    in_order = [int(x) for (batch,) in evaluation for x in batch]
    engine.set_data_post_process_func(lambda batch, state: (batch[0] + 100 * state["epoch"] + 100,))
    (first,) = next(iter(training))
    with pytest.raises(ValueError, match="torch Dataset"):
        engine.deepspeed_io(3)
    with pytest.raises(ValueError, match="route"):
        engine.deepspeed_io(TensorDataset(torch.arange(4)), route="test")
    with pytest.raises(ConfigError, match="no curriculum"):
        engine.set_custom_curriculum_learning_schedule({})
    engine.training_dataloader = None
    with pytest.raises(ModelError, match="training_data"):
        engine.set_data_post_process_func(print)
    engine.destroy()
    return in_order, [rank + 2 * k for k in range(5)], int(first.flatten()[0])


def test_loaders_for_other_data_and_a_function_over_every_batch(world2: World) -> None:
    """An evaluation loader keeps the order, each rank its part; the function sees the batch and the position."""
    for in_order, expected, first in world2.run(loaders):
        assert in_order == expected and first >= 100


def reduced(stage: int) -> None:
    engine = start(stage)
    plain = start(stage)
    for one in (engine, plain):
        one.backward(one(data(0, one.global_rank)).square().mean())
    engine.allreduce_gradients()
    assert torch.equal(
        safe_get_full_grad(engine.module.layers[0].weight), safe_get_full_grad(plain.module.layers[0].weight)
    )
    engine.allreduce_gradients(bucket_size=10)
    engine.step()
    engine.allreduce_gradients()  # nothing to reduce
    step(engine, 1)
    engine.empty_partition_cache()
    assert_weights(engine, wanted(2))
    engine.destroy()
    plain.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_reducing_by_hand_changes_nothing(world2: World, stage: int) -> None:
    world2.run(reduced, stage)


def parked(stage: int, include: tuple[str, ...] | None) -> None:
    """Parking is exercised on the host, where `offload_states` itself has nothing to do."""
    engine, other = start(stage), start(stage)
    for number in range(4):
        step(other, number)
        step(engine, number)
        if number == 1:
            engine.offload_states()  # says that the states are on the host already
            step(other, 5)
            step(engine, 5)
            engine._park(frozenset(include or onecopy.engine.parking.KINDS), False, False)
            own = [f.master.untyped_storage() for u in engine.units for f in u.buffers]
            assert all(storage.nbytes() == 0 for storage in own if storage.resizable())  # some is shared by ranks
            with pytest.raises(ModelError, match="reload_states"):
                engine(data(0, 0))
            engine.reload_states()
    for mine, its in zip(engine.masters.runs, other.masters.runs, strict=True):
        assert torch.equal(mine.master, its.master)
    engine.reload_states()
    engine.destroy()
    other.destroy()


@pytest.mark.parametrize(("stage", "include"), [(0, None), (1, ("hp_params", "optim_states")), (3, None)])
def test_states_leave_the_device_and_come_back_bit_for_bit(world2: World, stage: int, include: Any) -> None:
    """Between steps; in between a use says what is missing."""
    world2.run(parked, stage, include)


class Root(Net):
    """Its root owns a matrix, which is held from a forward to its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Parameter(torch.eye(64) * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum() * self.last


def parked_after_a_forward() -> None:
    with mock.patch("onecopy.comm.shared_memory.can_share", return_value=False):  # what is shared stays where it is
        engine = onecopy.initialize(model=Root(), config=configuration(3))[0]
    before = engine(data(0, 0)).detach().clone()
    engine._park(frozenset(onecopy.engine.parking.KINDS), False, False)
    elsewhere = [torch.full((1 << 12,), 7.0) for _ in range(8)]
    engine.reload_states()
    del elsewhere
    assert torch.equal(engine(data(0, 0)), before)
    with pytest.raises(ModelError, match="reload_states"):
        engine._park(frozenset(["hp_params"]), False, False)
        engine.save_checkpoint("nowhere")
    engine.reload_states()
    engine.destroy()


def test_states_leave_after_a_forward_without_a_backward(world2: World) -> None:
    """What the root owns is gathered anew afterwards; and nothing is saved meanwhile."""
    world2.run(parked_after_a_forward)


def refuse_offload() -> None:
    engine = start(1)
    with pytest.raises(ValueError, match="nvme"):
        engine.offload_states(device="nvme")
    with pytest.raises(ValueError, match="moments"):
        engine.offload_states(include=["moments"])
    engine.offload_states(device="none")
    engine.backward(engine(data(0, 0)).square().mean())
    with pytest.raises(ModelError, match="between backward and step"):
        engine.offload_states()
    engine.destroy()
    bare = onecopy.initialize(model=Net(), config={"train_micro_batch_size_per_gpu": 1})[0]
    with pytest.raises(ModelError, match="optimizer"):
        bare.offload_states()
    bare.destroy()


def test_bad_uses_of_offload_states_are_named(world1: World) -> None:
    world1.run(refuse_offload)


def saved(folder: str) -> None:
    engine = start(2)
    files = engine.checkpoint_engine
    files.makedirs(Path(folder) / "extra", exist_ok=True)
    files.create("extra")
    files.save({"a": torch.ones(2)}, Path(folder) / "extra" / f"{engine.global_rank}.pt")
    assert files.load(Path(folder) / "extra" / f"{engine.global_rank}.pt")["a"].sum() == 2 and files.commit("extra")
    step(engine, 0)
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    assert engine.loaded_checkpoint_dp_world_size == 2
    engine.destroy()


def test_what_a_load_leaves_behind(world2: World, tmp_path: Path) -> None:
    world2.run(saved, str(tmp_path))
