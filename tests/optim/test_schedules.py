"""DeepSpeed's schedules against their closed formulas, and schedules by name."""

import json
import logging
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onecopy.errors import ConfigError
from onecopy.optim.schedules import VALID_LR_SCHEDULES, WarmupLR, build_scheduler


def optimizer(rates=(0.01,), kind=torch.optim.AdamW):
    return kind([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


def sequence(name, params, steps, rates=(0.01,)):
    """The rate of the first group at construction and after each of `steps` steps."""
    target = optimizer(rates)
    schedule = build_scheduler(name, params, target)
    seen = [target.param_groups[0]["lr"]]
    for _ in range(steps):
        schedule.step()
        assert schedule.get_last_lr() == [group["lr"] for group in target.param_groups] == schedule.get_lr()
        seen.append(target.param_groups[0]["lr"])
    return seen


def test_names():
    assert VALID_LR_SCHEDULES == ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


def test_warmup_linear():
    params = {"warmup_min_lr": 1.0, "warmup_max_lr": 5.0, "warmup_num_steps": 4, "warmup_type": "linear"}
    assert sequence("WarmupLR", params, 7) == [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0]


def test_warmup_log_is_the_default():
    expected = [0.0] + [0.01 * math.log(t + 1) / math.log(8) for t in range(8)] + [0.01] * 3
    assert sequence("WarmupLR", {"warmup_num_steps": 8}, 11) == pytest.approx(expected)


def test_warmup_of_one_step_is_two_steps_long():
    assert sequence("WarmupLR", {"warmup_num_steps": 1, "warmup_type": "linear"}, 4) == [0.0, 0.0, 0.005, 0.01, 0.01]


def test_warmup_decay():
    params = {"total_num_steps": 8, "warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"}
    expected = [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]
    assert sequence("WarmupDecayLR", params, 11) == expected
    default = sequence("WarmupDecayLR", {"total_num_steps": 4, "warmup_num_steps": 2}, 3)
    assert default[3] == 0.001  # its own default, not the group's rate


def test_warmup_cosine_scales_each_groups_rate():
    params = {
        "total_num_steps": 10,
        "warmup_min_ratio": 0.1,
        "warmup_num_steps": 4,
        "cos_min_ratio": 0.2,
        "warmup_type": "linear",
    }
    rise = [0.1 + 0.9 * t / 4 for t in range(4)]
    fall = [0.2 + 0.8 * (1 + math.cos(math.pi * min(1.0, (t - 3) / 6))) / 2 for t in range(4, 14)]
    target = optimizer((1.0, 10.0))
    schedule = build_scheduler("WarmupCosineLR", params, target)
    assert [group["lr"] for group in target.param_groups] == [0.0, 0.0]
    for ratio in rise + fall:
        schedule.step()
        assert [group["lr"] for group in target.param_groups] == pytest.approx([ratio, 10 * ratio])
    assert schedule.get_last_lr() == pytest.approx([0.2, 2.0])


def test_range_test():
    params = {"lr_range_test_min_lr": 1.0, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 4.0}
    assert sequence("LRRangeTest", params, 4) == [1.0, 3.0, 5.0, 7.0, 9.0]
    assert sequence("LRRangeTest", {**params, "lr_range_test_staircase": True}, 4) == [1.0, 1.0, 5.0, 5.0, 9.0]
    assert sequence("LRRangeTest", {}, 1) == [1e-3, 1e-3 * (1 + 1 / 2000)]


def test_one_cycle_and_its_momentum():
    params = {
        "cycle_min_lr": 1.0,
        "cycle_max_lr": 5.0,
        "cycle_first_step_size": 4,
        "cycle_second_step_size": 2,
        "cycle_min_mom": 0.5,
        "cycle_max_mom": 0.9,
        "decay_step_size": 2,
        "decay_lr_rate": 0.5,
        "decay_mom_rate": 0.1,
    }
    target = optimizer()
    schedule = build_scheduler("OneCycle", params, target)
    assert target.param_groups[0]["betas"] == (0.5, 0.99)
    heights = [0.25, 0.5, 0.75, 1.0, 0.5, 0.0]
    expected = [(1 + 4 * height, 0.9 - 0.4 * height) for height in heights]
    expected += [(1 / (1 + 0.5 * i / 2), 0.9 * (1 + 0.1 * i / 2)) for i in (1, 2, 3)]
    for rate, momentum in expected:
        schedule.step()
        group = target.param_groups[0]
        assert group["lr"] == pytest.approx(rate)
        assert group["betas"] == (pytest.approx(momentum), 0.99)
        assert schedule.get_mom() == [group["betas"]]


def test_one_cycle_in_stairs():
    params = {"cycle_min_lr": 0.0, "cycle_max_lr": 4.0, "cycle_first_step_size": 4, "cycle_first_stair_count": 2}
    assert sequence("OneCycle", params, 8) == [0.0, 0.0, 2.0, 2.0, 4.0, 2.0, 2.0, 0.0, 0.0]


def test_one_cycle_without_betas_says_so(caplog):
    target = optimizer(kind=torch.optim.SGD)
    with caplog.at_level(logging.WARNING, logger="onecopy"):
        schedule = build_scheduler("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}, target)
    assert "cycle_momentum" in caplog.text
    schedule.step()
    assert schedule.get_mom() is None


def test_values_for_each_group():
    target = optimizer((1.0, 2.0))
    build_scheduler("WarmupLR", {"warmup_min_lr": [0.1, 0.2], "warmup_max_lr": [1.0, 2.0]}, target)
    assert [group["lr"] for group in target.param_groups] == [0.1, 0.2]
    with pytest.raises(ConfigError, match="expected 2 values for warmup_min_lr"):
        build_scheduler("WarmupLR", {"warmup_min_lr": [0.1]}, target)


SMALL = {
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 5, "decay_step_size": 2},
    "WarmupLR": {"warmup_num_steps": 7},
    "WarmupDecayLR": {"total_num_steps": 15, "warmup_num_steps": 7},
    "WarmupCosineLR": {"total_num_steps": 15, "warmup_num_steps": 7},
}


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_before_the_first_step_the_last_rate_is_what_construction_wrote_if_it_did(name):
    target = optimizer()
    schedule = build_scheduler(name, SMALL[name], target)
    if name != "OneCycle":
        assert schedule.get_last_lr() == [group["lr"] for group in target.param_groups]
    continuing = build_scheduler(name, {**SMALL[name], "last_batch_iteration": 3}, optimizer())
    for silent in [continuing, *([schedule] if name == "OneCycle" else [])]:
        with pytest.raises(AssertionError, match="need to call step"):
            silent.get_last_lr()


@given(name=st.sampled_from(VALID_LR_SCHEDULES), before=st.integers(1, 20), after=st.integers(0, 8))
def test_continues_exactly_from_its_state(name, before, after):
    one = optimizer((0.01, 0.02))
    whole = build_scheduler(name, SMALL[name], one)
    for _ in range(before):
        whole.step()
    state = whole.state_dict()
    assert state == {"last_batch_iteration": before - 1} == json.loads(json.dumps(state))
    other = optimizer((0.01, 0.02))
    resumed = build_scheduler(name, SMALL[name], other)
    resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
    for _ in range(after):
        whole.step()
        resumed.step()
    assert resumed.get_last_lr() == whole.get_last_lr()
    assert [(g["lr"], g["betas"]) for g in one.param_groups] == [(g["lr"], g["betas"]) for g in other.param_groups]


def test_step_can_jump_to_an_iteration():
    schedule = build_scheduler("LRRangeTest", {"lr_range_test_step_size": 1, "lr_range_test_min_lr": 1.0}, optimizer())
    schedule.step(4)
    assert schedule.get_last_lr() == [6.0]
    schedule.step(last_batch_iteration=1)
    assert schedule.get_last_lr() == [3.0]
    schedule.step(batch_iteration=0)
    assert schedule.get_last_lr() == [2.0]


def test_group_dicts_replaced_by_a_load_are_followed():
    target = optimizer()
    schedule = build_scheduler("WarmupLR", {"warmup_num_steps": 2, "warmup_type": "linear"}, target)
    target.load_state_dict(target.state_dict())
    schedule.step()
    schedule.step()
    assert target.param_groups[0]["lr"] == 0.005


def test_a_tensor_rate_stays_the_same_tensor():
    rate = torch.tensor(0.5)
    target = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    schedule = build_scheduler("WarmupLR", {"warmup_num_steps": 2, "warmup_type": "linear"}, target)
    schedule.step()
    schedule.step()
    assert target.param_groups[0]["lr"] is rate and rate.item() == 0.25


def test_anything_with_groups_will_do():
    WarmupLR(SimpleNamespace(param_groups=[{"lr": 1.0}])).step()
    with pytest.raises(TypeError, match="param_groups"):
        WarmupLR(torch.nn.Linear(1, 1))


def test_torch_schedules_by_name():
    target = optimizer((1.0,))
    schedule = build_scheduler("StepLR", {"step_size": 1, "gamma": 0.5}, target)
    target.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.5]
    assert type(build_scheduler("CosineAnnealingLR", {"T_max": 10}, target)).__module__.startswith("torch.")


def test_unknown_warmup_type_is_said_and_becomes_log(caplog):
    with caplog.at_level(logging.WARNING, logger="onecopy"):
        seen = sequence("WarmupLR", {"warmup_num_steps": 8, "warmup_type": "liner"}, 3)
    assert '"linear"' in caplog.text
    assert seen[2] == pytest.approx(0.01 * math.log(2) / math.log(8))


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("WarmupLr", {}, ["'WarmupLR'"]),
        ("CosineAnealingLR", {}, ["'CosineAnnealingLR'"]),
        ("Nothing", {}, ["unknown", "WarmupDecayLR"]),
        (3, {}, ["scheduler.type"]),
        ("LambdaLR", {}, ["lr_scheduler=lambda"]),
        ("WarmupDecayLR", {}, ["needs total_num_steps"]),
        ("OneCycle", {"cycle_min_lr": 1.0}, ["needs cycle_max_lr"]),
        ("WarmupLR", {"warmup_steps": 3}, ["scheduler.params.warmup_steps", "'warmup_num_steps'"]),
        ("WarmupLR", {"warmup_num_steps": "auto"}, ["scheduler.params.warmup_num_steps", '"auto"']),
        ("WarmupLR", {"warmup_num_steps": 0}, ["warmup_num_steps", "positive integer"]),
        ("WarmupLR", {"warmup_num_steps": 2.5}, ["warmup_num_steps", "2.5"]),
        ("WarmupLR", {"warmup_max_lr": "1e-3"}, ["warmup_max_lr", "quotes"]),
        ("LRRangeTest", {"lr_range_test_step_size": -1}, ["lr_range_test_step_size"]),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_first_step_size": 0}, ["cycle_first_step_size"]),
        ("StepLR", {}, ["needs step_size"]),
    ],
)
def test_bad_input_names_key_value_and_fix(name, params, words):
    with pytest.raises(ConfigError) as caught:
        build_scheduler(name, params, optimizer())
    for word in words:
        assert word in str(caught.value)


def test_integral_floats_are_integers():
    assert sequence("WarmupLR", {"warmup_num_steps": 4.0, "warmup_type": "linear"}, 2) == [0.0, 0.0, 0.0025]
