"""Operations on tensors and their implementations, with torch and attrs alone.

In: tensors and the lengths of packed rows. Out: tensors, with gradients. Every implementation of an operation has one
signature; `reference` or `eager` is the definition that laws hold the others to.
Begin with `table.Kernels`, which holds one implementation of each; `table` names them all.
"""
