"""Gather, reduce and small agreements between the ranks of one shard group; every byte sent is counted."""

from onecopy.comm.communicator import Communicator, PendingGather, PendingReduce
from onecopy.comm.connect import connect, ensure_process_group
from onecopy.comm.counters import Counters

__all__ = ["Communicator", "Counters", "PendingGather", "PendingReduce", "connect", "ensure_process_group"]
