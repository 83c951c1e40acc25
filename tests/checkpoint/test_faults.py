"""What goes wrong around a save or a load, each injected: the newest complete checkpoint loads, or one error says why not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from onecopy.checkpoint import export
from onecopy.checkpoint import folder as folders
from onecopy.checkpoint.manifest import Manifest
from onecopy.errors import CheckpointError
from tests.checkpoint import small


def save_each_step(directory: str | Path, stage: int, steps: int, **options: Any) -> list[float]:
    """Train and save after every step; the losses of the steps and of two more."""
    engine = small.make_engine(stage, **options)
    losses = []
    for step in range(steps):
        losses += small.train(engine, step, step + 1)
        engine.save_checkpoint(directory)
    losses += small.train(engine, steps, steps + 2)
    engine.destroy()
    return losses


def load_newest(directory: str | Path, stage: int, tag: Any = None, **options: Any) -> tuple[str | None, list[float]]:
    engine = small.make_engine(stage, seed=5, **options)
    try:
        path, _ = engine.load_checkpoint(directory, tag)
        return path and Path(path).name, small.train(engine, engine.global_steps, engine.global_steps + 2)
    finally:
        engine.destroy()


@pytest.fixture
def two(world1, tmp_path: Path) -> tuple[Path, list[float]]:
    """A folder with checkpoints of steps 1 and 2, and the losses of four steps."""
    (losses,) = world1.run(save_each_step, tmp_path, 2, 2)
    return tmp_path, losses


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 7)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def flip_the_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES = [(damage, "__0_0.distcp") for damage in (truncate, flip_a_bit, flip_the_last_bit, Path.unlink)]
DAMAGES += [(damage, "manifest.json") for damage in (truncate, flip_a_bit, flip_the_last_bit, Path.unlink)]
DAMAGES += [(truncate, "state.pt"), (flip_a_bit, "state.pt"), (Path.unlink, "rank_00000.pt"), (flip_a_bit, ".metadata")]


@pytest.mark.parametrize(("damage", "file"), DAMAGES)
def test_damage_is_found_and_the_one_before_loads(world1, two: Any, capfd: Any, damage: Any, file: str) -> None:
    directory, losses = two
    damage(directory / "global_step2" / file)
    ((loaded, continued),) = world1.run(load_newest, directory, 2)
    assert loaded == "global_step1"
    assert continued == losses[1:3]
    with pytest.raises(CheckpointError, match=r"global_step2.*complete tags.*global_step1"):
        world1.run(load_newest, directory, 2, "global_step2")


def test_every_byte_counts(two: Any) -> None:
    directory, _ = two
    path = directory / "global_step2"
    manifest = Manifest.read(path)
    assert manifest.problems(path) == []
    data = (path / "__0_0.distcp").read_bytes()
    for position in range(0, len(data), 997):
        changed = bytearray(data)
        changed[position] ^= 16
        (path / "__0_0.distcp").write_bytes(changed)
        (problem,) = manifest.problems(path, ["__0_0.distcp"])
        if " in model." in problem:  # an export reads the weights only
            with pytest.raises(CheckpointError, match=r"nothing was exported.*__0_0.*damaged in model\..*global_step1"):
                export(directory, directory / "out")
            assert os.listdir(directory / "out") == []


def test_what_a_killed_job_left_goes(tmp_path: Path) -> None:
    own, dead = folders.temporary_name("latest"), folders.temporary_name("tag").replace(str(os.getpid()), "99999999")
    for name in (own, f"{dead}0"):
        (tmp_path / name).write_text("global_step1")
    (tmp_path / dead).mkdir()
    (tmp_path / dead / "state.pt").touch()
    folders.clear_leftovers(tmp_path)
    assert os.listdir(tmp_path) == [own]


def test_folders_that_hold_something_else_are_named(tmp_path: Path) -> None:
    for name in (
        "hub/model.safetensors",
        "torch/.metadata",
        "half/.metadata",
        "half/state.pt",
        "deepspeed/t/mp_rank_00_model_states.pt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert "onecopy.load_pretrained(engine, " in folders.describe_tags(tmp_path / "hub")
    assert "dcp_to_torch" in folders.describe_tags(tmp_path / "torch")
    assert "import-deepspeed" in folders.describe_tags(tmp_path / "deepspeed")
    assert folders.describe_tags(tmp_path / "half").endswith(": none")
    (tmp_path / "run" / "checkpoints" / "step1").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step1" / "manifest.json").touch()
    assert folders.describe_tags(tmp_path / "run").endswith(
        f"there are checkpoints in {tmp_path}/run/checkpoints: give that folder"
    )
    (tmp_path / "link").symlink_to(tmp_path / "deleted" / "meanwhile")
    folders.make_folder(tmp_path / "link")
    assert (tmp_path / "deleted" / "meanwhile").is_dir()


def test_missing_tags(world1, two: Any, tmp_path: Path) -> None:
    directory, _ = two
    (directory / "half").mkdir()
    with pytest.raises(
        CheckpointError,
        match=r"there is no checkpoint 'step9'.*complete tags in .*: global_step1, global_step2; without manifest: half",
    ):
        world1.run(load_newest, directory, 2, "step9")
    with pytest.raises(CheckpointError, match="has no manifest"):
        world1.run(load_newest, directory, 2, "half")
    empty = tmp_path / "nothing here"
    assert world1.run(load_newest, empty, 2)[0][0] is None
    with pytest.raises(CheckpointError, match="does not exist"):
        world1.run(load_newest, empty, 2, "latest")


def test_latest_is_followed_repaired_and_overtaken(world1, two: Any) -> None:
    directory, losses = two
    folders.write_latest(directory, "global_step1")  # somebody goes back on purpose
    assert world1.run(load_newest, directory, 2)[0] == ("global_step1", losses[1:3])
    os.utime(directory / "latest", ns=(0, 0))  # a crash came between the rename and `latest`
    assert world1.run(load_newest, directory, 2)[0][0] == "global_step2"
    (directory / "latest").unlink()
    (directory / "latest").mkdir()  # no file can take its place: the checkpoint counts without it
    world1.run(save_each_step, directory, 2, 3)
    assert world1.run(load_newest, directory, 2)[0][0] == "global_step3" and len(os.listdir(directory)) == 4
    (directory / "latest").rmdir()
    shutil.rmtree(directory / "global_step3")
    assert world1.run(load_newest, directory, 2, "latest")[0][0] == "global_step2"
    (directory / "latest").write_text("gone")
    assert world1.run(load_newest, directory, 2)[0][0] == "global_step2"


def save_on_one_rank(directory: str, flag: str) -> tuple[str, float]:
    engine = small.make_engine(3, onecopy={"timeout_seconds": 2})
    small.train(engine, 0, 1)
    message, seconds = "", 0.0
    if torch.distributed.get_rank() == 0:
        started = time.monotonic()
        try:
            engine.save_checkpoint(directory)
        except CheckpointError as error:
            message = str(error)
        seconds = time.monotonic() - started
        Path(flag).touch()
    while not Path(flag).exists():
        time.sleep(0.02)
    engine.save_checkpoint(directory, "together")  # the ranks are in step again
    engine.destroy()
    return message, seconds


def test_save_on_one_rank_only_is_named(world2, tmp_path: Path) -> None:
    (message, seconds), _ = world2.run(save_on_one_rank, str(tmp_path / "run"), str(tmp_path / "flag"))
    assert "save_checkpoint was called by rank 0 and not by 1" in message and "if rank == 0" in message
    assert seconds < 8
    assert sorted(folders.tags(tmp_path / "run")) == ["together"]


def save_with_client_state(directory: str, client_state: Any) -> Any:
    engine = small.make_engine(1)
    try:
        engine.save_checkpoint(directory, "one", client_state)
        return engine.load_checkpoint(directory, "one")[1]
    finally:
        engine.destroy()


def test_client_state(world1, tmp_path: Path) -> None:
    import numpy

    given = {"epoch": 3, "best": numpy.float64(1.5), "nested": {"t": torch.arange(3), "x": (1, [2.0])}}
    (back,) = world1.run(save_with_client_state, str(tmp_path), given)
    assert back["best"] == 1.5 and type(back["best"]) is float and back["nested"]["x"] == (1, [2.0])
    assert torch.equal(back["nested"]["t"], torch.arange(3)) and set(back) == set(given)
    with pytest.raises(CheckpointError, match=r"'module', 'optimizer', which the engine's own state has"):
        world1.run(save_with_client_state, str(tmp_path / "refused"), {"module": 1, "optimizer": 2})
    with pytest.raises(CheckpointError, match=r"client_state\['args'\] is a argparse.Namespace.*vars"):
        import argparse

        world1.run(save_with_client_state, str(tmp_path / "refused"), {"args": argparse.Namespace(x=1)})
    assert not (tmp_path / "refused").exists()


def save_with_tag(directory: str, tag: Any) -> None:
    engine = small.make_engine(1)
    try:
        engine.save_checkpoint(directory, tag)
    finally:
        engine.destroy()


@pytest.mark.parametrize("tag", ["", "a/b", "..", "latest", ".hidden", "x" * 300])
def test_bad_tags(world1, tmp_path: Path, tag: str) -> None:
    with pytest.raises(CheckpointError, match="tag"):
        world1.run(save_with_tag, str(tmp_path / "run"), tag)
    assert not (tmp_path / "run").exists()


def relative(directory: str) -> list[str]:
    os.chdir(directory)
    engine = small.make_engine(2)
    engine.save_checkpoint("a run/ünïcode ✓", tag=7)
    engine.save_checkpoint(Path("a run") / "again")
    engine.save_checkpoint("link", tag="through the link")
    found = [engine.load_checkpoint("./a run/ünïcode ✓/", 7)[0], engine.load_checkpoint(Path("a run/again"))[0]]
    found += [engine.load_checkpoint("link")[0], engine.load_checkpoint("link/through the link")[0]]
    inner = [engine.load_checkpoint(f"link/{file}")[0] for file in ("latest", "through the link/state.pt")]
    assert inner == found[2:]
    Path(f"{engine.global_rank}.bin").touch()
    with pytest.raises(CheckpointError, match=r"\.bin is a file and in no checkpoint.*load_pretrained"):
        engine.load_checkpoint(f"{engine.global_rank}.bin")
    engine.destroy()
    return [os.path.relpath(path) for path in found]


def test_paths_of_all_kinds(world2, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    for found in world2.run(relative, str(tmp_path)):
        assert found == [
            "a run/ünïcode ✓/7",
            "a run/again/global_step0",
            "link/through the link",
            "link/through the link",
        ]
    assert (tmp_path / "elsewhere" / "through the link" / "manifest.json").is_file()


def different_tags(directory: str, validation: str) -> str:
    engine = small.make_engine(2, checkpoint={"tag_validation": validation})
    try:
        engine.save_checkpoint(directory, f"tag{torch.distributed.get_rank()}")
        return "saved"
    except CheckpointError as error:
        return str(error)
    finally:
        engine.destroy()


def test_tags_that_differ_between_ranks(world2, tmp_path: Path) -> None:
    assert all(
        "rank 0: 'tag0', rank 1: 'tag1'" in message for message in world2.run(different_tags, str(tmp_path), "Fail")
    )
    assert world2.run(different_tags, str(tmp_path), "Warn") == ["saved", "saved"]
    assert sorted(folders.tags(tmp_path)) == ["tag0"]


def keep_two(directory: str) -> None:
    engine = small.make_engine(2, checkpoint={"keep_last": 2})
    Path(directory, "notes").mkdir(parents=True, exist_ok=True)
    for step in range(4):
        engine.save_checkpoint(directory, f"s{step}")
    engine.save_checkpoint(directory, "s3")  # the same tag again
    engine.save_checkpoint(directory, "best", save_latest=False)
    engine.save_checkpoint(directory, "better", save_latest=False)
    engine.destroy()


def test_retention_and_saving_a_tag_again(world2, tmp_path: Path) -> None:
    world2.run(keep_two, str(tmp_path))
    assert (tmp_path / "latest").read_text() == "s3"
    assert sorted(os.listdir(tmp_path)) == ["best", "better", "latest", "notes", "s3"]
    assert all(Manifest.read(path).problems(path) == [] for path in folders.tags(tmp_path).values())


def two_jobs(directory: str) -> list[str]:
    """Each rank is a job of its own, saving the same tag into the same folder."""
    import onecopy

    alone = [torch.distributed.new_group([rank]) for rank in range(2)][torch.distributed.get_rank()]

    class Alone:
        def get_data_parallel_group(self) -> Any:
            return alone

    engine = onecopy.initialize(model=small.make_model(), config=small.config(2), mpu=Alone())[0]
    for step in range(6):
        engine.save_checkpoint(directory, f"s{step % 3}")
    engine.destroy()
    return sorted(os.listdir(directory))


def test_two_jobs_in_one_folder(world2, tmp_path: Path) -> None:
    world2.run(two_jobs, str(tmp_path), stray_groups=True)
    paths = folders.tags(tmp_path)
    assert sorted(paths) == ["s0", "s1", "s2"]
    assert all(Manifest.read(path).problems(path) == [] for path in paths.values())


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_new_tag_put_in_place_twice_at_once(
    tmp_path: Path, can_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither save finds the tag, both put theirs in place: one of the two is there, whole, and no save has failed."""
    if not can_exchange:  # a system that cannot swap two folders in one step
        monkeypatch.setattr(folders, "_exchange", lambda first, second: False)
    for number in range(100):
        final, together = tmp_path / f"tag{number}", threading.Barrier(2)

        def save(name: str, final: Path = final, together: threading.Barrier = together) -> None:
            temporary = tmp_path / folders.temporary_name(name)
            temporary.mkdir()
            (temporary / "whose").write_text(name)
            together.wait()
            folders.put_in_place(temporary, final)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(save, ("a", "b")))
        assert (final / "whose").read_text() in ("a", "b")
    assert sorted(os.listdir(tmp_path)) == sorted(f"tag{number}" for number in range(100))


