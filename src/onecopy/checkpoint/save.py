"""Save: every rank writes its pieces under a temporary name; when all is on the disk, one rename makes it a checkpoint.

        all ranks      meet, compare tags; rank 0 makes the temporary folder
        each rank      its pieces and random generators into files of its own, forced to the disk
        the leader     state, metadata and manifest; rename to the tag; `latest`; old checkpoints go
        all ranks      wait for the leader's word

The leader is rank 0, or the lowest rank on each node where nodes do not share the folder. A crash at any moment leaves
the checkpoints that were there before as they were.
"""

from __future__ import annotations

import gc
import os
import platform
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from onecopy.checkpoint import dcp, folder, manifest, random_state, state
from onecopy.checkpoint.manifest import Manifest, ModelEntry, file_problems
from onecopy.checkpoint.meeting import Meeting, StoreLost
from onecopy.checkpoint.pieces import Piece, model_entries, model_pieces, optimizer_pieces
from onecopy.checkpoint.writer import Written, write_file, write_pieces
from onecopy.errors import CheckpointError
from onecopy.observe.log import note, warn

if TYPE_CHECKING:
    from onecopy.engine import Engine


@dataclass
class Job:
    """One save of one rank, all that is needed without the engine.

    Attributes:
        directory: the folder of checkpoints.
        temporary: name of the folder written into.
        members: the ranks that see the same folder as this one; the lowest leads.
        reads_back: compare every byte with its checksum before the checkpoint takes its place.
    """

    meeting: Meeting
    directory: Path
    tag: str
    temporary: str
    members: list[int]
    pieces: Iterable[Piece]
    values: dict[str, Any]
    numbers: list[str]
    state: bytes
    own_state: bytes
    model: dict[str, ModelEntry]
    head: dict[str, Any]
    moves_latest: bool
    keep_last: int | None
    companions: dict[str, bytes] = field(default_factory=dict)
    reads_back: bool = False

    @property
    def leads(self) -> bool:
        return self.meeting.rank == min(self.members)


class Saver:
    """Saves one engine's checkpoints, one after the other."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.count = 0
        self._previous: Meeting | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(
        self,
        directory: str | os.PathLike[str],
        tag: object = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """See `Engine.save_checkpoint`."""
        self.wait()
        job = self._prepare(folder.absolute(directory), tag, client_state, save_latest)
        if exclude_frozen_parameters:
            frozen = {f"model.{name}" for name, entry in job.model.items() if entry.kind == "frozen"}
            job.pieces = [piece for piece in job.pieces if piece.key not in frozen]
            job.model = {name: entry for name, entry in job.model.items() if entry.kind != "frozen"}
        if self.engine.configuration.checkpoint.async_save:
            self._start(job)
        else:
            with _no_collections():
                write(job)
        return True

    def wait(self) -> None:
        """Wait for a save under way; raises what it failed with."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"the asynchronous save before this call failed: {failure}") from failure

    def _start(self, job: Job) -> None:
        """Copy the pieces and write them in a thread, which the interpreter waits for at its exit."""
        job.pieces = [Piece(p.key, p.shape, p.start, p.data.detach().to("cpu", copy=True)) for p in job.pieces]
        job.meeting.in_thread()

        def work() -> None:
            try:
                write(job)
            except BaseException as error:
                self._failure = error
                warn(f"the asynchronous save of checkpoint '{job.tag}' failed: {error}", every_rank=True)

        self._thread = threading.Thread(target=work, name=f"onecopy save {job.tag}")
        self._thread.start()

    def _prepare(self, directory: Path, tag: object, client_state: Any, save_latest: bool) -> Job:
        """Meet, agree on tag and folder, and take down what is to be written."""
        engine, communicator = self.engine, self.engine.communicator
        wanted = f"global_step{engine.global_steps}" if tag is None else str(tag)
        problem, common = "", b""
        try:
            wanted = folder.checked_tag(wanted)
            client = state.check_client_state(client_state)
            common = state.to_bytes(state.common_state(engine, client))
        except CheckpointError as error:
            problem = str(error)
        buffers = state.checksums_of_buffers(engine)
        meeting = Meeting(communicator, "save_checkpoint", self.count, timeout_of(engine))
        arrivals = meeting.arrive({"tag": wanted, "problem": problem, "buffers": buffers})
        self.count += 1
        if self._previous is not None:
            self._previous.leave()
        self._previous = meeting
        raise_first(arrivals)
        tag_text = self._agreed_tag([arrival["tag"] for arrival in arrivals])
        temporary, members = make_temporary(
            meeting, directory, tag_text, engine.configuration.checkpoint.use_node_local_storage
        )
        pieces = list(model_pieces(engine, members))
        states, values, numbers = optimizer_pieces(engine, everybody=len(members) < communicator.world_size)
        zero = engine.configuration
        precision = "fp16" if zero.fp16.enabled else "bf16" if zero.bf16.enabled else "fp32"
        head = {
            "identity": temporary,
            "world_size": communicator.world_size,
            "stage": zero.zero.stage,
            "precision": precision,
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
        }
        # Rank 0's too: the files of nodes that share no folder may be moved into one.
        shared = [arrivals[rank]["buffers"] for rank in {0, members[0]}]
        own = state.to_bytes(state.own_state(engine, buffers, *shared))
        return Job(
            meeting, directory, tag_text, temporary, members, pieces + states, values, numbers, common, own, model_entries(engine), head,
            save_latest, zero.checkpoint.keep_last, companions(engine), zero.checkpoint.verify_after_save,
        )  # fmt: skip

    def _agreed_tag(self, asked: list[str]) -> str:
        validation = self.engine.configuration.checkpoint.tag_validation.lower()
        if len(set(asked)) > 1:
            text = f"ranks save under different tags: {', '.join(f'rank {r}: {t!r}' for r, t in enumerate(asked[:8]))}"
            if validation == "fail":
                raise CheckpointError(f"{text}; give the same tag on every rank (checkpoint.tag_validation is 'Fail')")
            if validation == "warn":
                warn(f"{text}; rank 0's is taken, as a checkpoint is one folder")
        return asked[0]


