"""`zero.Init`: inside the context a model is built sharded; each module's parameters leave as soon as its `__init__` is over.

The classes' constructors are wrapped while a context is open, and nothing else is changed: tensors, buffers and functions
of torch stay what they are.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onecopy.comm import ensure_process_group
from onecopy.comm.connect import default_device
from onecopy.errors import ConfigError
from onecopy.sharding import early_parameter, host_memory
from onecopy.sharding.early import borrowed_communicator, early_shard

Constructor = Callable[..., None]

_open: list[Init] = []  # the contexts entered and not left; the innermost decides
_wrapped: dict[type, Constructor] = {}
_left_whole: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # built in `not_sharded` inside an open context


class Init:
    """Build models sharded: a rank keeps its part of every parameter. Entering, building and leaving are collective.

    Until `initialize` takes the model, touching a parameter makes it whole (see `onecopy.sharding.early_parameter`), so
    initialisers and copies see real weights; rank 0's values count. Contexts can be nested; the innermost decides.

    Args:
        module: shard this model, which exists already, instead of building one; the context need not be entered.
        data_parallel_group: the ranks to shard over; default all. `mpu.get_data_parallel_group()` is another way to say it.
        remote_device: where shards are kept until `initialize`: "cpu", or None for this rank's device.
        dtype: the dtype that floating-point parameters are cast to; default: they keep the one the model gives them, and
            `initialize` applies the configuration's precision with exact masters.
        enabled: False makes it do nothing.
        config_dict_or_path, config: accepted; the configuration takes effect in `initialize`.
        mem_efficient_linear, pin_memory, zero_param_parallel_group, zero_quantized_weights,
        zero_quantized_nontrainable_weights, sequence_data_parallel_group, param_swapper, tensor_overrides: accepted for
            DeepSpeed's signature; they change nothing here.

    Raises:
        ConfigError: `remote_device` is neither "cpu" nor an accelerator.
        CommunicationError: the environment names a world of several ranks that cannot be joined.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | torch.device | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"zero.Init(dtype={dtype}): give a floating-point dtype, or leave it out")
        self.enabled = enabled
        self.dtype = dtype
        if not enabled:
            return
        ensure_process_group()
        self.group = mpu.get_data_parallel_group() if mpu is not None else data_parallel_group
        _check_world(self.group)
        device = default_device()
        self.communicator = borrowed_communicator(self.group, device)
        self.home = _home(remote_device, device)
        if module is not None:
            self.shard(module)
            early_parameter.settle_all()

    def __enter__(self) -> None:
        if self.enabled:
            if not _open:
                _wrap_constructors()
            _open.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.enabled:
            return
        _open.remove(self)
        if not _open:
            _unwrap_constructors()
            if kind is None:
                early_parameter.settle()
            host_memory.give_back()

    def shard(self, module: nn.Module) -> None:
        """Shard those parameters of the module that are not sharded yet. Collective."""
        for owner in _to_be_sharded(module, set()):
            for local, parameter in owner._parameters.items():
                if parameter is not None and _can_be_sharded(parameter):
                    self._shard_one(parameter, f"{type(owner).__name__}.{local}")
            _let_it_load(owner)

    def _shard_one(self, parameter: nn.Parameter, label: str) -> None:
        if self.dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(self.dtype)
        early_parameter.shard_early(parameter, label, self.communicator, self.home)


def _to_be_sharded(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """The module and all inside it, without those that were to stay whole."""
    if module in seen or module in _left_whole:
        return
    seen.add(module)
    yield module
    for child in module.children():
        yield from _to_be_sharded(child, seen)


def _can_be_sharded(parameter: nn.Parameter) -> bool:
    """Plain parameters with values; those of an engine, of the meta device and of special classes stay as they are."""
    return (
        type(parameter) is nn.Parameter
        and early_shard(parameter) is None
        and not hasattr(parameter, "_onecopy")
        and not parameter.is_meta
        and parameter.numel() > 0
    )


def _check_world(group: dist.ProcessGroup | None) -> None:
    """A group of one rank where the launcher started several would build the whole model everywhere, unseen."""
    wanted = int(os.environ.get("WORLD_SIZE", "1"))
    if group is None and wanted > 1 and dist.get_world_size() == 1:
        raise ConfigError(
            f"zero.Init would shard over one rank, but WORLD_SIZE is {wanted}: torch.distributed was initialised for this "
            "process alone; initialise it with the launcher's environment before, or not at all"
        )


def _home(remote_device: str | torch.device | None, device: torch.device) -> torch.device:
    if remote_device in (None, "none"):
        return device
    if str(remote_device) == "nvme":
        raise ConfigError('zero.Init(remote_device="nvme"): there is no offload to NVMe; use "cpu", or leave it out')
    assert remote_device is not None
    return torch.device(remote_device)


# ----------------------------------------------------------------------------------------------------- loading before use
def _let_it_load(module: nn.Module) -> None:
    """`load_state_dict` compares shapes before it copies, so what it is about to fill is made whole first."""
    first = next((early for p in module._parameters.values() if (early := early_shard(p)) is not None), None)
    hooks = module._load_state_dict_pre_hooks.values()
    if first is not None and not any(getattr(hook, "hook", None) is _before_loading for hook in hooks):
        first.handles.append(module._register_load_state_dict_pre_hook(_before_loading, with_module=True))


def _before_loading(module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
    if not early_parameter.one_rank_works():
        wanted = [p for name, p in module._parameters.items() if p is not None and prefix + name in state_dict]
        early_parameter.bring(wanted)


# ------------------------------------------------------------------------------------------------------------ constructors
def _wrap_constructors() -> None:
    """Let every module class say when an outermost constructor of it is over; those declared from now on too."""
    for kind in {nn.Module, *_subclasses(nn.Module)}:
        _wrap(kind)
    nn.Module.__init_subclass__ = classmethod(_declared)  # type: ignore[assignment,arg-type,method-assign]


def _declared(kind: type, /, **kwargs: Any) -> None:
    super(nn.Module, kind).__init_subclass__(**kwargs)  # type: ignore[misc]
    _wrap(kind)


def _subclasses(kind: type) -> Iterator[type]:
    children: list[type] = type.__subclasses__(kind)
    for child in children:
        yield child
        yield from _subclasses(child)


def _wrap(kind: type) -> None:
    constructor = kind.__dict__.get("__init__")
    if kind in _wrapped or kind is nn.Module or not callable(constructor):
        return
    _wrapped[kind] = constructor
    kind.__init__ = _announcing(constructor)  # type: ignore[misc]


def _announcing(constructor: Constructor) -> Constructor:
    @functools.wraps(constructor)
    def construct(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        whole = early_parameter.construction_suspended()
        if not _open or whole or self.__dict__.get("_onecopy_building", False):
            constructor(self, *args, **kwargs)
            if _open and whole:
                _left_whole.add(self)
            return
        self.__dict__["_onecopy_building"] = True
        try:
            constructor(self, *args, **kwargs)
        finally:
            self.__dict__.pop("_onecopy_building", None)
        if "_parameters" in self.__dict__ and _open and not early_parameter.construction_suspended():
            _open[-1].shard(self)

    return construct


def _unwrap_constructors() -> None:
    for kind, constructor in _wrapped.items():
        kind.__init__ = constructor  # type: ignore[misc]
    _wrapped.clear()
    _left_whole.clear()
    del nn.Module.__init_subclass__


@contextmanager
def not_sharded() -> Iterator[None]:
    """Inside, models are built whole although a `zero.Init` is open: for a small helper model, say."""
    early_parameter.suspend_construction()
    try:
        yield
    finally:
        early_parameter.resume_construction()
