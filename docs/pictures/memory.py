"""Draws memory.svg: the bytes one rank holds at each stage, as `engine.memory()` says after two real steps.

python docs/pictures/memory.py            # starts four local CPU ranks, measures, and writes memory.svg beside itself
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import onecopy
from onecopy.train.launch import run_ranks, under_launcher
from onecopy.train.model import GPT, GPTConfig

HERE = Path(__file__).parent
RANKS = 4
PARTS = {
    "parameters": "#4c78a8",
    "slots": "#9ecae9",
    "gradients": "#f58518",
    "masters": "#54a24b",
    "moments": "#88d27a",
}
SHAPE = GPTConfig(vocabulary_size=4096, context=64, layers=12, heads=4, width=256)
WIDTH, LEFT, TOP, ROW, BAR = 760, 84, 92, 46, 28


def measure(stage: int) -> dict[str, int]:
    """Bytes by category on this rank after two steps in bf16. Collective."""
    torch.manual_seed(0)
    engine, *_ = onecopy.initialize(
        model=GPT(SHAPE),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        },
    )
    tokens = torch.randint(0, SHAPE.vocabulary_size, (1, SHAPE.context))
    for _ in range(4):
        engine.backward(engine(tokens, tokens))
        engine.step()
    memory = {name: size for name, size in engine.memory().items() if name in PARTS}
    engine.destroy()
    return memory


def draw(stages: list[dict[str, int]], parameters: int) -> str:
    """The picture: one bar a stage, one colour a category."""
    scale = (WIDTH - LEFT - 90) / max(sum(stage.values()) for stage in stages)
    height = TOP + ROW * len(stages) + 14
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="14">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="28" font-size="17" font-weight="bold">What one of {RANKS} ranks holds</text>',
        f'<text x="16" y="48" fill="#555555">GPT with {parameters / 1e6:.1f} million parameters, bf16, AdamW; '
        "measured with engine.memory()</text>",
    ]
    x = 16.0
    for name, colour in PARTS.items():
        lines.append(f'<rect x="{x:.0f}" y="62" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 17:.0f}" y="73">{name}</text>')
        x += 34 + 7.6 * len(name)
    for number, stage in enumerate(stages):
        y = TOP + ROW * number
        lines.append(f'<text x="16" y="{y + 20}" font-weight="bold">stage {number}</text>')
        x = float(LEFT)
        for name, colour in PARTS.items():
            wide = stage.get(name, 0) * scale
            lines.append(f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{BAR}" fill="{colour}"/>')
            x += wide
        lines.append(f'<text x="{x + 8:.0f}" y="{y + 20}">{sum(stage.values()) / 1e6:.0f} MB</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> int:
    if not under_launcher():
        with tempfile.TemporaryDirectory() as folder:
            os.environ["PICTURE_FOLDER"] = folder
            code = run_ranks([__file__], RANKS)
            if code == 0:
                stages = json.loads((Path(folder) / "stages.json").read_text())
                parameters = sum(parameter.numel() for parameter in GPT(SHAPE).parameters())
                (HERE / "memory.svg").write_text(draw(stages, parameters))
                for number, stage in enumerate(stages):
                    print(f"stage {number}: {sum(stage.values()) / 1e6:6.1f} MB  {stage}")
        return code
    stages = [measure(stage) for stage in range(4)]
    if dist.get_rank() == 0:
        (Path(os.environ["PICTURE_FOLDER"]) / "stages.json").write_text(json.dumps(stages))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
