"""Write large files so that the disk works while more is being produced, and force them to it.

Left alone, the kernel gathers gigabytes in its page cache before it writes them back, pushes out what others have cached,
and the `fsync` at the end waits for all of it. So what is written goes to the disk at once, some megabytes at a time, a
window of it is under way, and what has arrived leaves the cache. Direct writes (`O_DIRECT`) would save the copy into the
cache, but one at a time they leave the disk idle between two; that was slower than this wherever it was measured.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

CHUNK_BYTES = 8 << 20  # sent to the disk at a time
WINDOW_BYTES = 64 << 20  # on their way there; also what the `fsync` at the end can still have to wait for
_PAGE_BYTES = mmap.PAGESIZE
_START, _START_AND_WAIT = 2, 7  # flags of Linux' sync_file_range
_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)  # Linux has it, others do not
_ABSENT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ESPIPE, errno.EPERM)


class FileWriter:
    """A new file being written front to back; as a context manager it is complete and on the disk at the end of the block.

    `progress` is called after every 8 MiB, so that a slow disk can be told from a dead one.

    Attributes:
        position: bytes given so far.

    Raises FileExistsError where there is such a file, and OSError from any method when the disk failed.
    """

    def __init__(self, path: Path, progress: Callable[[], None] = lambda: None) -> None:
        self.position = 0
        self._progress = progress
        self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        self._writeback = Writeback(self._descriptor)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: Any, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._writeback.finish()
        finally:
            os.close(self._descriptor)

    def write(self, content: Any) -> None:
        """Append bytes; the caller may change them afterwards."""
        view = memoryview(content)
        for low in range(0, len(view), CHUNK_BYTES):
            part = view[low : low + CHUNK_BYTES]
            write_all(self._descriptor, part, self.position)
            self._writeback.wrote(self.position, len(part))
            self.position += len(part)
            self._progress()


class Writeback:
    """Sends what is written to one descriptor on to the disk, and waits when more than a window is under way."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._start = self._stop = 0  # the range written last and not yet sent
        self._sent: deque[tuple[int, int]] = deque()  # (start, stop) of what is under way, oldest first
        self._under_way = 0  # bytes

    def wrote(self, position: int, count: int) -> None:
        """Take note of `count` bytes written at `position`."""
        if not 0 <= position - self._stop < CHUNK_BYTES:  # a small gap is another rank's range: it may go along
            self._send(self._stop)
            self._start = position
        self._stop = position + count
        if self._stop - self._start >= CHUNK_BYTES:
            self._send(self._stop // _PAGE_BYTES * _PAGE_BYTES)  # the next write goes on in the page that is left out

    def finish(self) -> None:
        """Return when everything is on the disk."""
        os.fsync(self._descriptor)
        _drop(self._descriptor, 0, 0)
        self._start = self._stop
        self._sent.clear()
        self._under_way = 0

    def _send(self, stop: int) -> None:
        start, self._start = self._start, stop
        if stop <= start:
            return
        _sync_range(self._descriptor, start, stop - start, _START)
        self._sent.append((start, stop))
        self._under_way += stop - start
        while self._under_way > WINDOW_BYTES:
            start, stop = self._sent.popleft()
            self._under_way -= stop - start
            if not _sync_range(self._descriptor, start, stop - start, _START_AND_WAIT):
                return self.finish()
            _drop(self._descriptor, start, stop - start)


def write_all(descriptor: int, content: Any, position: int) -> None:
    """`os.pwrite` until all of the bytes `content` are written."""
    view = memoryview(content)
    while len(view):
        count = os.pwrite(descriptor, view, position)
        if count == 0:  # a file system that takes nothing and says nothing would be asked for ever
            raise OSError(errno.EIO, "the file system wrote nothing")
        position += count
        view = view[count:]


def _sync_range(descriptor: int, start: int, count: int, flags: int) -> bool:
    """Start (or finish) writing a range of a file to the disk; False where the system cannot."""
    if _sync_file_range is None:
        return False
    if _sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(count), ctypes.c_uint(flags)) == 0:
        return True
    error = ctypes.get_errno()
    if error in _ABSENT:
        return False
    # Not left to `fsync`: the kernel tells a descriptor of each lost write once.
    raise OSError(error, os.strerror(error))


def _drop(descriptor: int, start: int, count: int) -> None:
    """Let the cached pages of a range go that are on the disk; a count of 0 means to the end of the file."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, count, os.POSIX_FADV_DONTNEED)
