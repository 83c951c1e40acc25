"""`OneCopyStrategy`: the Trainer's losses, metrics and weights are those of DDP at every stage, and again after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import lightning.pytorch as pl

from onecopy.errors import CheckpointError, ConfigError, ModelError
from onecopy.integrations.lightning import OneCopyStrategy, release, single_file
from tests.integrations.lightning_runs import QUIET, Net, fit, loader, numbers, whole_weights
from tests.worlds import world

CLOSE: dict[str, Any] = {"rel": 1e-5, "abs": 1e-6}


def on_two_ranks(function: Any, *arguments: Any) -> list[Any]:
    """On two ranks; the strategy keeps a module's engine for the next Trainer, so groups are left behind."""
    return world(2).run(function, *arguments, stray_groups=True)


def train_as_ddp_and_at_every_stage() -> list[dict[str, Any]]:
    options: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    strategies = ["ddp", *(OneCopyStrategy(stage=stage) for stage in range(4))]
    return [numbers(fit(strategy, **options)) for strategy in strategies]


def test_every_stage_trains_as_ddp() -> None:
    for plain, *stages in on_two_ranks(train_as_ddp_and_at_every_stage):
        assert plain["steps"] == 6  # two windows of two batches and one of the fifth, twice
        for run in stages:
            assert run["losses"] == pytest.approx(plain["losses"], **CLOSE)
            assert run["weights"] == pytest.approx(plain["weights"], **CLOSE)
            assert run["metrics"] == pytest.approx(plain["metrics"], **CLOSE)
            assert (run["rates"], run["steps"]) == (plain["rates"], plain["steps"])


def save_and_come_back(folder: Path) -> dict[str, Any]:
    """Train 2 epochs, with a checkpoint of each; resume the first; evaluate the second in a new module."""
    keep = pl.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_last=True)
    whole = fit(OneCopyStrategy(stage=3), folder, callbacks=[keep], enable_checkpointing=True)
    path = folder / "epoch=0.ckpt"
    resumed = fit(OneCopyStrategy(stage=1), folder, resume=path)
    trainer = pl.Trainer(strategy=OneCopyStrategy(stage=3), **QUIET)
    model = Net()
    last = folder / "epoch=1.ckpt"
    (tested,) = trainer.test(model, loader(16), ckpt_path=last / "checkpoint", verbose=False)
    (validated,) = trainer.validate(model, loader(16), ckpt_path=last, verbose=False)
    (before,) = trainer.validate(model, loader(16), ckpt_path=path, verbose=False)
    predicted = trainer.predict(model, loader(16), ckpt_path=last)
    best = whole["trainer"].test(whole["model"], loader(16), ckpt_path="best", verbose=False)
    if trainer.is_global_zero:
        single_file(last, folder / "whole.ckpt")
    trainer.strategy.barrier()
    alone = pl.Trainer(**{**QUIET, "strategy": "ddp"})
    (plain,) = alone.test(Net.load_from_checkpoint(folder / "whole.ckpt"), loader(16), verbose=False)
    (single,) = trainer.test(Net(), loader(16), ckpt_path=folder / "whole.ckpt", verbose=False)
    try:
        trainer.test(model, loader(16), ckpt_path=folder / "none.ckpt", verbose=False)
    except Exception as error:
        missing = error
    return {
        "whole": numbers(whole), "resumed": numbers(resumed), "tested": tested, "validated": validated, "before": before,
        "predicted": torch.cat(predicted).shape, "best": best, "plain": plain, "single": single, "missing": str(missing),
    }  # fmt: skip


def test_checkpoints_resume_at_another_stage_and_open_everywhere(tmp_path: Path) -> None:
    for found in on_two_ranks(save_and_come_back, tmp_path):
        whole, resumed = found["whole"], found["resumed"]
        assert resumed["losses"] == pytest.approx(whole["losses"][5:], **CLOSE)
        assert resumed["weights"] == pytest.approx(whole["weights"], **CLOSE)
        assert (resumed["rates"], resumed["steps"]) == (whole["rates"][5:], whole["steps"])
        loss = whole["metrics"]["val_loss"]
        for tested in (found["tested"], found["plain"], found["single"]):
            assert tested["test_loss"] == pytest.approx(loss, **CLOSE)
        assert found["validated"]["val_loss"] == pytest.approx(loss, **CLOSE)
        assert found["before"]["val_loss"] != pytest.approx(loss, rel=1e-2)
        assert found["predicted"] == (8, 1)
        assert "none.ckpt" in found["missing"] and "does not exist" in found["missing"]
    lost = min((tmp_path / "last.ckpt" / "checkpoint").glob("*.distcp"))
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        single_file(tmp_path / "last.ckpt", tmp_path / "never.ckpt")


