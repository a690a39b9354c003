"""Gradients of functions of trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


def value_and_grad(fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` over the first argument of `fn`, a tree of floating-point tensors.

    `fn` returns a 0-d loss, or (loss, aux) with `has_aux`. The result is (the detached result of `fn`, the gradients as
    a tree like the first argument). A leaf that the loss does not use gets zeros. It uses `torch.autograd.grad`, since
    `torch.func.grad` does not run checkpointed layers or collectives.
    """

    def wrapped(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        leaves, spec = pytree.tree_flatten(params)
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        with torch.enable_grad():
            out = fn(pytree.tree_unflatten(leaves, spec), *args, **kwargs)
            loss = out[0] if has_aux else out
            if not loss.requires_grad:  # every token was masked, or no leaf was used
                grads = [torch.zeros_like(leaf) for leaf in leaves]
            else:
                grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, out), pytree.tree_unflatten(grads, spec)

    return wrapped
