"""What the user calls a model, made into one that can be rehearsed: a preset, a `config.json`, or a function of their own."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode

from onecopy.errors import PlanError
from onecopy.plan.presets import PRESETS
from onecopy.plan.rehearsal import Subject
from onecopy.plan.tasks import TASKS, longest_of, task_of

_LEARNED_POSITIONS = (  # a row each
    "gpt2", "opt", "bert", "roberta", "electra", "distilbert", "bart", "gpt_neo", "gpt_bigcode",
)  # fmt: skip


def subject_for(model: str | Path | nn.Module | Subject) -> Subject:
    """The subject that `model` names.

    Args:
        model: a preset's name, a folder or file with a Hugging Face `config.json`, or `package.module:function`, where
            the function returns `module, inputs` (inputs: keyword arguments of forward for one sample batch, or a
            function of (micro-batch, sequence length) that makes them).

    Raises:
        PlanError: nothing of that name exists; says the nearest names.
    """
    if isinstance(model, Subject):
        return model
    text = str(model)
    if text.lower() in PRESETS:
        return from_config_dict(PRESETS[text.lower()], text.lower(), text)
    if ":" in text and not Path(text).exists():
        return _from_function(text)
    path = Path(text)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise PlanError(f"{file} is no JSON: {error}") from None
        if not isinstance(content, dict) or "model_type" not in content:
            raise PlanError(f"{file} has no model_type; give the config.json that Hugging Face's save_pretrained wrote")
        return from_config_dict(content, _name_of(path), text)
    near = difflib.get_close_matches(text.lower(), PRESETS, n=3, cutoff=0.4)
    hint = f"the nearest presets are {', '.join(near)}" if near else f"presets are {', '.join(PRESETS)}"
    raise PlanError(f"model '{text}' is no preset, no folder with a config.json and no package.module:function; {hint}")


def _name_of(path: Path) -> str:
    """A folder's name, or that of a file which is not called as all are."""
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    return path.stem if path.is_file() and path.name != "config.json" else folder.name


def from_config_dict(content: dict[str, Any], name: str, source: str = "") -> Subject:
    """A transformers model of the class its configuration stands for, with the loss its task usually has."""
    try:
        from transformers import AutoConfig
    except ImportError:
        raise PlanError(
            f"'{name}' is built by transformers, which is not installed; run `pip install transformers`"
        ) from None
    rest = {
        key: value
        for key, value in content.items()
        if key not in ("model_type", "transformers_version", "auto_map", "torch_dtype", "dtype")
    }
    try:
        config = AutoConfig.for_model(content["model_type"], **rest)
    except ValueError:
        from transformers import CONFIG_MAPPING

        near = difflib.get_close_matches(str(content["model_type"]), list(CONFIG_MAPPING), n=3)
        raise PlanError(
            f"model_type '{content['model_type']}' is not known to transformers; nearest: {', '.join(near) or 'none'}"
        ) from None
    config.use_cache = False
    _import_model_of(config)
    task = task_of(content)
    if task in ("sequence", "speech") and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    if task == "classification" and config.pad_token_id is None:
        config.pad_token_id = 0  # where the sample ends: of whole batches it does not matter
    longest = longest_of(config, task)
    fixed = content["model_type"] in _LEARNED_POSITIONS or task == "speech"
    auto, inputs = TASKS[task]

    def batch(size: int, length: int) -> dict[str, Any]:
        if longest and length > longest and fixed:
            raise PlanError(
                f"{name} has positions for {longest:,} tokens; plan at most so many (--seq {longest}) instead of {length:,}"
            )
        return inputs(config, size, length)

    deep = _depth_of(content, two_stacks=task in ("sequence", "speech"))
    return Subject(
        name, lambda: _build(config, auto), batch, lambda output: output.loss, 0 if task == "image" else min(longest or 1024, 4096), source,
        layers=deep,
        shrink=(lambda layers: from_config_dict(_shallower(content, deep, layers), name, source)) if deep else None,
    )  # fmt: skip


def _import_model_of(config: Any) -> None:
    """Before any rehearsal: what of it an accelerator has kernels for is found by name (`as_accelerator`)."""
    place = type(config).__module__.replace("configuration_", "modeling_")
    if place != type(config).__module__ and importlib.util.find_spec(place) is not None:
        importlib.import_module(place)


