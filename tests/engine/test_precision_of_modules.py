"""Dtypes that the configuration gives to buffers, and to the modules it names."""

from __future__ import annotations

import pytest
import torch

import onecopy
from onecopy.errors import ConfigError
from tests.engine.test_precision import WIDTH, Mixed, one_loss
from tests.reference import configuration, full_masters
from tests.worlds import World


def buffers(stage: int, kept: str | tuple[str, ...]) -> None:
    model = Mixed()
    model.router.register_buffer("bias_table", torch.ones(WIDTH))
    config = configuration(
        stage, bf16={"enabled": True}, data_types={"buffer_dtype": "bf16", "keep_in_fp32_modules": kept}
    )
    engine = onecopy.initialize(model=model, config=config)[0]
    assert model.table.dtype == torch.bfloat16 and model.count.dtype == torch.int64
    assert model.router.bias_table.dtype == (torch.float32 if kept != "auto" else torch.bfloat16)
    engine.backward(next(one_loss(engine, 0, engine.global_rank)))
    engine.step()
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_take_the_type_that_is_written(world2: World, stage: int) -> None:
    """`data_types.buffer_dtype` casts floating-point buffers, but not those of modules kept in fp32, nor integers."""
    world2.run(buffers, stage, "auto")
    world2.run(buffers, stage, ("router",))


def autocast_modules(stage: int) -> tuple[int, int]:
    """Weights after training with and without, and the bytes sent in the last step of each."""
    sent, weights = [], []
    for names in (None, ["torch.nn.Linear"]):
        autocast = {"enabled": True, "dtype": "bfloat16"}
        if names is not None:
            autocast["lower_precision_safe_modules"] = names
        engine = onecopy.initialize(model=Mixed(torch.float32), config=configuration(stage, torch_autocast=autocast))[0]
        for number in range(3):
            engine.backward(next(one_loss(engine, number, engine.global_rank)))
            engine.step()
        sent.append(engine.communication()["bytes_sent"])
        weights.append(full_masters(engine))
        assert all(run.master.dtype == torch.float32 for run in engine.masters.runs)
        engine.destroy()
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=2e-2, atol=5e-3)
    return sent[0], sent[1]


@pytest.mark.parametrize("stage", [1, 3])
def test_modules_safe_in_lower_precision_send_half(world2: World, stage: int) -> None:
    """`torch_autocast.lower_precision_safe_modules`: the same training, in bf16 on the wire; masters stay fp32."""
    whole, half = world2.run(autocast_modules, stage)[0]
    assert half < 0.7 * whole


def wrong_class() -> None:
    autocast = {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linaer"]}
    onecopy.initialize(model=Mixed(), config=configuration(1, torch_autocast=autocast))


def test_a_module_class_that_is_none_is_named(world1: World) -> None:
    with pytest.raises(ConfigError, match=r'"torch\.nn\.Linaer"'):
        world1.run(wrong_class)
