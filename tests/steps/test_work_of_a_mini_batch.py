"""What a mini-batch needs once is made once: casts of parameters and indices of rows, by what torch dispatches."""

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fppo import batch as batches
from fppo import losses
from fppo.grad import value_and_grad
from fppo.steps.actor import policy_objective, update_actor
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import sgd
from fppo.steps.train_state import init_state
from fppo_kernels.record import Kernels
from tests import tiny
from tests.models.families import make

aten = torch.ops.aten
ROWS = 12


class Calls(TorchDispatchMode):
    """Every operation with its arguments, while the context lasts."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.made.append((func.overloadpacket, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def casts(self, params):
        """How often one of these was cast."""
        places = {x.untyped_storage().data_ptr() for x in params.values()}
        copied = [args[0] for op, args, _ in self.made if op is aten._to_copy]
        return sum(x.untyped_storage().data_ptr() in places for x in copied)


class Waits(TorchFunctionMode):
    """How often the host would wait for a GPU to learn numbers, while the context lasts: its own reads, and what torch
    must know the size of."""

    READS = (Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.nonzero)

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        picked = args[1] if func is Tensor.__getitem__ else ()
        by_mask = [x for x in pytree.tree_leaves(picked) if isinstance(x, Tensor) and x.dtype == torch.bool]
        self.count += len(by_mask) + (func in self.READS)
        return func(*args, **(kwargs or {}))


def half_model():
    """bfloat16 passes of float32 parameters, no two of which are one."""
    return make("llama", dtype=torch.float32, compute_dtype=torch.bfloat16)


def batch():
    return tiny.experience(4, ROWS, dtype=torch.float32)


def objective(params, rows, weights, *, forward):
    return policy_objective(params, rows, weights, forward=forward, loss_fn=losses.ppo_clip)


SGD = sgd(lambda step: 1.0, max_grad_norm=None)


@pytest.mark.parametrize("size", [12, 4, 3])
def test_parameters_are_cast_once_for_a_mini_batch_and_for_passes_without_a_gradient(size):
    """The gradient is that of casts in every pass: gradients of 16 bits, added up in float32."""
    model, params = half_model()
    forward, cut = Forward(model), MicroBatching(size=size)
    rows, loop = batch(), Loop(mini_batch_size=ROWS, micro_batching=cut, weight_mode="token-sum")
    with Calls() as calls:
        after, _ = update_actor(
            init_state(params, SGD), rows, forward=forward, loss_fn=losses.ppo_clip, loop=loop, optimizer=SGD
        )
    assert calls.casts(params) == len(params)
    grads = None
    for start in range(0, ROWS, size):
        part = batches.rows(rows, range(start, start + size))
        ones = part.response_mask.float()
        _, new = value_and_grad(objective, has_aux=True)(params, part, ones, forward=forward)
        grads = new if grads is None else {name: grads[name] + x for name, x in new.items()}
    for name, x in params.items():
        assert torch.equal(after.params[name], x - grads[name]), name
    with Calls() as calls:
        compute_log_probs(params, rows, forward=forward, micro_batching=cut)
    assert calls.casts(params) == len(params)


def test_a_micro_batch_waits_for_the_device_three_times():
    """For the places of the responses and of the tokens, and for the lengths of the rows; attention is not counted."""
    model, params = tiny.model_and_params(dtype=torch.float32)
    rows = batch()
    forward = Forward(model, kernels=Kernels.named(attention="eager"))
    with Waits() as waits:
        value_and_grad(objective, has_aux=True)(params, rows, rows.response_mask.float(), forward=forward)
    assert waits.count == 3


def test_an_index_of_rows_goes_to_a_device_once():
    there = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), batch())
    with Calls() as calls:
        part = batches.rows((there, there.response_mask), [3, 1])
    moved = [args for op, args, keywords in calls.made if op is aten._to_copy]
    assert len(moved) == 1
    assert part[0].tokens.shape[0] == part[1].shape[0] == 2
