"""Checkpoints that DeepSpeed itself wrote load here, and training goes on with DeepSpeed's own next losses."""

from __future__ import annotations

import json
import os
import pickle
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import onecopy
from onecopy.checkpoint import get_fp32_state_dict_from_zero_checkpoint
from onecopy.checkpoint.inert_pickle import Inert, load_inert
from onecopy.cli.main import main
from onecopy.errors import CheckpointError
from tests.checkpoint import small

SAMPLES = Path(__file__).with_name("deepspeed_samples")


def plain_model(seed: int) -> small.Model:
    """The small model without what DeepSpeed has no room for: a parameter without dimensions, an empty one."""
    model = small.make_model(seed)
    del model.empty
    model.scale = torch.nn.Parameter(torch.tensor([1.5]))
    return model


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]


def go_on(folder: str, stage: int, precision: str) -> Any:
    model = plain_model(5)
    config = small.config(stage, precision, torch.distributed.get_world_size())
    engine = onecopy.initialize(model=model, model_parameters=groups_of(model), config=config)[0]
    path, client_state = engine.load_checkpoint(folder)
    found = (
        engine.global_steps,
        engine.global_samples,
        engine.get_lr()[0],
        engine.optimizer.param_groups[1]["weight_decay"],
    )
    scale = engine.loss_scale()
    losses = small.train(engine, 3, 5)
    engine.destroy()
    return path, client_state, found, scale, losses


FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 and later


@pytest.fixture
def sample(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    with tarfile.open(SAMPLES / f"{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path / "theirs", **FILTER)
    return next((tmp_path / "theirs").iterdir())


TARGETS = {
    "stage2_fp16": ((3, 2), (1, 3)),  # DeepSpeed 0.19 where a name says no version
    "stage3_bf16": ((3, 2), (1, 3)),
    "universal_bf16": ((3, 2), (1, 3)),
    "deepspeed0.16_stage1_bf16": ((3, 2),),
    "deepspeed0.17_stage2_fp32": ((1, 2),),
    "deepspeed0.18_stage3_fp16": ((2, 2),),
}


@pytest.mark.parametrize("sample", TARGETS, indirect=True)
def test_training_goes_on_with_deepspeeds_losses(
    world, sample: Path, tmp_path: Path, capsys: Any, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["sample"]
    assert main(["import-deepspeed", str(sample), str(tmp_path / "ours")]) == 0
    assert "17 trained parameters with optimizer states, 4 others" in capsys.readouterr().out
    losses = json.loads((sample / "losses.json").read_text())[-2:]
    precision = name.rsplit("_", 1)[1]
    for stage, size in TARGETS[name]:
        path, client_state, found, scale, ours = world(size).run(go_on, str(tmp_path / "ours"), stage, precision)[0]
        assert path == str(tmp_path / "ours" / "global_step3") and client_state == {"epoch": 1, "words": ["a"]}
        assert found == (3, 36, pytest.approx(0.0061314719), 0.0)
        assert scale == (256.0 if precision == "fp16" else 1.0)
        assert ours == pytest.approx(losses, rel=1e-6 if precision == "fp32" else 3e-3)
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ours")
    assert weights["head.weight"] is weights["embedding.weight"] and weights["seen"].dtype == torch.int64
    plain_model(1).load_state_dict(weights)
    assert main(["verify", str(tmp_path / "ours")]) == 0


@pytest.mark.parametrize("sample", ["stage3_bf16"], indirect=True)
def test_what_is_missing_is_named(sample: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = ["import-deepspeed", str(sample), str(tmp_path / "ours")]
    assert main([*arguments, "--tag", "global_step9"]) == 1
    assert "folders there: global_step3" in capsys.readouterr().err
    file = sample / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    latest, whole = (sample / "latest").read_bytes(), file.read_bytes()
    (sample / "latest").write_bytes(b"\x8f\xff")
    assert main(arguments) == 1 and "folders there: global_step3" in capsys.readouterr().err
    (sample / "latest").write_bytes(latest)
    middle = len(whole) // 2
    file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :])
    assert main(arguments) == 1 and f"{file} is damaged" in capsys.readouterr().err
    os.truncate(file, 1000)
    assert main(arguments) == 1
    assert "no complete file" in capsys.readouterr().err
    file.unlink()
    assert main(arguments) == 1
    assert "optimizer states of 1 ranks and was saved by 2" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="written by DeepSpeed: `onecopy import-deepspeed"):
        get_fp32_state_dict_from_zero_checkpoint(sample)
    (sample / "global_step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    assert main(arguments) == 1
    assert "lacks the file of rank 0" in capsys.readouterr().err
    assert not list((tmp_path / "ours").glob("*")) if (tmp_path / "ours").exists() else True


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil-was-here",)


class Listed(list):
    pass


def test_nothing_is_executed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    listed = Listed([1])
    listed.note = "n"
    content = {
        "evil": Evil(),
        "calls": [print, eval, sys.exit],
        "size": torch.Size([2]),
        "listed": listed,
        "t": torch.ones(2),
    }
    torch.save(content, "file.pt", pickle_module=pickle)
    found = load_inert(tmp_path / "file.pt")
    assert not (tmp_path / "evil-was-here").exists()
    assert (
        isinstance(found["evil"], Inert) and torch.equal(found["t"], torch.ones(2)) and found["size"] == torch.Size([2])
    )
    assert not any(call in (print, eval) for call in found["calls"])
    (tmp_path / "text").write_text("no pickle")
    with pytest.raises(CheckpointError, match="no complete file"):
        load_inert(tmp_path / "text")
