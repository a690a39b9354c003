"""GAE kernels keep the laws, agree on long rows, and each mistake breaks its law; reverse scans too."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fppo import advantages, laws
from fppo_kernels import table
from fppo_kernels.gae.loop import loop
from fppo_kernels.gae.scan import reverse_scan, scan

NAMES = [name for name, reason in table.available("gae").items() if reason is None]


def draw(rows, width, density, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, width, generator=generator, dtype=torch.float64).to(dtype).unbind()
    return rewards, values, torch.rand(rows, width, generator=generator) < density


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_gae_kernels_keep_the_laws(name):
    laws.check_gae(table.get("gae", name))


@given(
    rows=st.integers(0, 4),
    width=st.sampled_from([0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300]),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**31),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
@example(rows=4000, width=130, density=0.8, seed=0, gamma=0.9, lam=0.8)  # more than are scanned together
def test_scan_is_the_loop(rows, width, density, seed, gamma, lam):
    rewards, values, mask = draw(rows, width, density, seed)
    found = scan(rewards, values, mask, gamma=gamma, lam=lam)
    torch.testing.assert_close(found, loop(rewards, values, mask, gamma=gamma, lam=lam), rtol=1e-10, atol=1e-10)


@pytest.mark.skipif("cpp" not in NAMES, reason=str(table.available("gae")["cpp"]))
@given(
    rows=st.integers(0, 4),
    width=st.sampled_from([0, 1, 2, 15, 16, 17, 33, 200]),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**31),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_the_program_in_cpp_is_the_loop(rows, width, density, seed, gamma, lam, dtype):
    """In every dtype, of tensors of any strides, whatever stands outside the mask."""
    rewards, values, mask = draw(rows, width, density, seed, dtype)
    rewards[~mask] = torch.nan
    kernels = [table.get("gae", name) for name in ("cpp", "loop")]
    found, expected = (fn(rewards.T.contiguous().T, values, mask, gamma=gamma, lam=lam) for fn in kernels)
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 2e-2)],
)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.01, 0.01), (0.0, 0.5), (0.5, 0.0)])
def test_long_rows_neither_overflow_nor_drift(dtype, tolerance, gamma, lam):
    rewards, values, mask = draw(3, 2048, 0.7, 0, dtype)
    mask[0] = True
    expected = loop(rewards.double(), values.double(), mask, gamma=gamma, lam=lam)
    for name in NAMES:
        for x, exact in zip(table.get("gae", name)(rewards, values, mask, gamma=gamma, lam=lam), expected, strict=True):
            assert x.dtype == dtype
            assert (x.double() - exact).abs().max() <= tolerance * exact.abs().max()


@given(
    rows=st.integers(0, 4),
    width=st.sampled_from([0, 1, 2, 5, 63, 64, 65, 200]),
    seed=st.integers(0, 2**31),
    low=st.sampled_from([-1.0, 0.0, 0.9]),
)
@example(rows=4000, width=130, seed=0, low=0.9)  # more than are scanned together
def test_reverse_scan_is_its_recurrence(rows, width, seed, low):
    x, decay, _ = draw(rows, width, 1.0, seed)
    decay = low + (1 - low) * torch.sigmoid(decay)
    kept = x.clone(), decay.clone()
    found, same = reverse_scan(x, decay), reverse_scan(x, 0.9)
    for result, factors in ((found, decay), (same, torch.full_like(x, 0.9))):
        carry, columns = torch.zeros(rows, dtype=x.dtype), []
        for t in reversed(range(width)):
            carry = x[:, t] + factors[:, t] * carry
            columns.append(carry)
        expected = torch.stack(columns[::-1], 1) if columns else x
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(x, kept[0])
    assert torch.equal(decay, kept[1])


def test_estimator_calls_the_kernel_it_is_given():
    rewards, values, mask = draw(2, 5, 0.7, 0)
    result = advantages.gae(rewards, values, mask, kernel=lambda r, v, m, *, gamma, lam: (r, v))
    assert torch.equal(result.advantages, rewards)
    assert torch.equal(result.returns, values)


def divides_by_powers(rewards, values, mask, *, gamma=1.0, lam=1.0):
    """Right on rows without holes, as long as the powers of gamma lam fit into the dtype."""
    rewards, values = (x.detach().where(mask, 0.0) for x in (rewards, values))
    following = torch.cat([values[:, 1:], values[:, :1] * 0], 1)
    delta = rewards + gamma * following - values
    powers = torch.as_tensor(gamma * lam, dtype=delta.dtype) ** torch.arange(mask.shape[1])
    result = ((delta * powers).flip(1).cumsum(1).flip(1) / powers).where(mask, 0.0)
    return result, result + values


def forgets_what_follows_a_window(rewards, values, mask, *, gamma=1.0, lam=1.0):
    parts = [
        loop(*(x[:, i : i + 64] for x in (rewards, values, mask)), gamma=gamma, lam=lam)
        for i in range(0, max(mask.shape[1], 1), 64)
    ]
    return tuple(torch.cat(x, 1) for x in zip(*parts, strict=True))


def garbage_of_masked_tokens(rewards, values, mask, *, gamma=1.0, lam=1.0):
    keep = mask.to(rewards.dtype)
    return loop(rewards * keep, values * keep, torch.ones_like(mask), gamma=gamma, lam=lam)


def half_precision(rewards, values, mask, *, gamma=1.0, lam=1.0):
    if rewards.dtype == torch.float64:
        return loop(rewards, values, mask, gamma=gamma, lam=lam)
    return tuple(x.float() for x in scan(rewards.bfloat16(), values.bfloat16(), mask, gamma=gamma, lam=lam))


def discounts_the_value_once_more(rewards, values, mask, *, gamma=1.0, lam=1.0):
    found = loop(rewards, values * gamma, mask, gamma=gamma, lam=lam)
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "law"),
    [
        (divides_by_powers, "masked steps"),
        (forgets_what_follows_a_window, "long rows"),
        (garbage_of_masked_tokens, "masked garbage"),
        (half_precision, "definition"),
        (discounts_the_value_once_more, "definition"),
    ],
)
def test_each_mistake_in_a_kernel_breaks_its_law(mistake, law):
    with pytest.raises(laws.LawViolation, match=mistake.__name__) as caught:
        laws.check_gae(mistake)
    assert caught.value.law == law
