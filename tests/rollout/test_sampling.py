"""Draws follow the distribution that was asked for, and are reported under the right one."""

import math

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fppo.data.stops import StopTexts
from fppo.key import Key
from fppo.rollout.engine import Sampling
from fppo.rollout.sampling import Columns, draw, draw_each, inverse_cdf, process_logits
from fppo.runtime.layout import Cut
from fppo.runtime.simulate import simulate

ALMOST_ONE = 1 - 2.0**-53


def logits_of(rows, size, seed, *, scale=3.0, dtype=torch.float64):
    return scale * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def kept_by_loop(logits, sampling):
    """The tokens of one row that stay, one by one from the likeliest."""
    scores = [x / sampling.temperature for x in logits.tolist()]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    if sampling.top_k:
        order = order[: sampling.top_k]
    peak = scores[order[0]]
    total = sum(math.exp(scores[i] - peak) for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass >= sampling.top_p:
            break
        kept.append(i)
        mass += math.exp(scores[i] - peak) / total
    return sorted(i for i in kept if math.exp(scores[i] - peak) >= sampling.min_p)


@given(
    size=st.sampled_from([1, 2, 7, 255, 400]),
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([None, 0, 1, 3, 300, 1000]),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 5e-324, 1e-3, 0.05, 0.3, 0.97, ALMOST_ONE]),
    scale=st.sampled_from([0.01, 1.0, 5.0]),
    seed=st.integers(0, 2**31),
)
@example(size=400, temperature=1.0, top_k=None, top_p=0.9, min_p=0.0, scale=0.01, seed=0)  # more than the 256 likeliest
@example(size=400, temperature=1.0, top_k=300, top_p=0.999, min_p=0.0, scale=0.01, seed=1)
def test_tokens_that_stay_are_those_of_the_loop(size, temperature, top_k, top_p, min_p, scale, seed):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = logits_of(3, size, seed, scale=scale)
    processed = process_logits(logits, sampling)
    for row, got in zip(logits, processed, strict=True):
        kept = kept_by_loop(row, sampling)
        assert got.isfinite().nonzero()[:, 0].tolist() == kept
        torch.testing.assert_close(got[kept], row[kept] / temperature)


def test_a_flat_row_keeps_its_tokens_beside_sharp_ones():
    """Its own need more than the 256 likeliest, theirs a few."""
    logits = logits_of(3, 400, 0, scale=0.01) * torch.tensor([[1.0], [900.0], [1.0]])
    sampling = Sampling(top_p=0.9)
    assert torch.equal(
        process_logits(logits, sampling), torch.cat([process_logits(row[None], sampling) for row in logits])
    )


def test_tokens_that_hold_top_p_exactly_are_enough():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
    for top_p, kept in ((0.5, 1), (0.75, 2), (0.875, 4), (0.51, 2)):  # the last two are alike
        assert (process_logits(logits, Sampling(top_p=top_p, max_tokens=1)) > -torch.inf).sum() == kept


def test_tokens_that_have_min_p_of_the_largest_exactly_stay():
    logits = torch.tensor([[0.25, 0.5, 0.125, 0.125]], dtype=torch.float64).log()
    for min_p, kept in ((0.0, 4), (0.24, 4), (0.26, 2), (0.5, 2), (0.51, 1), (ALMOST_ONE, 1)):
        assert (process_logits(logits, Sampling(min_p=min_p)) > -torch.inf).sum() == kept
    assert process_logits(logits, Sampling(temperature=2.0, min_p=0.6)).isfinite().sum() == 2  # 0.5 ** 0.5 is above it
    assert process_logits(logits, Sampling(temperature=0.5, min_p=0.3)).isfinite().sum() == 1  # 0.5 ** 2 is below it


