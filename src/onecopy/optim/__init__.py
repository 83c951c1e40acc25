"""Optimizer and schedule registries, loss scale, and the step on sharded master weights."""
