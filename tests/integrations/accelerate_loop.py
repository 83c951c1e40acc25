"""The loop of accelerate's documentation with its DeepSpeed plugin, for each stage named on the command line.

Prints the trained weights as JSON; the state is saved, spoilt and loaded back before they are taken.
"""

from __future__ import annotations

import json
import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def small_model() -> nn.Sequential:
    """Two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def examples() -> TensorDataset:
    """64 rows in a fixed order."""
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(rows, rows.sum(1, keepdim=True))


def train(stage: int) -> dict[str, list[float]]:
    """The weights after two epochs."""
    AcceleratorState._reset_state(reset_partial_state=False)
    plugin = DeepSpeedPlugin(
        zero_stage=stage, gradient_accumulation_steps=2, gradient_clipping=1.0, zero3_save_16bit_model=True
    )
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
    assert accelerator.num_processes == 2
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(examples(), batch_size=4))
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(inputs) - targets).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.save_state(f"state{stage}")
    accelerator.backward(model(inputs).sum())
    accelerator.load_state(f"state{stage}")
    weights = accelerator.get_state_dict(model)
    assert isinstance(accelerator.unwrap_model(model), nn.Sequential)
    found = {name: weight.flatten().tolist() for name, weight in (weights or {}).items()}
    return found if accelerator.is_main_process else {}


if __name__ == "__main__":
    for one in sys.argv[1:]:
        result = train(int(one))
        if result:
            print("RESULT", json.dumps(result), flush=True)
    torch.distributed.barrier()
