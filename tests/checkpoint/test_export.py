"""Exported weights are what others read: complete, in place, tied once, in the dtype asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from onecopy.checkpoint import (
    convert_zero_checkpoint_to_fp32_state_dict,
    export,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from onecopy.cli.main import main
from onecopy.errors import CheckpointError
from tests.checkpoint import small


def train_and_write(folder: str, stage: int, precision: str, **zero: Any) -> Any:
    """A checkpoint, 16-bit files of both kinds and the consolidated dictionary."""
    engine = small.make_engine(stage, precision, zero_optimization={"stage": stage, **zero})
    small.train(engine, 0, 2)
    engine.save_checkpoint(folder)
    results = [
        engine.save_16bit_model(f"{folder}/bin"),
        engine.save_16bit_model(f"{folder}/safe", "model.safetensors"),
        engine.save_fp16_model(f"{folder}/old", "w.pt"),
        engine.save_16bit_model(f"{folder}/trained", "model.safetensors", exclude_frozen_parameters=True),
    ]
    whole = engine._consolidated_16bit_state_dict()
    if stage == 3:
        again = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        assert (whole is None) == (again is None) and (whole is None or "frozen.weight" not in again)
    else:
        with pytest.raises(ValueError, match="requires ZeRO-3"):
            engine._zero3_consolidated_16bit_state_dict()
    engine.destroy()
    return results, whole


GATHER = {"stage3_gather_16bit_weights_on_model_save": True}


@pytest.mark.parametrize(
    ("stage", "size", "precision"), [(0, 1, "bf16"), (1, 2, "fp16"), (3, 2, "bf16"), (3, 3, "fp32")]
)
def test_16bit_model(world, tmp_path: Path, stage: int, size: int, precision: str) -> None:
    results = world(size).run(train_and_write, str(tmp_path), stage, precision, **GATHER)
    (flags, whole), *others = results
    assert flags == [True] * 4 and all(other is None for _, other in others)
    plain = small.make_model()
    assert set(whole) == set(plain.state_dict())
    for file in ("bin/pytorch_model.bin", "old/w.pt"):
        loaded = torch.load(tmp_path / file, weights_only=True)
        assert set(loaded) == set(whole)
        assert all(
            torch.equal(loaded[name], value) and loaded[name].dtype == value.dtype for name, value in whole.items()
        )
        assert loaded["head.weight"].data_ptr() == loaded["embedding.weight"].data_ptr()
    safe = load_file(tmp_path / "safe" / "model.safetensors")
    assert set(safe) == set(whole) - {"head.weight"}
    assert all(torch.equal(value, whole[name]) for name, value in safe.items())
    assert set(safe) - set(load_file(tmp_path / "trained" / "model.safetensors")) == {
        "frozen.weight",
        "frozen.bias",
        "empty",
    }
    assert sorted(p.name for p in (tmp_path / "safe").iterdir()) == ["model.safetensors"]
    plain.load_state_dict(whole)


def test_without_the_gather_flag_nothing_is_written(world2, tmp_path: Path, capfd: Any) -> None:
    for flags, _ in world2.run(train_and_write, str(tmp_path), 3, "bf16"):
        assert flags == [False] * 4
    assert not (tmp_path / "bin").exists() and not (tmp_path / "safe").exists()


def write_on_a_full_disk(folder: str) -> str:
    from onecopy.checkpoint.weight_files import WeightFiles

    engine, create = small.make_engine(2), WeightFiles.create

    def failing(files: WeightFiles) -> None:
        create(files)
        raise OSError(28, "No space left on device")

    WeightFiles.create = failing  # type: ignore[method-assign]
    try:
        engine.save_16bit_model(folder)
        return "written"
    except CheckpointError as error:
        return str(error)
    finally:
        WeightFiles.create = create  # type: ignore[method-assign]
        engine.destroy()


def test_16bit_model_on_a_full_disk(world1, tmp_path: Path) -> None:
    (message,) = world1.run(write_on_a_full_disk, str(tmp_path))
    assert message == f"{tmp_path} cannot be written: No space left on device" and os.listdir(tmp_path) == []


def test_command_line(world2, tmp_path: Path, capsys: Any) -> None:
    world2.run(train_and_write, str(tmp_path / "run"), 3, "bf16")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    arguments = [
        "export",
        str(tmp_path / "run"),
        str(tmp_path / "out"),
        "--max-shard-size",
        "6KB",
        "--model",
        str(tmp_path / "model"),
    ]
    assert main(arguments) == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 1 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    merged: dict[str, torch.Tensor] = {}
    for shard in shards:
        merged |= load_file(tmp_path / "out" / shard)
    assert set(merged) == set(index["weight_map"]) and merged["blocks.0.up.weight"].dtype == torch.bfloat16
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in merged.values())
    assert (tmp_path / "out" / "tokenizer.json").exists()
    exact = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run")
    assert all(torch.equal(value, exact[name].to(value.dtype)) for name, value in merged.items())
    assert main([*arguments[:3], "--dtype", "fp32"]) == 0  # again into the same folder: the shards give way
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["model.safetensors", "tokenizer.json"]
    assert "bytes" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "int3"]) == 1
    assert main(["export", str(tmp_path / "nothing"), str(tmp_path / "out")]) == 1
    with pytest.raises(CheckpointError, match="no size"):
        export(tmp_path / "run", tmp_path / "out", max_shard_size="large")


def test_inspect_and_verify(world2, tmp_path: Path, capsys: Any) -> None:
    world2.run(train_and_write, str(tmp_path), 2, "bf16")
    (tmp_path / "half").mkdir()
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "global_step2 (latest)" in text and "bf16" in text and "'half' holds no complete" in text
    assert main(["inspect", str(tmp_path), "--tag", "global_step2"]) == 0
    text = capsys.readouterr().out
    assert (
        "blocks.2.down.weight" in text
        and "24 x 37" in text
        and "exp_avg, exp_avg_sq, step" in text
        and "head.weight" in text
    )
    assert main(["inspect", str(tmp_path / "latest"), "--tag", "latest"]) == 0
    assert "blocks.2.down.weight" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "global_step2")]) == 0
    assert "every checksum is right" in capsys.readouterr().out
    data = bytearray((tmp_path / "global_step2" / "__1_0.distcp").read_bytes())
    data[len(data) // 3] ^= 1
    (tmp_path / "global_step2" / "__1_0.distcp").write_bytes(data)
    assert main(["verify", str(tmp_path)]) == 1
    assert "__1_0.distcp (written by rank 1" in capsys.readouterr().out
    (tmp_path / "global_step2" / "state.pt").unlink()
    assert main(["inspect", str(tmp_path)]) == 1
    assert "incomplete: state.pt" in capsys.readouterr().out


def test_zero_to_fp32_functions(world2, tmp_path: Path, caplog: Any) -> None:
    saved = world2.run(small.run_and_save, str(tmp_path / "run"), 1, "bf16")
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run", lazy_mode=True)
    assert weights["head.weight"] is weights["embedding.weight"]
    for result in saved:
        for key, value in result["held"].items():
            name, start = key[:-1].rsplit("[", 1)
            if name.startswith("model.") and value.numel():
                part = weights[name.removeprefix("model.")].flatten()[int(start) : int(start) + value.numel()]
                assert torch.equal(part, value.to(part.dtype))
    model = load_state_dict_from_zero_checkpoint(small.make_model(9), tmp_path / "run", "global_step3")
    assert torch.equal(model.blocks[1].up.weight, weights["blocks.1.up.weight"])
    assert model.head.weight is model.embedding.weight
    load_state_dict_from_zero_checkpoint(torch.nn.Linear(2, 2), tmp_path / "run")
    assert "the checkpoint lacks weight, bias" in caplog.text
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "run", tmp_path / "out", max_shard_size="8KB")
    index = json.loads((tmp_path / "out" / "pytorch_model.bin.index.json").read_text())["weight_map"]
    for name, file in index.items():
        assert torch.equal(torch.load(tmp_path / "out" / file, weights_only=True)[name], weights[name])
    convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path / "run", tmp_path / "out", safe_serialization=True, exclude_frozen_parameters=True
    )
    assert "frozen.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def load_dictionary(folder: str, stage: int) -> Any:
    """Whole weights given as a dictionary, and through the user's own function."""
    engine = small.make_engine(stage, "bf16", seed=3)
    small.train(engine, 0, 1)
    given = small.make_model(8).state_dict()
    versions: list[Any] = []
    hook = engine.module.register_load_state_dict_pre_hook(lambda *call: versions.append(call[3].get("version")))
    engine.load_module_state_dict({"module": given})
    hook.remove()
    assert versions == [1], "torch's record of module versions is lost"
    first = get_whole(engine)
    engine.save_checkpoint(folder, "given")
    small.train(engine, 1, 2)

    def mine(src: dict, dst: Any) -> None:
        dst.load_state_dict(
            {name: value for name, value in src.items() if not name.startswith("blocks.0")}, strict=False
        )
        dst.blocks[0].up.weight.fill_(0.5)

    engine.load_checkpoint(folder, "given", custom_load_fn=mine)
    second = get_whole(engine)
    losses = small.train(engine, 2, 4)
    with pytest.raises(RuntimeError, match="Missing key"):
        engine.load_module_state_dict({"scale": given["scale"]})
    engine.destroy()
    return first, second, losses, given


def get_whole(engine: Any) -> Any:
    return engine._consolidated_16bit_state_dict()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_whole_weights_and_custom_load(world2, tmp_path: Path, stage: int) -> None:
    (first, second, losses, given), _ = world2.run(load_dictionary, str(tmp_path), stage)
    assert all(torch.equal(value.to(first[name].dtype), first[name]) for name, value in given.items())
    assert (second["blocks.0.up.weight"] == 0.5).all()
    assert torch.equal(second["blocks.1.up.weight"], first["blocks.1.up.weight"])
    assert all(loss == loss for loss in losses)
