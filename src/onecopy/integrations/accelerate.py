"""accelerate on CPU ranks: without an accelerator it would take every rank of a DeepSpeed run for a run of its own.

`PartialState` starts the process group, then finds no backend name and says that there is one process. The name is all
it lacks, so it gets "gloo"; nothing changes on a machine with an accelerator or outside a launcher.
"""

from __future__ import annotations

import os
from typing import Any

from onecopy.integrations.when_imported import when_imported


def allow_cpu_ranks() -> None:
    """Name gloo to accelerate where it finds no backend: now if it is imported, else when it is. Repeatable."""
    when_imported("accelerate.state", _patch)


def _patch(module: Any) -> None:
    state = module.PartialState
    prepare = getattr(state, "_prepare_backend", None)
    if prepare is None or hasattr(prepare, "_onecopy"):
        return

    def with_gloo(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        backend, kind = prepare(self, *args, **kwargs)
        if backend is None and int(os.environ.get("WORLD_SIZE", "1")) > 1 and _meant_for_deepspeed():
            return "gloo", module.DistributedType.MULTI_CPU
        return backend, kind

    with_gloo._onecopy = True  # type: ignore[attr-defined]
    state._prepare_backend = with_gloo


def _meant_for_deepspeed() -> bool:
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
