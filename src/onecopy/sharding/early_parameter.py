"""Parameters sharded at construction, seen from the code that builds a model: touch one, and it is whole.

Until `initialize` takes the model, whatever reads or writes such a parameter gathers it first, so initialisers, copies and
even forwards see real weights. It is put away again when the next one is touched: rank 0's values are then everyone's, as
they are at the start of every run. Touching is therefore collective, like construction itself.

Note "aliases". Code may hold on to `weight.data` and write to it later, so a parameter is put away only when nothing else
holds its memory on rank 0, whose values count. `tests/init/test_construct.py` loses a write if that is given up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from onecopy.comm import Communicator
from onecopy.errors import ModelError, ReleasedParameterError
from onecopy.sharding.early import EarlyShard, early_shard, nobody_else_holds
from onecopy.sharding.parameter import METADATA

_T = torch.Tensor
# Asked of a placeholder these would mislead (`if p.dim() > 1: xavier_(p)`), so they gather; `shape` and `numel` do not,
# because DeepSpeed's are those of the placeholder and libraries rely on it.
_DIMENSIONS = {_T.dim, _T.ndimension, _T.size, _T.ndim.__get__, _T.stride, torch.Tensor.is_contiguous}  # type: ignore[attr-defined]
_UNTOUCHED = METADATA - _DIMENSIONS
_UNSEEN_WRITES = {
    _T.data.__get__,  # type: ignore[attr-defined]
    *(
        getattr(_T, name)
        for name in ("numpy", "data_ptr", "untyped_storage", "storage", "__array__", "__dlpack__", "tolist")
    ),
}
_SHAPE = _T.shape.__get__  # type: ignore[attr-defined]
_KEEP, _DROP, _SEND = 0, 1, 2

_live: list[nn.Parameter] = []
_one_rank_works = 0  # open contexts in which perhaps one rank alone edits: nothing collective may happen inside


class EarlyParameter(nn.Parameter):
    """A sharded parameter that nobody uses now."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # not collective: debuggers print parameters
        early = early_shard(self)
        return f"EarlyParameter({early!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError(
            f"{early_shard(self)!r} cannot be pickled; save model.state_dict() on every rank, whose tensors are whole"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) in memo:
            known: nn.Parameter = memo[id(self)]
            return known
        early = early_shard(self)
        assert early is not None
        copied = nn.Parameter(torch.empty(0, dtype=early.dtype, device=early.origin), self.requires_grad)
        other = EarlyShard(copied, early.label, early.communicator, early.home, EarlyParameter)
        other.shape, other.dtype, other.shard = early.shape, early.dtype, early.shard.clone()
        other.unbind(copied)
        memo[id(self)] = copied
        return copied


class EarlyAlias(torch.Tensor):
    """What `detach()` of such a parameter gives: nothing is gathered until it is used. `state_dict` is made of these."""

    of: nn.Parameter

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"EarlyAlias({early_shard(self.of)!r})"


