"""Attention of one more token per row over the keys and values that a cache has of the row."""