_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")


def _depth_of(content: dict[str, Any], two_stacks: bool) -> int:
    """The blocks of a model, of each stack where it has two; 0 where that is not said, or they are not equally deep."""
    depths = {content[key] for key in _DEPTHS if isinstance(content.get(key), int)}
    if two_stacks and "num_layers" not in content and "decoder_layers" not in content:
        return 0
    return depths.pop() if len(depths) == 1 else 0


def _shallower(content: dict[str, Any], whole: int, layers: int) -> dict[str, Any]:
    """The configuration with so many blocks; lists that have an entry a block are cut too."""
    return {
        name: layers
        if name in _DEPTHS
        else value[:layers]
        if isinstance(value, list) and len(value) == whole
        else value
        for name, value in content.items()
    }


def _build(config: Any, auto: str) -> nn.Module:
    import transformers

    maker = getattr(transformers, auto)
    try:
        with _without_initial_values():
            model: nn.Module = maker.from_config(config)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise PlanError(
            f"model_type '{config.model_type}' is not among those that transformers' {auto} makes; write a function that returns "
            "(module, inputs) and name it as package.module:function"
        ) from None
    model.tie_weights()  # type: ignore[operator]  # is left out together with the initial values
    return model


def _without_initial_values() -> AbstractContextManager[Any]:
    """Fake weights need none, and some initialisers read what they write."""
    if detect_fake_mode([torch.empty(0)]) is None:
        return nullcontext()
    place = "transformers.initialization"  # transformers 5; before, it was in modeling_utils
    if importlib.util.find_spec(place) is None:
        place = "transformers.modeling_utils"
    context: AbstractContextManager[Any] = importlib.import_module(place).no_init_weights()
    return context


def _from_function(text: str) -> Subject:
    module_name, _, attribute = text.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise PlanError(
            f"'{text}' names the module {module_name}, which cannot be imported ({error}); run from the folder that holds it"
        ) from None
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        near = difflib.get_close_matches(attribute, public, n=3, cutoff=0.3) or public[:5]
        raise PlanError(f"{module_name} has no function '{attribute}'; nearest: {', '.join(near) or 'it has none'}")
    return _from_maker(function, text)


def _from_maker(function: Any, text: str) -> Subject:
    """A user's function is called anew for each rehearsal; its second result makes the batch."""
    kept: dict[str, Any] = {}

    def build() -> nn.Module:
        made = function()
        if not (isinstance(made, tuple) and len(made) >= 2 and isinstance(made[0], nn.Module)):
            got = (
                f"({', '.join(type(part).__name__ for part in made)})"
                if isinstance(made, tuple)
                else f"a {type(made).__name__}"
            )
            raise PlanError(f"{text} returned {got}; return (module, inputs) or (module, inputs, loss function)")
        kept["inputs"] = made[1]
        kept["loss"] = made[2] if len(made) > 2 else _any_loss
        model: nn.Module = made[0]
        return model

    def batch(size: int, length: int) -> dict[str, Any]:
        inputs = kept["inputs"]
        if callable(inputs):
            inputs = inputs(size, length)
        elif size > 1:
            raise PlanError(
                f"{text} gives inputs of one size, so micro-batch {size} cannot be planned; give a function of (micro-batch, length) "
                "that makes them instead"
            )
        if isinstance(inputs, dict):
            return inputs
        kind = "Tensor" if isinstance(inputs, torch.Tensor) else type(inputs).__name__
        raise PlanError(f"{text} gives its inputs as a {kind}; give a dict of keyword arguments of forward")

    return Subject(text, build, batch, lambda output: kept["loss"](output), 1024, text)


def _any_loss(output: Any) -> torch.Tensor:
    """The loss in an output: itself when it is a scalar, its `loss` when it has one, else the mean of its first tensor."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    while isinstance(output, tuple | list):
        output = output[0]
    if not isinstance(output, torch.Tensor):
        output = next(value for value in vars(output).values() if isinstance(value, torch.Tensor))
    assert isinstance(output, torch.Tensor)
    return output if output.dim() == 0 else output.float().mean()
