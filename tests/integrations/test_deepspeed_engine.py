"""What the `deepspeed` module's engine, optimizer and parameters are beyond onecopy's own."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.worlds import World


def _engine(stage: int, **blocks: Any) -> Any:
    import deepspeed

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        **blocks,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def _optimizer_tells_its_mode() -> None:
    import deepspeed
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    for stage in (0, 2, 3):
        engine = _engine(stage, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
        optimizer = engine.optimizer
        assert isinstance(optimizer, DeepSpeedZeroOptimizer) == (stage == 2)
        assert isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) == (stage == 3)
        assert isinstance(optimizer, deepspeed.ZeROOptimizer) == (stage > 0)
        assert isinstance(optimizer, deepspeed.DeepSpeedOptimizer)
        assert optimizer.dynamic_loss_scale and optimizer.loss_scaler.dynamic and optimizer.clip_grad == 1.0
        engine.backward(engine(torch.randn(2, 4).half()).float().sum() * float("inf"))
        engine.step()
        assert optimizer.overflow and optimizer.loss_scaler.cur_scale == optimizer.cur_scale == 8.0
        optimizer.loss_scaler.cur_scale = 2.0
        assert engine.loss_scale() == 2.0
        assert engine._config.zero_optimization_stage == engine._config.zero_config.stage == stage
        assert engine._config.optimizer_name == "adam" and engine._config.train_batch_size == 4
        engine.destroy()


def _counting_step_applies_nothing() -> None:
    engine = _engine(1, gradient_accumulation_steps=2)
    applied = []
    for _ in range(3):
        loss = engine(torch.ones(2, 4)).sum()
        engine.backward(loss)
        engine.step()
        applied.append(engine.was_step_applied())
    assert applied == [False, True, False] and not engine.optimizer.overflow
    with pytest.raises(AssertionError, match="scalar loss"):
        engine.scale(engine(torch.ones(2, 4)))
    assert list(engine.module_state_dict(prefix="a.")) == ["a.0.weight", "a.0.bias", "a.1.weight", "a.1.bias"]
    engine.module[0].requires_grad_(False)
    assert list(engine.module_state_dict(exclude_frozen_parameters=True)) == ["1.weight", "1.bias"]
    engine.destroy()


def _hooks_can_be_taken_off_for_a_generation() -> None:
    """As TRL's `unwrap_model_for_generation` does it at stage 3; each rank calls the model as often as it likes."""
    import deepspeed

    def losses(between: bool) -> list[float]:
        engine, found = _engine(3), []
        for number in range(3):
            if between:
                with deepspeed.zero.GatheredParameters(engine.parameters()):
                    offload = engine.optimizer.parameter_offload
                    assert not list(offload.module.ds_external_parameters())
                    for parameter in offload.module.parameters():
                        parameter.ds_active_sub_modules.clear()
                    for hook in [*offload.forward_hooks, *offload.backward_hooks]:
                        hook.remove()
                    offload.forward_hooks, offload.backward_hooks = [], []
                    for _ in range(1 + 2 * engine.global_rank):
                        engine.module(torch.ones(1, 4)).sum().item()
                    offload._register_deepspeed_module(offload.module)
            loss = engine(torch.full((2, 4), float(number))).square().sum()
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        engine.destroy()
        return found

    assert losses(True) == losses(False)