@contextmanager
def _no_collections() -> Iterator[None]:
    """Without garbage collection: what a save makes all lives to its end, and makes Python search the whole program in vain.

    That search takes 0.2 s where transformers is imported.
    """
    runs = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if runs:
            gc.enable()


def timeout_of(engine: Engine) -> float:
    """Seconds a rank waits for another that gives no sign of life."""
    return float(engine.configuration.onecopy.timeout_seconds or 120.0)


def raise_first(arrivals: list[Any]) -> None:
    """Raise on every rank what one of them met."""
    for rank, arrival in enumerate(arrivals):
        if arrival["problem"]:
            where = f"rank {rank}: " if len(arrivals) > 1 else ""
            raise CheckpointError(where + arrival["problem"])


def make_temporary(meeting: Meeting, directory: Path, tag: str, per_node: bool) -> tuple[str, list[int]]:
    """Make the folder to write into; returns its name and the ranks that see it as this one does. All ranks call it.

    One rank makes a shared folder, so that a slow network file system sees no race; with `per_node` every rank makes it
    where it is missing, and ranks find out by looking who shares it with them.
    """
    problem, name = "", ""
    if meeting.rank == 0:
        name = folder.temporary_name(tag)
        problem = _made(directory, name, clear=True)
    name, problem = meeting.of_rank("folder", 0) if meeting.rank else _published(meeting, "folder", [name, problem])
    if problem:
        raise CheckpointError(problem)
    path = directory / name
    if per_node and meeting.rank:
        problem = _made(directory, name)
    deadline = time.monotonic() + min(30.0, meeting.timeout / 2)
    while not problem and not path.is_dir():  # a network file system may show a new folder late
        if time.monotonic() > deadline:
            problem = (
                f"rank {meeting.rank} on {platform.node()} does not see the folder {path} that rank 0 made; give a folder that all nodes "
                'share, or set "checkpoint": {"use_node_local_storage": true}'
            )
        time.sleep(0.01)
    if per_node and not problem:
        (path / f".here-{meeting.rank}").touch()
    raise_first(meeting.exchange("folder seen", {"problem": problem}))
    if not per_node:
        return name, list(range(meeting.world_size))
    members = sorted(int(entry.name.removeprefix(".here-")) for entry in path.glob(".here-*"))
    meeting.exchange("members", members)
    (path / f".here-{meeting.rank}").unlink()
    return name, members


def _published(meeting: Meeting, step: str, value: Any) -> Any:
    meeting.publish(step, value)
    return value


def _made(directory: Path, name: str, clear: bool = False) -> str:
    """Make the temporary folder; returns what is wrong."""
    try:
        folder.make_folder(directory)
        if clear:
            folder.clear_leftovers(directory)
        (directory / name).mkdir(exist_ok=True)
        return ""
    except OSError as error:
        return f"the folder {directory} cannot be written to: {error.strerror or error}"
    except CheckpointError as error:
        return str(error)


