"""The JSON document: read, checked and resolved in one place, with a verdict for every key."""

from onecopy.config.diagnosis import ConfigWarning, Finding
from onecopy.config.document import Config
from onecopy.config.loading import Examination, examine, load
from onecopy.config.precision import Bf16Config, DataTypesConfig, Fp16Config, TorchAutocastConfig
from onecopy.config.services import (
    ActivationCheckpointingConfig,
    CheckpointConfig,
    CometConfig,
    MonitorConfig,
    OneCopyConfig,
    WandbConfig,
)
from onecopy.config.training import OptimizerConfig, SchedulerConfig
from onecopy.config.zero import LeafModuleConfig, OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig

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
