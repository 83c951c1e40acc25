"""DeepSpeed's public names on onecopy's engine; `docs/compatibility.md` says which are honoured, differ or are refused."""

import argparse

from onecopy.engine import Engine as DeepSpeedEngine
from onecopy.inference import InferenceEngine, default_inference_config, init_inference
from onecopy.integrations.deepspeed.missing import refuse_missing_modules
from onecopy.integrations.deepspeed.refusal import refused_class, refused_function
from onecopy.integrations.deepspeed.start import initialize

refuse_missing_modules()

from . import (  # noqa: E402
    accelerator,
    checkpoint,
    checkpointing,
    comm,
    constants,
    inference,
    launcher,
    monitor,
    ops,
    pipe,
    profiling,
    runtime,
    utils,
    zero,
)
from . import comm as dist  # noqa: E402
from .accelerator import get_accelerator  # noqa: E402
from .comm import init_distributed  # noqa: E402
from .runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer  # noqa: E402
from .runtime.config import DeepSpeedConfig, DeepSpeedConfigError  # noqa: E402
from .runtime.dataloader import DeepSpeedDataLoader  # noqa: E402
from .utils import OnDevice, log_dist, logger  # noqa: E402

__version__ = "0.19.8+onecopy"
version = __version__
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
__git_hash__ = __git_branch__ = None

_NO_PIPELINE = "ZeRO-3 shards the model's layers without stages; give the whole model to initialize"

PipelineModule = refused_class("PipelineModule", _NO_PIPELINE)
PipelineEngine = refused_class("PipelineEngine", _NO_PIPELINE)
tp_model_init = refused_function(
    "tp_model_init", "tensor parallelism is not in onecopy; parallelise with torch.distributed.tensor and pass mpu="
)
add_tuning_arguments = refused_function("add_tuning_arguments", "write the scheduler block of the configuration")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config (and their old hidden names) to a script's parser, which is returned."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="train with the deepspeed engine")
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed JSON configuration file")
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser


__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "InferenceEngine",
    "OnDevice",
    "PipelineEngine",
    "PipelineModule",
    "ZeROOptimizer",
    "accelerator",
    "add_config_arguments",
    "add_tuning_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "constants",
    "default_inference_config",
    "dist",
    "get_accelerator",
    "inference",
    "init_distributed",
    "init_inference",
    "initialize",
    "launcher",
    "log_dist",
    "logger",
    "monitor",
    "ops",
    "pipe",
    "profiling",
    "runtime",
    "tp_model_init",
    "utils",
    "zero",
]
