"""Run by every Python under `onecopy exec`: `import deepspeed` finds onecopy's module, then the machine's own sitecustomize.

Only the path is set here; what costs time waits until a library is imported that has to be told of CPU ranks.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_TREE = os.path.join(os.path.dirname(_HERE), "tree")
_WATCHED = {
    "accelerate.state",
    "lightning.pytorch.strategies.deepspeed",
    "lightning.fabric.strategies.deepspeed",
    "pytorch_lightning.strategies.deepspeed",
    "lightning_fabric.strategies.deepspeed",
}


class _InstallsFirst:
    """Installs onecopy's module for good when one of the watched modules is looked for, and is then gone."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname not in _WATCHED:
            return None
        sys.meta_path.remove(cls)  # type: ignore[arg-type]
        from onecopy.integrations.deepspeed import install

        install(force=os.environ.get("ONECOPY_DEEPSPEED") == "force")
        return importlib.util.find_spec(fullname)


def _begin() -> None:
    force = os.environ.get("ONECOPY_DEEPSPEED") == "force"
    other = importlib.machinery.PathFinder.find_spec("deepspeed")
    if other is not None and other.origin is not None and not force:
        return
    if force:
        sys.path.insert(0, _TREE)
    else:
        sys.path.append(_TREE)
    sys.meta_path.insert(0, _InstallsFirst)  # type: ignore[arg-type]


def _go_on() -> None:
    """Run the sitecustomize that ours stands before, if there is one."""
    spec = importlib.machinery.PathFinder.find_spec(
        "sitecustomize", [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    )
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_begin()
_go_on()
