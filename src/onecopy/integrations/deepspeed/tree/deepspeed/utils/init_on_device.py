"""Building models on a device or without memory."""

from typing import Any

import torch


class OnDevice:
    """Build a model on `device` ("meta" by default) with floating-point tensors in `dtype`."""

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled

    def __enter__(self) -> None:
        if self.enabled:
            self._before = torch.get_default_dtype()
            self._context = torch.device(self.device)
            self._context.__enter__()
            torch.set_default_dtype(self.dtype)

    def __exit__(self, *exception: Any) -> None:
        if self.enabled:
            torch.set_default_dtype(self._before)
            self._context.__exit__(*exception)


__all__ = ["OnDevice"]
