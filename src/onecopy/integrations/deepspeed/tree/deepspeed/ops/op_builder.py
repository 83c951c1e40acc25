"""Builders of compiled extensions: none is needed, so every one says that it cannot be built."""

from typing import Any, NoReturn

from onecopy.integrations.deepspeed.refusal import NotOffered

_WHY = "onecopy compiles no extensions; torch's fused optimizers and onecopy's own need none"


class OpBuilder:
    """What code asks before it uses an extension: `is_compatible()` is false."""

    NAME = "none"

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        return False

    def load(self, verbose: bool = True) -> NoReturn:
        raise NotOffered(f"deepspeed.ops.op_builder.{type(self).__name__} is not offered by onecopy: {_WHY}")


ALL_OPS: dict[str, OpBuilder] = {}


def __getattr__(name: str) -> Any:
    if name.endswith("Builder") and not name.startswith("_"):
        return type(name, (OpBuilder,), {"NAME": name.removesuffix("Builder").lower(), "__module__": __name__})
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
