"""Lightning on onecopy's engine: `OneCopyStrategy` for the Trainer, `OneCopyFabricStrategy` for Fabric."""

from onecopy.integrations.lightning.checkpoints import single_file
from onecopy.integrations.lightning.engines import release
from onecopy.integrations.lightning.fabric import OneCopyFabricStrategy
from onecopy.integrations.lightning.packages import fabric_module, trainer_module
from onecopy.integrations.lightning.trainer import OneCopyStrategy

__all__ = ["OneCopyFabricStrategy", "OneCopyStrategy", "release", "single_file"]

OneCopyStrategy.register_strategies(trainer_module("strategies").StrategyRegistry)
OneCopyFabricStrategy.register_strategies(fabric_module("strategies").STRATEGY_REGISTRY)
