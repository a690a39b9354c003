"""Ablations of kernels: every implementation of an operation side by side, with laws, errors, memory and times.

In: the name of an operation, or functions of your own, with shapes and dtypes. Out: an `Ablation`, a row for each
implementation that a table, JSON or a chart shows. Nothing of a run is read but, for a replay, a checkpoint.
Begin with `ablation.ablate`; `evaluation` calls an operation, `measure` times it.
"""

from fppo.studies.ablate.ablation import ablate

__all__ = ["ablate"]
