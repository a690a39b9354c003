"""The value loss against a loop, its gradient where clipped, and garbage outside the mask."""

import pytest
import torch
from hypothesis import given

from fppo import losses
from fppo.laws import references
from fppo.metrics import report

from .batches import batches, gradient, spoil


@pytest.mark.parametrize("margin", [None, 0.1, 0.5, 2.0, float("inf")])
@given(batches())
def test_equals_the_loop(margin, batch):
    values, old, returns, mask = batch
    per_token, metrics = losses.value_loss(values, old, returns, mask, clip=margin)
    expected = references.values.value_loss(values, old, returns, mask, clip=margin)[0]
    torch.testing.assert_close(per_token, expected, rtol=1e-12, atol=1e-15)
    plain = references.values.value_loss(values, old, returns, mask, clip=None)[0]
    hits, tokens = int((expected > plain)[mask].sum()), int(mask.sum())
    assert (per_token[~mask] == 0).all()
    if tokens:
        numbers = report(metrics)
        assert numbers["critic/vpred_mean"] == pytest.approx(values[mask].mean().item())
        assert numbers.get("critic/vf_clipfrac", 0.0) == pytest.approx(hits / tokens)


@given(batches())
def test_gradient_is_the_error_or_zero_where_the_clipped_term_is_taken(batch):
    values, old, returns, mask = batch
    grad = gradient(lambda v: losses.value_loss(v, old, returns, mask, clip=0.5)[0], values)
    near = torch.minimum(torch.maximum(values, old - 0.5), old + 0.5)
    clipped = (near - returns) ** 2 > (values - returns) ** 2
    torch.testing.assert_close(grad, torch.where(mask & ~clipped, values - returns, 0.0))


@given(batches())
def test_what_is_masked_changes_nothing(batch):
    values, old, returns, mask = batch
    dirty = [spoil(x, mask) for x in (values, old, returns)]
    found = losses.value_loss(dirty[0], dirty[1], dirty[2], mask)[0]
    torch.testing.assert_close(found, losses.value_loss(*batch)[0], rtol=0, atol=0)
    grad = gradient(lambda v: losses.value_loss(v, dirty[1], dirty[2], mask)[0], dirty[0])
    torch.testing.assert_close(
        grad, gradient(lambda v: losses.value_loss(v, old, returns, mask)[0], values), rtol=0, atol=0
    )


@given(batches())
def test_old_values_and_returns_are_constants_and_clip_vmaps(batch):
    values, old, returns = (x.clone().requires_grad_() for x in batch[:3])
    loss = losses.value_loss(values, old, returns, batch.mask)[0].sum()
    assert torch.autograd.grad(loss, (old, returns), allow_unused=True) == (None, None)
    margins = torch.tensor([0.1, 0.5, 3.0], dtype=torch.float64)
    found = torch.func.vmap(lambda c: losses.value_loss(*batch, clip=c)[0])(margins)
    for i, c in enumerate(margins.tolist()):
        torch.testing.assert_close(found[i], losses.value_loss(*batch, clip=c)[0])


def test_default_clip_and_an_impossible_one():
    x = torch.tensor([[2.0]])
    mask = torch.ones(1, 1, dtype=torch.bool)
    assert losses.value_loss(x, 0 * x, 0 * x, mask)[0].item() == 2.0
    assert losses.value_loss(0 * x, x, 0 * x, mask)[0].item() == 0.5 * 1.5**2
    with pytest.raises(ValueError, match="clip must be > 0"):
        losses.value_loss(x, x, x, mask, clip=0.0)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("spoiled", ["values", "old_values", "returns"])
def test_shapes_that_would_broadcast_are_named(spoiled):
    tensors = {name: torch.zeros(2, 3) for name in ("values", "old_values", "returns")}
    with pytest.raises(
        ValueError, match=rf"^{spoiled} must be floating \[B, T\] = \[2, 3\] as the mask, got .*\[2, 1\]"
    ):
        losses.value_loss(**tensors | {spoiled: torch.zeros(2, 1)}, mask=torch.ones(2, 3, dtype=torch.bool))
