"""Named random states of the device: what model-parallel layers draw their dropout from, and recomputation repeats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

MODEL_PARALLEL = "model-parallel-rng"
_APART = 2718  # between the seed of what all model-parallel ranks draw alike and the seeds of what each draws by itself


def device_state() -> torch.Tensor:
    """The state of the generator that the accelerator (or the CPU, where there is none) draws from now."""
    if torch.accelerator.is_available():
        return _module().get_rng_state()  # type: ignore[no-any-return]
    return torch.get_rng_state()


def set_device_state(state: torch.Tensor) -> None:
    if torch.accelerator.is_available():
        _module().set_rng_state(state)
    else:
        torch.set_rng_state(state)


def seed_device(seed: int) -> None:
    """Seed the accelerator's generator alone, or the CPU's where there is none."""
    if torch.accelerator.is_available():
        _module().manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _module() -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator())


class CudaRNGStatesTracker:
    """Random states by name beside the current one; `fork` draws from one of them. Megatron's interface."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """A copy of the states by name."""
        return {name: state.clone() for name, state in self.states_.items()}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state that starts from `seed`. Raises Exception when the name or the seed is there already."""
        if seed in self.seeds_:
            raise Exception(f"seed {seed} already exists")
        if name in self.states_:
            raise Exception(f"cuda rng state {name} already exists")
        self.seeds_.add(seed)
        before = device_state()
        seed_device(seed)
        self.states_[name] = device_state()
        set_device_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the named state inside, and go on where it stopped the next time. Raises Exception if unknown."""
        if name not in self.states_:
            raise Exception(f"cuda rng state {name} is not added")
        before = device_state()
        set_device_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device_state()
            set_device_state(before)


TRACKER = CudaRNGStatesTracker()


def seed_model_parallel(seed: int, rank: int) -> None:
    """The device draws from `seed`, alike on all model-parallel ranks; the tracker's state differs by `rank` among them."""
    TRACKER.reset()
    seed_device(seed)
    TRACKER.add(MODEL_PARALLEL, seed + _APART + rank)


def reseed_model_parallel(seed: int, rank: int) -> None:
    """Start the tracker's state anew; the device's own stays."""
    with TRACKER.fork():
        seed_device(seed + _APART + rank)
