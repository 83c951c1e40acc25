"""A pool of persistent gloo ranks, so that a test on N ranks costs a message instead of N process starts.

    def losses(steps):                                  # a top-level function: ranks import it by name
        ...
        return tensor

    def test_same_on_every_rank(world):
        first, second = world(2).run(losses, 3)

A rank is forked from a server that has already imported torch, joins its world's process group once, and then answers
calls until the session ends. An exception on a rank is raised again in the test, with that rank's traceback. A world
whose ranks no longer agree (one raised alone, died or ran past the time limit) is ended; the next call starts it again.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

GROUP_TIMEOUT = timedelta(seconds=60)  # a collective that waits longer raises on its rank
GRACE_SECONDS = 15.0  # how long the other ranks may still work once one has raised
START_SECONDS = 120.0
MOST_RANKS_ALIVE = 7  # worlds that were not used for longest are ended beyond this
TIMEOUT_FACTOR = float(os.environ.get("ONECOPY_TEST_TIMEOUT_FACTOR", "1"))


class RankFailure(RuntimeError):
    """A rank died, ran past the time limit, left process groups behind, or raised something that cannot be pickled."""


@dataclass
class Outcome:
    """What one rank answered to one call: a value, or an error with the moment it was raised."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    moment: float = 0.0  # time.monotonic() of the error, to tell the cause from its consequences
    stray_groups: int = 0
    usable: bool = True  # the default process group is still the one the rank started with


# ---------------------------------------------------------------------------------------------- inside a rank


def _load_function(module_name: str, qualified_name: str, path: str | None) -> Callable[..., Any]:
    """Import a test's function in this process; a test file that is not importable by name is loaded from its path."""
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        if path is None:
            raise
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in qualified_name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _default_state(rank: int) -> None:
    """Put back what one test may have changed for the next: seeds, default dtype, gradient mode, threads."""
    import torch

    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)


def _stray_groups(home: Any) -> int:
    """Destroy every process group but the default one and say how many there were."""
    import torch.distributed as dist

    strays = [group for group in list(dist.distributed_c10d._world.pg_map) if group is not home]
    for group in strays:
        dist.destroy_process_group(group)
    return len(strays)


def _answer(message: bytes, home: Any, rank: int) -> Outcome:
    import torch.distributed as dist

    outcome = Outcome()
    environment, folder = dict(os.environ), os.getcwd()
    _default_state(rank)
    try:
        path_list, module_name, qualified_name, path, packed = pickle.loads(message)
        sys.path[:] = path_list
        function = _load_function(module_name, qualified_name, path)
        arguments, keywords = pickle.loads(packed)
        outcome.value = function(*arguments, **keywords)
    except BaseException as error:  # also SystemExit: a test may run a command line
        outcome.moment = time.monotonic()
        outcome.trace = traceback.format_exc()
        outcome.error = error.with_traceback(None)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    gc.collect()
    outcome.usable = dist.is_initialized() and dist.group.WORLD is home
    if outcome.usable:
        outcome.stray_groups = _stray_groups(home)
    return outcome


def _packed(outcome: Outcome) -> bytes:
    """Pickle an outcome by value; what cannot be pickled becomes an error that says so."""
    try:
        message = pickle.dumps(outcome)
        pickle.loads(message)  # exceptions with required arguments pickle but do not unpickle
        return message
    except Exception as problem:
        if outcome.error is not None:
            outcome.error = RankFailure(f"{type(outcome.error).__name__}: {outcome.error}")
        else:
            outcome.moment, outcome.trace = time.monotonic(), traceback.format_exc()
            outcome.error = RankFailure(f"a result of type {type(outcome.value).__name__} cannot be pickled: {problem}")
        outcome.error.__cause__ = outcome.error.__context__ = None
        outcome.value = None
        return pickle.dumps(outcome)


def _serve(rank: int, size: int, port: int, stack_path: str, connection: multiprocessing.connection.Connection) -> None:
    """The life of a rank: join the group, then answer calls until the connection closes."""
    import faulthandler

    stack_file = open(stack_path, "w")  # noqa: SIM115  open for as long as the rank lives
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=GROUP_TIMEOUT)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=GROUP_TIMEOUT)
    home = dist.group.WORLD
    connection.send_bytes(_packed(Outcome()))
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            os._exit(0)  # the test process is gone
        if message == b"stop":
            os._exit(0)  # no orderly teardown: a peer may be dead, and gloo would wait for it
        connection.send_bytes(_packed(_answer(message, home, rank)))


# ------------------------------------------------------------------------------------- inside the test process