def _call(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a torch function on sharded parameters: they are whole by then, and stay so until another one is touched."""
    plain = func in _UNTOUCHED or (_one_rank_works and func in _DIMENSIONS)
    if func == _SHAPE and sys._getframe(2).f_globals.get("__name__") == "torch.nn.init":
        plain = bool(_one_rank_works)  # some of torch's initialisers leave tensors without elements alone
    if func is _T.detach and isinstance(args[0], EarlyParameter):
        return _alias(args[0])
    if not plain:
        found = [_parameter_of(leaf) for leaf in torch.utils._pytree.tree_leaves((args, kwargs))]
        touched = [parameter for parameter in found if parameter is not None]
        if _one_rank_works and any(type(parameter) is EarlyParameter for parameter in touched):
            raise ReleasedParameterError(_not_gathered(touched, func))
        bring(touched)
        if func in _UNSEEN_WRITES:
            for parameter in touched:
                early = early_shard(parameter)
                if early is not None:
                    early.suspect = True
        args, kwargs = torch.utils._pytree.tree_map_only(EarlyAlias, lambda alias: alias.of.detach(), (args, kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    if not plain and isinstance(result, torch.Tensor) and result.grad_fn is not None:
        result.register_hook(_explain_backward(func))
    return result


def _alias(parameter: EarlyParameter) -> EarlyAlias:
    with torch._C.DisableTorchFunctionSubclass():
        alias = torch.empty_like(parameter, requires_grad=False).as_subclass(EarlyAlias)
    alias.of = parameter
    return alias


def _parameter_of(leaf: Any) -> nn.Parameter | None:
    """The sharded parameter that an argument is or stands for; also one that is whole now, which the call must not lose."""
    if isinstance(leaf, EarlyAlias):
        return leaf.of
    return leaf if isinstance(leaf, nn.Parameter) and early_shard(leaf) is not None else None


def _not_gathered(touched: list[nn.Parameter], func: Callable[..., Any]) -> str:
    missing = next(early_shard(p) for p in touched if type(p) is EarlyParameter)
    return (
        f"{missing!r} was read (by `{getattr(func, '__name__', func)}`) inside a GatheredParameters(modifier_rank=...) that "
        "does not name it; give it to that context too"
    )


def _explain_backward(func: Callable[..., Any]) -> Callable[[torch.Tensor], None]:
    def explain(grad: torch.Tensor) -> None:
        raise ModelError(
            f"a backward reached weights built under zero.Init (through `{getattr(func, '__name__', func)}`) whose model was "
            "never given to onecopy.initialize; initialize it, or run its forward under torch.no_grad()"
        )

    return explain


# ------------------------------------------------------------------------------------------------------- life of weights
def shard_early(parameter: nn.Parameter, label: str, communicator: Communicator, home: torch.device) -> None:
    """Let rank 0's values be everyone's and keep this rank's part of them. Collective."""
    early = EarlyShard(parameter, label, communicator, home, EarlyParameter)
    parameter.grad = None
    early.send(parameter, 0)
    early.unbind(parameter)


def bring(parameters: Iterable[nn.Parameter]) -> None:
    """Make sharded parameters whole, and put away what was whole and is no longer needed. Collective."""
    wanted = list({id(parameter): parameter for parameter in parameters}.values())
    absent = [p for p in wanted if (early := early_shard(p)) is not None and not early.live]
    if not absent:
        return
    settle(keep=wanted)
    for parameter in absent:
        early = early_shard(parameter)
        assert early is not None
        early.bind(parameter)
        _live.append(parameter)


def settle(keep: Iterable[nn.Parameter] = (), force: Iterable[nn.Parameter] = ()) -> None:
    """Put whole parameters away, but for `keep` and those whose memory others hold (unless in `force`). Collective."""
    kept, forced = {id(parameter) for parameter in keep}, {id(parameter) for parameter in force}
    candidates = [(p, early) for p in _live if id(p) not in kept and (early := early_shard(p)) is not None]
    for communicator in dict.fromkeys(early.communicator for _, early in candidates):
        mine = [(p, early) for p, early in candidates if early.communicator is communicator]
        verdicts = torch.tensor([_verdict(p, early, id(p) in forced) for p, early in mine], device=communicator.device)
        communicator.broadcast(verdicts, 0, "verdicts on whole parameters")
        for (parameter, early), verdict in zip(mine, verdicts.tolist(), strict=True):
            if verdict == _KEEP:
                continue
            if verdict == _SEND:
                early.send(parameter, 0)
            early.unbind(parameter)
            _live[:] = [other for other in _live if other is not parameter]


def _verdict(parameter: nn.Parameter, early: EarlyShard, forced: bool) -> int:
    if not forced and not nobody_else_holds(parameter):
        return _KEEP
    return _SEND if early.changed(parameter) else _DROP


def settle_all() -> None:
    """Put every whole parameter away. Collective."""
    settle(force=list(_live))


class Borrowed:
    """Sharded parameters that a gathering context holds whole, and one rank may edit.

    Args:
        editor: the group rank whose values count at the end; None to discard edits.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], editor: int | None) -> None:
        found = {id(p): (early.number, p, early) for p in parameters if (early := early_shard(p)) is not None}
        self.members = [(p, early) for _, p, early in sorted(found.values(), key=lambda entry: entry[0])]
        self.editor = editor

    def enter(self) -> None:
        """Gather them. Collective."""
        global _one_rank_works
        settle(force=[parameter for parameter, early in self.members if early.live and not early.borrowed])
        for parameter, early in self.members:
            if not early.borrowed:
                early.bind(parameter)
            early.borrowed += 1
        if self.editor is not None:
            _one_rank_works += 1

    def exit(self, keep_edits: bool) -> None:
        """Put them away, with the editor's values if asked for. Collective."""
        global _one_rank_works
        if self.editor is not None:
            _one_rank_works -= 1
        for parameter, early in self.members:
            if self.editor is not None and keep_edits:
                early.send(parameter, self.editor)
            early.borrowed -= 1
            if not early.borrowed:
                early.unbind(parameter)


def one_rank_works() -> bool:
    """Whether a context is open in which perhaps one rank alone edits parameters."""
    return _one_rank_works > 0


_suspended = 0


def suspend_construction() -> None:
    """Let models be built whole although a `zero.Init` is open, until `resume_construction`."""
    global _suspended
    _suspended += 1


def resume_construction() -> None:
    """Undo one `suspend_construction`."""
    global _suspended
    _suspended = max(0, _suspended - 1)


def construction_suspended() -> bool:
    return _suspended > 0
