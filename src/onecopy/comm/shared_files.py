"""Anonymous files that the ranks of one machine map: the memory under `shared_memory.py`, and whether their owners live."""

import mmap
import os
from pathlib import Path

import torch

from onecopy.errors import CommunicationError
from onecopy.observe.ledger import ELSEWHERE


class SharedFile:
    """Anonymous memory that other processes of this user can map while it is open here."""

    def __init__(self, nbytes: int) -> None:
        self.number = -1
        self.nbytes = nbytes
        try:
            self.number = os.memfd_create("onecopy", os.MFD_CLOEXEC)
            os.ftruncate(self.number, max(1, nbytes))
            self.bytes = _map(self.number)
        except OSError as error:
            self.close()
            raise CommunicationError(
                f"memory of {nbytes} bytes for the ranks of this machine to share could not be made ({error}); allow this process "
                "more memory or more open files (`ulimit -n`), or give a larger zero_optimization.reduce_bucket_size"
            ) from error

    def close(self) -> None:
        """Nobody can map it any more; what is mapped stays until its tensors are gone."""
        if self.number >= 0:
            os.close(self.number)
            self.number = -1


def allow_many_files() -> None:
    """Every buffer is a file: take the number of open files that this process may have at most."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _map(number: int) -> torch.Tensor:
    """The bytes of an open file as a tensor; the mapping lives as long as the tensor."""
    mapped = mmap.mmap(number, os.fstat(number).st_size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapped.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a wish
    return torch.frombuffer(mapped, dtype=torch.uint8)


def open_of(process: int, number: int) -> torch.Tensor:
    """Map a file that another process has open."""
    descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
    try:
        mapped = _map(descriptor)
    finally:
        os.close(descriptor)
    ELSEWHERE.add(mapped.untyped_storage().data_ptr())
    return mapped


def lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
