"""Join the world and choose the back end for a shard group: the one place where back ends are told apart."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from onecopy.comm.collective import Collective
from onecopy.comm.communicator import Communicator
from onecopy.comm.long_waits import joining, timeout_of
from onecopy.comm.point_to_point import LARGEST_WORLD, PointToPoint
from onecopy.comm.shared_memory import ImaginedSharedMemory, SharedMemory
from onecopy.comm.watchdog import watchdog_for
from onecopy.errors import CommunicationError

_USUAL_TIMEOUT = timedelta(minutes=30)


def default_device() -> torch.device:
    """This rank's accelerator, or the CPU where there is none.

    Ranks that see fewer devices than there are ranks count again from 0: a launcher that shows each rank its own device
    alone calls it device 0 on all of them.
    """
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    index = int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.accelerator.device_count())
    return torch.device(accelerator.type if accelerator else "cpu", index)


def ensure_process_group(backend: str | None = None, timeout_seconds: float | None = None, port: int = 29500) -> None:
    """Start torch.distributed from the launcher's environment, or as a world of one rank without a launcher.

    A process group that is already up is kept as it is.

    Raises:
        CommunicationError: the environment names a world size above 1 but no rank.
    """
    if dist.is_initialized():
        return
    environment = os.environ
    if int(environment.get("WORLD_SIZE", "1")) > 1 and "RANK" not in environment:
        raise CommunicationError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']} but RANK is not set; start the script with torchrun "
            "(or `onecopy train` / `onecopy run`), which sets both"
        )
    timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    device = default_device()
    chosen = backend or ("gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device))
    if "RANK" in environment:
        environment.setdefault("MASTER_ADDR", "127.0.0.1")
        environment.setdefault("MASTER_PORT", str(port))
        environment.setdefault("WORLD_SIZE", "1")
        dist.init_process_group(chosen, timeout=timeout)
    else:
        dist.init_process_group(
            chosen, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)


def connect(
    group: dist.ProcessGroup | None,
    device: torch.device,
    timeout_seconds: float | None = None,
    kind: str | None = None,
) -> Communicator:
    """A communicator over the ranks of `group` (default: all ranks), on process groups of its own. Collective.

    Args:
        timeout_seconds: how long a rank may wait for the others; default: the parent group's own timeout.
        kind: "collective", "point_to_point" or "shared_memory"; default: the first on accelerators and above
            `LARGEST_WORLD` ranks, the last where all ranks share a machine, else the second. The last becomes the second
            where memory cannot be shared.
    """
    parent = group if group is not None else dist.group.WORLD
    assert parent is not None
    ranks = dist.get_process_group_ranks(parent)
    timeout = timedelta(seconds=timeout_seconds) if timeout_seconds is not None else timeout_of(parent, device)

    def new_group() -> dist.ProcessGroup:
        made: dist.ProcessGroup
        with joining(parent, device, "meeting of all ranks that starts an engine (initialize, init_inference)"):
            if len(ranks) == dist.get_world_size():
                made = dist.new_group(ranks, timeout=timeout)
                return made
            # Ranks outside this shard group do not call us, so only its members synchronise.
            with _agreed_name(parent):
                made = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
            return made

    if kind is None:
        kind = "shared_memory" if device.type == "cpu" and len(ranks) <= LARGEST_WORLD else "collective"
    communicator: Communicator | None = None
    if kind == "collective":
        communicator = Collective(new_group(), new_group(), device)
    else:
        made = new_group()
        if kind == "shared_memory" and "fake" in str(dist.get_backend_config(made)):
            communicator = ImaginedSharedMemory(made, device)
        elif kind == "shared_memory" and len(ranks) > 1:
            communicator = SharedMemory.try_to_connect(made, device, (timeout or _USUAL_TIMEOUT).total_seconds())
        if communicator is None:
            communicator = PointToPoint(made, device)
    communicator.watchdog = watchdog_for(communicator, timeout_seconds)
    return communicator


@contextmanager
def _agreed_name(parent: dist.ProcessGroup) -> Iterator[None]:
    """Inside, a new group has a name that is new and the same on all ranks of `parent`. Collective over `parent`.

    torch makes the name of a group that only its members know from its ranks and the number of groups each rank is in:
    a second group of the same ranks would find the addresses of a destroyed first one, and ranks that are in different
    numbers of groups would wait for each other under different names.
    """
    names = [uuid.uuid4().hex if dist.get_rank(parent) == 0 else None]
    dist.broadcast_object_list(names, group=parent, group_src=0)
    torch_distributed: Any = dist.distributed_c10d
    before = torch_distributed._process_group_name
    torch_distributed._process_group_name = lambda ranks, use_hashed_name: type(before(ranks, True))(names[0])
    try:
        yield
    finally:
        torch_distributed._process_group_name = before
