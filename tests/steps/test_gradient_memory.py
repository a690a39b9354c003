"""The memory of an update."""

import weakref

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fppo.quickstart import small_model
from fppo.steps import Forward, loop

LEAVES, SIZE = 6, 1000


@pytest.mark.parametrize("passes", [1, 2, 4])
def test_two_trees_of_gradients_are_in_memory_and_never_three(passes, monkeypatch):
    alive, most = [], 0
    params = {str(i): torch.full((SIZE,), float(i)) for i in range(LEAVES)}
    factor = torch.arange(float(SIZE))
    known = {x.untyped_storage().data_ptr() for x in (*params.values(), factor)}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal most
            out = func(*args, **(kwargs or {}))
            new = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.numel() == SIZE]
            alive.extend(weakref.ref(x) for x in new if x.untyped_storage().nbytes() >= 4 * SIZE)
            places = {x.untyped_storage().data_ptr() for ref in alive if (x := ref()) is not None}
            most = max(most, len(places - known))
            return out

    class Sums(loop._Passes):
        def loss(self, params, micro, weights):
            return torch.stack([(weights * x).sum() for x in params.values()]).sum(), {}

    monkeypatch.setattr(loop, "micro_batches", lambda mini, forward: [(None, factor)] * passes)
    forward = Forward(small_model(8, width=8, layers=1))
    mini = loop.MiniBatch(*[None] * 8)._replace(passes=passes)
    with Watch():
        grads, _ = loop._gradients(params, mini, Sums(None, forward, None, None, ""), None, record=None)
    assert all(torch.equal(x, passes * factor) for x in grads.values())
    assert LEAVES <= most <= (1 if passes == 1 else 2) * LEAVES + 2
