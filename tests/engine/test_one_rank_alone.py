"""What one rank does alone between steps: reading whole weights needs nobody else, and an engine that ends tells the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
from onecopy.comm import connect
from onecopy.errors import CommunicationError
from tests.reference import configuration
from tests.worlds import World


def make(stage: int, frozen: int = 0) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
    model[:frozen].requires_grad_(False)
    config = configuration(stage, optimizer={"type": "AdamW", "params": {"lr": 0.01}})
    return onecopy.initialize(model=model, config=config)[0]


def step(engine: Any) -> None:
    engine.backward(engine(torch.randn(2, 16)).square().mean())
    engine.step()


def reads_alone(stage: int) -> None:
    engine = make(stage)
    for _ in range(2):
        step(engine)
    weights = torch.zeros(0)
    for reader in range(2):
        if engine.communicator.rank == reader:
            weights = torch.cat([value.reshape(-1) for value in engine.module.state_dict().values()])
        dist.barrier()
    found = engine.communicator.exchange(weights.sum().item(), "sums")
    assert found[0] == found[1]
    step(engine)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_reads_whole_weights_while_the_others_wait_for_it(world2: World, stage: int) -> None:
    """As `if rank == 0: torch.save(model.state_dict(), ...)` before a barrier does."""
    world2.run(reads_alone, stage, timeout=30)


def one_leaves() -> str:
    communicator = connect(None, torch.device("cpu"), kind="shared_memory")
    rank = communicator.rank
    whole = communicator.allocate(4 * 128).view(torch.float32)
    wire = communicator.wire(whole)
    for turn in range(2):
        whole.fill_(rank + turn)
        pending = communicator.start_gather(wire, 1, "weights")
        if turn == 0 or rank == 0:
            pending.wait()
        if turn == 0:
            pending.drain()
    if rank == 1:
        communicator.close()
        return ""
    pending.drain()
    assert whole.tolist() == [1.0] * 64 + [2.0] * 64
    try:
        communicator.start_gather(wire, 1, "weights").wait()
    except CommunicationError as error:
        return str(error)
    finally:
        communicator.close()
    return "no error"


def test_a_rank_that_left_is_waited_for_no_longer(world2: World) -> None:
    """What it had posted is read, nobody waits for it to read, and what it never posts is an error at once."""
    assert "rank 1 has left" in world2.run(one_leaves, timeout=30)[0]


def thaws() -> None:
    engine = make(3, frozen=3)
    step(engine)
    before = engine.communicator.unseen_bytes
    for layer in range(3):
        engine.module[layer].requires_grad_(True)
        step(engine)
        slots = len(engine.gradients._slots) * engine.gradients._slots[0].memory.nbytes
        assert engine.communicator.unseen_bytes <= before + slots
    engine.destroy()
    assert engine.communicator.unseen_bytes == 0


def test_shared_memory_does_not_pile_up(world2: World) -> None:
    """Slots of gradients serve parameters that are unfrozen later too, and all memory goes with the engine."""
    world2.run(thaws)
