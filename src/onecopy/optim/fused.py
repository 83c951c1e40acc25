"""The fused step of torch, made to unscale, clip and skip by itself through `grad_scale` and `found_inf`.

Torch's fused kernels divide every gradient by the tensor `optimizer.grad_scale` and do nothing at all when the tensor
`optimizer.found_inf` is 1, without a host synchronisation. That costs no pass over the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_KERNELS: dict[type, str] = {
    torch.optim.Adam: "aten::_fused_adam_",
    torch.optim.AdamW: "aten::_fused_adamw_",
    torch.optim.SGD: "aten::_fused_sgd_",
    torch.optim.Adagrad: "aten::_fused_adagrad_",
}
_MARK = "_onecopy_fused"


def supports_fused_scaling(optimizer: object) -> bool:
    """True when `make_fused` can make this optimizer's step honour `grad_scale` and `found_inf`.

    Exactly torch's Adam, AdamW, SGD or Adagrad (a subclass may step otherwise), with no implementation chosen by the
    user (foreach, fused=False, capturable, differentiable), on floating-point tensors of a device with the kernel.
    """
    kernel = _KERNELS.get(type(optimizer))
    if kernel is None:
        return False
    groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", [])
    return all(_group_allows(optimizer, group) and _kernel_exists(kernel, group) for group in groups)


def make_fused(optimizer: torch.optim.Optimizer) -> None:
    """Switches every group to the fused step; call it when the groups hold the tensors that will be stepped.

    Repeatable, and repeated by itself after `optimizer.load_state_dict` (a saved state carries its own choice of
    implementation); groups added later are fused too. Set `optimizer.grad_scale` (gradients are divided by it) and
    `optimizer.found_inf` (0.0 or 1.0) to fp32 scalar tensors before `step()`. Afterwards `grad` holds the unscaled
    gradient when `grad_scale` was set and the step was not skipped.

    Raises `ValueError` when `supports_fused_scaling` is false.
    """
    if not supports_fused_scaling(optimizer):
        raise ValueError(f"{type(optimizer).__name__} has no fused step that unscales and skips, with these options.")
    _set_fused(optimizer)
    if not hasattr(optimizer, _MARK):
        setattr(optimizer, _MARK, True)
        optimizer.register_load_state_dict_post_hook(_set_fused)
        if type(optimizer) is torch.optim.SGD:
            optimizer.register_step_pre_hook(_zero_missing_momentum)


def _group_allows(optimizer: object, group: dict[str, Any]) -> bool:
    fused = group.get("fused")
    if fused is False or group.get("foreach") or group.get("differentiable"):
        return False
    if group.get("capturable") and not fused:
        return False
    # SGD's first step takes the gradient undamped; `_zero_missing_momentum` cannot express that.
    return not (type(optimizer) is torch.optim.SGD and group["momentum"] != 0 and group["dampening"] != 0)


def _kernel_exists(kernel: str, group: dict[str, Any]) -> bool:
    if not all(parameter.is_floating_point() for parameter in group["params"]):
        return False
    return all(_has_kernel(kernel, device) for device in {parameter.device.type for parameter in group["params"]})


def _has_kernel(kernel: str, device_type: str) -> bool:
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(kernel, device_type.upper()))
    except RuntimeError:  # not the name of a dispatch key
        return False


def _set_fused(optimizer: torch.optim.Optimizer) -> None:
    optimizer.defaults["fused"] = True
    for group in optimizer.param_groups:
        group["fused"] = True
        group["foreach"] = None
        for parameter in group["params"]:
            step = optimizer.state.get(parameter, {}).get("step")
            if step is None:
                continue
            # The kernel reads the step count on the device, in fp32; other implementations keep it on the host.
            where: dict[str, Any] = {"dtype": torch.float32, "device": parameter.device}
            moved = step.to(**where) if isinstance(step, Tensor) else torch.tensor(float(step), **where)
            optimizer.state[parameter]["step"] = moved
    # What `fused=True` in the constructor sets besides the groups, in torch 2.11 to 2.13.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]


def _zero_missing_momentum(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Named note "first momentum": fused SGD allocates its momentum uninitialised, for the first step to fill.

    A first step skipped by `found_inf` would leave that memory as the momentum, and the next step would train on it.
    Zeros give the same first step (0 x momentum + gradient) and survive a skip.
    """
    for group in optimizer.param_groups:
        if group["momentum"] == 0:
            continue
        for parameter in group["params"]:
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
