"""Cut a model into units: one repeated block each, large modules on their own, and the rest at the root."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

ROOT = "(root)"
_LARGE = 0.01  # of the model's elements: a module outside the blocks with this share is a unit of its own


@dataclass(slots=True)
class UnitPlan:
    """A unit before it has memory: its name, its module (None at the root) and its parameters by qualified name."""

    name: str
    module: nn.Module | None
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class UnitRules:
    """What the user said about unit boundaries.

    Attributes:
        classes: class names whose instances are units (`onecopy.unit_classes`, `leaf_module.classes`).
        names: qualified module names that are units.
        name_suffixes: modules whose qualified name ends so are units.
        granularity: modules with fewer elements a submodule than this are units; 0 is off.
    """

    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()
    granularity: int = 0

    def marks(self, name: str, module: nn.Module) -> bool:
        """Whether the user has named this very module."""
        kinds = {
            name for cls in type(module).__mro__ for name in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")
        }
        return (
            bool(kinds & set(self.classes))
            or name in self.names
            or any(name.endswith(suffix) for suffix in self.name_suffixes)
            or getattr(module, "_z3_leaf", False)
        )

    def is_fine(self, module: nn.Module) -> bool:
        """Whether the module is made of such small parts that they are kept together."""
        return self.granularity > 0 and _elements(module) / sum(1 for _ in module.modules()) < self.granularity


def discover_units(model: nn.Module, rules: UnitRules) -> list[UnitPlan]:
    """The units of `model` in module order, the root's last (left out when nothing is left for it).

    A parameter shared by modules of two units (a tied weight) goes to the root, which stays gathered through a step.
    """
    roots = dict(_unit_modules(model, rules, max(1, int(_LARGE * _elements(model)))))
    plans = {id(module): UnitPlan(name, module) for name, module in roots.items()}
    rest = UnitPlan(ROOT, None)
    inside = {id(child): plans[id(module)] for module in roots.values() for child in module.modules()}
    homes: dict[int, tuple[str, nn.Parameter, UnitPlan]] = {}
    for prefix, module in model.named_modules():
        plan = inside.get(id(module), rest)
        for local, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{prefix}.{local}" if prefix else local
            first_name, _, first_plan = homes.get(id(parameter), (name, parameter, plan))
            homes[id(parameter)] = (first_name, parameter, plan if first_plan is plan else rest)
    for name, parameter, plan in homes.values():
        plan.parameters.append((name, parameter))
    return [plan for plan in (*plans.values(), rest) if plan.parameters]


def _unit_modules(model: nn.Module, rules: UnitRules, large: int) -> Iterator[tuple[str, nn.Module]]:
    """Walk down from the model and stop at the first module on each path that is a unit."""
    pending: list[tuple[str, nn.Module, bool]] = [
        (name, child, _is_sequence(model)) for name, child in model.named_children()
    ]
    pending.reverse()
    seen: set[int] = set()
    while pending:
        name, module, in_sequence = pending.pop()
        if id(module) in seen or not any(True for _ in module.parameters()):
            continue
        seen.add(id(module))
        if rules.marks(name, module):
            if type(module).forward is not nn.Module.forward:
                yield name, module
            continue  # a list that is never called: its parameters are the root's, gathered for whoever uses them
        if _has_forward(module) and (rules.is_fine(module) or in_sequence or _is_large_alone(module, large)):
            yield name, module
            continue
        children = [(f"{name}.{local}", child, _is_sequence(module)) for local, child in module.named_children()]
        pending += reversed(children)


def _is_sequence(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _has_forward(module: nn.Module) -> bool:
    """A container without a forward of its own never runs its hooks; its children are looked at instead.

    An `nn.Sequential` is looked into as well: its children are the blocks.
    """
    return type(module).forward is not nn.Module.forward and not isinstance(module, nn.Sequential)


def _is_large_alone(module: nn.Module, large: int) -> bool:
    """A leaf (or one of torch's own composite layers) with many elements outside any block."""
    torchs_own = type(module).__module__.startswith("torch.nn.") and not any(
        _is_sequence(child) for child in module.modules()
    )
    if any(True for _ in module.children()) and not torchs_own:
        return False
    return _elements(module) >= large


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def choose_small(
    plans: Sequence[UnitPlan], threshold: int, most: int, eligible: Callable[[nn.Parameter], bool]
) -> set[int]:
    """The ids of parameters kept whole: those of at most `threshold` elements, smallest first, `most` elements in all."""
    small = sorted(
        (parameter.numel(), order, id(parameter))
        for order, parameter in enumerate(p for plan in plans for _, p in plan.parameters)
        if parameter.numel() < threshold and eligible(parameter)
    )
    chosen: set[int] = set()
    total = 0
    for numel, _, identity in small:
        total += numel
        if total > most:
            break
        chosen.add(identity)
    return chosen
