"""Inference with sharded weights: no masters, no moments, no gradients, and ranks that generate together."""

from onecopy.inference.engine import InferenceEngine, init_inference
from onecopy.inference.settings import InferenceSettings, default_inference_config

__all__ = ["InferenceEngine", "InferenceSettings", "default_inference_config", "init_inference"]
