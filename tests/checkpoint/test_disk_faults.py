"""Disks that refuse, fill up or lie, as the system itself brings it about: the checkpoints before stay what they were."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from onecopy.checkpoint import export
from onecopy.checkpoint import folder as folders
from onecopy.checkpoint.manifest import Manifest
from onecopy.errors import CheckpointError
from tests.checkpoint import small

NOBODY = 65534


def message_of(work: Any, *arguments: Any) -> str:
    try:
        work(*arguments)
        return ""
    except CheckpointError as error:
        return str(error)


def save_as_nobody(directory: str) -> tuple[str, ...]:
    engine = small.make_engine(3)
    engine.save_checkpoint(directory, "before")
    engine.save_checkpoint(directory, "closed", save_latest=False)
    os.chmod(directory, 0o555)
    os.chmod(f"{directory}/closed", 0)
    os.seteuid(NOBODY)  # the superuser may write anywhere
    try:
        assert engine.load_checkpoint(directory)[0] == f"{directory}/before"
        return tuple(message_of(work, directory, "closed") for work in (engine.save_checkpoint, engine.load_checkpoint))
    finally:
        os.seteuid(0)
        engine.destroy()


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can become somebody else")
def test_a_read_only_folder(world2) -> None:
    directory = tempfile.mkdtemp()
    try:
        for saved, loaded in world2.run(save_as_nobody, directory):
            assert "cannot be written to" in saved and "Permission denied" in saved
            assert "closed is no complete checkpoint: manifest.json cannot be read (Permission denied)" in loaded
        assert sorted(os.listdir(directory)) == ["before", "closed", "latest"]
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", str(path)], capture_output=True)
    if done.returncode:
        pytest.skip("file systems cannot be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def save_until_full(directory: str) -> tuple[int, str, list[float], list[float]]:
    engine = small.make_engine(2)
    for step in range(40):
        expected = small.train(engine, step, step + 1)
        message = message_of(engine.save_checkpoint, directory)
        if message:
            break
    loaded, _ = engine.load_checkpoint(directory)
    assert loaded == f"{directory}/global_step{step}"
    again = small.train(engine, step, step + 1)
    engine.destroy()
    return step, message, expected, again


def test_a_full_disk(world2, small_disk: Path) -> None:
    for step, message, expected, again in world2.run(save_until_full, str(small_disk)):
        assert 0 < step < 39 and "No space left on device" in message and f"global_step{step}" in message
        assert again == expected  # the last complete one loads, and training goes on from it
    paths = folders.tags(small_disk)
    assert sorted(os.listdir(small_disk)) == sorted([*paths, "latest"])
    assert all(Manifest.read(path).problems(path) == [] for path in paths.values())
    (small_disk / "out" / "deep").mkdir(parents=True)
    with open(small_disk / "rest", "wb", buffering=0) as rest, pytest.raises(OSError, match="No space left"):
        while True:
            rest.write(bytes(4096))
    with pytest.raises(CheckpointError, match="nothing was exported to .*No space left"):
        export(small_disk, small_disk / "out" / "deep", "fp32")
    assert os.listdir(small_disk / "out" / "deep") == []


def save_into(directory: str, fail_on: int | None = None, error: int = 28) -> str:
    """Save; rank `fail_on` meets an error of the system at its first write of tensors."""
    import onecopy.checkpoint.file_writer as files

    engine = small.make_engine(3)
    small.train(engine, 0, 1)
    write_all = files.write_all

    def failing(descriptor: int, content: memoryview, position: int) -> None:
        raise OSError(error, os.strerror(error))

    if torch.distributed.get_rank() == fail_on:
        files.write_all = failing
    try:
        engine.save_checkpoint(directory)
        return "saved"
    except CheckpointError as problem:
        return str(problem)
    finally:
        files.write_all = write_all
        engine.destroy()


def test_full_disk_on_one_rank_is_said_on_all(world2, tmp_path: Path) -> None:
    assert world2.run(save_into, str(tmp_path)) == ["saved", "saved"]
    before = sorted(os.listdir(tmp_path))
    os.rename(tmp_path / "global_step1", tmp_path / "first")
    for message in world2.run(save_into, str(tmp_path), 1):
        assert "rank 1" in message and "No space left on device" in message and "complete tags" in message
    assert sorted(os.listdir(tmp_path)) == ["first", "latest"] and before == ["global_step1", "latest"]


def test_a_folder_that_cannot_be_made(world2, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for message in world2.run(save_into, str(tmp_path / "file" / "run")):
        assert "cannot be" in message and "Not a directory" in message


def test_no_permission_as_the_system_says_it(world2, tmp_path: Path) -> None:
    for message in world2.run(save_into, str(tmp_path), 0, 13):
        assert "rank 0" in message and "Permission denied" in message


def save_on_a_disk_that_lies(directory: str, reads_back: bool) -> tuple[str, str]:
    """Rank 1's disk keeps one bit other than it was given."""
    import onecopy.checkpoint.file_writer as files

    engine = small.make_engine(3, checkpoint={"verify_after_save": reads_back})
    engine.save_checkpoint(directory, "before")
    write_all = files.write_all

    def lying(descriptor: int, content: memoryview, position: int) -> None:
        changed = bytearray(content)
        if len(changed) > 2000:
            changed[2000] ^= 8
        write_all(descriptor, changed, position)

    if torch.distributed.get_rank() == 1:
        files.write_all = lying
    try:
        return message_of(engine.save_checkpoint, directory, "after"), message_of(
            engine.load_checkpoint, directory, "after"
        )
    finally:
        files.write_all = write_all
        engine.destroy()


