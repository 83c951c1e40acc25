"""The sequence of loss scales, and what is said at the minimum."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onecopy.errors import ConfigError, OneCopyError
from onecopy.optim.loss_scale import LossScaler


def scales(scaler, overflows):
    seen = []
    for overflow in overflows:
        scaler.update(overflow)
        seen.append(scaler.scale)
    return seen


def test_hysteresis_is_used_up_before_the_scale_halves():
    scaler = LossScaler(64.0, hysteresis=3)
    assert scales(scaler, [True] * 5) == [64.0, 64.0, 32.0, 16.0, 8.0]


def test_doubles_after_each_clean_window_counted_from_the_last_overflow():
    scaler = LossScaler(64.0, window=2, hysteresis=1)
    assert scales(scaler, [True, False, False, False, False, False]) == [32.0, 32.0, 32.0, 64.0, 64.0, 128.0]


def test_hysteresis_comes_back_when_the_scale_doubles():
    scaler = LossScaler(64.0, window=1, hysteresis=2)
    assert scales(scaler, [True, False, False, True, True]) == [64.0, 64.0, 128.0, 128.0, 64.0]


@pytest.mark.parametrize(("consecutive", "last"), [(False, 32.0), (True, 64.0)])
def test_consecutive_hysteresis_comes_back_at_a_clean_step(consecutive, last):
    scaler = LossScaler(64.0, window=100, hysteresis=2, consecutive_hysteresis=consecutive)
    assert scales(scaler, [True, False, True])[-1] == last


def test_at_the_minimum_the_error_says_what_to_try_and_nothing_changes():
    scaler = LossScaler(4.0, hysteresis=1, minimum=2.0)
    scaler.update(True)
    before = scaler.state_dict()
    with pytest.raises(OneCopyError) as caught:
        scaler.update(True, "First at model.head.weight.")
    for word in (
        "already at minimum",
        "bf16",
        "loss",
        "learning rate",
        "min_loss_scale",
        "model.head.weight",
        "update 2",
    ):
        assert word in str(caught.value)
    assert scaler.state_dict() == before and scaler.scale == 2.0


def test_the_minimum_is_reached_even_between_powers_of_two():
    scaler = LossScaler(4.0, hysteresis=1, minimum=3.0)
    assert scales(scaler, [True]) == [3.0]


def test_a_static_scale_never_changes():
    scaler = LossScaler(128.0, dynamic=False)
    assert scales(scaler, [True, True, False] * 3) == [128.0] * 9


@given(
    flags=st.lists(st.sampled_from([True, False, False]), max_size=40),
    cut=st.integers(0, 40),
    window=st.integers(1, 5),
    hysteresis=st.integers(1, 3),
    consecutive=st.booleans(),
)
def test_continues_exactly_from_its_state(flags, cut, window, hysteresis, consecutive):
    def make():
        return LossScaler(2.0**60, window=window, hysteresis=hysteresis, consecutive_hysteresis=consecutive)

    whole, first, second = make(), make(), make()
    expected = scales(whole, flags)
    seen = scales(first, flags[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert seen + scales(second, flags[cut:]) == expected


def test_between_static_and_dynamic_the_configuration_wins():
    static, dynamic = LossScaler(8.0, dynamic=False), LossScaler(64.0)
    dynamic.load_state_dict(static.state_dict())
    assert dynamic.scale == 64.0
    static.load_state_dict(dynamic.state_dict())
    assert static.scale == 8.0


def fp16(**changes):
    settings = dict(
        enabled=True,
        loss_scale=0.0,
        initial_scale=65536.0,
        loss_scale_window=1000,
        hysteresis=2,
        consecutive_hysteresis=False,
        min_loss_scale=1.0,
    )
    return SimpleNamespace(**{**settings, **changes})


def test_from_the_fp16_block():
    assert (LossScaler.from_config(fp16()).scale, LossScaler.from_config(fp16()).dynamic) == (65536.0, True)
    static = LossScaler.from_config(fp16(loss_scale=512.0))
    assert (static.scale, static.dynamic) == (512.0, False)
    off = LossScaler.from_config(fp16(enabled=False))
    assert (off.scale, off.dynamic) == (1.0, False)


@pytest.mark.parametrize(
    "wrong", [{"scale": 0.0}, {"scale": float("inf")}, {"window": 0}, {"hysteresis": 0}, {"scale": 1.0, "minimum": 2.0}]
)
def test_bad_settings(wrong):
    with pytest.raises(ConfigError, match="fp16"):
        LossScaler(**wrong)
