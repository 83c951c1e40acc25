"""`deepspeed.inference`: computing with sharded weights."""

from onecopy.inference import InferenceEngine

__all__ = ["InferenceEngine"]