@pytest.mark.parametrize("reads_back", [True, False])
def test_a_disk_that_lies(world2, tmp_path: Path, reads_back: bool) -> None:
    for saving, loading in world2.run(save_on_a_disk_that_lies, str(tmp_path), reads_back):
        if reads_back:
            assert "rank 1: what was written reads back as something else: __1_0.distcp" in saving
            assert "there is no checkpoint 'after'" in loading
        else:
            assert saving == "" and "'after' is damaged (__1_0.distcp (written by rank 1" in loading
    assert (tmp_path / "latest").read_text() == ("before" if reads_back else "after")


def save_through_small_windows(directory: str, system: str) -> tuple[str, str, bool]:
    """Files many times larger than what may be on its way to the disk, on systems that know ranges, do not, or lose one."""
    import onecopy.checkpoint.file_writer as files

    def lost(*range_of: Any) -> int:
        ctypes.set_errno(errno.EIO)
        return -1

    before = files.CHUNK_BYTES, files.WINDOW_BYTES, files._sync_file_range
    files.CHUNK_BYTES, files.WINDOW_BYTES = 4096, 8192
    if system != "linux":
        files._sync_file_range = {"other": None, "lost": lost}[system]
    engine = small.make_engine(2, "bf16")
    try:
        small.train(engine, 0, 1)
        saving = message_of(engine.save_checkpoint, directory)
        exporting = message_of(engine.save_16bit_model, f"{directory}/out", "model.safetensors")
    finally:
        files.CHUNK_BYTES, files.WINDOW_BYTES, files._sync_file_range = before
    expected = small.train(engine, 1, 3)
    if not saving:
        engine.load_checkpoint(directory)
    same = bool(saving) or small.train(engine, 1, 3) == expected
    engine.destroy()
    return saving, exporting, same


@pytest.mark.parametrize("system", ["linux", "other", "lost"])
def test_files_larger_than_the_window(world2, tmp_path: Path, system: str) -> None:
    for saving, exporting, same in world2.run(save_through_small_windows, str(tmp_path), system):
        assert same
        assert [("Input/output error" in message) for message in (saving, exporting)] == [system == "lost"] * 2
    if system == "lost":
        assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == []
        return
    path = tmp_path / "global_step1"
    assert Manifest.read(path).problems(path) == []
    export(tmp_path, tmp_path / "again", "as-trained")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
