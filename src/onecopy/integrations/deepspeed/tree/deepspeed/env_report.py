"""What is installed (`ds_report`)."""

import platform

import torch

from . import __version__
from .accelerator import get_accelerator


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print the versions of onecopy's module, torch and Python, and the device."""
    rows = {
        "deepspeed (onecopy's)": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": get_accelerator().current_device_name(),
        "compiled extensions": "none are needed",
    }
    for name, value in rows.items():
        print(f"{name:<24}{value}")


cli_main = main
