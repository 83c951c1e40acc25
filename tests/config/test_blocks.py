"""Precision, optimizer, scheduler, offload and the features of DeepSpeed that onecopy does not have."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

from onecopy.config import Config, ConfigWarning, load
from onecopy.config.training import REQUIRED, SCHEDULER_PARAMETERS
from onecopy.config.training_blocks import OPTIMIZERS, REFUSED_OPTIMIZERS, SCHEDULERS
from onecopy.errors import ConfigError
from onecopy.optim import registry, schedules


def _load(**keys: Any) -> Config:
    return load({"train_batch_size": 8, **keys}, world_size=1)


def _verdict(config: Config, path: str) -> tuple[str, str]:
    return next((one.verdict, one.message) for one in config.findings if one.key_path == path and one.verdict != "note")


def _notes(config: Config) -> str:
    return "\n".join(f"{one.key_path}: {one.message}" for one in config.findings if one.verdict == "note")


# precision


def test_compute_dtype() -> None:
    assert _load().compute_dtype == torch.float32
    assert _load(fp16={"enabled": True}, bf16={"enabled": False}).compute_dtype == torch.float16
    assert _load(bf16={"enabled": True}, fp16={"enabled": False}).compute_dtype == torch.bfloat16
    with pytest.raises(ConfigError, match=r"bf16.enabled = true: fp16.enabled is true as well"):
        _load(bf16={"enabled": True}, fp16={"enabled": True})


def test_initial_scale_is_a_power_and_its_synonym_a_scale() -> None:
    assert _load(fp16={"enabled": True}).fp16.initial_scale == 65536.0
    assert _load(fp16={"enabled": True, "initial_scale_power": 4}).fp16.initial_scale == 16.0
    config = _load(fp16={"enabled": True, "initial_loss_scale": 4096})
    assert config.fp16.initial_scale == 4096.0
    assert '"initial_scale_power": 12' in _notes(config)
    with pytest.raises(ConfigError, match="initial_scale_power; keep one"):
        _load(fp16={"enabled": True, "initial_loss_scale": 4096, "initial_scale_power": 12})
    with pytest.raises(ConfigError, match="at most 127"):
        _load(fp16={"enabled": True, "initial_scale_power": 65536})


@pytest.mark.parametrize(
    ("key", "value"),
    [("loss_scale", -1), ("loss_scale", float("inf")), ("loss_scale", True), ("loss_scale_window", 0),
     ("hysteresis", 0),
     ("min_loss_scale", 0), ("min_loss_scale", -1), ("min_loss_scale", 1e9), ("initial_loss_scale", 0)],
)  # fmt: skip
def test_wrong_loss_scales(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^fp16.{key} = "):
        _load(fp16={"enabled": True, key: value})


def test_keys_without_effect_are_reported_so() -> None:
    static = _load(fp16={"enabled": True, "loss_scale": 128, "hysteresis": 4})
    assert _verdict(static, "fp16.hysteresis") == ("ignored", "the loss scale is constant, 128")
    assert not static.fp16.dynamic
    off = _load(fp16={"enabled": False, "hysteresis": 4})
    assert _verdict(off, "fp16.hysteresis") == ("ignored", "fp16 is not enabled")


def test_param_dtype_must_agree() -> None:
    assert _load(bf16={"enabled": True}, data_types={"param_dtype": "bf16"}).compute_dtype == torch.bfloat16
    with pytest.raises(ConfigError, match=r'data_types.param_dtype .*"fp16": {"enabled": true}'):
        _load(data_types={"param_dtype": "fp16"})


@pytest.mark.parametrize("value", ["auto", ["norm", "router"], [], "norm"])
def test_keep_in_fp32_modules(value: object) -> None:
    kept = _load(data_types={"keep_in_fp32_modules": value}).data_types.keep_in_fp32_modules
    assert kept == ("auto" if value == "auto" else tuple([value] if isinstance(value, str) else value))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="keep_in_fp32_modules"):
        _load(data_types={"keep_in_fp32_modules": [1]})


@pytest.mark.parametrize(
    "block",
    [{"fp16": {"fp16_master_weights_and_grads": True}}, {"bf16": {"bf16_master_weights_and_grads": True}},
     {"bf16": {"bf16_optimizer_states": True}}],
)  # fmt: skip
def test_masters_stay_fp32(block: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="fp32"):
        _load(**block)


# optimizer and scheduler


def test_adam_is_decoupled_and_said_so() -> None:
    config = _load(optimizer={"type": "Adam", "params": {"lr": 1e-3}})
    assert "decoupled" in _notes(config) and "adam_w_mode" in config.report()
    config = _load(optimizer={"type": "adam", "params": {"adam_w_mode": False}})
    assert "L2" in _verdict(config, "optimizer.type")[1]
    assert "decoupled" not in _notes(config)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_accepted_optimizer_can_be_built(name: str) -> None:
    config = _load(optimizer={"type": name.lower(), "params": {"lr": 1e-2}})
    assert config.optimizer is not None
    built = registry.build_optimizer(
        config.optimizer.type, config.optimizer.params, [torch.nn.Parameter(torch.zeros(3))]
    )
    assert built.param_groups[0]["lr"] == 1e-2
    assert set(OPTIMIZERS) == set(registry.ELEMENTWISE)


@pytest.mark.parametrize("name", [*REFUSED_OPTIMIZERS, "Adan", "", 3, None, "auto"])
def test_other_optimizers_are_refused(name: object) -> None:
    with pytest.raises(ConfigError, match=r"^optimizer.type = "):
        _load(optimizer={"type": name})


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"lr": "2e-5"}, "write 2e-05 without quotes"),
        ({"lr": -1}, "at least 0"),
        ({"betas": 0.9}, "two numbers"),
        ({"betas": [0.9, 1.0]}, "two numbers"),
        ({"weight_decy": 0.1}, 'did you mean "weight_decay"'),
        ({"max_grad_norm": 1.0}, 'write "gradient_clipping": 1.0'),
        ({"foreach": "auto"}, '"auto" has no honest value'),
        ({"bias_correction": False}, "remove the key"),
        ([1], "must be a block"),
    ],
)
def test_wrong_optimizer_parameters(params: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=r"^optimizer.params") as caught:
        _load(optimizer={"type": "AdamW", "params": params})
    assert says in str(caught.value)


def test_schedules_have_the_parameters_of_their_classes() -> None:
    assert set(SCHEDULER_PARAMETERS) == set(schedules.VALID_LR_SCHEDULES)
    for name, parameters in SCHEDULER_PARAMETERS.items():
        signature = inspect.signature(getattr(schedules, name)).parameters
        accepted = {key: one.default for key, one in signature.items() if key != "optimizer"}
        ours = {key: inspect.Parameter.empty if value is REQUIRED else value for key, (_, value) in parameters.items()}
        assert ours == accepted, name


@pytest.mark.parametrize("name", [*SCHEDULER_PARAMETERS, *SCHEDULERS])
def test_schedules_are_found_in_any_case(name: str) -> None:
    required = {key: 10 for key, (_, value) in SCHEDULER_PARAMETERS.get(name, {}).items() if value is REQUIRED}
    config = _load(scheduler={"type": name.lower(), "params": required})
    assert config.scheduler is not None and config.scheduler.type == name
    assert hasattr(schedules, name) or hasattr(torch.optim.lr_scheduler, name)


@pytest.mark.parametrize(
    ("scheduler", "says"),
    [
        ({"type": "WarmupDecayLR"}, "scheduler.params.total_num_steps = null: WarmupDecayLR needs it"),
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}, '"auto" has no honest value'),
        ({"type": "WarmupLR", "params": {"warmup_steps": 3}}, 'did you mean "warmup_num_steps"'),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "at least 1"),
        ({"type": "WarmupRL"}, 'did you mean "WarmupLR"'),
        ({"type": "LambdaLR"}, "give initialize an lr_scheduler"),
        ({"params": {}}, "the block has no type"),
    ],
)
def test_wrong_schedules(scheduler: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(scheduler=scheduler)
    assert says in str(caught.value)


def test_auto_in_schedules() -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 3e-4}}
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": 50}
    config = _load(optimizer=optimizer, scheduler={"type": "WarmupDecayLR", "params": params})
    assert config.scheduler is not None
    assert config.scheduler.params == {
        "warmup_min_lr": 0.0, "warmup_max_lr": 3e-4, "warmup_num_steps": 1000, "total_num_steps": 50,
    }  # fmt: skip
    assert _load(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}).scheduler.params == {}  # type: ignore[union-attr]


def test_an_unknown_warmup_type_is_log_as_in_deepspeed() -> None:
    with pytest.warns(ConfigWarning, match='taken as "log"'):
        config = _load(scheduler={"type": "WarmupLR", "params": {"warmup_type": "cosine"}})
    assert config.scheduler is not None and config.scheduler.params == {"warmup_type": "log"}


# offload and features


@pytest.mark.parametrize("name", ["offload_param", "offload_optimizer"])
def test_offload_is_refused_unless_its_device_is_none(name: str) -> None:
    for block in (None, {}, {"device": "none", "nvme_path": None}, "auto", {"device": "auto", "nvme_path": "auto"}):
        _load(zero_optimization={"stage": 3, name: block})
    for device in ("cpu", "nvme", "CPU"):
        with pytest.raises(ConfigError, match=f"^zero_optimization.{name}.device = .*does not offload[^.]*$"):
            _load(zero_optimization={"stage": 3, name: {"device": device, "pin_memory": True}})
    with pytest.raises(ConfigError, match=r"device = \"gpu\""):
        _load(zero_optimization={"stage": 3, name: {"device": "gpu"}})


@pytest.mark.parametrize("name", ["cpu_offload", "cpu_offload_param"])
def test_old_offload_names(name: str) -> None:
    config = _load(zero_optimization={"stage": 3, name: False, "cpu_offload_use_pin_memory": True})
    assert _verdict(config, f"zero_optimization.{name}")[0] == "ignored"
    with pytest.raises(ConfigError, match="does not offload"):
        _load(zero_optimization={"stage": 3, name: True})


@pytest.mark.parametrize(
    "keys",
    [
        {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}, {"zero_hpz_partition_size": 2},
        {"zero_quantized_nontrainable_weights": True}, {"mics_shard_size": 8},
        {"mics_hierarchical_params_gather": True},
        {"zeropp_loco_param": {"err_beta": 0.8}}, {"zenflow": {"topk_ratio": 0.1}}, {"legacy_stage1": True},
    ],
)  # fmt: skip
def test_zero_features_are_refused_when_on(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^zero_optimization.{next(iter(keys))} = "):
        _load(zero_optimization={"stage": 3, **keys})


def test_zero_features_are_accepted_when_off() -> None:
    off = {"zero_quantized_weights": False, "zero_hpz_partition_size": 1, "mics_shard_size": -1,
           "zeropp_loco_param": None,
           "mics_hierarchical_params_gather": False, "zenflow": None, "legacy_stage1": False}  # fmt: skip
    config = _load(zero_optimization={"stage": 3, **off})
    assert not re.search("refused", config.report())


@pytest.mark.parametrize(
    ("name", "off", "on"),
    [
        ("amp", {"enabled": False, "opt_level": "O1"}, {"enabled": True}),
        ("sparse_gradients", False, True),
        ("elasticity", {"enabled": False, "max_train_batch_size": 8}, {"enabled": True}),
        ("nebula", None, {"enabled": True}),
        ("curriculum_learning", {"enabled": False}, {"enabled": True}),
        ("sparse_attention", {}, {"mode": "fixed"}),
        ("hybrid_engine", {"enabled": False}, {"enabled": True}),
        ("tensor_parallel", {"autotp_size": 0}, {"autotp_size": 2}),
        ("sequence_parallel_size", 1, 2),
        ("compile", {"deepcompile": False}, {"deepcompile": True}),
        (
            "compression_training",
            {"weight_quantization": {"shared_parameters": {"enabled": False, "schedule_offset": 1}}},
            {"weight_quantization": {"shared_parameters": {"enabled": True}}},
        ),
    ],
)
def test_features_are_accepted_when_off_and_refused_when_on(name: str, off: Any, on: Any) -> None:
    assert _verdict(_load(**{name: off}), name)[0] in ("ignored", "implied")
    with pytest.raises(ConfigError, match=f"^{name} = .*onecopy has no") as caught:
        _load(**{name: on})
    assert "\n" not in str(caught.value)


def test_observers_warn_when_on() -> None:
    for name in ("comms_logger", "wandb", "comet"):
        _load(**{name: {"enabled": False}})
        with pytest.warns(ConfigWarning, match="has no effect"):
            _load(**{name: {"enabled": True}})


def test_data_parallel_size_is_the_world_size() -> None:
    assert load({"train_batch_size": 8, "data_parallel_size": 2}, world_size=2).world_size == 2
    with pytest.raises(ConfigError, match="data_parallel_size"):
        load({"train_batch_size": 8, "data_parallel_size": 2}, world_size=4)


def test_sums_are_refused_at_stage_3() -> None:
    assert _load(gradient_allreduce_op="SUM").gradient_allreduce_op == "sum"
    with pytest.raises(ConfigError, match="^gradient_allreduce_op = "):
        _load(gradient_allreduce_op="sum", zero_optimization={"stage": 3})


def test_a_buffer_dtype_is_honoured() -> None:
    config = _load(data_types={"buffer_dtype": "bf16"})
    assert config.data_types.buffer_dtype == torch.bfloat16
    assert any(f.key_path == "data_types.buffer_dtype" and f.verdict == "honoured" for f in config.findings)
