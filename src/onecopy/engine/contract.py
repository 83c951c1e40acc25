"""The rest of DeepSpeed's engine: sizes changed in flight, loaders, reductions on demand, states moved off the device."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch.utils.data import DistributedSampler, IterableDataset

from onecopy.engine.dataloader import ShardedDataLoader
from onecopy.engine.parking import ParkedStates, chosen_states
from onecopy.errors import ConfigError, ModelError
from onecopy.observe.log import log_once

if TYPE_CHECKING:
    from onecopy.engine.engine import Engine

_ROUTES = ("train", "eval", "predict")


class PlainFiles:
    """What `engine.checkpoint_engine` is for others' code: single files by `torch.save` and `torch.load`.

    Checkpoints of the engine do not go through it: each rank writes its own shards.
    """

    def create(self, info: Any) -> None:
        """Nothing to prepare."""

    def makedirs(self, path: str | os.PathLike[str], exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str | os.PathLike[str]) -> None:
        torch.save(state_dict, Path(path))

    def load(self, path: str | os.PathLike[str], map_location: Any = None) -> Any:
        return torch.load(Path(path), map_location=map_location, weights_only=True)

    def commit(self, tag: Any) -> bool:
        return True

    def is_decoupled(self) -> bool:
        return False


class Contract:
    """Mixed into the engine, which sets the attributes it reads.

    Attributes:
        loaded_checkpoint_dp_world_size: ranks that the last loaded checkpoint was saved by; None before a load.
        collate_fn: what `initialize` was given, for further loaders.
    """

    loaded_checkpoint_dp_world_size: int | None = None
    collate_fn: Callable[..., Any] | None = None
    _parked: ParkedStates | None = None

    # --------------------------------------------------------------------------------------------------------- sizes, data
    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Count so many samples of a rank as a micro-batch; `gradient_accumulation_steps` stays, train_batch_size follows.

        Loaders that were made before keep their size. Not collective; every rank says the same.
        """
        engine = cast("Engine", self)
        if isinstance(micro_batch_size, bool) or not isinstance(micro_batch_size, int) or micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is {micro_batch_size!r}; it must be an integer of at least 1")
        engine.configuration = replace(
            engine.configuration,
            train_micro_batch_size_per_gpu=micro_batch_size,
            train_batch_size=micro_batch_size * engine.window.steps * engine.communicator.world_size,
        )

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> ShardedDataLoader:
        """A loader of this rank's part of a dataset, as `initialize(training_data=...)` makes it.

        Args:
            route: "train" shuffles anew every epoch; "eval" and "predict" keep the dataset's order.
            pin_memory: accepted; batches are pinned wherever there is an accelerator.
        """
        engine = cast("Engine", self)
        if not isinstance(dataset, IterableDataset) and not (
            hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        ):
            raise ValueError(f"Training data must be a torch Dataset, not a {type(dataset).__name__}")
        if route not in _ROUTES:
            raise ValueError(f"route is {route!r}; write one of {', '.join(_ROUTES)}")
        rank, size = engine.communicator.rank, engine.communicator.world_size
        if data_sampler is None and route != "train" and not isinstance(dataset, IterableDataset):
            data_sampler = DistributedSampler(dataset, num_replicas=size, rank=rank, shuffle=False)
        return ShardedDataLoader(
            dataset,
            batch_size or engine.train_micro_batch_size_per_gpu(),
            rank,
            size,
            collate_fn or self.collate_fn,
            engine.configuration.dataloader_drop_last,
            num_local_io_workers or 0,
            data_sampler,
        )

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """Pass every batch of the training loader through `post_process_func(batch, loader.state_dict())`."""
        loader = cast("Engine", self).training_dataloader
        if loader is None:
            raise ModelError("set_data_post_process_func: there is no loader; give training_data to initialize")
        loader.post_process_func = post_process_func

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: dict[str, Any]) -> NoReturn:
        """Refused: there is no curriculum."""
        raise ConfigError(
            "set_custom_curriculum_learning_schedule is not offered: onecopy has no curriculum learning; "
            "give deepspeed_io a data_sampler that orders the samples"
        )

    # ------------------------------------------------------------------------------------------------------- gradients
    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Finish the reduction of the gradients so far; `step()` does it by itself. Collective.

        Where gradients are whole (stages 0 and 1) only before a boundary, as in DeepSpeed. `bucket_size` is accepted; the
        configuration's `reduce_bucket_size` holds.
        """
        engine = cast("Engine", self)
        if engine.optimizer is None or engine.runtime.micro_batches == 0:
            return
        if engine.placement.gradients.sharded or engine.is_gradient_accumulation_boundary():
            engine.gradients.settle()

    # ------------------------------------------------------------------------------------------------------------- groups
    def get_sequence_parallel_group(self) -> None:
        """None: sequences are not divided over ranks."""
        return None

    def get_tensor_parallel_rank(self) -> int:
        return cast("Engine", self).get_model_parallel_rank()

    @property
    def checkpoint_engine(self) -> PlainFiles:
        """Single files by `torch.save` and `torch.load`, for code that writes some of its own beside a checkpoint."""
        return PlainFiles()

    # ------------------------------------------------------------------------------------------------------------- memory
    def empty_partition_cache(self) -> None:
        """Release gathered parameters that nobody uses now, and give cached memory back to the device. Not collective."""
        engine = cast("Engine", self)
        engine.runtime.release_all()
        gc.collect()
        if engine.device.type != "cpu":
            torch.accelerator.empty_cache()

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Move training state to the host, between steps, to make room on the device until `reload_states`. Not collective.

        Every tensor stays the object it is; only its memory moves. On ranks without an accelerator nothing moves.

        Args:
            include: any of "optim_states" (moments), "hp_params" (masters), "lp_params" (whole weights, shards and slots),
                "lp_grads" and "contiguous_grad_buffer" (gradients and their slots), or members of DeepSpeed's
                `OffloadStateTypeEnum`; default all.

        Raises:
            ModelError: in the middle of a window, or without an optimizer.
            ValueError: another device, or an unknown state.
        """
        engine = cast("Engine", self)
        where = str(getattr(device, "value", device)).removeprefix("OffloadDeviceEnum.")
        if where == "none":
            return
        if torch.device(where if where != "nvme" else "meta").type != "cpu":
            raise ValueError(f'offload_states moves states to "cpu" only, not to {where!r}')
        kinds = chosen_states(include)
        if engine.optimizer is None:
            raise ModelError("offload_states needs an engine with an optimizer: there is no training state to move")
        if engine.runtime.micro_batches:
            raise ModelError("offload_states came between backward and step; call it after step()")
        if engine.device.type == "cpu":
            log_once(("offload_states", id(self)), "offload_states: the states are on the host already")
            return
        self._park(kinds, pin_memory, non_blocking)

    def _park(self, kinds: frozenset[str], pin_memory: bool, non_blocking: bool) -> None:
        engine = cast("Engine", self)
        if self._parked is None:
            self._parked = ParkedStates(engine)
        self._parked.park(kinds, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` moved away. Not collective."""
        if self._parked is not None:
            self._parked.bring_back(non_blocking)

    def _check_states_are_here(self) -> None:
        if self._parked is not None and self._parked.away:
            raise ModelError(
                f"{', '.join(sorted(self._parked.away))} were moved off the device by offload_states; call reload_states() first"
            )