class World:
    """`size` ranks of one gloo process group; started by the first call."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0.0
        self._processes: list[Any] = []
        self._connections: list[multiprocessing.connection.Connection] = []
        self._store: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __repr__(self) -> str:
        return f"World({self.size}, {'alive' if self.alive else 'not started'})"

    @property
    def alive(self) -> bool:
        """True while the ranks are running."""
        return bool(self._processes)

    def start(self) -> None:
        """Start the ranks and wait until every one has joined the group."""
        import torch.distributed as dist

        context = multiprocessing.get_context("forkserver")
        # `torch._dynamo` is what the first optimizer made in a process imports, for seconds.
        context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
        self._folder = tempfile.TemporaryDirectory(prefix="onecopy-world-")
        # The store lives here, so that it outlasts any rank and its port is never taken by another world.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.size, self._store.port, str(self._stack_path(rank)), theirs)
            process = context.Process(target=_serve, args=arguments, name=f"rank {rank} of {self.size}")
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        _, problem = self._collect(START_SECONDS * TIMEOUT_FACTOR, "the start of the world")
        if problem:
            self.stop()
            raise RankFailure(problem)

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float = 120.0,
        stray_groups: bool = False,
        **keywords: Any,
    ) -> list[Any]:
        """Call a top-level function with the same arguments on every rank and return the results in rank order.

        `timeout` is in seconds. Seeds, default dtype, environment and folder are put back for every call.
        Process groups left behind by the function are destroyed, and fail the call unless `stray_groups` allows them.
        Raises the first rank's exception (by time), or `RankFailure` when a rank died or ran past the time limit.
        """
        message = _message(function, arguments, keywords)
        _make_room(self)
        if not self.alive:
            self.start()
        self.used = time.monotonic()
        for connection in self._connections:
            connection.send_bytes(message)
        outcomes, problem = self._collect(timeout * TIMEOUT_FACTOR, function.__qualname__)
        errors = {rank: outcome for rank, outcome in outcomes.items() if outcome.error is not None}
        agreed = len(errors) in (0, self.size) and len({type(outcome.error) for outcome in errors.values()}) <= 1
        if problem or not agreed or not all(outcome.usable for outcome in outcomes.values()):
            self.stop()
        if errors:
            _raise_first(errors, problem)
        if problem:
            raise RankFailure(problem)
        strays = {rank: outcome.stray_groups for rank, outcome in outcomes.items() if outcome.stray_groups}
        if strays and not stray_groups:
            raise RankFailure(f"process groups left behind by rank: {strays}; call engine.destroy() before returning")
        return [outcomes[rank].value for rank in range(self.size)]

    def stop(self) -> None:
        """End the ranks at once."""
        for connection, process in zip(self._connections, self._processes, strict=True):
            try:
                connection.send_bytes(b"stop")
            except OSError:
                pass  # already dead
            connection.close()
            process.join(0.2)
            if process.is_alive():
                process.kill()
            process.join()
        self._processes, self._connections, self._store = [], [], None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _stack_path(self, rank: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"rank{rank}.stack"

    def _collect(self, seconds: float, what: str) -> tuple[dict[int, Outcome], str]:
        """One outcome a rank, and a sentence about the ranks that gave none."""
        answers: dict[int, Outcome] = {}
        deadline = time.monotonic() + seconds
        waiting = dict(enumerate(self._connections))
        while waiting:
            left = deadline - time.monotonic()
            ready = multiprocessing.connection.wait(list(waiting.values()), timeout=max(0.0, left))
            if not ready:
                return answers, self._late(sorted(waiting), seconds, what)
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                try:
                    answers[rank] = pickle.loads(waiting.pop(rank).recv_bytes())
                except (EOFError, OSError):
                    return answers, self._dead(rank, what)
                if answers[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers, ""

    def _dead(self, rank: int, what: str) -> str:
        self._processes[rank].join(5)
        code = self._processes[rank].exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
        return f"rank {rank} of {self.size} {how} in {what}"

    def _late(self, ranks: list[int], seconds: float, what: str) -> str:
        """Name the ranks that have not answered, each with the stack it is hanging in."""
        limit = f"limit {seconds:.0f} s, or {GRACE_SECONDS:.0f} s after another rank's error"
        lines = [f"no answer from ranks {ranks} of {self.size} in {what} ({limit})"]
        for rank in ranks:
            pid = self._processes[rank].pid
            if pid is not None and self._processes[rank].is_alive():
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        for rank in ranks:
            stack = self._stack_path(rank).read_text() if self._stack_path(rank).exists() else ""
            lines.append(f"rank {rank} hangs in:\n{stack}")
        return "\n".join(lines)


def _message(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bytes:
    name = getattr(function, "__qualname__", "")
    if not name or "<" in name:
        raise TypeError(f"{function!r} is not a top-level function, which ranks need to import it by name")
    path = getattr(sys.modules.get(function.__module__), "__file__", None)
    packed = pickle.dumps((arguments, keywords))
    return pickle.dumps((list(sys.path), function.__module__, name, path, packed))


def _raise_first(errors: dict[int, Outcome], problem: str) -> None:
    """Raise the error that came first; the others are usually its consequences and go into its notes."""
    rank = min(errors, key=lambda each: errors[each].moment)
    error = errors[rank].error
    assert error is not None
    error.add_note(f"raised on rank {rank}:\n{errors[rank].trace}")
    for other, outcome in errors.items():
        if other != rank:
            error.add_note(f"rank {other} raised {type(outcome.error).__name__}: {outcome.error}")
    if problem:
        error.add_note(problem)
    raise error


_worlds: dict[int, World] = {}


def world(size: int) -> World:
    """The session's world of `size` ranks (1 to 8)."""
    if not 1 <= size <= 8:
        raise ValueError(f"a world has 1 to 8 ranks, not {size}")
    if size not in _worlds:
        _worlds[size] = World(size)
    return _worlds[size]


def _make_room(wanted: World) -> None:
    """End the worlds that were not used for longest, so that at most `MOST_RANKS_ALIVE` ranks are alive."""
    others = [each for each in _worlds.values() if each.alive and each is not wanted]
    others.sort(key=lambda each: each.used)
    while others and wanted.size + sum(each.size for each in others) > MOST_RANKS_ALIVE:
        others.pop(0).stop()


def stop_all() -> None:
    """End every world."""
    for each in _worlds.values():
        each.stop()


atexit.register(stop_all)
