"""Gradients of functions of trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

from fppo_kernels.transforms import active


def variables(tree: Any) -> Any:
    """Replace each tensor of a tree, all floating-point, by a fresh leaf of autograd."""
    return pytree.tree_map(lambda leaf: leaf.detach().requires_grad_(), tree)


def gradients(loss: torch.Tensor, tree: Any) -> Any:
    """The gradients of a 0-d loss with respect to the leaves of a tree of `variables`, as a tree like it; zeros for a
    leaf that the loss does not use. Computed by `torch.autograd.grad`, since `torch.func.grad` cannot run checkpointed
    layers or collectives. (`value_and_grad` uses torch.func only inside its transforms.)"""
    leaves, spec = pytree.tree_flatten(tree)
    if not loss.requires_grad:  # every token was masked, or no leaf was used
        return pytree.tree_unflatten([torch.zeros_like(leaf) for leaf in leaves], spec)
    return pytree.tree_unflatten(list(torch.autograd.grad(loss, leaves, materialize_grads=True)), spec)


def value_and_grad(fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` over the first argument of `fn`, a tree of floating-point tensors.

    `fn` returns a 0-d loss, or (loss, aux) with `has_aux`. The result is (what `fn` returned, detached; the
    gradients, a tree like the first argument). Inside a transform of torch.func the gradients can be transformed, too.
    """

    def wrapped(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if active():
            return _transformed(fn, has_aux, params, *args, **kwargs)
        params = variables(params)
        with torch.enable_grad():
            out = fn(params, *args, **kwargs)
            grads = gradients(out[0] if has_aux else out, params)
        return detached(out), grads

    return wrapped


def _transformed(fn: Callable[..., Any], has_aux: bool, params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    # torch.func would wrap the other arguments, too
    grads, out = grad_and_value(lambda own: fn(own, *args, **kwargs), has_aux=has_aux)(params)
    return detached(out), grads


def detached(tree: Any) -> Any:
    """Detach every tensor of a tree from autograd's graph."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, tree)
