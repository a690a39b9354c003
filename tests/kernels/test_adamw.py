"""AdamW kernels keep the laws, and each mistake breaks its law; adamw_ is torch.optim.AdamW to the last bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import laws
from fppo_kernels import table
from fppo_kernels.adamw import adamw_, reference_


@pytest.mark.slow
@pytest.mark.parametrize("name", table.BUILTIN["adamw"])
def test_adamw_kernels_keep_the_laws(name):
    laws.check_adamw(table.get("adamw", name))
    laws.check_adamw(table.get("adamw", name), dtypes=(torch.bfloat16,))


def draw(seed, shapes=((3, 2), (4,), ())):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@given(
    seed=st.integers(0, 2**31),
    lr=st.floats(1e-5, 1e-1),
    weight_decay=st.sampled_from([0.0, 0.1]),
    beta2=st.sampled_from([0.95, 0.999]),
    as_tensor=st.booleans(),
    grad_scale=st.sampled_from([None, 4.0]),
)
def test_equals_torch_over_several_steps(seed, lr, weight_decay, beta2, as_tensor, grad_scale):
    params = draw(seed)
    modules = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = torch.optim.AdamW(modules, lr=lr, betas=(0.9, beta2), weight_decay=weight_decay, fused=True)
    mu, nu, steps = draw(0), draw(0), [torch.zeros(()) for _ in params]
    for x in (*mu, *nu):
        x.zero_()
    for i in range(3):
        grads = draw(seed + i + 1)
        for module, grad in zip(modules, grads, strict=True):
            module.grad = grad.clone()
        optimizer.step()
        scale = 1.0 if grad_scale is None else grad_scale
        adamw_(
            params,
            [g * scale for g in grads],
            mu,
            nu,
            steps,
            lr=torch.tensor(lr, dtype=torch.float64) if as_tensor else lr,
            betas=(0.9, beta2),
            weight_decay=weight_decay,
            grad_scale=None if grad_scale is None else torch.tensor(grad_scale),
            found_inf=torch.zeros(()),
        )
    assert [s.item() for s in steps] == [3.0] * 3
    torch.testing.assert_close(params, [m.detach() for m in modules], rtol=0, atol=0)


def test_equals_the_paper_for_one_step():
    p, g, lr, decay, eps = 2.0, 0.5, 0.1, 0.3, 1e-8
    params = [torch.tensor(p)]
    adamw_(
        params,
        [torch.tensor(g)],
        [torch.zeros(())],
        [torch.zeros(())],
        [torch.zeros(())],
        lr=lr,
        weight_decay=decay,
        eps=eps,
    )
    torch.testing.assert_close(params[0], torch.tensor(p - lr * decay * p - lr * g / (abs(g) + eps)))


@pytest.mark.parametrize("kernel", [adamw_, reference_])
def test_memory_layout_changes_nothing(kernel):
    """torch's fused kernel walks all four in the order of memory, and would take a transposed gradient as it lies."""
    g = torch.Generator().manual_seed(0)
    param, grad = torch.randn(3, 4, generator=g), torch.randn(4, 3, generator=g).t()
    results = []
    for laid in (grad, grad.contiguous()):
        tensors = [param.clone(), laid.clone(memory_format=torch.preserve_format), *torch.zeros(2, 3, 4).unbind()]
        kernel(*([x] for x in tensors), [torch.tensor(0.0)], lr=0.1, grad_scale=torch.tensor(2.0))
        results.append(tensors[0])
    assert torch.allclose(*results, rtol=1e-6, atol=0)


def test_found_inf_changes_no_bit():
    state = [draw(seed) for seed in range(3)] + [[torch.tensor(5.0) for _ in range(3)]]
    for x in state[2]:
        x.abs_()
    before = [[x.clone() for x in part] for part in state]
    grads = [torch.full_like(x, torch.inf) for x in state[0]]
    settings = {"lr": 0.1, "weight_decay": 0.1, "grad_scale": torch.tensor(2.0)}
    adamw_(state[0], grads, *state[1:], found_inf=torch.ones(()), **settings)
    torch.testing.assert_close(state, before, rtol=0, atol=0)
    adamw_(state[0], draw(9), *state[1:], found_inf=torch.zeros(()), **settings)
    assert all(not torch.equal(a, b) for part, old in zip(state, before) for a, b in zip(part, old))


def decay_through_the_moments(params, grads, *state, weight_decay=0.0, **settings):
    """Adam with L2 regularisation."""
    for p, g in zip(params, grads, strict=True):
        g.add_(p, alpha=weight_decay)
    adamw_(params, grads, *state, weight_decay=0.0, **settings)


def multiplies_by_the_scale(*args, grad_scale=None, **settings):
    adamw_(*args, grad_scale=None if grad_scale is None else 1 / grad_scale, **settings)


def starts_the_count_again(params, grads, mu, nu, steps, **settings):
    for step in steps:
        step.zero_()
    adamw_(params, grads, mu, nu, steps, **settings)


def ignores_found_inf(*args, found_inf=None, **settings):
    adamw_(*args, **settings)


def counts_skipped_steps(params, grads, mu, nu, steps, **settings):
    counts = [step + 1 for step in steps]
    adamw_(params, grads, mu, nu, steps, **settings)
    for step, count in zip(steps, counts, strict=True):
        step.copy_(count)


def multiplies_by_zero(*args, found_inf=None, **settings):
    """Skips by a gradient of zero, which lets the moments decay."""
    if found_inf is not None and found_inf == 1:
        args[1][:] = [torch.zeros_like(g) for g in args[1]]
    adamw_(*args, **settings)


def clips_over_the_list(params, grads, *state, **settings):
    norm = torch.nn.utils.get_total_norm(grads).clamp(min=1e9) / 1e9
    adamw_(params, [g / norm if len(grads) == 1 else g / norm * 1.5 for g in grads], *state, **settings)


def shares_the_first_count(params, grads, mu, nu, steps, **settings):
    reference_(params, grads, mu, nu, [steps[0]] * len(steps), **settings)


@pytest.mark.parametrize(
    ("mistake", "law"),
    [
        (decay_through_the_moments, "textbook"),
        (multiplies_by_the_scale, "textbook"),
        (starts_the_count_again, "textbook"),
        (shares_the_first_count, "textbook"),
        (ignores_found_inf, "skipped step"),
        (counts_skipped_steps, "skipped step"),
        (multiplies_by_zero, "skipped step"),
        (clips_over_the_list, "alone"),
    ],
)
def test_each_mistake_in_adamw_breaks_its_law(mistake, law):
    with pytest.raises(laws.LawViolation, match=mistake.__name__) as caught:
        laws.check_adamw(mistake)
    assert law in (caught.value.law, *str(caught.value).split('"')[1::2])
