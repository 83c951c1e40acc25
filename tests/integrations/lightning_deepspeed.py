"""Lightning's own DeepSpeedStrategy on onecopy's `deepspeed`: runs at stages 1 to 3, printed as JSON by rank 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy as FabricStrategy
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

from tests.integrations.lightning_runs import QUIET, Net, fabric_run, fit, loader, numbers, whole_weights


def trainer_run(stage: int) -> dict[str, Any]:
    """Train, resume, evaluate after training and from a checkpoint, convert."""
    folder = Path(f"stage{stage}")
    options: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "limit_train_batches": 4}
    keep = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    whole = fit(DeepSpeedStrategy(stage=stage), folder, callbacks=[keep], enable_checkpointing=True, **options)
    (after,) = whole["trainer"].test(whole["model"], loader(16), verbose=False)
    resumed = fit(DeepSpeedStrategy(stage=stage), folder, resume=folder / "epoch=0.ckpt", **options)
    (validated,) = Trainer(strategy=DeepSpeedStrategy(stage=stage), **QUIET).validate(
        Net(), loader(16), ckpt_path=folder / "epoch=1.ckpt", verbose=False
    )
    if torch.distributed.get_rank() == 0:
        convert_zero_checkpoint_to_fp32_state_dict(folder / "epoch=1.ckpt", folder / "whole.ckpt")
        again = Net.load_from_checkpoint(folder / "whole.ckpt")
        assert whole_weights(again) == whole["weights"]
    return {"whole": numbers(whole), "resumed": numbers(resumed), "after": after, "validated": validated}


def json_run() -> dict[str, Any]:
    """A configuration of one's own, in bf16."""
    config = {
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "overlap_comm": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.02}},
    }
    model = Net()
    model.configure_optimizers = lambda: None  # type: ignore[method-assign]
    return numbers(fit(DeepSpeedStrategy(config=config), model=model, precision="bf16-mixed", max_epochs=1))


CONFIG: dict[str, Any] = {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}

if __name__ == "__main__":
    options: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "limit_train_batches": 4}
    results: dict[str, Any] = {"ddp": numbers(fit("ddp", **options)), "json": json_run()}
    for one in (1, 2, 3):
        results[str(one)] = trainer_run(one)
    results["fabric"] = [fabric_run("ddp", "")]
    for one in (1, 2, 3):
        strategy = FabricStrategy(stage=one, config={**CONFIG, "zero_optimization": {"stage": one}})
        results["fabric"].append(fabric_run(strategy, f"fabric{one}"))
    if torch.distributed.get_rank() == 0:
        print("RESULT", json.dumps(results), flush=True)
