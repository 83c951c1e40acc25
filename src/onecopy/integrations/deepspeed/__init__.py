"""The `deepspeed` module that onecopy provides, found by `import` only after `install()`.

The folder `tree/` holds the module as files, with the metadata of a distribution, and `install` puts that folder on
`sys.path`: so `importlib`, `importlib.metadata` and processes started by `multiprocessing` all see the same thing. A
DeepSpeed that is installed comes first on the path and is never touched, unless `install(force=True)` asks for ours.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from pathlib import Path

from onecopy.errors import OneCopyError

__all__ = ["install", "installed", "uninstall"]

TREE = Path(__file__).parent / "tree"


def install(force: bool = False) -> bool:
    """Let `import deepspeed` find onecopy's module in this process. Repeatable, not collective.

    Args:
        force: take ours even where a DeepSpeed is installed; it stays on disk as it is.

    Returns:
        Whether `deepspeed` is onecopy's now; False means that an installed DeepSpeed is used, which is said once.

    Raises:
        OneCopyError: `force` is asked for when the other DeepSpeed has been imported already.
    """
    if "deepspeed" in sys.modules and force and not installed():
        raise OneCopyError(
            f"deepspeed was imported from {getattr(sys.modules['deepspeed'], '__file__', None)} before "
            "onecopy.integrations.deepspeed.install(force=True); call install first"
        )
    if "deepspeed" not in sys.modules and not installed():
        _extend_path(force)
    if installed():
        from onecopy.integrations import accelerate, lightning_deepspeed

        accelerate.allow_cpu_ranks()
        lightning_deepspeed.allow_cpu_ranks()
    return installed()


def _extend_path(force: bool) -> None:
    other = _other_deepspeed()
    if other is None:
        sys.path.append(str(TREE))  # scripts expect their own folder at the front
    elif force:
        sys.path.insert(0, str(TREE))
    else:
        from onecopy.observe.log import note  # here, because `onecopy exec` must not wait for torch

        note(
            f"the DeepSpeed installed at {other} is used; install(force=True) or `onecopy run --force` takes onecopy's"
        )
    importlib.invalidate_caches()


def uninstall() -> None:
    """Take onecopy's `deepspeed` off the path; modules that were imported already keep what they have."""
    sys.path[:] = [entry for entry in sys.path if entry != str(TREE)]
    importlib.invalidate_caches()


def installed() -> bool:
    """Whether `deepspeed` is onecopy's: the imported one, or the one an import would find."""
    module = sys.modules.get("deepspeed")
    if module is not None:
        return str(TREE) in str(getattr(module, "__file__", ""))
    return str(TREE) in sys.path


def _other_deepspeed() -> str | None:
    """Where an installed DeepSpeed is; None where there is none. A folder without `__init__.py` is not one."""
    spec = importlib.machinery.PathFinder.find_spec("deepspeed")
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent)
