"""Promises 1 to 3: the engine trains as plain torch does, whatever the stage, and leaves the same bits on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.reference import Case, assert_like, assert_ranks_agree, assert_same_bits, expected, train_all
from tests.worlds import World, world
from tests.zoo import DIFFERENT_ON_RANKS, KINDS, Shape

GetWorld = Callable[[int], World]
BUCKETS = (1, 7, 1000, 1_000_000_000)
SETTINGS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "derandomize": True,
    "database": None,
    "phases": [Phase.explicit, Phase.generate],  # every example runs on ranks: to shrink one costs minutes
}
OPTIMIZERS: dict[str, dict[str, float]] = {
    "AdamW": {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3},
    "Adam": {"lr": 0.02, "eps": 1e-3},
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05},
    "Adagrad": {"lr": 0.05, "eps": 1e-3},
    "RMSprop": {"lr": 0.01, "eps": 1e-2, "momentum": 0.5},
}


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    container = draw(st.sampled_from(["list", "list", "flat", "sequence"]))
    kinds = [kind for kind in KINDS if container == "list" or kind not in DIFFERENT_ON_RANKS]
    blocks = tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4)))
    flags = [draw(st.booleans()) for _ in range(4)]
    return Shape(draw(st.integers(1, 13)), blocks, container, *flags, seed=draw(st.integers(0, 5)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    optimizer = draw(st.sampled_from(list(OPTIMIZERS)))
    zero = {
        "reduce_bucket_size": draw(st.sampled_from(BUCKETS)),
        "overlap_comm": draw(st.booleans()),
        "stage3_param_persistence_threshold": draw(st.sampled_from([0, 10, 100_000])),
    }
    return Case(
        draw(shapes()),
        optimizer=optimizer,
        params=dict(OPTIMIZERS[optimizer]),
        groups=draw(st.sampled_from(["one", "decay", "each"])),
        client=optimizer == "Adam" or draw(st.booleans()),
        precision=draw(st.sampled_from(["fp32", "fp32", "fp32", "bf16", "fp16"])),
        clip=draw(st.sampled_from([0.0, 0.1, 1.0])),
        windows=draw(st.sampled_from([(1, 1, 1), (3, 3), (3, 3, 2), (2, 1, 3)])),
        zero=zero,
    )


def check_against_torch(some: list[Case], size: int) -> None:
    """Train every case at every stage on `size` ranks and compare with the reference."""
    every = [case.with_(stage=stage) for case in some for stage in range(4)]
    ranks = world(size).run(train_all, every, timeout=300)
    references = [expected(case, size) for case in some]
    for place, case in enumerate(every):
        assert_ranks_agree([rank[place] for rank in ranks], case)
        assert_like(ranks[0][place], references[place // 4], case)
    for place, case in enumerate(some):
        if set(case.windows) == {1}:
            for stage in (1, 2, 3):
                assert_same_bits(ranks[0][4 * place], ranks[0][4 * place + stage], (stage, case))


@settings(max_examples=5, **SETTINGS)
@given(st.lists(cases(), min_size=3, max_size=3))
def test_every_stage_trains_as_plain_torch_on_two_ranks(some: list[Case]) -> None:
    """Losses, norms and weights are those of one process on the concatenated batch, for any model and settings."""
    check_against_torch(some, 2)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_every_stage_trains_as_plain_torch_on(size: int) -> None:
    """The same on other numbers of ranks."""

    @settings(max_examples=2, **SETTINGS)
    @given(st.lists(cases(), min_size=3, max_size=3))
    def check(some: list[Case]) -> None:
        check_against_torch(some, size)

    check()


def test_ranks_with_more_half_filled_buffers_than_others() -> None:
    """Small parameters one by one, two branches: some ranks have many reductions to start at the end of a backward."""
    shape = Shape(5, ("branches", "unused", "unused", "unused"), "list", True, True, True, True, seed=4)
    zero = {"reduce_bucket_size": 1, "stage3_param_persistence_threshold": 100_000}
    check_against_torch([Case(shape, windows=(3, 3), zero=zero)], 3)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_many_more_models_and_settings_on(size: int) -> None:
    """The same on new examples every time."""

    @settings(max_examples=40, **{**SETTINGS, "derandomize": False})
    @given(cases())
    def check(case: Case) -> None:
        check_against_torch([case], size)

    check()
