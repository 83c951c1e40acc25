"""Spellings, unknown names, numbers, null and "auto": what is accepted, what is refused, and what is said about it."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from onecopy.config import Config, ConfigWarning, Finding, ZeroConfig, load
from onecopy.config.keys import keys_of
from onecopy.errors import ConfigError, OneCopyError

STAGE3_NAMES = [key.name for _, key in keys_of(ZeroConfig) if key.name.startswith("stage3_")]


def _load(**keys: Any) -> Config:
    return load({"train_batch_size": 8, **keys}, world_size=1)


def _zero(**keys: Any) -> Config:
    return _load(zero_optimization={"stage": 3, **keys})


def _finding(config: Config, path: str) -> Finding:
    return next(one for one in config.findings if one.key_path == path and one.verdict != "note")


def _notes(config: Config) -> str:
    return "\n".join(f"{one.key_path}: {one.message}" for one in config.findings if one.verdict == "note")


@pytest.mark.parametrize("name", STAGE3_NAMES)
def test_a_stage3_key_has_its_short_name_and_not_both(name: str) -> None:
    short = name.removeprefix("stage3_")
    value = True if isinstance(getattr(_zero().zero, short), bool) else 12345
    for spelling in (name, short):
        config = _zero(**{spelling: value})
        assert getattr(config.zero, short) == (value if short != "prefetch_bucket_size" else 12345)
        assert config.zero.given == {"stage", short}
    with pytest.raises(ConfigError, match=f"zero_optimization.({name}|{short}) = .*same key"):
        _zero(**{name: value, short: value})


def test_old_names_are_accepted_with_a_note() -> None:
    config = _zero(stage3_gather_fp16_weights_on_model_save=True)
    assert config.zero.gather_16bit_weights_on_model_save is True
    assert 'write "stage3_gather_16bit_weights_on_model_save"' in _notes(config)
    with pytest.raises(ConfigError, match="same key"):
        _zero(stage3_gather_fp16_weights_on_model_save=True, gather_16bit_weights_on_model_save=True)


def test_bf16_has_an_alias_and_the_old_boolean_form_works() -> None:
    assert _load(bfloat16={"enabled": True}).compute_dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="same key"):
        _load(bfloat16={"enabled": True}, bf16={"enabled": True})
    config = _load(zero_optimization=True, allgather_size=1000)
    assert (config.zero.stage, config.zero.allgather_bucket_size) == (1, 1000)
    assert "old form" in _notes(config)
    assert _load(zero_optimization=False).zero.stage == 0


@pytest.mark.parametrize(
    ("document", "path", "nearest"),
    [
        ({"zero_optimization": {"stagee": 3}}, "zero_optimization.stagee", "stage"),
        ({"zero_optimization": {"Stage": 3}}, "zero_optimization.Stage", "stage"),
        ({"zero_optimization": {"cpu_offload_params": True}}, "cpu_offload_params", "cpu_offload"),
        ({"zero_optimization": {"reduce_buckt_size": 1}}, "zero_optimization.reduce_buckt_size", "reduce_bucket_size"),
        ({"zero_optimization": {"offload_optimizer": {"devise": "none"}}}, "offload_optimizer.devise", "device"),
        ({"zero_optimization": {"leaf_module": {"class": []}}}, "leaf_module.class", "classes"),
        ({"fp16": {"enabled": False, "initial_scale_pow": 3}}, "fp16.initial_scale_pow", "initial_scale_power"),
        ({"fp16": {"opt_level": "O2"}}, "fp16.opt_level", "remove the key"),
        ({"bf16": {"loss_scale": 3}}, "bf16.loss_scale", "fp16.loss_scale"),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, "data_types.grad_acum_dtype", "grad_accum_dtype"),
        ({"torch_autocast": {"enable": True}}, "torch_autocast.enable", "enabled"),
        ({"onecopy": {"slot": 3}}, "onecopy.slot", "slots"),
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation", "zero_optimization"),
        ({"FP16": {"enabled": True}}, "FP16", "fp16"),
    ],
)
def test_unknown_names_are_errors_where_they_change_memory_or_numbers(
    document: dict[str, Any], path: str, nearest: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(**document)
    assert path in str(caught.value)
    assert nearest in str(caught.value)


@pytest.mark.parametrize(
    ("document", "path", "nearest"),
    [
        ({"gradient_cliping": 1.0}, "gradient_cliping", "gradient_clipping"),
        ({"reduce_bucket_size": 5e8}, "reduce_bucket_size", "zero_optimization.reduce_bucket_size"),
        ({"checkpoint": {"tag_validaton": "Fail"}}, "checkpoint.tag_validaton", "tag_validation"),
        ({"activation_checkpointing": {"partition_activation": True}}, "partition_activation", "partition_activations"),
        ({"optimizer": {"type": "AdamW", "param": {}}}, "optimizer.param", "params"),
        ({"tensorboard": {"enable": True}}, "tensorboard.enable", "enabled"),
        ({"qqqqqqqq": 1}, "qqqqqqqq", "remove the key"),
        ({7: 1}, "7", "remove the key"),
    ],
)
def test_unknown_names_elsewhere_warn(document: dict[Any, Any], path: str, nearest: str) -> None:
    with pytest.warns(ConfigWarning, match="unknown key") as caught:
        config = load({"train_batch_size": 8, **document}, world_size=1)
    assert nearest in str(caught[0].message)
    assert path in _notes(config)


def test_a_key_under_an_alias_finds_its_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r'bfloat16.enable = true: unknown key; did you mean "enabled"'):
        _load(bfloat16={"enable": True})


@pytest.mark.parametrize("value", [3, 3.0, "3"])
def test_stage_spellings(value: object) -> None:
    assert _load(zero_optimization={"stage": value}).zero.stage == 3


def test_stage_true_is_one() -> None:
    assert _load(zero_optimization={"stage": True}).zero.stage == 1


@pytest.mark.parametrize("value", [4, -1, 1.5, "three", "auto", None, [], float("nan")])
def test_other_stages_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^zero_optimization.stage = .*0, 1, 2 or 3"):
        _load(zero_optimization={"stage": value})


def test_whole_numbers() -> None:
    assert _zero(reduce_bucket_size=5e8).zero.reduce_bucket_size == 500_000_000
    assert type(_zero(reduce_bucket_size=5e8).zero.reduce_bucket_size) is int
    with pytest.raises(ConfigError, match=r'reduce_bucket_size = "5e8": .* write 500000000 without quotes'):
        _zero(reduce_bucket_size="5e8")
    with pytest.raises(ConfigError, match="fraction"):
        _zero(reduce_bucket_size=0.5)
    with pytest.raises(ConfigError, match="at least 1"):
        _zero(reduce_bucket_size=0)
    with pytest.raises(ConfigError, match="a boolean"):
        _zero(sub_group_size=True)


def test_switches() -> None:
    assert _zero(overlap_comm=0).zero.overlap_comm is False
    with pytest.raises(ConfigError, match="write false without quotes"):
        _zero(overlap_comm="false")
    with pytest.raises(ConfigError, match=r"overlap_comm = 2: must be true or false"):
        _zero(overlap_comm=2)


@pytest.mark.parametrize("value", [math.inf, None])
def test_steps_per_print_may_be_infinite(value: object) -> None:
    assert _load(steps_per_print=value).steps_per_print is None
    with pytest.raises(ConfigError, match="steps_per_print"):
        _load(steps_per_print=-math.inf)


@pytest.mark.parametrize("name", ["fp32", "FP32", "float32", "torch.float32"])
def test_dtype_names(name: str) -> None:
    assert _load(communication_data_type=name).communication_data_type == torch.float32
    assert _load(data_types={"grad_accum_dtype": name}).data_types.grad_accum_dtype == torch.float32


@pytest.mark.parametrize("name", ["bfp16", "int8", 16, True, "float64"])
def test_other_dtype_names_are_refused(name: object) -> None:
    with pytest.raises(ConfigError, match=r"communication_data_type = .*bf16"):
        _load(communication_data_type=name)


BLOCKS = ["zero_optimization", "fp16", "bf16", "data_types", "torch_autocast", "optimizer", "scheduler", "tensorboard",
          "activation_checkpointing", "checkpoint", "onecopy"]  # fmt: skip


@pytest.mark.parametrize("block", BLOCKS)
def test_null_blocks_read_as_absent(block: str) -> None:
    config = _load(**{block: None})
    assert config.report().count(block) >= 1
    for value in ("auto", 3, [1], "text"):
        with pytest.raises(ConfigError, match=f"^{block} = "):
            _load(**{block: value})


def test_null_for_a_plain_key_says_the_default() -> None:
    with pytest.raises(ConfigError, match=r"gradient_clipping = null: .*default 1.0"):
        _load(gradient_clipping=None)


def test_auto_takes_documented_defaults_with_a_note() -> None:
    config = _load(
        gradient_clipping="auto",
        zero_optimization={"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
        optimizer={"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    )
    assert (config.gradient_clipping, config.zero.reduce_bucket_size) == (1.0, 500_000_000)
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    for path in ("gradient_clipping", "zero_optimization.reduce_bucket_size", "optimizer.params.lr"):
        assert f"{path}: " in _notes(config)


@pytest.mark.parametrize("on, auto", [("fp16", "bf16"), ("bf16", "fp16")])
def test_auto_precision_follows_from_the_other(on: str, auto: str) -> None:
    config = _load(**{on: {"enabled": True}, auto: {"enabled": "auto"}})
    assert getattr(config, on).enabled and not getattr(config, auto).enabled
    for other in ({}, {on: {"enabled": False}}, {on: {"enabled": "auto"}}):
        with pytest.raises(ConfigError, match=f'{auto}.enabled = "auto"'):
            _load(**{auto: {"enabled": "auto"}, **other})


def test_all_problems_come_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"train_batch_size": 0, "gradient_clipping": -1, "zero_optimization": {"stage": 9, "x": 1}}, world_size=1)
    text = str(caught.value)
    assert text.startswith("4 problems")
    for path in (
        "train_batch_size = 0",
        "gradient_clipping = -1",
        "zero_optimization.stage = 9",
        "zero_optimization.x = 1",
    ):
        assert path in text
    assert isinstance(caught.value, (OneCopyError, ValueError))


def test_stage_3_keys_are_ignored_below_stage_3() -> None:
    config = _load(zero_optimization={"stage": 2, "stage3_max_live_parameters": 1e9, "prefetch_bucket_size": 1})
    for path in ("stage3_max_live_parameters", "prefetch_bucket_size"):
        assert _finding(config, f"zero_optimization.{path}").verdict == "ignored"
    assert _finding(_zero(prefetch_bucket_size=1), "zero_optimization.prefetch_bucket_size").verdict == "honoured"


def test_sequential_gathering_means_no_prefetch() -> None:
    assert _zero(stage3_allgather_sequential=True).zero.prefetch_bucket_size == 0


def test_leaf_module_takes_a_single_name() -> None:
    leaf = _zero(leaf_module={"classes": "Block", "name_suffixes": ["mlp"]}).zero.leaf_module
    assert (leaf.classes, leaf.names, leaf.name_suffixes) == (("Block",), (), ("mlp",))


def test_our_own_block() -> None:
    own = _load(onecopy={"slots": 3, "unit_classes": ["Block"], "timeout_seconds": 5, "trace_step": 2}).onecopy
    assert (own.slots, own.unit_classes, own.timeout_seconds, own.trace_step) == (3, ("Block",), 5.0, 2)
    for name, value in (("slots", 0), ("timeout_seconds", 0), ("trace_step", 0), ("trace_path", " ")):
        with pytest.raises(ConfigError, match=f"onecopy.{name}"):
            _load(onecopy={name: value})


def test_every_verdict_has_a_sentence_and_no_warning_is_issued_for_good_keys() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = _zero(overlap_comm=True, contiguous_gradients=False, round_robin_gradients=True, reduce_scatter=False)
    assert all(one.message for one in config.findings)
    assert _finding(config, "zero_optimization.contiguous_gradients").verdict == "ignored"
    assert _finding(config, "zero_optimization.round_robin_gradients").verdict == "implied"
