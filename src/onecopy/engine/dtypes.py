"""In what dtype each parameter and buffer is used, as the precision blocks of the configuration say."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from onecopy.config import Config
from onecopy.errors import ConfigError

_KEY = "torch_autocast.lower_precision_safe_modules"


def compute_dtype_rule(model: nn.Module, config: Config) -> Callable[[str, nn.Parameter], torch.dtype]:
    """The dtype a parameter is used in: the configured one, but for integers and modules kept in fp32.

    Under autocast parameters keep their own dtype, but for those of modules that the configuration calls safe in lower
    precision: autocast would cast them at every use, so they are gathered and their gradients travel in its dtype.
    """
    low = config.compute_dtype if (config.fp16.enabled or config.bf16.enabled) else None
    kept = kept_in_fp32(model, config)
    lowered = _lowered(model, config)
    autocast = config.torch_autocast.dtype or torch.bfloat16

    def rule(name: str, parameter: nn.Parameter) -> torch.dtype:
        if not parameter.dtype.is_floating_point:
            return parameter.dtype
        if id(parameter) in lowered:
            return autocast
        if low is None:
            return parameter.dtype
        return torch.float32 if kept(name) else low

    return rule


def kept_in_fp32(model: nn.Module, config: Config) -> Callable[[str], bool]:
    """Whether a parameter or buffer of this name belongs to a module that stays in fp32."""
    wanted = config.data_types.keep_in_fp32_modules
    patterns = set(wanted) if wanted != "auto" else _known_to_need_fp32(model)
    owners = _with_running_statistics(model) if wanted == "auto" and config.data_types.buffer_dtype is None else set()

    def kept(name: str) -> bool:
        named = any(pattern in name.split(".") or name.startswith(pattern + ".") for pattern in patterns)
        return named or name.rpartition(".")[0] in owners

    return kept


def _known_to_need_fp32(model: nn.Module) -> set[str]:
    """The names that a model of transformers lists."""
    listed = (getattr(model, name, None) or () for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"))
    return {pattern for names in listed for pattern in names}


def _with_running_statistics(model: nn.Module) -> set[str]:
    """Batch norms and the like with fp32 statistics: buffers stay as they are, and weights must be of the statistics' dtype.

    The input may be of a lower one.
    """
    kinds = nn.modules.batchnorm._NormBase
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, kinds) and module.running_mean is not None and module.running_mean.dtype == torch.float32
    }


def move_buffers(model: nn.Module, config: Config, device: torch.device) -> None:
    """Bring buffers to the device; floating-point ones take `data_types.buffer_dtype` where that is written."""
    wanted = config.data_types.buffer_dtype
    kept = kept_in_fp32(model, config)
    for name, tensor in model.named_buffers():
        change = wanted is not None and tensor.is_floating_point() and not kept(name)
        tensor.data = tensor.data.to(device, wanted if change else tensor.dtype)


def _lowered(model: nn.Module, config: Config) -> set[int]:
    """Identities of the parameters that modules of the classes named as safe own themselves.

    Raises:
        ConfigError: a name is no class that can be imported.
    """
    settings = config.torch_autocast
    if not settings.enabled or settings.lower_precision_safe_modules is None:
        return set()
    classes = tuple(_class_called(name) for name in settings.lower_precision_safe_modules)
    return {id(p) for m in model.modules() if type(m) in classes for p in m.parameters(recurse=False)}


def _class_called(name: str) -> type:
    place, _, own = name.rpartition(".")
    try:
        found = getattr(import_module(place), own)
    except (ImportError, AttributeError, ValueError):
        found = None
    if not isinstance(found, type):
        raise ConfigError(
            f'{_KEY} names "{name}", which is no class that can be imported; write it with its module, such as "torch.nn.Linear"'
        )
    return found


def half(value: Any) -> Any:
    """The same nest of containers, its floating-point tensors in fp16."""
    cast: Callable[[Any], Any] = lambda v: v.half() if isinstance(v, torch.Tensor) and v.is_floating_point() else v  # noqa: E731
    return torch.utils._pytree.tree_map(cast, value)
