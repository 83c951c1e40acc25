"""`deepspeed.accelerator.get_accelerator()`: the device this rank trains on, through `torch.accelerator`."""

import os
from typing import Any

import torch

from onecopy.comm.connect import default_device
from onecopy.integrations.deepspeed.refusal import NotOffered

__all__ = ["Accelerator", "get_accelerator"]


class Accelerator:
    """Answers for the kind of device that the engine uses; memory is in bytes and 0 on the CPU."""

    def __init__(self, kind: str) -> None:
        self._name = kind

    @property
    def _is_cpu(self) -> bool:
        return self._name == "cpu"

    def device_name(self, device_index: int | str | None = None) -> str:
        """ "cuda", or "cuda:1" with an index; the CPU has no index."""
        return self._name if device_index is None or self._is_cpu else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        return self._name if self._is_cpu else f"{self._name}:{self.current_device()}"

    def current_device(self) -> int:
        return 0 if self._is_cpu else int(torch.accelerator.current_device_index())

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def set_device(self, device_index: int) -> None:
        if not self._is_cpu:
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        """Devices of this machine; on the CPU the local ranks."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self._is_cpu else int(torch.accelerator.device_count())

    def is_available(self) -> bool:
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        if not self._is_cpu:
            torch.accelerator.synchronize(device_index)

    def communication_backend_name(self) -> str:
        return "gloo" if self._is_cpu else str(torch.distributed.get_default_backend_for_device(self._name))

    def is_synchronized_device(self) -> bool:
        return self._is_cpu

    def is_bf16_supported(self) -> bool:
        return self._is_cpu or bool(getattr(self._module(), "is_bf16_supported", lambda: True)())

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def _module(self) -> Any:
        return getattr(torch, self._name)

    def empty_cache(self) -> None:
        if not self._is_cpu:
            torch.accelerator.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return 0 if self._is_cpu else int(torch.accelerator.memory_allocated(device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return 0 if self._is_cpu else int(torch.accelerator.max_memory_allocated(device_index))

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if not self._is_cpu:
            torch.accelerator.reset_peak_memory_stats(device_index)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._is_cpu else tensor.pin_memory()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and not self._is_cpu and hasattr(self._module(), name):
            return getattr(self._module(), name)
        raise AttributeError(
            f"onecopy's get_accelerator() has no '{name}'; use torch.accelerator or torch.{self._name}"
        )


_accelerator: Accelerator | None = None


def get_accelerator() -> Accelerator:
    """The one accelerator of this process. DS_ACCELERATOR may name it, but cannot choose another one."""
    global _accelerator
    if _accelerator is None:
        kind = default_device().type
        asked = os.environ.get("DS_ACCELERATOR", kind)
        if asked != kind:
            raise NotOffered(
                f"DS_ACCELERATOR is '{asked}' but torch finds '{kind}' here; hide the device (CUDA_VISIBLE_DEVICES=) or unset it"
            )
        _accelerator = Accelerator(kind)
    return _accelerator
