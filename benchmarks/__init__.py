"""Measurements against peers in the same run; see docs/performance.md for tables and the commands that made them."""