def on_two_nodes(directory: str, local: bool, tag: Any = None) -> Any:
    """Ranks 0, 1 and ranks 2, 3 each see a folder of their own."""
    rank = torch.distributed.get_rank()
    engine = small.make_engine(3, checkpoint={"use_node_local_storage": local}, onecopy={"timeout_seconds": 4})
    here = os.path.join(directory, f"node{rank // 2}")
    try:
        if tag is None:
            small.train(engine, 0, 2)
            engine.save_checkpoint(here)
        else:
            engine.load_checkpoint(here, tag)
        return small.train(engine, 2, 4)
    except CheckpointError as error:
        return str(error)
    finally:
        engine.destroy()


def test_nodes_that_share_no_folder(world4, tmp_path: Path) -> None:
    for message in world4.run(on_two_nodes, str(tmp_path), False):
        assert "does not see the folder" in message and "use_node_local_storage" in message
    saved = world4.run(on_two_nodes, str(tmp_path), True)
    assert sorted(p.name for p in (tmp_path / "node1" / "global_step2").glob("*.distcp")) == [
        "__2_0.distcp",
        "__3_0.distcp",
    ]
    assert world4.run(on_two_nodes, str(tmp_path), True, "global_step2") == saved
    (tmp_path / "node1" / "global_step2" / "__3_0.distcp").unlink()
    for message in world4.run(on_two_nodes, str(tmp_path), True, "global_step2"):
        assert "__3_0.distcp (written by rank 3" in message and "missing" in message


@pytest.mark.parametrize("rounds", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_at_any_moment(tmp_path: Path, rounds: int) -> None:
    program = Path(__file__).with_name("kill_loop.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), str(rounds), "1"],
        capture_output=True, text=True, timeout=60 + 20 * rounds, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{rounds} rounds" in done.stdout
