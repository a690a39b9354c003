"""Normalisation by the root of the mean square (Zhang and Sennrich, 2019, arXiv:1910.07467)."""
