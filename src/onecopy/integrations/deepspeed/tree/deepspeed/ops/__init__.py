"""Optimizers by their places in DeepSpeed's tree."""

from . import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]
