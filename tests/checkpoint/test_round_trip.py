"""A checkpoint of any stage, world size and precision loads at any other, and training goes on as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint import small

SAME = [(stage, world, precision) for stage in range(4) for world, precision in ((2, "fp32"), (2, "bf16"))]
SAME += [(3, 3, "fp16"), (1, 1, "fp16"), (3, 1, "fp32")]


@pytest.mark.parametrize(("stage", "size", "precision"), SAME)
def test_same_place_same_bits(world, tmp_path: Path, stage: int, size: int, precision: str) -> None:
    saved = world(size).run(small.run_and_save, tmp_path, stage, precision, dropout=0.1)
    loaded = world(size).run(small.load_and_run, tmp_path, stage, precision, dropout=0.1)
    for before, after in zip(saved, loaded, strict=True):
        assert before["held"].keys() == after["held"].keys()
        assert all(torch.equal(value, after["held"][key]) for key, value in before["held"].items())
        assert before["losses"] == after["losses"]
        assert after["counters"] == (3, 36, 0, 3)
        assert after["client_state"] == {"note": "ours", "numbers": [1, 2.5]}
        assert after["path"] == str(tmp_path / "global_step3")


PAIRS = [
    ((0, 1, "fp32"), (3, 2, "fp32")), ((3, 2, "fp32"), (0, 1, "fp32")), ((3, 3, "fp32"), (2, 2, "fp32")),
    ((1, 2, "fp32"), (3, 4, "fp32")), ((2, 2, "bf16"), (3, 3, "bf16")), ((3, 4, "bf16"), (1, 1, "bf16")),
    ((3, 2, "fp32"), (3, 2, "bf16")), ((3, 2, "bf16"), (2, 3, "fp32")), ((1, 2, "fp16"), (3, 2, "bf16")),
    ((0, 2, "fp32"), (3, 1, "fp16")),
]  # fmt: skip


@pytest.mark.parametrize(("origin", "target"), PAIRS)
def test_elsewhere_to_reduction_order(world, tmp_path: Path, origin: tuple, target: tuple) -> None:
    (stage, size, precision), (other_stage, other_size, other_precision) = origin, target
    saved = world(size).run(small.run_and_save, tmp_path, stage, precision)
    loaded = world(other_size).run(small.load_and_run, tmp_path, other_stage, other_precision, before=2)
    tolerance = 1e-4 if precision == other_precision == "fp32" else 2e-2
    assert loaded[0]["losses"] == pytest.approx(saved[0]["losses"], rel=tolerance)
    assert loaded[0]["lr"] == saved[0]["lr"]
    before, after = _joined(saved), _joined(loaded)
    for name in before:  # masters and moments: to the bit; what is not trained has the dtype it is computed in
        if ".frozen." not in name or precision == other_precision:
            assert before[name] == after[name], name


def _joined(results: list[dict]) -> dict[str, list[float]]:
    """Whole tensors by name, from every rank's ranges."""
    parts: dict[str, list] = {}
    for result in results:
        for key, value in result["held"].items():
            name, start = key[:-1].rsplit("[", 1)
            parts.setdefault(name, []).append((int(start), value.double().tolist()))
    return {name: [x for _, values in sorted(ranges) for x in values] for name, ranges in parts.items()}


def test_torchs_own_reader_reads_it(world, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    (saved, other) = world(2).run(small.run_and_save, tmp_path, 3, "fp32")
    dcp_to_torch_save(tmp_path / "global_step3", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    model = small.make_model(3)
    missing, unexpected = model.load_state_dict(whole["model"], strict=False)
    assert (missing, unexpected) == (["empty"], []) or (missing, unexpected) == ([], [])
    joined = _joined([saved, other])
    for name, value in whole["model"].items():
        if name != "head.weight" and value.numel():
            assert value.double().flatten().tolist() == joined[f"model.{name}"], name
    state = whole["optimizer"]["state"]["blocks.1.up.weight"]
    assert state["step"].item() == 3 and state["exp_avg"].shape == (37, small.WIDTH)


def test_every_file_loads_safely(world, tmp_path: Path) -> None:
    world(2).run(small.run_and_save, tmp_path, 2, "bf16")
    folder = tmp_path / "global_step3"
    state = torch.load(folder / "state.pt", weights_only=True)
    assert state["global_steps"] == 3
    for rank in range(2):
        assert torch.load(folder / f"rank_{rank:05d}.pt", weights_only=True)["random"]["python"]
    assert {path.suffix for path in folder.iterdir()} <= {".pt", ".json", ".distcp", ".metadata", ""}