def test_min_p_cuts_what_top_k_and_top_p_leave():
    """Each of them counts for itself: the mass of top-p is not that of the tokens with min-p."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    for sampling, kept in (
        (Sampling(top_p=0.65, min_p=0.7), 2),
        (Sampling(top_p=0.75, min_p=0.7), 2),
        (Sampling(top_p=0.65, min_p=0.1), 2),
        (Sampling(top_k=3, min_p=0.1), 3),
        (Sampling(top_k=3, min_p=0.6), 2),
    ):
        assert process_logits(logits, sampling).isfinite().sum() == kept


@given(
    min_p=st.sampled_from([1e-3, 0.1, 0.5, 0.9]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    seed=st.integers(0, 2**31),
)
def test_a_token_below_min_p_of_the_largest_is_never_drawn(min_p, temperature, seed):
    """The definition, in float64; others are drawn with their own probabilities among those that stay."""
    logits = logits_of(1, 300, seed)
    uniforms = torch.linspace(0, ALMOST_ONE, 500, dtype=torch.float64)
    drawn = draw(logits.expand(len(uniforms), -1), uniforms, Sampling(temperature=temperature, min_p=min_p))
    probs = (logits[0] / temperature).softmax(-1)
    assert (probs[drawn.tokens] >= min_p * probs.max()).all()
    stay = probs.where(probs >= min_p * probs.max(), 0.0)
    torch.testing.assert_close(drawn.log_probs, probs[drawn.tokens].log(), rtol=0, atol=1e-12)
    torch.testing.assert_close(drawn.sampling_log_probs, (stay / stay.sum())[drawn.tokens].log(), rtol=0, atol=1e-12)


def test_ties_with_the_last_kept_token_stay():
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    for sampling in (Sampling(top_k=2), Sampling(top_p=0.6), Sampling(min_p=0.3)):
        assert process_logits(logits, sampling).isfinite().tolist() == [[True, True, True, False]]


@given(size=st.sampled_from([1, 3, 77, 256, 257, 384, 1000]), share=st.floats(0.01, 1.0), seed=st.integers(0, 2**31))
def test_inverse_cdf_is_the_loop(size, share, seed):
    g = torch.Generator().manual_seed(seed)
    weights = torch.rand(6, size, generator=g, dtype=torch.float64).pow(4)
    weights = weights.where(torch.rand(6, size, generator=g) < share, 0.0)
    weights[:, torch.randint(size, (1,), generator=g)] = 1e-6
    uniforms = torch.rand(6, generator=g, dtype=torch.float64)
    uniforms[:2] = torch.tensor([0.0, ALMOST_ONE])
    got = inverse_cdf(weights, uniforms).tolist()
    for row, u, token in zip(weights.tolist(), uniforms.tolist(), got, strict=True):
        assert row[token] > 0
        before, total = sum(row[:token]), sum(row)
        assert before <= u * total * (1 + 1e-12) + 1e-14
        assert u * total < (before + row[token]) * (1 + 1e-12) + 1e-14


@pytest.mark.parametrize("size", [5, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_of_zero_weight_is_never_drawn(size, dtype):
    uniforms = torch.tensor([0.0, 0.25, 0.5, 0.75, ALMOST_ONE], dtype=torch.float64)
    for kept in ([1], [1, 3], [size - 2], [0, size - 2]):
        weights = torch.zeros(5, size, dtype=dtype)
        weights[:, kept] = 0.1
        assert set(inverse_cdf(weights, uniforms).tolist()) <= set(kept)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=3, top_p=0.5, min_p=0.1), Sampling(greedy=True)])
def test_not_a_number_still_gives_a_token(sampling):
    for size in (3, 300):
        drawn = draw(torch.full((2, size), torch.nan), torch.tensor([0.0, 0.9], dtype=torch.float64), sampling)
        assert ((drawn.tokens >= 0) & (drawn.tokens < size)).all()
        assert drawn.log_probs.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.6),
        Sampling(temperature=2.0, top_k=5),
        Sampling(top_k=50, top_p=0.7),
        Sampling(temperature=1.5, top_p=0.95, min_p=0.1),
    ],
)
def test_log_probs_are_of_the_two_distributions(sampling, dtype):
    logits = logits_of(64, 300, 0, dtype=dtype)
    drawn = draw(logits, Key(1).uniform(torch.arange(64), 1)[:, 0], sampling)
    full = (logits.double() / sampling.temperature).log_softmax(-1)
    processed = process_logits(logits, sampling).double().log_softmax(-1)
    tolerance = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 2e-6, "check_dtype": False}
    torch.testing.assert_close(drawn.log_probs, full.gather(1, drawn.tokens[:, None])[:, 0], **tolerance)
    torch.testing.assert_close(drawn.sampling_log_probs, processed.gather(1, drawn.tokens[:, None])[:, 0], **tolerance)
    assert drawn.log_probs.dtype == drawn.sampling_log_probs.dtype == dtype
    assert drawn.sampling_log_probs.isfinite().all()


@given(
    ranks=st.integers(2, 4),
    size=st.sampled_from([4, 31, 700]),
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from([1.0, 0.5, 2.0]),
        top_k=st.sampled_from([None, 1, 30, 500]),
        top_p=st.sampled_from([1.0, 0.9, 0.1]),
        min_p=st.sampled_from([0.0, 0.02, 0.8]),
        greedy=st.booleans(),
    ),
    scale=st.sampled_from([0.01, 3.0, 400.0]),
    seed=st.integers(0, 2**31),
)
@example(ranks=3, size=700, sampling=Sampling(top_p=0.9), scale=0.01, seed=0)  # more than are looked at first
def test_ranks_with_some_of_the_columns_each_draw_together(ranks, size, sampling, scale, seed):
    """Also equal logits on several ranks, and ranks without a likely token."""
    logits = logits_of(5, size, seed, scale=scale)
    logits[4] = logits[4].round()
    uniforms = Key(seed).uniform(torch.arange(5), 1)[:, 0]
    expected, cut = draw(logits, uniforms, sampling), Cut(1, ranks, (size,))

    def on_rank(mesh):
        axis = mesh["tensor"]
        columns = Columns(axis, cut.runs(axis.rank)[0][0], size)
        return draw(cut.take(logits, axis.rank), uniforms, sampling, columns)

    for drawn in simulate({"tensor": ranks}, on_rank):
        assert torch.equal(drawn.tokens, expected.tokens)
        torch.testing.assert_close(drawn.log_probs, expected.log_probs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(drawn.sampling_log_probs, expected.sampling_log_probs, rtol=1e-12, atol=1e-12)


def test_greedy_takes_the_likeliest():
    logits = logits_of(5, 9, 3)
    drawn = draw(logits, torch.zeros(5, dtype=torch.float64), Sampling(greedy=True, temperature=0.5))
    assert torch.equal(drawn.tokens, logits.argmax(-1))
    torch.testing.assert_close(drawn.log_probs, (logits / 0.5).log_softmax(-1).amax(-1))
    assert (drawn.sampling_log_probs == 0).all()


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.9}])
def test_the_coldest_temperature_takes_the_likeliest(cut):
    logits = logits_of(5, 300, 4, scale=1e4, dtype=torch.float32)
    drawn = draw(logits, Key(1).uniform(torch.arange(5), 1)[:, 0], Sampling(temperature=1e-30, **cut))
    assert torch.equal(drawn.tokens, logits.argmax(-1))
    assert (drawn.log_probs == 0).all()
    assert (drawn.sampling_log_probs == 0).all()


@pytest.mark.parametrize("size", [7, 400])
@pytest.mark.parametrize(
    "sampling",
    [
        *(Sampling(), Sampling(temperature=0.5), Sampling(top_k=4), Sampling(temperature=1.5, top_p=0.8)),
        Sampling(temperature=1.5, min_p=0.2),
    ],
)
def test_frequencies_are_the_distribution(size, sampling):
    """Pearson's statistic stays within 5 standard deviations above its mean."""
    rows = 20000
    logits = logits_of(1, size, 2, scale=1.0, dtype=torch.float32)
    expected = rows * process_logits(logits.double(), sampling).softmax(-1)[0]
    drawn = draw(logits.expand(rows, -1), Key(7).uniform(torch.arange(rows), 1)[:, 0], sampling)
    counts = torch.bincount(drawn.tokens, minlength=size).double()
    assert (counts[expected == 0] == 0).all()
    likely = expected >= 5
    freedom = int(likely.sum()) - 1
    statistic = ((counts - expected).square() / expected)[likely].sum()
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature = 0.0: .* set greedy"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"temperature": 1e-38}, "temperature = 1e-38: give a number of at least 1e-30"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": 1.5}, "top_p = 1.5"),
        ({"min_p": -0.1}, "min_p = -0.1"),
        ({"min_p": 1.0}, "min_p = 1.0: give a number from 0 to below 1"),
        ({"min_p": math.nan}, "min_p = nan"),
        ({"n": 0}, "n = 0: give 1 or more samples"),
        ({"max_tokens": 0}, "max_tokens = 0: give 1 or more tokens"),
        ({"max_tokens": 2.5}, "max_tokens = 2.5"),
        ({"stop_token_ids": [3, -1]}, r"stop_token_ids = \(3, -1\): \[-1\]"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


def test_settings_that_draw_alike_are_one_per_token():
    ends = {"n": 2, "max_tokens": 7, "stop_token_ids": (3,), "stop_texts": StopTexts((b"a",), (b"a",))}
    draws = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "greedy": True}
    assert {*ends, *draws} == {*attrs.fields_dict(Sampling)}
    own = Sampling(temperature=0.7, top_k=0)
    assert attrs.evolve(own, **ends, top_k=None).per_token == own.per_token
    assert hash(attrs.evolve(own, **ends).per_token) == hash(own.per_token)
    assert len({own.per_token, *(attrs.evolve(own, **{name: x}).per_token for name, x in draws.items())}) == 6


