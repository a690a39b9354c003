"""Tensor operations and their implementations, which depend on torch and attrs alone.

In: tensors, and the lengths of packed rows. Out: tensors, with gradients. All implementations of an operation have one
signature; `reference` or `eager` is its definition, to which laws compare the others.
Begin with `table.Kernels`, which holds one implementation of each operation; `table` lists all of them.
"""
