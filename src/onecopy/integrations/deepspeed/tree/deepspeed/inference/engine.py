"""The engine that only computes."""

from onecopy.inference import InferenceEngine

__all__ = ["InferenceEngine"]
