"""Plan before you rent: exact memory, expected time, what fits and which settings, by rehearsing the engine without memory."""

from onecopy.observe.ledger import Ledger
from onecopy.plan.estimators import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from onecopy.plan.planning import Plan, plan
from onecopy.plan.rehearsal import Rehearsal, Subject, rehearse
from onecopy.plan.virtual import virtual_world

__all__ = [
    "Ledger", "Plan", "Rehearsal", "Subject", "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live", "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live", "plan", "rehearse", "virtual_world",
]  # fmt: skip
