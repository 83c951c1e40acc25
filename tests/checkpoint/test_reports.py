"""Kinds of failures that people reported of other engines' checkpoints and that no other file here provokes.

folders on slow network file systems      test_a_folder_that_shows_late
time limits while another rank writes     test_a_slow_rank_is_waited_for
saves after a load elsewhere              test_a_save_after_a_load_elsewhere_is_whole
conversions that need the whole model     test_an_export_holds_blocks_only
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from onecopy.checkpoint import export
from onecopy.checkpoint.manifest import Manifest
from tests.checkpoint import small


def save_where_folders_show_late(directory: str) -> int:
    """Rank 0 alone may make folders; rank 1 sees them half a second later."""
    import onecopy.checkpoint.folder as folder
    import onecopy.checkpoint.save as save

    engine = small.make_engine(3)
    started, is_dir, made = time.monotonic(), Path.is_dir, [0]
    make_folder = folder.make_folder

    def late(path: Path) -> bool:
        return time.monotonic() > started + 0.5 and is_dir(path)

    def counted(path: Path) -> None:
        made[0] += 1
        make_folder(path)

    folder.make_folder = counted
    if torch.distributed.get_rank() == 1:
        save.Path.is_dir = late
    try:
        engine.save_checkpoint(directory, "late")
    finally:
        Path.is_dir, folder.make_folder = is_dir, make_folder
        engine.destroy()
    return made[0]


def test_a_folder_that_shows_late(world2, tmp_path: Path) -> None:
    assert world2.run(save_where_folders_show_late, str(tmp_path / "new" / "run")) == [1, 0]
    assert Manifest.read(tmp_path / "new" / "run" / "late").world_size == 2


def save_with_a_slow_rank(directory: str) -> float:
    """Rank 0 takes longer over its files than the time limit; it is at work, so nobody gives up."""
    import onecopy.checkpoint.save as save

    engine = small.make_engine(2, onecopy={"timeout_seconds": 3})
    inner = save.write_pieces

    def slow(*arguments: Any) -> None:
        for _ in range(10):
            time.sleep(0.5)
            arguments[-1]()
        inner(*arguments)

    if torch.distributed.get_rank() == 0:
        save.write_pieces = slow
    started = time.monotonic()
    try:
        engine.save_checkpoint(directory)
        small.train(engine, 0, 1)
    finally:
        save.write_pieces = inner
        engine.destroy()
    return time.monotonic() - started


def test_a_slow_rank_is_waited_for(world2, tmp_path: Path) -> None:
    assert min(world2.run(save_with_a_slow_rank, str(tmp_path))) > 5


def export_to_a_slow_disk(directory: str) -> int:
    """Rank 0 forces every file to the disk, and each takes a while: more in all than the others wait for a silent rank."""
    import onecopy.checkpoint.weight_files as weight_files

    export = sys.modules["onecopy.checkpoint.export"]  # the package has a function of that name

    engine = small.make_engine(1, "bf16", onecopy={"timeout_seconds": 2})
    bytes_of, sync = export.bytes_of, os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(0.6)
        sync(descriptor)

    weight_files.os.fsync, export.bytes_of = slow, lambda size: 2500
    try:
        assert engine.save_16bit_model(directory, "model.safetensors")
    finally:
        weight_files.os.fsync, export.bytes_of = sync, bytes_of
        engine.destroy()
    return len(list(Path(directory).glob("*.safetensors")))


@pytest.mark.slow
def test_a_slow_disk_is_waited_for(world2, tmp_path: Path) -> None:
    assert world2.run(export_to_a_slow_disk, str(tmp_path))[0] > 4


def load_and_save_again(first: str, second: str) -> list[float]:
    engine = small.make_engine(3, seed=4)
    engine.load_checkpoint(first)
    engine.save_checkpoint(second)
    losses = small.train(engine, 3, 5)
    engine.destroy()
    return losses


def test_a_save_after_a_load_elsewhere_is_whole(world, tmp_path: Path) -> None:
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    world(2).run(small.run_and_save, first, 1, "fp32")
    losses = world(3).run(load_and_save_again, first, second)[0]
    assert world(2).run(load_and_save_again, second, third)[0] == pytest.approx(losses, rel=1e-5)
    origin, last = Manifest.read(Path(first, "global_step3")), Manifest.read(Path(third, "global_step3"))
    assert last.problems(Path(third, "global_step3")) == []
    assert set(last.tensors) == set(origin.tensors) and last.model == origin.model
    assert all(last.tensors[key].shape == entry.shape for key, entry in origin.tensors.items())


def test_an_export_holds_blocks_only(world1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest read is a block, however large the tensor, and the file is the same."""
    world1.run(small.run_and_save, str(tmp_path), 3, "fp32")
    export(tmp_path, tmp_path / "whole", "fp16")
    read, sizes = os.preadv, []

    def counted(descriptor: int, buffers: Any, position: int) -> int:
        sizes.extend(len(buffer) for buffer in buffers)
        return read(descriptor, buffers, position)

    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(sys.modules[export.__module__], "_BLOCK", 100)
    export(tmp_path, tmp_path / "blocks", "fp16")
    assert max(sizes) == 100 * 4 < 37 * small.WIDTH * 4  # bytes of fp32
    name = "model.safetensors"
    assert (tmp_path / "blocks" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
