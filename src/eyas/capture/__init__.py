"""Samples times engine to store: plan, run, check."""
