"""Checkpoints: save, load at any stage and world size, export, import, look. Format: `docs/checkpoints.md`."""
