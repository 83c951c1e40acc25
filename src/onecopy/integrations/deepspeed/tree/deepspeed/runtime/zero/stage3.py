"""The optimizer of stage 3, and DeepSpeed's memory estimates for it."""

from onecopy.integrations.deepspeed.optimizers import DeepSpeedZeroOptimizer_Stage3
from onecopy.layout.estimates import DEEPSPEED

estimate_zero3_model_states_mem_needs = DEEPSPEED.estimate_zero3_model_states_mem_needs
estimate_zero3_model_states_mem_needs_all_cold = DEEPSPEED.estimate_zero3_model_states_mem_needs_all_cold
estimate_zero3_model_states_mem_needs_all_live = DEEPSPEED.estimate_zero3_model_states_mem_needs_all_live

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]