# ------------------------------------------------------------------------------------------------------------- writing
def write(job: Job) -> None:
    """Write this rank's files, and lead the rest if it leads. All ranks of the job call it.

    Raises CheckpointError on every rank when one of them failed; the temporary folder is gone then.
    """
    meeting, path = job.meeting, job.directory / job.temporary
    written = Written(values=job.values, numbers=job.numbers)
    problem = ""
    try:
        host = platform.node()
        write_pieces(path, f"__{meeting.rank}_0.distcp", job.pieces, written, meeting.rank, host, meeting.beat)
        write_file(path, random_state.file_name(meeting.rank), job.own_state, written, meeting.rank, host)
        _read_back(job, written, list(written.files))
    except Exception as error:
        problem = cause_of(error, path)
    meeting.publish("files", {"problem": problem, "written": written.to_plain()})
    if job.leads:
        problem = _lead(job, written)
        meeting.publish("done", {"problem": problem})
    answer = _leaders_word(job)
    meeting.part()
    if answer["problem"]:
        raise CheckpointError(
            f"checkpoint '{job.tag}' was not saved: {answer['problem']}; {folder.describe_tags(job.directory)}"
        )


def _read_back(job: Job, written: Written, names: list[str]) -> None:
    """Where the configuration asks for it, compare files just written with their checksums. Raises CheckpointError."""
    if job.reads_back:
        files = {name: written.files[name] for name in names}
        problems = file_problems(job.directory / job.temporary, files, written.tensors, lambda _: job.meeting.beat())
        if problems:
            raise CheckpointError(f"what was written reads back as something else: {'; '.join(problems[:3])}")


def _leaders_word(job: Job) -> dict[str, str]:
    """What the leader says about the end; the folder tells when the leader's process has ended meanwhile, and its store with it."""
    try:
        answer: dict[str, str] = job.meeting.of_rank("done", min(job.members))
        return answer
    except StoreLost as error:
        if (job.directory / job.tag / manifest.NAME).exists() and not (job.directory / job.temporary).exists():
            return {"problem": ""}
        return {"problem": str(error)}


def _lead(job: Job, written: Written) -> str:
    """Complete the checkpoint once all ranks have written; returns what is wrong."""
    path = job.directory / job.temporary
    try:
        answers = job.meeting.collect("files")
        for rank, answer in enumerate(answers):
            if answer["problem"]:
                raise CheckpointError(f"rank {rank}: {answer['problem']}")
        for rank in sorted(range(len(answers)), key=lambda rank: rank not in job.members):
            if rank != job.meeting.rank:
                written.take_in(answers[rank]["written"])
        complete(job, written)
    except Exception as error:
        folder.delete(path) if path.exists() else None
        return cause_of(error, path)
    try:
        if job.moves_latest:
            folder.write_latest(job.directory, job.tag)
        if job.keep_last is not None:
            gone = folder.keep_newest(job.directory, job.keep_last, job.tag)
            if gone:
                note(f"checkpoints beyond the newest {job.keep_last} were deleted: {', '.join(gone)}")
    except (OSError, CheckpointError) as error:
        warn(
            f"checkpoint '{job.tag}' is complete and can be loaded, but what follows a save (`latest`, keep_last) failed: "
            f"{cause_of(error, job.directory / folder.LATEST)}"
        )
    return ""


def complete(job: Job, written: Written) -> None:
    """Write what describes the checkpoint, check that every file has its size, and put it in place."""
    path, rank, host = job.directory / job.temporary, job.meeting.rank, platform.node()
    write_file(path, state.NAME, job.state, written, rank, host)
    for name, content in job.companions.items():
        write_file(path, name, content, written, rank, host)
    write_file(path, dcp.NAME, dcp.metadata_bytes(written.tensors, job.model), written, rank, host)
    _read_back(job, written, [state.NAME, dcp.NAME, *job.companions])
    here = set(job.members)
    for name, entry in written.files.items():
        if entry.rank in here and (path / name).stat().st_size != entry.nbytes:
            raise CheckpointError(
                f"{name} has {(path / name).stat().st_size} bytes after writing {entry.nbytes}; the disk may be full"
            )
    described = Manifest(
        tag=job.tag, saved_at=time.time_ns(), moves_latest=job.moves_latest, model=job.model, tensors=written.tensors,
        files=written.files, values=written.values, numbers=written.numbers, **job.head,
        versions={"torch": torch.__version__, "onecopy": _version()},
    )  # fmt: skip
    write_file(path, manifest.NAME, described.to_json().encode())
    folder.put_in_place(path, job.directory / job.tag)


def _version() -> str:
    import onecopy

    return onecopy.__version__


def cause_of(error: Exception, path: Path) -> str:
    """What went wrong, as a part of a sentence; `path` is where the system names no file."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or path} cannot be written: {error.strerror or error}"
    return f"{type(error).__name__}: {error}"


def companions(engine: Engine) -> dict[str, bytes]:
    """Files that others need beside the weights: a transformers model's configuration."""
    config = getattr(engine.module, "config", None)
    if config is None or not hasattr(config, "to_json_string"):
        return {}
    files = {"config.json": config.to_json_string(use_diff=True).encode()}
    generation = getattr(engine.module, "generation_config", None)
    if generation is not None and hasattr(generation, "to_json_string"):
        files["generation_config.json"] = generation.to_json_string().encode()
    return files
