"""`deepspeed.accelerator.get_accelerator()`: the device this rank trains on, through `torch.accelerator`."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from onecopy.comm.connect import default_device
from onecopy.integrations.deepspeed.refusal import NotOffered

__all__ = ["DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]


class DeepSpeedAccelerator:
    """Answers for the kind of device that the engine uses; memory is in bytes and 0 on the CPU."""

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._compile_backend = "inductor"

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

    def is_fp64_supported(self) -> bool:
        return self._name != "mps"

    def is_triton_supported(self) -> bool:
        return self._name in ("cuda", "xpu")

    def use_host_timers(self) -> bool:
        return self._is_cpu

    resolves_data_dependency = handles_memory_backpressure = use_host_timers

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

    def memory_reserved(self, device_index: int | None = None) -> int:
        return 0 if self._is_cpu else int(torch.accelerator.memory_reserved(device_index))

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return 0 if self._is_cpu else int(torch.accelerator.max_memory_reserved(device_index))

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return {} if self._is_cpu else dict(torch.accelerator.memory_stats(device_index))

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        self.reset_peak_memory_stats(device_index)

    reset_max_memory_cached = reset_max_memory_allocated

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device; of the machine on the CPU."""
        if self._is_cpu:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(torch.accelerator.get_memory_info(device_index)[1])

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that are free."""
        if self._is_cpu:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(torch.accelerator.get_memory_info(device_index)[0])

    # -------------------------------------------------------------------------------------------------- random numbers
    def random(self) -> Any:
        return torch.random

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        state: torch.Tensor = torch.get_rng_state() if self._is_cpu else self._module().get_rng_state()
        return state

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        (torch if self._is_cpu else self._module()).set_rng_state(new_state)

    def default_generator(self, device_index: int) -> torch.Generator:
        found: torch.Generator = (
            torch.default_generator if self._is_cpu else self._module().default_generators[device_index]
        )
        return found

    # --------------------------------------------------------------------------------------- streams, which the CPU lacks
    @property
    def Stream(self) -> Any:
        return None if self._is_cpu else self._module().Stream

    @property
    def Event(self) -> Any:
        return None if self._is_cpu else self._module().Event

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = (
            nullcontext() if self._is_cpu or stream is None else self._module().stream(stream)
        )
        return found

    def current_stream(self, device_index: int | None = None) -> Any:
        return None if self._is_cpu else self._module().current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        return None if self._is_cpu else self._module().default_stream(device_index)

    def is_current_stream_capturing(self) -> bool:
        return not self._is_cpu and bool(getattr(self._module(), "is_current_stream_capturing", lambda: False)())

    # ----------------------------------------------------------------------------------------------------------- compile
    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        self._compile_backend = backend

    # ------------------------------------------------------------------------------------------------------------ tensors
    def _tensor(self, name: str) -> Callable[..., torch.Tensor]:
        made: Callable[..., torch.Tensor] = getattr(torch, name)
        return made if self._is_cpu else partial(torch.tensor, dtype=made.dtype, device=self.current_device_name())  # type: ignore[attr-defined]

    BFloat16Tensor = property(lambda self: self._tensor("BFloat16Tensor"))
    HalfTensor = property(lambda self: self._tensor("HalfTensor"))
    FloatTensor = property(lambda self: self._tensor("FloatTensor"))
    DoubleTensor = property(lambda self: self._tensor("DoubleTensor"))
    ByteTensor = property(lambda self: self._tensor("ByteTensor"))
    IntTensor = property(lambda self: self._tensor("IntTensor"))
    LongTensor = property(lambda self: self._tensor("LongTensor"))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return not self._is_cpu and tensor.is_pinned()

    def range_push(self, msg: str) -> None:
        """Nothing: `torch.profiler.record_function` names stretches of time."""

    def range_pop(self) -> None:
        pass

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback()

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> Any:
        """The builder's class, which says that it cannot be built."""
        from ..ops import op_builder

        return getattr(op_builder, class_name, None)

    def create_op_builder(self, class_name: str) -> Any:
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def export_envs(self) -> list[str]:
        return []

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor if self._is_cpu else tensor.pin_memory()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and not self._is_cpu and hasattr(self._module(), name):
            return getattr(self._module(), name)
        raise AttributeError(
            f"onecopy's get_accelerator() has no '{name}'; use torch.accelerator or torch.{self._name}"
        )


_accelerator: Any = None


def is_current_accelerator_supported() -> bool:
    return True


def set_accelerator(accel_obj: Any) -> Any:
    """Let `get_accelerator` answer with another object; the engine itself does not ask it."""
    global _accelerator
    _accelerator = accel_obj
    return accel_obj


def get_accelerator() -> Any:
    """The one accelerator of this process. DS_ACCELERATOR may name it, but cannot choose another one."""
    global _accelerator
    if _accelerator is None:
        kind = default_device().type
        asked = os.environ.get("DS_ACCELERATOR", kind)
        if asked != kind:
            raise NotOffered(
                f"DS_ACCELERATOR is '{asked}' but torch finds '{kind}' here; hide the device (CUDA_VISIBLE_DEVICES=) or unset it"
            )
        _accelerator = DeepSpeedAccelerator(kind)
    return _accelerator
