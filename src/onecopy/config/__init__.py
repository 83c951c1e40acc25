"""The JSON document: read, checked and resolved in one place, with a verdict for every key."""

from .diagnosis import ConfigWarning, Finding
from .document import Config
from .loading import Examination, examine, load
from .precision import Bf16Config, DataTypesConfig, Fp16Config, TorchAutocastConfig
from .services import (
    ActivationCheckpointingConfig,
    CheckpointConfig,
    CometConfig,
    MonitorConfig,
    OneCopyConfig,
    WandbConfig,
)
from .training import OptimizerConfig, SchedulerConfig
from .zero import LeafModuleConfig, OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig

__all__ = [
    "ActivationCheckpointingConfig",
    "Bf16Config",
    "CheckpointConfig",
    "CometConfig",
    "Config",
    "ConfigWarning",
    "DataTypesConfig",
    "Examination",
    "Finding",
    "Fp16Config",
    "LeafModuleConfig",
    "MonitorConfig",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "OneCopyConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "TorchAutocastConfig",
    "WandbConfig",
    "ZeroConfig",
    "examine",
    "load",
]
