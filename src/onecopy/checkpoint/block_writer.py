"""Write one file front to back in large aligned blocks past the page cache: one block fills while another goes to the disk.

What is forced to the disk at once anyway gains nothing from a copy of it in the kernel's memory; on many machines that
copy is the slowest part of a save, and it pushes out what others have cached. Where the file system takes no direct
writes (memory file systems), the same blocks are written in the ordinary way.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import queue
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

BLOCK_BYTES = 8 << 20
_BLOCKS = 3  # one filling, one being written, one ready
_DIRECT = getattr(os, "O_DIRECT", 0)
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)  # how a file system says that it takes no direct writes
PAGE_BYTES = mmap.PAGESIZE
# Most that the kernel holds back of a file: the last `fsync` of a slow disk gives no sign of life.
DIRTY_BYTES = 1 << 30


class BlockWriter:
    """A new file being written; as a context manager it is complete and on the disk at the end of the block.

    Attributes:
        position: bytes given so far.

    Raises OSError from any method when a write before it failed.
    """

    def __init__(self, path: Path) -> None:
        self.position = 0
        self._descriptor = open_for_blocks(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        for _ in range(_BLOCKS):
            self._free.put(mmap.mmap(-1, BLOCK_BYTES))
        self._block, self._filled, self._sent = self._free.get(), 0, 0
        self._full: queue.SimpleQueue[tuple[mmap.mmap, int] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = threading.Thread(target=self._work, name="onecopy writes")
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is ending and starts no threads: blocks are written one after the other
            self._thread = None

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: Any, trace: TracebackType | None) -> None:
        try:
            if self._thread is not None:
                self._full.put(None)
                self._thread.join()
            if kind is None:
                self._finish()
        finally:
            os.close(self._descriptor)

    def write(self, content: Any) -> None:
        """Append bytes; they are copied before this returns."""
        view = memoryview(content)
        self.position += len(view)
        while len(view):
            count = min(len(view), BLOCK_BYTES - self._filled)
            self._block[self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == BLOCK_BYTES:
                self._send()

    def _send(self) -> None:
        """Let the full block be written, and take one that is free."""
        if self._failure is not None:
            raise self._failure
        if self._thread is None:
            write_block(self._descriptor, memoryview(self._block), self._sent)
        else:
            self._full.put((self._block, self._sent))
            self._block = self._free.get()
        self._sent += BLOCK_BYTES
        self._filled = 0

    def _work(self) -> None:
        held_back = 0
        while (given := self._full.get()) is not None:
            block, position = given
            try:
                if self._failure is None:
                    write_block(self._descriptor, memoryview(block), position)
                    held_back += 0 if _is_direct(self._descriptor) else BLOCK_BYTES
                    if held_back >= DIRTY_BYTES:
                        os.fsync(self._descriptor)
                        held_back = 0
            except BaseException as error:
                self._failure = error
            self._free.put(block)

    def _finish(self) -> None:
        if self._failure is not None:
            raise self._failure
        rest = memoryview(self._block)[: self._filled]
        whole = len(rest) // PAGE_BYTES * PAGE_BYTES
        write_block(self._descriptor, rest[:whole], self._sent)
        end_direct(self._descriptor)
        write_block(self._descriptor, rest[whole:], self._sent + whole)
        os.fsync(self._descriptor)


def open_for_blocks(path: Path, flags: int) -> int:
    """A descriptor for direct writes of aligned blocks, or an ordinary one where there are none."""
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
    return os.open(path, flags & ~os.O_EXCL, 0o666)  # a file system may have made the file before it refused


def end_direct(descriptor: int) -> None:
    """From now on writes may be of any length and place."""
    if _DIRECT:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_DIRECT)


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & _DIRECT)


def write_block(descriptor: int, block: memoryview, position: int) -> None:
    """Write all of a block at a position; a file system that refuses direct writes only now gets ordinary ones."""
    while len(block):
        try:
            count = os.pwrite(descriptor, block, position)
        except OSError as error:
            if error.errno not in _REFUSED or not _is_direct(descriptor):
                raise
            end_direct(descriptor)
            continue
        position += count
        block = block[count:]
        if count % PAGE_BYTES:  # a short write (a nearly full disk): the rest has lost its alignment
            end_direct(descriptor)
