"""Generalised advantage estimates from token rewards and values."""
