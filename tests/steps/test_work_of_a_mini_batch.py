"""What a mini-batch needs once is made once: casts of parameters and indices of rows, by what torch dispatches."""

import contextlib
from functools import partial

import attrs
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fppo import batch as batches
from fppo import losses
from fppo.grad import value_and_grad
from fppo.steps.actor import PolicyTerms, SelectiveLoss, UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward, compute_log_probs, forward_micro_batch
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import sgd
from fppo.steps.packed import indexed, masks_of
from fppo.steps.train_state import init_state
from fppo_kernels.table import Kernels
from tests import tiny
from tests.models.families import make
from tests.steps.test_invariance import POLICY_LOSSES

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


class Waits(TorchDispatchMode):
    """For what the host would wait, while the context lasts, on a device that "meta" stands for: numbers of its tensors
    and sizes that depend on them, and copies that are not begun without waiting. In a backward pass too."""

    READS = frozenset(
        {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.equal}
    )

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, op = kwargs or {}, func.overloadpacket
        there = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_meta]
        by_mask = op in (aten.index, aten.index_put_) and any(
            x is not None and x.is_meta and x.dtype == torch.bool for x in args[1]
        )
        sized = op is aten.repeat_interleave and kwargs.get("output_size") is None
        if there and (op in self.READS or by_mask or sized):
            self.found.append(f"{op}")
        out = func(*args, **kwargs)
        if op in (aten._to_copy, aten.copy_):
            source, target = args[1] if op is aten.copy_ else args[0], out
            asked = kwargs.get("non_blocking", False) or (op is aten.copy_ and len(args) > 2 and args[2])
            if source.is_meta != target.is_meta and not (target.is_meta and asked):
                self.found.append(f"{op} to {target.device}")
        return out


class WrittenThere(TorchFunctionMode):
    """Numbers of the host that become a tensor on the device, which waits for the copy. Dispatch does not show it."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        there = torch.device(kwargs.get("device") or "cpu").type == "meta"
        if there and func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor):
            self.found.append(f"{func.__name__}({args[0]!r})")
        return func(*args, **kwargs)


def half_model():
    """bfloat16 passes of float32 parameters, no two of which are one."""
    return make("llama", dtype=torch.float32, compute_dtype=torch.bfloat16)


def batch():
    return tiny.experience(4, ROWS, dtype=torch.float32)


def objective(update, params, rows, weights, indices=None):
    """The loss of an update on some rows, by a pass over them."""
    made = update.objective()
    out = forward_micro_batch(params, rows, forward=update.forward, outputs=made.outputs, indices=indices)
    return made.loss(out, rows, weights)


TERMS = PolicyTerms(entropy_coef=0.1, kl_coef=0.1)
SGD = sgd(lambda step: 1.0, max_grad_norm=None)


@pytest.mark.parametrize("size", [12, 4, 3])
def test_parameters_are_cast_once_for_a_mini_batch_and_for_passes_without_a_gradient(size):
    """The gradient is that of casts in every pass: gradients of 16 bits, added up in float32."""
    model, params = half_model()
    forward, cut = Forward(model), MicroBatching(size=size)
    rows, loop = batch(), Loop(mini_batch_size=ROWS, micro_batching=cut, weight_mode="token-sum")
    update = UpdateActor(forward=forward, loss_fn=losses.ppo_clip, loop=loop, optimizer=SGD)
    with Calls() as calls:
        after, _ = update(init_state(params, SGD), rows)
    assert calls.casts(params) == len(params)
    grads = None
    for start in range(0, ROWS, size):
        part = batches.rows(rows, range(start, start + size))
        _, new = value_and_grad(partial(objective, update), has_aux=True)(params, part, part.response_mask.float())
        grads = new if grads is None else {name: grads[name] + x for name, x in new.items()}
    for name, x in params.items():
        assert torch.equal(after.params[name], x - grads[name]), name
    with Calls() as calls:
        compute_log_probs(params, rows, forward=forward, micro_batching=cut)
    assert calls.casts(params) == len(params)


def to_meta(x):
    return pytree.tree_map_only(Tensor, lambda x: x.to("meta"), x)


def waits_of(fn):
    """For what `fn` would wait on a device."""
    with WrittenThere() as written, Waits() as waits:
        fn()
    return [*written.found, *waits.found]


@pytest.mark.slow
@pytest.mark.parametrize("remove_padding", [True, False])
@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_micro_batch_waits_for_no_device(attention, head, remove_padding, dtype):
    """Forward and backward, from picking its rows on; the tensors have no numbers that could be read."""
    model, params = tiny.model_and_params(head, dtype=torch.float32)
    model = attrs.evolve(model, compute_dtype=dtype)
    kernels = Kernels.named(attention=attention)
    forward = Forward(model, kernels=kernels, remove_padding=remove_padding)
    rows = batch()
    masks, weights, away = masks_of(rows), to_meta(rows.response_mask.float()), to_meta(params)
    how = {"forward": forward, "loop": None, "optimizer": SGD}
    policy = UpdateActor(loss_fn=losses.ppo_clip, terms=TERMS, old_log_probs="engine", **how)
    run = value_and_grad(partial(objective, policy if head == "lm" else UpdateCritic(**how)), has_aux=True)
    there = to_meta(rows)

    def micro_batch(numbers):
        part, part_masks, part_weights = batches.rows((there, masks, weights), numbers)
        (loss, report), grads = run(away, part, part_weights, indexed(part, part_masks, forward).indices)
        assert report
        assert all(x.is_meta for x in (loss, *grads.values()))

    micro_batch([3, 1, 4])  # what a model has beside its parameters is sent once
    assert waits_of(lambda: micro_batch([5, 0, 2, 7])) == []


def values_of(name):
    """The loss of a value head, as a policy's is called: of values that are log-probs."""
    head = getattr(losses, f"{name}_head")(**({} if name in ("mse", "huber") else {"bins": 5}))
    wide = (lambda x: x) if name in ("mse", "huber") else (lambda x: x[..., None].expand(*x.shape, 5))
    return lambda log_probs, old, advantages, mask: head.loss_fn(wide(log_probs), old, advantages, mask)


