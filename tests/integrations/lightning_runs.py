"""A LightningModule, its data, and runs of it that each rank of a world executes; results are plain numbers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 2,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Net(pl.LightningModule):
    """Blocks that become units; AdamW with a schedule a step; logs its losses."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(width, 1)
        self.losses: list[float] = []
        self.rates: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(inputs))

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return (self(inputs).float() - targets.float()).square().mean()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss.detach(), sync_dist=True)
        self.losses.append(loss.item())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(rows: int = 40) -> DataLoader[Any]:
    """Batches of 4 in a fixed order; a rank gets every second row."""
    inputs = torch.randn(rows, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)


def whole_weights(module: nn.Module) -> list[float]:
    """All weights, gathered."""
    from onecopy.zero import GatheredParameters

    found: list[float] = []
    for parameter in module.parameters():
        with GatheredParameters(parameter):
            found += parameter.detach().float().flatten().tolist()
    return found


def fit(strategy: Any, folder: Path | None = None, **options: Any) -> dict[str, Any]:
    """Train with the strategy; returns losses, learning rates, logged metrics and whole weights."""
    warnings.simplefilter("ignore")
    resume = options.pop("resume", None)
    model = options.pop("model", None) or Net()
    callbacks = options.pop("callbacks", [])
    arguments: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 1, "enable_checkpointing": False}
    trainer = pl.Trainer(
        strategy=strategy, callbacks=callbacks, default_root_dir=folder, **{**QUIET, **arguments, **options}
    )
    trainer.fit(model, loader(), loader(16), ckpt_path=resume)
    return {
        "losses": list(model.losses),
        "rates": list(model.rates),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
        "weights": whole_weights(model),
        "trainer": trainer,
        "model": model,
    }


def numbers(run: dict[str, Any]) -> dict[str, Any]:
    """What of a run can leave the rank."""
    return {name: value for name, value in run.items() if name not in ("trainer", "model")}


def fabric_run(strategy: Any, name: str) -> list[float]:
    """Whole weights after two epochs; with a name, the second is trained twice, from a checkpoint."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = Net()
    module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    module.mark_forward_method("loss")
    data = fabric.setup_dataloaders(loader())
    state = {"model": module, "optimizer": optimizer, "epoch": 0}
    for attempt in range(3 if name else 2):
        for batch in data:
            fabric.backward(module.loss(batch))
            optimizer.step()
            optimizer.zero_grad()
        state["epoch"] += 1
        if name and attempt == 0:
            fabric.save(name, state)
        elif name and attempt == 1:
            fabric.load(name, state)
            assert state["epoch"] == 1
    return whole_weights(model)
