"""Causal attention over packed sequences."""