def test_options_of_a_client_change_what_they_name():
    own = Sampling(temperature=0.7, top_k=3, top_p=0.9, n=2, stop_token_ids=(5,))
    assert own.with_options({"temperature": None, "top_k": None, "top_p": 0.5}) == attrs.evolve(own, top_p=0.5)
    assert own.with_options({"top_k": -1}) == attrs.evolve(own, top_k=None)
    likeliest = own.with_options({"temperature": 0})
    assert likeliest == attrs.evolve(own, greedy=True)
    assert likeliest.with_options({"temperature": 1.5}) == attrs.evolve(own, temperature=1.5)
    with pytest.raises(ValueError, match="top_p = 2"):
        own.with_options({"top_p": 2})


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("shift", [-3000.0, 0.0, 3000.0])
def test_alternatives_are_drawn_by_the_tempered_distribution_wherever_logits_lie(temperature, shift):
    """The first token of which the mass up to and with it exceeds the uniform number."""
    g = torch.Generator().manual_seed(0)
    logits, uniforms = torch.randn(7, 40, generator=g), torch.rand(7, 3, generator=g, dtype=torch.float64)
    found = draw_each(logits + shift, uniforms, Sampling(temperature=temperature, top_k=1, top_p=0.1, min_p=0.9))
    mass = ((logits + shift).double() / temperature).softmax(-1).cumsum(-1)
    assert torch.equal(found, (mass[:, None] <= uniforms[..., None]).sum(-1))