class Manual(Net):
    """Two losses added up into one step, the second batch of every three clipped."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part in (batch, [tensor * 0.5 for tensor in batch]):
            self.manual_backward(self.loss(part))
        if index % 3 == 1:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()
        self.losses.append(self.loss(batch).item())


def manual_runs() -> list[dict[str, Any]]:
    runs = [fit(s, model=Manual(), max_epochs=1) for s in ("ddp", OneCopyStrategy(stage=3))]
    model = runs[1]["model"]
    again = fit(OneCopyStrategy(stage=2), model=model, max_epochs=1)  # the sharded module is trained on
    release(model)
    assert all(type(p) is torch.nn.Parameter and p.numel() for p in model.parameters())
    assert whole_weights(model) == pytest.approx(again["weights"], rel=1e-6)
    return [numbers(run) for run in runs]


def test_manual_optimization_sums_losses_as_torch_does() -> None:
    for plain, ours in on_two_ranks(manual_runs):
        assert ours["losses"] == pytest.approx(plain["losses"], **CLOSE)
        assert ours["weights"] == pytest.approx(plain["weights"], **CLOSE)


class Late(Net):
    """Builds its blocks when the strategy lets it: sharded from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = None

    def configure_model(self) -> None:
        if self.blocks is None:
            torch.manual_seed(self.trainer.global_rank)  # rank 0's weights count
            self.blocks = torch.nn.Sequential(
                *[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(3)]
            )
            self.elements = sum(type(p) is torch.nn.Parameter for p in self.blocks.parameters())


def late_runs() -> list[dict[str, Any]]:
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    runs = [fit(s, model=Late(), max_epochs=1) for s in ("ddp", OneCopyStrategy(config=config))]
    return [{**numbers(run), "whole": run["model"].elements} for run in runs]


def test_configure_model_builds_sharded_at_stage_3() -> None:
    for plain, ours in on_two_ranks(late_runs):
        assert (plain["whole"], ours["whole"]) == (6, 0)
        assert ours["losses"] == pytest.approx(plain["losses"], **CLOSE)
        assert ours["weights"] == pytest.approx(plain["weights"], **CLOSE)


class NoClipping(Net):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")


class TwoOptimizers(Manual):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.blocks, self.head)]


class OwnBackward(Net):
    def backward(self, loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        loss.backward()


def other_runs() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, precision, config in (
        ("bf16", "bf16-mixed", {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}),
        ("fp16", "32-true", {"fp16": {"enabled": True, "initial_scale_power": 24}}),
        ("from json", "32-true", {"optimizer": {"type": "AdamW", "params": {"lr": 0.02}}}),
    ):
        model = Net()
        if name == "from json":
            model.configure_optimizers = lambda: None  # type: ignore[method-assign]
        run = fit(OneCopyStrategy(config=config), model=model, precision=precision, max_epochs=1)
        found[name] = numbers(run)
        found[name]["dtype"] = str(next(iter(run["trainer"].model.units)).buffers[0].dtype)
        found[name]["skipped"] = run["trainer"].model.skipped_steps
    found["plain"] = numbers(fit("ddp", max_epochs=1))
    clipped = [fit(s, model=NoClipping(), max_epochs=1) for s in ("ddp", OneCopyStrategy(stage=2))]
    found["clipped"] = [numbers(run) for run in clipped]
    refused = {
        "two": (TwoOptimizers(), {}, {}),
        "backward": (OwnBackward(), {}, {}),
        "value": (Net(), {}, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}),
        "differ": (Net(), {"gradient_clipping": 0.1, "gradient_accumulation_steps": 3}, {"gradient_clip_val": 1.0}),
        "both": (Net(), {"fp16": {"enabled": True}}, {"precision": "bf16-mixed"}),
        "double": (Net(), {}, {"precision": "64-true"}),
    }
    for name, (model, config, options) in refused.items():
        try:
            fit(OneCopyStrategy(config=config), model=model, max_epochs=1, **options)
        except (ModelError, ConfigError) as error:
            found[name] = str(error)
    return found


def test_precision_clipping_hooks_and_what_is_refused() -> None:
    for found in on_two_ranks(other_runs):
        assert [found[name]["dtype"] for name in ("bf16", "fp16")] == ["torch.bfloat16", "torch.float16"]
        assert found["bf16"]["losses"] == pytest.approx(found["plain"]["losses"], rel=0.1, abs=0.3)
        assert found["fp16"]["skipped"] >= 2
        assert found["fp16"]["rates"][2] == 0.02  # a skipped step is none of the schedule's
        assert len(set(found["from json"]["rates"])) == 1
        plain, ours = found["clipped"]
        assert ours["weights"] == pytest.approx(plain["weights"], **CLOSE)
        assert "2 optimizers" in found["two"] and "LightningModule.backward" in found["backward"]
        assert "norm" in found["value"]
        assert "gradient_clipping is 0.1" in found["differ"] and "gradient_accumulation_steps is 3" in found["differ"]
        assert "enables fp16" in found["both"]
        assert "64-true" in found["double"]


def test_stages_that_differ_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="stage=1"):
        OneCopyStrategy(stage=1, config={"zero_optimization": {"stage": 3}})
    with pytest.raises(CheckpointError, match="does not exist"):
        single_file("nowhere", "out")
