"""Train a small character GPT with Lightning's Trainer, its training state sharded by `OneCopyStrategy`.

    pip install "onecopy[lightning]"
    python examples/train_lightning.py --ranks 2 --stage 3 --steps 100 --folder runs/lightning
    python examples/train_lightning.py --ranks 2 --stage 3 --steps 200 --folder runs/lightning --resume

Lightning starts the other ranks itself; under torchrun it takes the ranks that are there. On a machine with GPUs,
--accelerator gpu --precision bf16-mixed.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

from onecopy.integrations.lightning import OneCopyStrategy, single_file


class Block(nn.Module):
    """Attention and a feed-forward part; Lightning knows nothing of it, and onecopy shards block by block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], device=inputs.device, dtype=inputs.dtype)
        normed = self.norms[0](inputs)
        inputs = inputs + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return inputs + self.feed_forward(self.norms[1](inputs))


class Characters(L.LightningModule):
    """Predicts the next byte of a text."""

    def __init__(self, width: int = 128, blocks: int = 4, context: int = 64, rate: float = 2e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads=4) for _ in range(blocks)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        places = torch.arange(rows.shape[1], device=rows.device)
        return self.head(self.blocks(self.embedding(rows) + self.positions(places)))

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        scores = self(rows[:, :-1]).float()
        return nn.functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())

    def training_step(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.loss(rows)
        self.log("train_loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, rows: torch.Tensor, index: int) -> None:
        self.log("val_loss", self.loss(rows), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Text(Dataset[torch.Tensor]):
    """Rows of `context + 1` bytes [context + 1]."""

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes = torch.tensor(list(text))
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self.context
        return self.bytes[start : start + self.context + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "README.md")
    parser.add_argument("--folder", type=Path, default=Path("runs/lightning"))
    parser.add_argument("--resume", action="store_true", help="go on from the folder's last checkpoint")
    options = parser.parse_args()

    L.seed_everything(0, verbose=False)
    content = options.text.read_bytes()
    cut = len(content) * 9 // 10
    loaders = [
        DataLoader(Text(part, context=64), batch_size=8, shuffle=shuffle)
        for part, shuffle in ((content[:cut], True), (content[cut:], False))
    ]
    keep = ModelCheckpoint(options.folder, "{step}", every_n_train_steps=50, save_top_k=-1, save_last=True)
    trainer = L.Trainer(
        strategy=OneCopyStrategy(stage=options.stage),
        accelerator=options.accelerator,
        devices=options.ranks,
        precision=options.precision,
        max_steps=options.steps,
        gradient_clip_val=1.0,
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Characters()
    trainer.fit(model, *loaders, ckpt_path=options.folder / "last.ckpt" if options.resume else None)
    memory = trainer.strategy.engine.memory()
    (found,) = trainer.test(model, loaders[1], ckpt_path=options.folder / "last.ckpt", verbose=False)
    if trainer.is_global_zero:
        print(f"validation loss {found['val_loss']:.3f} after {trainer.global_step} steps at stage {options.stage}")
        print(f"bytes of masters on a rank: {memory['masters']}, of moments: {memory['moments']}")
        single_file(options.folder / "last.ckpt", options.folder / "weights.ckpt")
        print(f"{options.folder / 'weights.ckpt'} opens with Characters.load_from_checkpoint, without onecopy")


if __name__ == "__main__":
    main()
