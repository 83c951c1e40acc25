"""Reads the `optimizer` and `scheduler` blocks: a known type, and parameters that its constructor will take."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from onecopy.config.diagnosis import Diagnosis, nearest
from onecopy.config.keys import Key
from onecopy.config.kinds import Mismatch, Text, show, type_word
from onecopy.config.training import (
    OPTIMIZER_PARAMETERS,
    REQUIRED,
    SCHEDULER_PARAMETERS,
    OptimizerConfig,
    SchedulerConfig,
)
from onecopy.config.unknown import warn_unknown

OPTIMIZERS = (
    "Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
"""Classes of `torch.optim` whose update of one element needs that element only, so that shards can be stepped."""

OWN_OPTIMIZERS = {
    "Lion": "onecopy.optim.Lion steps the rank's shards of the masters",
    "Lamb": "onecopy.optim.Lamb steps the rank's shards; the norms of all parameters are summed in one small collective a step",
    "Muon": "onecopy.optim.Muon orthogonalises each rank's share of the matrices, whole; AdamW steps what is no hidden matrix",
}
"""Optimizers of the package itself, with what the report says of them."""

SCHEDULERS = (
    "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LinearLR",
    "MultiStepLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "StepLR",
)  # fmt: skip
"""Classes of `torch.optim.lr_scheduler` that JSON values alone can make."""

NEED_OBJECTS = ("ChainedScheduler", "LambdaLR", "MultiplicativeLR", "SequentialLR")
WHOLE = "needs whole matrices or norms of parameters, and a rank holds only a part of them"
GONE = "is an optimizer with compressed communication, which onecopy does not have"
MUP = "needs scales that the mup package computes; build it yourself and give it to initialize, or"
REFUSED_OPTIMIZERS = {
    "adafactor": WHOLE,
    "lbfgs": "needs several forward passes a step and dot products over all parameters",
    "sparseadam": "needs sparse gradients, and gradients go to dense flat buffers",
    "muadam": MUP,
    "muadamw": MUP,
    "musgd": MUP,
    "onebitadam": GONE,
    "onebitlamb": GONE,
    "zerooneadam": GONE,
}
CONSTRUCTOR_WORDS = (
    "adam_lr", "adamw_mode", "alpha", "capturable", "centered", "dampening", "decoupled_weight_decay", "differentiable",
    "eps_inside_sqrt", "etas", "foreach", "fused", "initial_accumulator_value", "lambd", "lr_decay", "max_coeff", "maximize",
    "min_coeff", "momentum_decay", "muon_lr", "nesterov", "ns_method", "per_head_muon", "rho", "set_grad_none", "step_sizes", "t0",
)  # fmt: skip


def read_optimizer(value: Any, diagnosis: Diagnosis) -> OptimizerConfig | None:
    """The optimizer block, or None when it is null or has no usable type."""
    found = _type_and_params("optimizer", value, ("type", "params", "legacy_fusion"), diagnosis)
    if found is None:
        return None
    name, params = found
    name = _optimizer_name(name, diagnosis)
    read: dict[str, Any] = {}
    for parameter, one in params.items():
        path = f"optimizer.params.{parameter}"
        if parameter == "bias_correction" and name == "Lamb" and isinstance(one, bool):
            read[parameter] = one
            diagnosis.judge(path, one, "honoured", "whether the step corrects the moments' start at zero")
        elif parameter in OPTIMIZER_PARAMETERS:
            _read_parameter(*OPTIMIZER_PARAMETERS[parameter], one, path, read, diagnosis)
        elif parameter == "max_grad_norm":
            if one in (None, 0, False):
                diagnosis.judge(path, one, "ignored", "off; gradient_clipping is the key for it")
            else:
                diagnosis.refuse(
                    path, one, f'is not a parameter of the optimizer; write "gradient_clipping": {show(one)}'
                )
        elif one == "auto":
            diagnosis.refuse(path, one, '"auto" has no honest value here; write the value or remove the key')
        elif parameter not in CONSTRUCTOR_WORDS:
            close = nearest(str(parameter), [*OPTIMIZER_PARAMETERS, *CONSTRUCTOR_WORDS])
            fix = f'did you mean "{close}"?' if close else "remove the key"
            diagnosis.refuse(path, one, f"is not a parameter of any optimizer known here; {fix}")
        else:
            read[parameter] = copy.deepcopy(one)
            diagnosis.judge(path, one, "honoured", "passed to the optimizer as it is")
    _say_decay(name, read, diagnosis)
    return OptimizerConfig(name, read)


def _optimizer_name(name: str, diagnosis: Diagnosis) -> str:
    """The name as torch spells it; an unknown one is a problem."""
    spelled = {one.lower(): one for one in (*OPTIMIZERS, *OWN_OPTIMIZERS)}.get(name.lower(), name)
    reason = REFUSED_OPTIMIZERS.get(name.lower().replace("_", ""))
    if reason is not None:
        joint = "" if reason.endswith(" or") else ";"
        diagnosis.refuse("optimizer.type", name, f'{reason}{joint} write for instance "AdamW"')
    elif spelled in OWN_OPTIMIZERS:
        diagnosis.judge("optimizer.type", name, "honoured", OWN_OPTIMIZERS[spelled])
    elif spelled in OPTIMIZERS:
        diagnosis.judge(
            "optimizer.type", name, "honoured", f"torch.optim.{spelled} steps the rank's shards of the masters"
        )
    else:
        close = nearest(name, (*OPTIMIZERS, *OWN_OPTIMIZERS))
        fix = f'did you mean "{close}"?' if close else 'write for instance "AdamW"'
        also = "any other elementwise optimizer can be built by you and given to initialize"
        diagnosis.refuse("optimizer.type", name, f"is not an optimizer known here; {fix} {also}")
    return spelled


def _say_decay(name: str, params: dict[str, Any], diagnosis: Diagnosis) -> None:
    if name != "Adam":
        return
    if params.get("adam_w_mode", True):
        text = 'decoupled weight decay (AdamW), as in DeepSpeed; "adam_w_mode": false gives L2'
    else:
        text = "Adam with L2 weight decay"
    diagnosis.amend("optimizer.type", "honoured", text)
    if params.get("adam_w_mode", True):
        diagnosis.note("optimizer.type", name, f'"Adam" is {text}')


def read_scheduler(value: Any, optimizer: Any, diagnosis: Diagnosis) -> SchedulerConfig | None:
    """The scheduler block, or None when it is null or has no usable type. `optimizer` is that block as written."""
    found = _type_and_params("scheduler", value, ("type", "params"), diagnosis)
    if found is None:
        return None
    name, params = found
    known_types = [*SCHEDULER_PARAMETERS, *SCHEDULERS]
    spelled = {one.lower(): one for one in known_types}.get(name.lower(), name)
    if name in NEED_OBJECTS:
        diagnosis.refuse("scheduler.type", name, "is made from Python objects; give initialize an lr_scheduler instead")
        return None
    if spelled not in known_types:
        close = nearest(name, known_types)
        fix = f'did you mean "{close}"?' if close else f"write one of {', '.join(SCHEDULER_PARAMETERS)}"
        diagnosis.refuse("scheduler.type", name, f"is not a scheduler of DeepSpeed or torch; {fix}")
        return None
    effect = "one step at every optimizer step that is not skipped"
    diagnosis.judge("scheduler.type", name, "honoured", effect)
    known = SCHEDULER_PARAMETERS.get(spelled)
    if known is None:
        for parameter, one in params.items():
            path = f"scheduler.params.{parameter}"
            if one == "auto":
                diagnosis.refuse(path, one, '"auto" has no honest value here; write the value or remove the key')
            else:
                diagnosis.judge(path, one, "honoured", f"passed to torch's {spelled} as it is")
        return SchedulerConfig(spelled, copy.deepcopy(dict(params)))
    return SchedulerConfig(spelled, _scheduler_params(spelled, known, params, optimizer, diagnosis))


def _scheduler_params(
    name: str, known: dict[str, tuple[Key, Any]], params: Mapping[Any, Any], optimizer: Any, diagnosis: Diagnosis
) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for parameter, one in params.items():
        path = f"scheduler.params.{parameter}"
        if parameter not in known:
            close = nearest(str(parameter), known)
            fix = f'did you mean "{close}"?' if close else f"it has {', '.join(known)}"
            diagnosis.refuse(path, one, f"is not a parameter of {name}; {fix}")
            continue
        key, default = known[parameter]
        if parameter == "warmup_max_lr" and one == "auto":
            default = _written_lr(optimizer, default)
        if parameter == "warmup_type" and isinstance(one, str) and one.lower() not in ("log", "linear", "auto"):
            diagnosis.note(
                path, one, 'is not known and taken as "log", as in DeepSpeed; write "log" or "linear"', warn=True
            )
            one = "log"
        _read_parameter(key, default, one, path, read, diagnosis)
    for parameter, (key, default) in known.items():
        if default is REQUIRED and parameter not in params:
            path = f"scheduler.params.{parameter}"
            diagnosis.refuse(path, None, f"{name} needs it; write {key.kind.describe()}")
    return read


def _written_lr(optimizer: Any, default: Any) -> Any:
    """The learning rate written in the optimizer block, which "auto" for the top of a warm-up stands for."""
    params = optimizer.get("params") if isinstance(optimizer, Mapping) else None
    lr = params.get("lr") if isinstance(params, Mapping) else None
    return lr if isinstance(lr, (int, float)) and not isinstance(lr, bool) else default


def _read_parameter(key: Key, default: Any, value: Any, path: str, read: dict[str, Any], diagnosis: Diagnosis) -> None:
    """Put one checked parameter into `read`, or record a problem."""
    if isinstance(value, str) and value == "auto":
        if default is REQUIRED:
            diagnosis.refuse(path, value, f'"auto" has no honest value here; write {key.kind.describe()}')
            return
        word = "the optimizer's own" if default is None else show(default)
        diagnosis.judge(path, default, key.verdict, key.effect, "auto")
        diagnosis.note(path, value, f'"auto" takes the default, {word}')
        if default is not None:
            read[key.name] = default
        return
    if value is None and key.nullable:
        diagnosis.judge(path, value, "ignored", "null reads as if the key were not written")
        return
    try:
        read[key.name] = key.kind.read(value)
    except Mismatch as mismatch:
        diagnosis.refuse(path, value, str(mismatch))
        return
    verdict, message = (key.judge(read[key.name]) if key.judge else None) or (key.verdict, key.effect)
    diagnosis.judge(path, value, verdict, message)


def _type_and_params(
    block: str, value: Any, names: tuple[str, ...], diagnosis: Diagnosis
) -> tuple[str, Mapping[Any, Any]] | None:
    """The type and the parameters of a block as written; None when the block is null or unusable."""
    if value is None:
        diagnosis.judge(block, None, "ignored", "null reads as if the block were not written")
        return None
    if not isinstance(value, Mapping):
        fix = 'write {"type": ..., "params": {...}}'
        why = '"auto" has no honest value here' if value == "auto" else f"must be a block, not {type_word(value)}"
        diagnosis.refuse(block, value, f"{why}; {fix}, or remove the block and give initialize the object")
        return None
    for name, one in value.items():
        if name not in names:
            warn_unknown(name if isinstance(name, str) else show(name), one, f"{block}.{name}", diagnosis)
    if "legacy_fusion" in value:
        diagnosis.judge(
            f"{block}.legacy_fusion", value["legacy_fusion"], "ignored", "torch's fused optimizers are used"
        )
    params = value.get("params")
    if params is not None and not isinstance(params, Mapping):
        fix = "write the parameters between braces"
        diagnosis.refuse(f"{block}.params", params, f"must be a block, not {type_word(params)}; {fix}")
        params = None
    name = value.get("type")
    if name is None or name == "auto":
        why = "the block has no type" if name is None else '"auto" has no honest value here'
        example = "AdamW" if block == "optimizer" else "WarmupLR"
        diagnosis.refuse(f"{block}.type", name, f'{why}; write for instance "type": "{example}", or remove the block')
        return None
    try:
        return Text(empty=False).read(name), params or {}
    except Mismatch as mismatch:
        diagnosis.refuse(f"{block}.type", name, str(mismatch))
        return None