@pytest.mark.parametrize("name", [*POLICY_LOSSES, "mse", "huber", "hl_gauss", "two_hot", "quantile"])
def test_no_loss_waits_for_a_device(name):
    loss_fn, there = POLICY_LOSSES[name] if name in POLICY_LOSSES else values_of(name), to_meta(batch())
    if isinstance(loss_fn, SelectiveLoss):
        loss_fn = partial(loss_fn.loss_fn, selected=there.response_mask)
    log_probs = there.old_log_probs.clone().requires_grad_()

    def run():
        loss, report = loss_fn(log_probs, there.old_log_probs, there.advantages, there.response_mask)
        assert report
        torch.autograd.grad(loss.sum(), log_probs)

    assert waits_of(run) == []


def test_the_stand_in_for_a_device_sees_waits():
    x = torch.ones(3, device="meta")
    host = torch.ones(3)
    for fn, name in (
        (lambda: x.copy_(host), "copy_"),
        (lambda: host.to("meta"), "_to_copy"),
        (lambda: torch.tensor([1.0], device="meta"), "tensor"),
    ):
        assert name in "".join(waits_of(fn))
    for fn in (
        lambda: host.to("meta", non_blocking=True),
        lambda: torch.full((3,), 1.0, device="meta"),
        lambda: host.nonzero(),
    ):
        assert waits_of(fn) == []
    for fn in (lambda: x.nonzero(), lambda: x.cpu(), lambda: x.sum().item(), lambda: x[x > 0]):
        with pytest.raises((NotImplementedError, RuntimeError)):
            fn()


def test_what_was_sent_in_inference_serves_training():
    model, _ = tiny.model_and_params()
    with torch.inference_mode():
        model.constants_on(torch.device("meta"))
    there = model.constants_on(torch.device("meta"))
    assert there.keys() == model.constants.keys()
    assert there is model.constants_on(torch.device("meta"))
    assert all(x.is_meta and not x.is_inference() for x in there.values())


@pytest.mark.parametrize("remove_padding", [True, False])
def test_rows_that_are_too_long_are_refused_without_a_wait(remove_padding, monkeypatch):
    model, params = tiny.model_and_params()
    forward, rows = Forward(model, remove_padding=remove_padding), batch()
    ready = indexed(to_meta(rows), masks_of(rows), forward)
    longest = int(rows.attention_mask.sum(1).max())
    for limit, refused in ((longest, False), (longest - 1, True)):
        monkeypatch.setattr("fppo.models.run.longest_row", lambda config, limit=limit: limit)
        error = pytest.raises(ValueError, match=f"a row of {longest} tokens") if refused else contextlib.nullcontext()
        with error:
            forward_micro_batch(to_meta(params), ready.rows, forward=forward, indices=ready.indices)


def test_indices_of_other_rows_are_refused():
    model, params = tiny.model_and_params(dtype=torch.float32)
    rows, forward = batch(), Forward(model)
    masks = masks_of(rows)
    (first, first_masks), (second, _) = (batches.rows((rows, masks), part) for part in ([0, 2], [1, 3]))
    indices = indexed(first, first_masks, forward).indices
    found = forward_micro_batch(params, first, forward=forward, indices=indices).log_probs
    assert torch.equal(found, forward_micro_batch(params, first, forward=forward).log_probs)
    for other, elsewhere in ((second, forward), (first, attrs.evolve(forward, remove_padding=False))):
        with pytest.raises(ValueError, match="indices are of other rows or of another forward"):
            forward_micro_batch(params, other, forward=elsewhere, indices=indices)


def test_an_index_of_rows_goes_to_a_device_once():
    there = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), batch())
    with Calls() as calls:
        part = batches.rows((there, there.response_mask), [3, 1])
    moved = [args for op, args, keywords in calls.made if op is aten._to_copy]
    assert len(moved) == 1
    assert part[0].tokens.shape[0] == part[1].shape[0] == 2
