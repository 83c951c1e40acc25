"""What the Trainer's and Fabric's strategy have in common: their arguments, their stage, their names, building sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from onecopy.init import Init
from onecopy.integrations.lightning import settings


class ShardedStrategy:
    """Comes before Lightning's own strategy among the base classes.

    Args:
        stage: ZeRO stage 0 to 3; default what the configuration says, else 2.
        config: the JSON document, as a dictionary or a path.
        exclude_frozen_parameters: leave frozen parameters out of checkpoints.
        timeout, ...: as in Lightning's strategy.
    """

    root_device: Any

    def __init__(
        self,
        stage: int | None = None,
        config: Any = None,
        exclude_frozen_parameters: bool = False,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        self.source = settings.document(config, stage)  # Lightning's constructor sets a precision, which needs it
        self.exclude_frozen_parameters = exclude_frozen_parameters
        super().__init__(**options, **({} if timeout is None else {"timeout": timeout}))

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return int(self.source["zero_optimization"]["stage"])

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """At stage 3 what is built inside is sharded as it is built; entering is collective then."""
        with Init(enabled=self.stage == 3, remote_device="cpu" if self.root_device.type == "cpu" else None):
            yield

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Let `strategy="onecopy"` and "onecopy_stage_0" to "onecopy_stage_3" find it."""
        strategy_registry.register("onecopy", cls, description="onecopy, ZeRO stage 2")
        for stage in range(4):
            strategy_registry.register(
                f"onecopy_stage_{stage}", cls, description=f"onecopy, ZeRO stage {stage}", stage=stage
            )
