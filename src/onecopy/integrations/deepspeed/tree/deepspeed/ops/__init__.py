"""Optimizers by their places in DeepSpeed's tree."""

from . import adagrad, adam, lamb, lion, op_builder

__compatible_ops__: dict[str, bool] = {}

__all__ = ["adagrad", "adam", "lamb", "lion", "op_builder"]
