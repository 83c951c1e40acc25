"""Models that were compiled before `initialize`: take the compiler off, and put it on again inside the engine's hooks.

The compiler would trace the hooks with the forward, and a released weight has no elements to trace. So the module is
used as it was written (no `_orig_mod.` in the names of weights either), and its blocks are compiled as it was to be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
Found = list[tuple[nn.Module, Compile]]


def take_off(model: nn.Module) -> tuple[nn.Module, Found]:
    """The model without compiled modules, changed in place, and which modules were compiled how."""
    found: Found = []
    if "torch._dynamo" not in sys.modules:  # importing it takes seconds
        return model, found
    from torch._dynamo.eval_frame import OptimizedModule

    if isinstance(model, OptimizedModule):
        found.append((model._orig_mod, model.dynamo_ctx))
        model = model._orig_mod
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, OptimizedModule):
                found.append((child._orig_mod, child.dynamo_ctx))
                parent._modules[name] = child._orig_mod
    for module in model.modules():
        how = _context_of(module._compiled_call_impl) if module._compiled_call_impl is not None else None
        if how is not None:
            found.append((module, how))
            module._compiled_call_impl = None
    return model, found


def _context_of(compiled: Any) -> Compile | None:
    """What `torch.compile` made this function with, None in a version of torch that keeps it elsewhere."""
    names = getattr(getattr(compiled, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(compiled, "__closure__", None) or (), strict=False))
    context = cells["self"].cell_contents if "self" in cells else None
    return context if callable(context) else None
