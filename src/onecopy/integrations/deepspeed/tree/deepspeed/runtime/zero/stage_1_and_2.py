"""The optimizer of stages 1 and 2, and DeepSpeed's memory estimates for it."""

from onecopy.integrations.deepspeed.optimizers import DeepSpeedZeroOptimizer
from onecopy.layout.estimates import DEEPSPEED

estimate_zero2_model_states_mem_needs = DEEPSPEED.estimate_zero2_model_states_mem_needs
estimate_zero2_model_states_mem_needs_all_cold = DEEPSPEED.estimate_zero2_model_states_mem_needs_all_cold
estimate_zero2_model_states_mem_needs_all_live = DEEPSPEED.estimate_zero2_model_states_mem_needs_all_live

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]
