"""Muon by its place in DeepSpeed's tree."""
