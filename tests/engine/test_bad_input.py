"""Wrong input gives one error on every rank that names what is wrong and what to do, at once, and never a hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
from onecopy.errors import ConfigError, ModelError, OneCopyError
from tests.reference import configuration
from tests.worlds import World


def net(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))


def freeze_first(model: nn.Module, freeze: bool) -> nn.Module:
    model[0].requires_grad_(not freeze)  # type: ignore[index]
    return model


def start(what: str) -> None:
    """One wrong call of `initialize`."""
    model, config = net(), configuration(3)
    rank = dist.get_rank()
    calls: dict[str, Any] = {
        "missing file": lambda: {"model": model, "config": "/nowhere/ds_config.json"},
        "no configuration": lambda: {"model": model},
        "no model": lambda: {"config": config},
        "not a model": lambda: {"model": model.state_dict(), "config": config},
        "wrong type": lambda: {"model": model, "config": {**config, "gradient_clipping": "one"}},
        "unknown zero key": lambda: {
            "model": model,
            "config": {**config, "zero_optimization": {"stage": 3, "stge": 1}},
        },
        "batch sizes": lambda: {
            "model": model,
            "config": {
                **config,
                "train_batch_size": 7,
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
            },
        },
        "bucket of zero": lambda: {
            "model": model,
            "config": {**config, "zero_optimization": {"stage": 2, "reduce_bucket_size": -1}},
        },
        "both precisions": lambda: {
            "model": model,
            "config": {**config, "fp16": {"enabled": True}, "bf16": {"enabled": True}},
        },
        "empty parameters": lambda: {"model": model, "config": config, "model_parameters": []},
        "all frozen": lambda: {"model": model.requires_grad_(False), "config": config},
        "foreign optimizer": lambda: {
            "model": model,
            "config": {**config, "optimizer": None},
            "optimizer": torch.optim.AdamW(net().parameters()),
        },
        "foreign parameters": lambda: {"model": model, "config": config, "model_parameters": net().parameters()},
        "unknown optimizer": lambda: {
            "model": model,
            "config": {**config, "optimizer": {"type": "AdamX", "params": {}}},
        },
        "unknown schedule": lambda: {
            "model": model,
            "config": {**config, "scheduler": {"type": "WarmupR", "params": {}}},
        },
        "schedule that fails": lambda: {
            "model": model,
            "config": config,
            "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, gamma=0.5),
        },
        "offload": lambda: {
            "model": model,
            "config": {**config, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
        },
        "complex": lambda: {"model": nn.Linear(4, 4, dtype=torch.complex64), "config": config},
        "other shapes": lambda: {"model": net(4 + rank), "config": config},
        "other names": lambda: {"model": nn.Sequential(*([nn.Identity()] * rank), *net()), "config": config},
        "other freezing": lambda: {"model": freeze_first(net(), rank == 1), "config": config},
        "all frozen on one": lambda: {"model": net().requires_grad_(rank == 0), "config": config},
        "other dtype": lambda: {"model": net().to(torch.bfloat16 if rank else torch.float32), "config": config},
    }
    engine, _, _, _ = onecopy.initialize(**calls[what]())
    engine.destroy()


ERRORS: dict[str, tuple[type[BaseException], str]] = {
    "missing file": (ConfigError, r"/nowhere/ds_config\.json"),
    "no configuration": (AssertionError, "config="),
    "no model": (AssertionError, "model="),
    "not a model": (AssertionError, "OrderedDict.*torch.nn.Module"),
    "wrong type": (ConfigError, "gradient_clipping.*one"),
    "unknown zero key": (ConfigError, "zero_optimization.stge.*stage"),
    "batch sizes": (ConfigError, "train_batch_size"),
    "bucket of zero": (ConfigError, "reduce_bucket_size.*-1"),
    "both precisions": (ConfigError, "bf16.*fp16|fp16.*bf16"),
    "empty parameters": (ModelError, "no parameter to train.*empty"),
    "all frozen": (ModelError, "no parameter to train.*requires_grad=False"),
    "foreign optimizer": (ModelError, "no parameter of the model"),
    "foreign parameters": (ModelError, "no parameter of the model"),
    "unknown optimizer": (ConfigError, "AdamX"),
    "unknown schedule": (ConfigError, "WarmupR.*WarmupLR"),
    "schedule that fails": (TypeError, "step_size"),
    "offload": (ConfigError, "offload_optimizer"),
    "complex": (ModelError, "weight.*complex64"),
    "other shapes": (ModelError, r"ranks built different models.*0\.weight.*\[4, 4\].*\[5, 4\]"),
    "other names": (ModelError, r"ranks built different models.*'0\.weight'.*'1\.weight'"),
    "other freezing": (ModelError, "ranks built different models.*trained.*frozen"),
    "all frozen on one": (ModelError, "ranks built different models.*trained.*frozen"),
    "other dtype": (ModelError, "ranks built different models.*float32.*bfloat16"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_wrong_arguments_of_initialize(world2: World, what: str) -> None:
    """One sentence with the value and the fix, the same kind of error on both ranks, and nothing left behind."""
    kind, words = ERRORS[what]
    with pytest.raises(kind, match=f"(?s){words}") as caught:
        world2.run(start, what, timeout=30)
    assert world2.alive, f"the ranks did not all raise the same: {caught.value.__notes__}"
    assert any(f"raised {kind.__name__}" in note for note in caught.value.__notes__)


def wrong_call(what: str) -> None:
    config = configuration(3)
    if what.endswith("without an optimizer"):
        config.pop("optimizer")
    engine, _, _, _ = onecopy.initialize(model=net(), config=config)
    x = torch.ones(2, 4)
    try:
        match what:
            case "backward of a vector":
                engine.backward(engine(x))
            case "backward of a number":
                engine.backward(3.0)
            case "backward without an optimizer":
                engine.backward(engine(x).mean())
            case "step without an optimizer":
                engine.step()
            case "new group":
                engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
            case "wrong shape":
                engine(torch.ones(2, 5))
            case _:
                raise NotImplementedError(what)
    finally:
        engine.destroy()


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("backward of a vector", AssertionError, r"scalar loss.*\[2, 1\].*mean"),
        ("backward of a number", AssertionError, "scalar loss.*float"),
        ("backward without an optimizer", OneCopyError, "optimizer"),
        ("step without an optimizer", OneCopyError, "optimizer"),
        ("new group", RuntimeError, "add_param_group"),
        ("wrong shape", RuntimeError, "shape|size"),
    ],
)
def test_wrong_calls_of_the_engine(world2: World, what: str, kind: type[BaseException], words: str) -> None:
    with pytest.raises(kind, match=words):
        world2.run(wrong_call, what, timeout=30)
    assert world2.alive


def no_such_operator() -> None:
    """An operator that torch does not have in fp16 on the CPU."""

    class Solve(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.solve(self.weight, x.to(self.weight.dtype))

    engine, _, _, _ = onecopy.initialize(model=Solve(), config=configuration(3, fp16={"enabled": True}))
    try:
        engine(torch.ones(4, 1))
    finally:
        engine.destroy()


def test_an_operator_missing_in_fp16_is_torchs_own_error_on_every_rank(world2: World) -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match="Half|half|16"):
        world2.run(no_such_operator, timeout=30)
    assert world2.alive


def unused_is_an_error(stage: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    engine, _, _, _ = onecopy.initialize(
        model=Net(), config=configuration(stage, zero={"ignore_unused_parameters": False})
    )
    try:
        engine.backward(engine(torch.ones(2, 4)).mean())
        engine.step()
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_unused_parameters_are_an_error_when_asked(world2: World, stage: int) -> None:
    with pytest.raises(ModelError, match=r"no gradient reached unused\.bias"):
        world2.run(unused_is_an_error, stage)
