"""What a user reads when weights are asked for that are not there: the parameter, the place and the remedy."""

from collections.abc import Callable
from typing import Any


def released(name: str, func: Callable[..., Any], world_size: int) -> str:
    """A sharded parameter was read outside any forward."""
    return (
        f"parameter '{name}' is sharded over {world_size} ranks and `{_called(func)}` read it outside any forward of the "
        "model; wrap the code in `with onecopy.zero.GatheredParameters([parameter]):` on every rank, or read one "
        "parameter with `onecopy.utils.safe_get_full_fp32_param(parameter)`; to save all weights call "
        "`engine.save_16bit_model(folder, 'model.safetensors')` (all are collective)"
    )


def destroyed(name: str, func: Callable[..., Any]) -> str:
    """A parameter was read whose engine, and with it its weights, are gone."""
    return (
        f"parameter '{name}' was sharded by an engine that has been destroyed, and `{_called(func)}` reads it; save or "
        "gather the weights before engine.destroy()"
    )


def loading(name: str, world_size: int) -> str:
    """`load_state_dict` met a sharded parameter."""
    return (
        f"load_state_dict cannot write parameter '{name}', which is sharded over {world_size} ranks; on every rank call "
        "engine.load_module_state_dict(state_dict), or load before onecopy.initialize, or wrap the call in "
        "`with onecopy.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):`"
    )


def double_backward(units: int) -> str:
    """A backward that builds a graph met weights whose slot others use."""
    return (
        "backward with create_graph=True differentiates through weights twice, and sharded weights that share a slot are "
        f'gone by then; give every unit a slot with the configuration "onecopy": {{"slots": {units}}}, '
        "or use zero_optimization.stage 2"
    )


def transformed() -> str:
    """One of torch.func's transforms runs through sharded weights."""
    return (
        "torch.func's transforms (grad, vmap, jvp and others) cannot run through sharded weights, which are gathered and released "
        "outside of the transform; use torch.autograd, or zero_optimization.stage 2"
    )


def pickled(what: str) -> str:
    """A model, or one of its parameters, was pickled while an engine holds it."""
    return (
        f"{what} belongs to an engine and cannot be pickled (torch.save(model) does that); save weights with "
        "engine.save_16bit_model(folder) or engine.save_checkpoint(folder) on every rank, or torch.save(engine.module.state_dict()) "
        "where they are whole (stages 0 to 2)"
    )


def copied() -> str:
    """A model was deep-copied while an engine holds its weights."""
    return (
        "a model that belongs to an engine cannot be copied: its weights and hooks are the engine's; copy the model before "
        "onecopy.initialize, or make a new one and load the engine's weights (engine.module_state_dict()) into it"
    )


def _called(func: Callable[..., Any]) -> str:
    return getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or str(func)
