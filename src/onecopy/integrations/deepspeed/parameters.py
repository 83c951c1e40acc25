"""What DeepSpeed's sharded parameters can do, on the parameters that an engine shards at stage 3."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from enum import Enum
from typing import Any

from torch import nn

from onecopy.engine import Engine
from onecopy.engine.access import safe_set_full_fp32_param
from onecopy.init.gathered import GatheredParameters


class ZeroParamType(Enum):
    """How a parameter is sharded: NORMAL is whole on every rank."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


def complete_parameters(engine: Engine) -> None:
    """Give the parameters of a stage-3 engine DeepSpeed's methods. Not collective."""
    if engine.zero_optimization_stage() != 3:
        return
    for parameter in engine.module.parameters():
        _Methods(parameter, engine.dp_world_size).hang_on(parameter)


class _Methods:
    """One parameter's methods; `all_gather` and `partition` are collective."""

    def __init__(self, parameter: nn.Parameter, ranks: int) -> None:
        self.parameter = weakref.ref(parameter)  # the parameter holds these methods
        self.ranks = ranks
        self.open: GatheredParameters | None = None

    def hang_on(self, parameter: nn.Parameter) -> None:
        whole = bool(parameter.ds_persist)  # type: ignore[attr-defined]
        attributes = {
            "ds_param_type": ZeroParamType.NORMAL if whole else ZeroParamType.PARTITIONED,
            "all_gather": self.all_gather,
            "partition": self.partition,
            "partition_numel": self.partition_numel,
            "ds_summary": self.ds_summary,
            "ds_methods": self,
        }
        for name, value in attributes.items():
            setattr(parameter, name, value)

    def all_gather(self, param_list: Iterable[Any] | None = None, async_op: bool = False, hierarchy: int = 0) -> None:
        """Make the parameter (or those of the list) whole until `partition`."""
        for methods in self._each(param_list):
            if methods.open is None:
                methods.open = GatheredParameters([methods._here()])
                methods.open.__enter__()

    def partition(
        self, param_list: Iterable[Any] | None = None, hierarchy: int = 0, has_been_updated: bool = False
    ) -> None:
        """End what `all_gather` began; edits count with `has_been_updated`, where every rank made the same."""
        for methods in self._each(param_list):
            context, methods.open = methods.open, None
            if context is None:
                continue
            values = methods._here().detach().clone() if has_been_updated else None
            context.__exit__(None, None, None)
            if values is not None:
                safe_set_full_fp32_param(methods._here(), values)

    def partition_numel(self) -> int:
        """Elements of one rank's equal part."""
        return -(-int(self._here().ds_numel) // self.ranks)  # type: ignore[attr-defined]

    def ds_summary(self, slice_shape: Any = None, use_debug_name: bool = False) -> dict[str, Any]:
        parameter: Any = self._here()
        return {
            "id": parameter.ds_id,
            "status": parameter.ds_status.name,
            "numel": parameter.numel(),
            "ds_numel": parameter.ds_numel,
            "shape": tuple(parameter.shape),
            "ds_shape": tuple(parameter.ds_shape),
            "requires_grad": parameter.requires_grad,
            "grad_shape": None if parameter.grad is None else tuple(parameter.grad.shape),
            "persist": parameter.ds_persist,
        }

    def _here(self) -> nn.Parameter:
        parameter = self.parameter()
        assert parameter is not None, "the parameter that this method belonged to is gone"
        return parameter

    def _each(self, parameters: Iterable[Any] | None) -> list[_Methods]:
        return [self] if parameters is None else [parameter.ds_methods for parameter in parameters]
