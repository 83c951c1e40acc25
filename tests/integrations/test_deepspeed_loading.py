"""What `load_checkpoint` restores for each of its arguments, against DeepSpeed 0.19.8's own numbers on two ranks.

The table holds what DeepSpeed gave for the programme of `_restored` in fp32 (stages 0 to 3 agree, but for
`load_module_only` at stage 3, where it restores nothing): counters, learning rate, position of the schedule, and the mean
losses of the three steps after loading.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.worlds import World

WIDTH = 16
FRESH = [0.08531, 0.05513, 0.11062, 0.12432, 0.05819, 0.05113]
# what is loaded: (global_steps, global_samples), (learning rate, schedule's position), losses
BY_DEEPSPEED: dict[str, tuple[tuple[int, int], tuple[float, int], list[float]]] = {
    "everything": ((4, 32), (0.003, 3), [0.0712, 0.06446, 0.0558, 0.06996, 0.08665, 0.07016]),
    "everything into an engine that has stepped": (
        (4, 32), (0.003, 3), [0.0712, 0.06446, 0.0558, 0.06996, 0.08665, 0.07016],
    ),
    "an older tag": ((3, 24), (0.002, 2), [0.07477, 0.06781, 0.05988, 0.07607, 0.09651, 0.07743]),
    "no schedule": ((4, 32), (0.003, -1), [0.0712, 0.06446, 0.0558, 0.06996, 0.09589, 0.07688]),
    "neither optimizer nor schedule": ((4, 32), (0.0, -1), [0.0712, 0.06446, 0.05982, 0.0758, 0.1038, 0.08251]),
    "the module only": ((0, 0), (0.0, -1), [0.0712, 0.06446, 0.05982, 0.0758, 0.1038, 0.08251]),
    "nothing, from a missing folder": ((0, 0), (0.0, -1), FRESH),
    "nothing, from an empty folder": ((0, 0), (0.0, -1), FRESH),
    "nothing, as the tag is wrong": ((0, 0), (0.0, -1), FRESH),
    "nothing, as the tag is in a missing folder": ((0, 0), (0.0, -1), FRESH),
    # DeepSpeed keeps the rate of the new engine for one more step, here 0; the schedule's own is in force at once
    "no optimizer": ((4, 32), (0.003, 3), [0.0712, 0.06446, 0.05602, 0.07049, 0.08788, 0.07088]),
}  # fmt: skip


def _engine(stage: int, seed: int) -> Any:
    import deepspeed

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    warmup = {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 10, "warmup_type": "linear"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": warmup},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def _train(engine: Any, steps: int, seed: int) -> list[float]:
    """The losses of every micro-batch, as the mean over ranks."""
    generator = torch.Generator().manual_seed(1000 + seed + 7 * dist.get_rank())
    losses = torch.zeros(2 * steps)
    for place in range(2 * steps):
        loss = engine(torch.randn(2, WIDTH, generator=generator)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses[place] = loss.item()
    dist.all_reduce(losses)
    return list((losses / dist.get_world_size()).tolist())


def _restored(folder: str, stage: int) -> None:
    saved = f"{folder}/saved"
    first = _engine(stage, seed=0)
    _train(first, 3, 0)
    assert first.save_checkpoint(saved, client_state={"mine": 7}) is True
    _train(first, 1, 10)
    first.save_checkpoint(saved, tag="second")
    first.destroy()
    loads: dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]] = {
        "everything": ((saved,), {}, {}),
        "everything into an engine that has stepped": ((saved,), {}, {}),
        "an older tag": ((saved, "global_step3"), {}, {"mine": 7}),
        "no schedule": ((saved,), {"load_lr_scheduler_states": False}, {}),
        "no optimizer": ((saved,), {"load_optimizer_states": False}, {}),
        "neither optimizer nor schedule": (
            (saved,), {"load_optimizer_states": False, "load_lr_scheduler_states": False}, {},
        ),
        "the module only": ((saved,), {"load_module_only": True}, {}),
        "nothing, from a missing folder": ((f"{folder}/nowhere",), {}, None),
        "nothing, from an empty folder": ((folder,), {}, None),
        "nothing, as the tag is wrong": ((saved, "wrong"), {}, AssertionError),
        "nothing, as the tag is in a missing folder": ((f"{folder}/nowhere", "x"), {}, AssertionError),
    }  # fmt: skip
    assert loads.keys() == BY_DEEPSPEED.keys()
    for name, (arguments, options, wanted) in loads.items():
        engine = _engine(stage, seed=5)
        if "stepped" in name:
            _train(engine, 2, 99)
        if wanted is AssertionError:
            with pytest.raises(AssertionError, match="there is no checkpoint"):
                engine.load_checkpoint(*arguments, **options)
        else:
            path, client_state = engine.load_checkpoint(*arguments, **options)
            assert client_state == wanted and (path is None) == (wanted is None), name
        counters, (rate, position), losses = BY_DEEPSPEED[name]
        assert (engine.global_steps, engine.global_samples) == counters and engine.skipped_steps == 0, name
        assert engine.get_lr() == pytest.approx([rate]), name
        assert engine.lr_scheduler.state_dict() == {"last_batch_iteration": position}, name
        assert _train(engine, 3, 20) == pytest.approx(losses, abs=2e-5), name
        engine.destroy()


def _check(folder: str, stage: int) -> None:
    """The ranks serve other tests afterwards, so the module is taken away again."""
    from onecopy.integrations.deepspeed import install, uninstall

    assert install(force=True)
    try:
        _restored(folder, stage)
    finally:
        uninstall()
        for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
            del sys.modules[name]


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 3))])
def test_arguments_restore_what_deepspeed_restores(world2: World, tmp_path: Any, stage: int) -> None:
    world2.run(_check, str(tmp_path), stage)
