"""The trainer on real ranks: one curve for every stage and world size, and a command line that ends as promised."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from onecopy.errors import OneCopyError
from onecopy.train.loop import Result, train
from onecopy.train.settings import Settings
from tests.commands import run_python
from tests.worlds import World

GetWorld = Callable[[int], World]
TEXT = "".join(f"{number} and {number + 1} make {2 * number + 1}.\n" for number in range(400))


def settings_for(folder: Path, stage: int = 3) -> Settings:
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT)
    settings = Settings(
        run=str(folder / "run"), data=str(text), context=16, layers=2, heads=2, width=32, steps=8,
        log_every=1, evaluate_every=4, evaluation_sequences=20, sample=10, prompt="1",
    )  # fmt: skip
    settings.config["zero_optimization"]["stage"] = stage
    settings.config["scheduler"]["params"].update(total_num_steps=8, warmup_num_steps=2)
    return settings


def run_once(settings: Settings, resume: bool = False) -> Result:
    return train(settings, resume)


def curve(folder: Path) -> list[float]:
    lines = (folder / "run" / "curve.csv").read_text().splitlines()
    assert lines[0] == "step,kind,loss,learning_rate"
    return [float(line.split(",")[2]) for line in lines[1:]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, world: GetWorld) -> tuple[list[float], Result]:
    folder = tmp_path_factory.mktemp("alone")
    (result,) = world(1).run(run_once, settings_for(folder, stage=0))
    return curve(folder), result


@pytest.mark.parametrize(("stage", "size"), [(3, 1), (0, 2), (1, 2), (2, 2), (3, 2), (3, 3)])
def test_stages_and_world_sizes_give_one_curve(
    tmp_path: Path, world: GetWorld, alone: tuple[list[float], Result], stage: int, size: int
) -> None:
    results = world(size).run(run_once, settings_for(tmp_path, stage))
    expected, result_alone = alone
    assert curve(tmp_path) == pytest.approx(expected, rel=1e-4)
    assert len(expected) == 8 + 2  # every step, and two evaluations
    assert len({(result.training_loss, result.validation_loss, result.sample) for result in results}) == 1
    assert results[0].validation_loss == pytest.approx(result_alone.validation_loss, rel=1e-4)
    assert results[0].sample.startswith("1") and len(results[0].sample) == 11


@pytest.mark.parametrize(("first", "second"), [((3, 2), (3, 2)), ((3, 2), (1, 3)), ((0, 1), (3, 2))])
def test_a_resumed_run_goes_on_with_the_same_curve(
    tmp_path: Path,
    world: GetWorld,
    alone: tuple[list[float], Result],
    first: tuple[int, int],
    second: tuple[int, int],
) -> None:
    half = settings_for(tmp_path, first[0])
    half.steps = 4
    world(first[1]).run(run_once, half)
    whole = settings_for(tmp_path, second[0])
    result = world(second[1]).run(run_once, whole, resume=True)[0]
    assert curve(tmp_path) == pytest.approx(alone[0], rel=1e-4)
    assert result.checkpoint.endswith("global_step8") and Path(result.checkpoint).is_dir()


def test_resuming_without_a_checkpoint_or_further_steps_is_told(tmp_path: Path, world1: World) -> None:
    settings = settings_for(tmp_path)
    with pytest.raises(OneCopyError, match="there is no complete checkpoint in .*checkpoints"):
        world1.run(run_once, settings, resume=True)
    world1.run(run_once, settings)
    with pytest.raises(OneCopyError, match="the run has made 8 steps already; give --steps more"):
        world1.run(run_once, settings, resume=True)


def onecopy_command(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "onecopy", *words, folder=folder, timeout=120)


SMALL = ["--context", "16", "--layers", "2", "--heads", "2", "--width", "32", "--steps", "4", "--sample", "5"]


def test_the_command_starts_ranks_and_ends_with_a_sample(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    done = onecopy_command("train", "--nproc", "2", "--data", "text.txt", *SMALL, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in (
        "ZeRO stage 3 on 2 ranks, 12 sequences",
        "validation loss",
        "moments",
        "sent a step",
        "generated text",
    ):
        assert part in done.stdout
    (command,) = [line.split(":", 1)[1].split() for line in done.stdout.splitlines() if line.startswith("continue:")]
    assert command[-6:] == ["--nproc", "2", "--resume", "runs/train", "--steps", "6"]
    again = onecopy_command(*command[command.index("train") :], folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "continued at step 4" in again.stdout and "global_step6" in again.stdout


def test_a_wrong_configuration_is_told_once_before_ranks_start(tmp_path: Path) -> None:
    done = onecopy_command("train", "--nproc", "2", "--set", "zero_optimization.stagee=3", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("zero_optimization.stagee") == 1 and "Traceback" not in done.stderr


def test_an_error_on_every_rank_is_told_once(tmp_path: Path) -> None:
    done = onecopy_command("train", "--nproc", "2", "--data", "absent.txt", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("absent.txt does not exist") == 1 and "Traceback" not in done.stderr
