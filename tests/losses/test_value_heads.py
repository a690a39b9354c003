"""Losses of heads of several outputs, and Huber's, against their formulas as loops over floats."""

from functools import partial

import pytest
import torch

from fppo import laws, losses
from fppo.laws import references

LOW, HIGH = -0.8, 1.3


SPAN = {"low": LOW, "high": HIGH}
CASES = {
    "hl_gauss": (SPAN, 5),
    "two_hot": (SPAN, 5),
    "quantile_loss": ({"delta": 0.4}, 4),
    "huber_value_loss": ({"delta": 0.4, "clip": 0.3}, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n == "hl_gauss" else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_a_loss_is_its_formula_and_keeps_the_laws(name):
    scalars, outputs = CASES[name]
    loss_fn, reference = (partial(getattr(of, name), **scalars) for of in (losses, references.values))
    laws.check_value_loss(loss_fn, squared=False, outputs=outputs, reference=reference)


@pytest.mark.slow
def test_a_law_sees_garbage_that_reaches_a_head_of_several_outputs():
    def leaking(outputs, old_values, returns, mask):
        loss, metrics = losses.two_hot(outputs, old_values, returns, mask, **SPAN)
        return loss + 0.0 * outputs.sum(-1), metrics

    with pytest.raises(laws.LawViolation, match="with NaN where the mask is False"):
        laws.check_value_loss(leaking, outputs=3)
    reference = partial(references.values.hl_gauss, **SPAN)
    with pytest.raises(laws.LawViolation, match=r"as of partial\(hl_gauss"):
        laws.check_value_loss(partial(losses.hl_gauss, **SPAN, sigma=0.7), outputs=5, reference=reference)


@pytest.mark.parametrize("name", ["hl_gauss", "two_hot", "quantile"])
def test_outputs_that_fit_the_return_say_it(name):
    """Where the loss has no gradient the mean is the return: exactly, or to less than a bin."""
    span = {} if name == "quantile" else {"low": -1.0, "high": 2.0}
    head = getattr(losses, f"{name}_head")(bins=21, **span)
    returns = torch.tensor([[0.31, 1.0, -0.2]], dtype=torch.float64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    if name == "quantile":
        outputs = returns[..., None].repeat(1, 1, 21)
    else:
        uniform = torch.zeros(1, 3, 21, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(head.loss_fn(uniform, returns, returns, mask)[0].sum(), uniform)
        outputs = (1 / 21 - grad).clamp(min=1e-30).log()  # the target: softmax - gradient
    torch.testing.assert_close(head.read(outputs), returns, rtol=0, atol=0.01 if name == "hl_gauss" else 1e-9)
    assert head.loss_fn(outputs, returns, returns, mask)[0].shape == (1, 3)


HEADS = {
    "mse": ("value_loss", {"clip": 0.3}),
    "huber": ("huber_value_loss", {"delta": 0.4, "clip": 0.3}),
    "hl_gauss": ("hl_gauss", {"low": LOW, "high": HIGH, "sigma": 1.5}),
    "two_hot": ("two_hot", SPAN),
    "quantile": ("quantile_loss", {"delta": 0.4}),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_has_the_loss_of_its_options(name):
    """Each option apart, and all of them, beside the loss that is given them itself; what is left out is the loss's."""
    loss_name, options = HEADS[name]
    loss_fn, wide = getattr(losses, loss_name), name not in ("mse", "huber")
    noise = torch.Generator().manual_seed(2)
    old, returns = torch.randn(2, 3, 7, generator=noise, dtype=torch.float64)
    outputs = torch.randn(*((3, 7, 5) if wide else (3, 7)), generator=noise, dtype=torch.float64)
    mask = torch.rand(3, 7, generator=noise) < 0.8
    span = SPAN if "low" in options else {}
    cases = [options, *({**span, key: value} for key, value in options.items())]
    cases += [{"clip": None}] if "clip" in options else []
    for case in cases:
        head = getattr(losses, f"{name}_head")(**case, **({"bins": 5} if wide else {}))
        found, _ = head.loss_fn(outputs, old, returns, mask)
        expected, _ = loss_fn(outputs, old, returns, mask, **case)
        assert torch.equal(found, expected), case
        if span:
            assert torch.equal(head.read(outputs), getattr(losses, f"{name}_head")(bins=5, **span).read(outputs))
        if case != span:  # an option that does nothing would be equal whatever is made of it
            assert not torch.equal(expected, loss_fn(outputs, old, returns, mask, **span)[0]), case


def test_a_quantile_is_pulled_up_by_its_share_and_down_by_the_rest():
    """Far from the return Huber's slope is 1: the quantile of share t gains t above it, and loses 1 - t below."""
    shares = [0.125, 0.375, 0.625, 0.875]
    returns = torch.tensor([[5.0, -5.0]], dtype=torch.float64)
    outputs = torch.zeros(1, 2, 4, dtype=torch.float64, requires_grad=True)
    loss, _ = losses.quantile_loss(outputs, returns, returns, torch.ones(1, 2, dtype=torch.bool))
    (grad,) = torch.autograd.grad(loss.sum(), outputs)
    assert grad[0].tolist() == [[-t for t in shares], [1 - t for t in shares]]


@pytest.mark.usefixtures("unhooked")
def test_bad_arguments_are_named():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    outputs = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"outputs must be floating \[B, T, K\] = \[2, 3, 2 or more\], got .*\[2, 3\]"):
        losses.two_hot(x, x, x, mask, low=0.0, high=1.0)
    with pytest.raises(ValueError, match=r"low=1\.0, high=1\.0: low must be less"):
        losses.hl_gauss(outputs, x, x, mask, low=1.0, high=1.0)
    with pytest.raises(ValueError, match="sigma must be > 0"):
        losses.hl_gauss(outputs, x, x, mask, low=0.0, high=1.0, sigma=0.0)
    with pytest.raises(ValueError, match="delta must be > 0"):
        losses.huber_value_loss(x, x, x, mask, delta=0.0)
    with pytest.raises(ValueError, match="bins must be 2 or more, got 1"):
        losses.quantile_head(bins=1)
    with pytest.raises(ValueError, match="outputs must be 1 or more, got 0"):
        laws.check_value_loss(losses.value_loss, outputs=0)


@pytest.mark.parametrize("name", ["hl_gauss", "two_hot"])
def test_returns_beyond_the_range_count_as_its_ends_and_are_reported(name):
    outputs, mask = torch.linspace(-1, 1, 10, dtype=torch.float64).view(1, 2, 5), torch.ones(1, 2, dtype=torch.bool)
    loss_fn = partial(getattr(losses, name), low=LOW, high=HIGH)

    def of(*returns):
        return loss_fn(outputs, torch.zeros(1, 2).double(), torch.tensor([returns]).double(), mask)

    (beyond, report), (ends, _) = of(LOW - 3, HIGH + 3), of(LOW, HIGH)
    torch.testing.assert_close(beyond, ends)
    assert (ends > 0).all()
    outside = report["critic/vf_outside"]
    assert outside.total / outside.count == 1
