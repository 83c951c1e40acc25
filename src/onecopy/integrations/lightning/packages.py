"""Which Lightning the program uses: `lightning` or the separate `pytorch_lightning` and `lightning_fabric`; one of them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any


def _choose(whole: str, alone: str) -> str:
    """The package that is imported already, else `lightning` where it is installed, else the separate one."""
    if whole not in sys.modules and alone in sys.modules:
        return alone
    if importlib.util.find_spec(whole.partition(".")[0]) is not None:
        return whole
    if importlib.util.find_spec(alone) is None:
        raise ModuleNotFoundError(
            'onecopy.integrations.lightning needs Lightning: pip install "onecopy[lightning]"', name="lightning"
        )
    return alone


_TRAINER = _choose("lightning.pytorch", "pytorch_lightning")
_FABRIC = "lightning.fabric" if _TRAINER.startswith("lightning.") else "lightning_fabric"


def trainer_module(name: str) -> Any:
    """A module of Lightning's Trainer package, such as "strategies.ddp"."""
    return importlib.import_module(f"{_TRAINER}.{name}")


def fabric_module(name: str) -> Any:
    """A module of Lightning's Fabric package."""
    return importlib.import_module(f"{_FABRIC}.{name}")