def _parameters_have_the_methods() -> None:
    from deepspeed.zero import GatheredParameters, ZeroParamStatus, ZeroParamType

    engine = _engine(3)
    parameter = engine.module[0].weight
    assert parameter.ds_shape == torch.Size([8, 4]) and parameter.ds_param_type is ZeroParamType.PARTITIONED
    assert parameter.partition_numel() == 16 and parameter.ds_summary()["ds_numel"] == 32
    with GatheredParameters(parameter):
        assert parameter.ds_status is ZeroParamStatus.AVAILABLE and parameter.shape == (8, 4)
    assert parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE and parameter.shape == (0,)
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_local_fp32_param, tensor_fragment
    from deepspeed.utils.tensor_fragment import safe_set_local_fp32_param

    assert len(tensor_fragment.__all__) == 13 and tensor_fragment.safe_get_full_fp32_param is safe_get_full_fp32_param
    bias = engine.module[1].bias
    mine = safe_get_local_fp32_param(bias)
    rank = torch.distributed.get_rank()
    assert mine.shape == (bias.partition_numel(),) == (2,)
    assert torch.equal(mine, safe_get_full_fp32_param(bias)[2 * rank : 2 * rank + 2])
    safe_set_local_fp32_param(bias, torch.full((2,), float(rank)))
    assert safe_get_full_fp32_param(param=bias).tolist() == [0.0, 0.0, 1.0, 1.0]
    parameter.all_gather()
    assert parameter.ds_status is ZeroParamStatus.AVAILABLE
    parameter.data.fill_(3.0)
    parameter.partition(has_been_updated=True)
    assert parameter.shape == (0,)
    with GatheredParameters(parameter):
        assert bool((parameter == 3.0).all())
    module = engine.module
    engine.destroy()
    left = {name for name in vars(parameter) if not name.startswith("_")} | {*vars(module)} & {"ds_external_parameters"}
    assert not left, left


def _checkpoints_have_the_script_and_deepspeeds_errors() -> None:
    from deepspeed.utils import safe_get_full_fp32_param, zero_to_fp32

    engine = _engine(2)
    folder = Path(tempfile.gettempdir()) / f"onecopy-script-{os.getppid()}"
    try:
        assert engine.save_checkpoint(folder, client_state={"epoch": 1})
        assert "save_checkpoint" not in vars(engine)  # a wrapper there would keep the engine alive by itself
        assert "exclude_frozen_parameters" in inspect.signature(engine.save_checkpoint).parameters
        assert engine.load_checkpoint(folder)[1] == {"epoch": 1}
        for call, kind in (
            (lambda: engine.load_checkpoint(folder, tag="absent"), AssertionError),
            (lambda: engine.save_checkpoint(folder, tag=""), ValueError),
            (lambda: zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, tag="absent"), FileNotFoundError),
            (lambda: zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder / "absent"), ValueError),
        ):
            with pytest.raises(kind):
                call()
        weight = safe_get_full_fp32_param(engine.module[0].weight)
        if engine.global_rank == 0:
            assert (folder / "zero_to_fp32.py").is_file()
            zero_to_fp32.main([str(folder), str(folder / "out"), "--safe_serialization"])
            zero_to_fp32.convert_zero_checkpoint_to_state_dict(folder, folder / "half", torch.bfloat16)
            found = torch.load(folder / "half" / "pytorch_model.bin")
            assert found["0.weight"].dtype == torch.bfloat16
            assert torch.equal(found["0.weight"], weight.bfloat16())
            assert (folder / "out" / "model.safetensors").is_file()
    finally:
        torch.distributed.barrier()
        shutil.rmtree(folder, ignore_errors=True)
    engine.destroy()


def _frozen_parameters_of_one_rank_have_the_methods() -> None:
    import deepspeed

    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1))
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, "optimizer": {"type": "Adam"}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    trained, frozen = model[1].weight, model[0].weight
    trained.all_gather([trained, frozen])
    assert frozen.ds_summary()["status"] == "AVAILABLE" and frozen.partition_numel() == 16
    trained.partition([trained, frozen])
    engine.destroy()


CHECKS = [
    _hooks_can_be_taken_off_for_a_generation,
    _optimizer_tells_its_mode,
    _counting_step_applies_nothing,
    _parameters_have_the_methods,
    _checkpoints_have_the_script_and_deepspeeds_errors,
]


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_ranks(world2: World, check: Callable[[], None]) -> None:
    world2.run(_with_deepspeed, check)


def test_on_one_rank(world1: World) -> None:
    world1.run(_with_deepspeed, _frozen_parameters_of_one_rank_have_the_methods)


def _with_deepspeed(check: Callable[[], None]) -> None:
    """The ranks serve other tests afterwards, so the module is taken away again."""
    from onecopy.integrations.deepspeed import install, uninstall

    assert install(force=True)
    try:
        check()
    finally:
        uninstall()
        for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
            del sys.modules[name]
