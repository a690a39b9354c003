"""Ablations of kernels: every implementation of an operation side by side, with laws, errors, memory and times."""

from fppo.ablate.ablation import ablate

__all__ = ["ablate"]
