"""Counts what a model's forward computes, module by module: multiply-accumulates, operations, parameters, time.

Counted are matrix products, convolutions and attention (two operations a multiply-accumulate), and one or a few operations
an element for activations, norms, softmax, sums and products of tensors. Backward is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_ACTIVATIONS = {
    "relu",
    "relu_",
    "gelu",
    "silu",
    "silu_",
    "leaky_relu",
    "elu",
    "sigmoid",
    "tanh",
    "hardtanh",
    "hardswish",
}
_ONE_AN_ELEMENT = {*_ACTIVATIONS, "softplus", "threshold", "_softmax", "_log_softmax"}
_ONE_AN_ELEMENT |= {"add", "add_", "mul", "mul_", "sub", "sub_", "div", "div_"}
_SEVERAL_AN_ELEMENT = {"native_layer_norm": 5, "native_batch_norm": 5, "native_group_norm": 5, "_fused_rms_norm": 4}


@dataclass
class Counts:
    """What one module's forward did, its children included: operations, multiply-accumulates, seconds."""

    flops: int = 0
    macs: int = 0
    duration: float = 0.0


class _Counting(TorchDispatchMode):
    """Adds what each operation costs to all modules that are running."""

    def __init__(self, running: list[Counts]) -> None:
        super().__init__()
        self.running = running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        flops, macs = _cost(func, args, kwargs or {}, result)
        if flops:
            for counts in {id(one): one for one in self.running}.values():
                counts.flops += flops
                counts.macs += macs
        return result


def _cost(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    packet = func._overloadpacket
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    elements = first.numel() if isinstance(first, torch.Tensor) else 0
    if packet in flop_registry:
        products = int(flop_registry[packet](*args, **kwargs, out_val=result))
        bias = packet is torch.ops.aten.convolution and len(args) > 2 and args[2] is not None
        return products + (elements if bias else 0), products // 2
    name = packet.__name__
    each = 1 if name in _ONE_AN_ELEMENT else _SEVERAL_AN_ELEMENT.get(name, 0)
    return each * elements, 0


class FlopProfile:
    """Counts forwards of a model between `start` and `stop`. Not collective.

    Attributes:
        of: the counts of each module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.of: dict[nn.Module, Counts] = {}
        self._running: list[Counts] = []
        self._handles: list[Any] = []
        self._mode: _Counting | None = None

    def start(self, ignored: Iterable[type[nn.Module]] = ()) -> None:
        """Count from now on; modules of the ignored classes get no counts of their own."""
        skipped = tuple(ignored)
        self.reset()
        for module in self.model.modules():
            if not isinstance(module, skipped):
                self._handles.append(module.register_forward_pre_hook(self._entering(module), prepend=True))
                self._handles.append(module.register_forward_hook(self._leaving, always_call=True))
        self._mode = _Counting(self._running)
        self._mode.__enter__()

    def stop(self) -> None:
        """Count no more; the numbers stay."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def reset(self) -> None:
        self.stop()
        self.of = {module: Counts() for module in self.model.modules()}

    def _entering(self, module: nn.Module) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            counts = self.of[module]
            counts.duration -= _now()
            self._running.append(counts)

        return enter

    def _leaving(self, *_: Any) -> None:
        self._running.pop().duration += _now()

    def counts(self, module: nn.Module) -> Counts:
        """Of one module; of one that is no step of a forward itself, such as a ModuleList, what its children did."""
        own = self.of[module]
        if own.duration or own.flops:
            return own
        parts = [self.counts(child) for child in module.children()]
        return Counts(sum(p.flops for p in parts), sum(p.macs for p in parts), sum(p.duration for p in parts))

    @property
    def total(self) -> Counts:
        return self.of.get(self.model, Counts())


def _now() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def parameters_of(module: nn.Module) -> int:
    """Elements of a module's parameters, whole even where an engine shards them."""
    return sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in module.parameters())
