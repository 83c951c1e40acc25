"""`GatheredParameters`: inside the context the parameters are whole; edits of one rank reach every rank and the masters."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from onecopy.sharding import FlatBuffer, GuardedParameter
from onecopy.sharding.early_parameter import Borrowed
from onecopy.sharding.parameter import ParameterHome


class GatheredParameters:
    """Make parameters whole for a while. Entering and leaving are collective.

    Args:
        params: a parameter, or an iterable of them. Tensors that no engine manages are left as they are.
        modifier_rank: the group rank whose edits count: they are sent to all ranks and into the masters, so the next
            steps keep them. None: for reading; edits of sharded parameters are discarded.
        fwd_module: accepted for DeepSpeed's signature; parameters used by other modules are fetched by themselves.
        enabled: False makes it do nothing.

    Inside a forward that is trained, or in its backward, the parameters stay until that backward is over, as those do that a
    module borrows from another: what autograd has saved of them, and the gradients that it brings them, need them whole.

    Memory: the flat buffers that hold the parameters, whole and in the compute dtype, and with `modifier_rank` a copy
    of the parameters.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
        for entry in given:
            if not isinstance(entry, torch.Tensor):
                raise TypeError(
                    f"GatheredParameters got a {type(entry).__name__}; give nn.Parameter objects, such as model.parameters()"
                )
        managed: list[Any] = [parameter for parameter in given if enabled and hasattr(parameter, "_onecopy")]
        homes: list[tuple[nn.Parameter, ParameterHome]] = [(parameter, parameter._onecopy) for parameter in managed]
        self._early = Borrowed(given if enabled else [], modifier_rank)
        self._homes = sorted(dict.fromkeys(homes), key=lambda entry: (_flat_of(*entry).key, entry[1].index))
        self._modifier = modifier_rank
        self._borrowed: list[nn.Parameter] = []
        self._before: list[torch.Tensor] = []

    def __enter__(self) -> None:
        self._early.enter()
        gathered: dict[int, list[torch.Tensor]] = {}
        for parameter, home in self._homes:
            home.unit.finish_refresh()
            if not isinstance(parameter, GuardedParameter):
                continue
            if self._modifier is None and home.runtime.lend(home):
                continue
            flat = _flat_of(parameter, home)
            if flat.key not in gathered:
                gathered[flat.key] = flat.views(_gather(flat))
            flat.bind_one(home.index, gathered[flat.key][home.index])
            self._borrowed.append(parameter)
        if self._modifier is not None:
            self._before = [parameter.detach().clone() for parameter, _ in self._homes]

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._modifier is not None and kind is None:
            for (parameter, home), before in zip(self._homes, self._before, strict=True):
                self._keep_edits(parameter, home, before)
        for parameter in self._borrowed:
            home = parameter._onecopy  # type: ignore[attr-defined]
            _flat_of(parameter, home).unbind_one(home.index)
        self._borrowed, self._before = [], []
        if self._modifier is not None:
            for unit in dict.fromkeys(home.unit for _, home in self._homes):
                unit.outdate()
        self._early.exit(keep_edits=kind is None)

    def _keep_edits(self, parameter: nn.Parameter, home: ParameterHome, before: torch.Tensor) -> None:
        """Send the modifier's values, and take over into the masters what changed: the rest keeps its precision."""
        flat = _flat_of(parameter, home)
        values = parameter.detach().contiguous()
        assert self._modifier is not None
        flat.communicator.broadcast(values, self._modifier, home.name)
        parameter.detach().copy_(values)
        flat.write(home.index, values, where=values != before)


def _flat_of(parameter: nn.Parameter, home: ParameterHome) -> FlatBuffer:
    return next(flat for flat in home.unit.buffers if any(parameter is member for member in flat.parameters))


def _gather(flat: FlatBuffer) -> torch.Tensor:
    """The flat buffer whole [n] in the compute dtype, in memory of its own. Collective."""
    whole = torch.empty(flat.numel, dtype=flat.dtype, device=flat.communicator.device)
    flat.fill_own(whole[flat.own])
    flat.communicator.gather(whole, flat.key, flat.label)
    return whole


def register_external_parameter(module: nn.Module, parameter: Any) -> None:
    """Accepted for DeepSpeed's sake: a parameter used by another module is fetched when that module touches it."""
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"register_external_parameter needs a torch.nn.Parameter, not a {type(parameter).__name__}")


def unregister_external_parameter(module: nn.Module, parameter: Any) -> None:
    """Accepted for DeepSpeed's sake; there is nothing to undo."""
