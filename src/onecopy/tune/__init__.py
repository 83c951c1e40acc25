"""Measure real short runs and keep the fastest configuration: what is run, one measured trial, the search, and its page."""
