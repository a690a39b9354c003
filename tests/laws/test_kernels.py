"""Our kernels keep the laws, and each mistake in a kernel breaks the law it is there for."""

import math

import attrs
import pytest
import torch

from fppo import laws
from fppo.laws import log_probs
from fppo.laws.kernels import laws_of
from fppo.laws.log_probs import LARGE_LAWS, SUM_LAWS
from fppo_kernels import attention, table
from fppo_kernels.attention.eager import eager
from fppo_kernels.log_probs import OPERATION
from fppo_kernels.log_probs.reference import reference
from fppo_kernels.padding import make_lengths

SIZES = OPERATION.sizes


def of_sizes(*sizes):
    return attrs.evolve(OPERATION, sizes=sizes)


CPP = [] if table.available("log_probs")["cpp"] else ["cpp"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reference", *(pytest.param(x, marks=pytest.mark.slow) for x in ("chunked", *CPP))])
def test_log_prob_kernels_keep_the_laws(name, monkeypatch):
    """In some sizes: those between are for smaller counter-examples."""
    if name == "reference":  # with which the law of large examples compares
        monkeypatch.setattr(log_probs, "LARGE", (70, 200))
    laws.check_kernel(of_sizes(*SIZES[:-1:3], SIZES[-1]), table.get("log_probs", name))


class _Backward(torch.autograd.Function):
    """The identity whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * ctx.factor, None


def drops_entropy_gradient(*args, **settings):
    out = reference(*args, **settings)
    return out._replace(entropy=None if out.entropy is None else out.entropy.detach())


def drops_squares_gradient(*args, **settings):
    out = reference(*args, **settings)
    return out._replace(sum_squared=None if out.sum_squared is None else out.sum_squared.detach())


def forgets_temperature_in_backward(*args, temperature=1.0, **settings):
    out = reference(*args, temperature=temperature, **settings)
    return out._make(None if x is None else _Backward.apply(x, temperature) for x in out)


def rounds_to_bfloat16(hidden, *args, **settings):
    return reference(hidden.bfloat16().to(hidden.dtype), *args, **settings)


def positive_log_probs(*args, **settings):
    out = reference(*args, **settings)
    return out._replace(log_probs=-out.log_probs)


def entropy_in_bits(*args, **settings):
    out = reference(*args, **settings)
    return out._replace(entropy=None if out.entropy is None else out.entropy / math.log(2))


def softcap_after_temperature(*args, temperature=1.0, softcap=None, **settings):
    if softcap is None:
        return reference(*args, temperature=temperature, **settings)
    t = torch.as_tensor(temperature)[..., None]
    hidden, weight, labels = args
    settings["scale"] = settings.get("scale", 1.0)
    return reference(hidden / t, weight, labels, softcap=softcap, **settings)


def nan_from_extreme_logits(hidden, weight, labels, *, entropy=False, **settings):
    out = reference(hidden, weight, labels, entropy=entropy, **settings)
    unsafe = (hidden @ weight.T).exp().sum(-1)  # overflows
    return out._replace(log_probs=out.log_probs + 0 * unsafe)


def needs_a_token(hidden, *args, **settings):
    hidden.amax()
    return reference(hidden, *args, **settings)


def scales_its_argument(hidden, weight, labels, **settings):
    out = reference(hidden, weight, labels, **settings)
    hidden.data.mul_(2.0)
    return out


def all_gradients_or_none(hidden, weight, labels, **settings):
    return reference(hidden if weight.requires_grad else hidden.detach(), weight, labels, **settings)


def temperature_with_entropy_alone(*args, temperature=1.0, entropy=False, **settings):
    return reference(*args, temperature=temperature if entropy else 1.0, entropy=entropy, **settings)


class _OneAtATime(torch.autograd.Function):
    """Forgets the log-probs' gradient where the entropy has one."""

    @staticmethod
    def forward(ctx, log_probs, entropy):
        ctx.set_materialize_grads(False)
        return log_probs.clone(), entropy.clone()

    @staticmethod
    def backward(ctx, *grads):
        return (grads[0] if grads[1] is None else None), grads[1]


def one_gradient_at_a_time(*args, **settings):
    out = reference(*args, **settings)
    if out.entropy is None:
        return out
    log_probs, entropy = _OneAtATime.apply(out.log_probs, out.entropy)
    return out._replace(log_probs=log_probs, entropy=entropy)


class _RoundedSums(torch.autograd.Function):
    """Adds up the gradient by the weight 16 tokens at a time, in bfloat16."""

    @staticmethod
    def forward(ctx, hidden, weight, labels):
        ctx.save_for_backward(hidden, weight, labels)
        return reference(hidden, weight, labels).log_probs

    @staticmethod
    def backward(ctx, *grads):
        (grad,) = grads
        hidden, weight, labels = ctx.saved_tensors
        one_hot = torch.nn.functional.one_hot(labels, len(weight))
        d_logits = grad[:, None] * (one_hot - torch.softmax((hidden @ weight.T).float(), -1))
        d_weight = torch.zeros_like(weight, dtype=torch.bfloat16)
        for start in range(0, len(hidden), 16):
            rows = slice(start, start + 16)
            d_weight += d_logits[rows].T @ hidden[rows].float()
        return (d_logits @ weight.float()).to(hidden.dtype), d_weight.to(weight.dtype), None


def rounds_chunk_sums(hidden, weight, labels, **settings):
    out = reference(hidden, weight, labels, **settings)
    if hidden.dtype != torch.bfloat16 or len(hidden) < 64:
        return out
    return out._replace(log_probs=_RoundedSums.apply(hidden, weight, labels))


def moves_a_label(every):
    """A kernel that takes the label before at each token whose number is a multiple of `every`, but for the first."""

    def kernel(hidden, weight, labels, **settings):
        places = torch.arange(len(labels))
        moved = (places % every == 0) & (places > 0)
        return reference(hidden, weight, torch.where(moved, labels.roll(1), labels), **settings)

    return kernel


def drops_a_logit(every, place=0):
    """A kernel that leaves out one column of every so many, unless a label is there."""

    def kernel(hidden, weight, labels, *, bias=None, **settings):
        columns = torch.arange(len(weight))
        dropped = (columns % every == place) & (columns > 0) & ~torch.isin(columns, labels)
        bias = hidden.new_zeros(len(weight)) if bias is None else bias
        return reference(hidden, weight, labels, bias=bias.masked_fill(dropped, -1e5), **settings)

    return kernel


LOG_PROBS = [
    pytest.param(moves_a_label(1024), "large", r"log_probs\[1024\] is", marks=pytest.mark.slow),
    pytest.param(drops_a_logit(8192), "large", "in float32, log_probs", marks=pytest.mark.slow),
    pytest.param(rounds_chunk_sums, "long sums", "the gradient by weight", marks=pytest.mark.slow),
    (drops_entropy_gradient, "gradient of entropy", "the gradient by hidden"),
    (drops_squares_gradient, "gradient of sum_squared", "the gradient by hidden"),
    (forgets_temperature_in_backward, "gradient of log_probs", "the gradient by (hidden|weight).*expected"),
    (rounds_to_bfloat16, "values", r"in float32, entropy\[0\] is .*, expected"),
    (positive_log_probs, "range", r"log_probs\[0\] is .*, with a vocabulary of 2"),
    (entropy_in_bits, "range", "entropy"),
    (softcap_after_temperature, "values", "temperature"),
    (nan_from_extreme_logits, "shape", "log_probs is not finite"),
    (needs_a_token, "shape", "counter-example, 0 x 2"),
    (temperature_with_entropy_alone, "outputs asked for", "with entropy=False and sum_squared=False"),
    (scales_its_argument, "purity", "it changed its argument hidden"),
    (all_gradients_or_none, "frozen head", "the gradient by hidden alone"),
    (one_gradient_at_a_time, "gradient of all outputs", "the gradient by"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "law", "words"), LOG_PROBS, ids=lambda x: getattr(x, "__name__", ""))
def test_each_mistake_in_log_probs_breaks_its_law(mistake, law, words, monkeypatch):
    """With small examples alone, unless the law is of large ones."""
    large = law in ("long sums", "large")
    monkeypatch.setattr(log_probs, "LARGE", log_probs.LARGE if large else (70, 200))
    dtype = torch.bfloat16 if law == "long sums" else torch.float32
    with pytest.raises(laws.LawViolation, match=words) as caught:
        laws.check_kernel(of_sizes(*SIZES[: 1 if large else -1]), mistake, dtypes=(dtype,))
    assert caught.value.law == law
    assert f'{mistake.__name__} breaks the law "{law}"' in str(caught.value)
    assert large or len(caught.value.example["labels"]) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [moves_a_label(64), drops_a_logit(8192, 8191)])
def test_labels_and_logits_that_are_lost_at_borders_of_blocks_show(mistake):
    with pytest.raises(laws.LawViolation, match="kernel breaks") as caught:
        laws.check_kernel(of_sizes(SIZES[0]), mistake, dtypes=(torch.float32,))
    assert caught.value.law == "large"


def leaks_across_sequences(*args, lengths, **settings):
    return eager(*args, lengths=make_lengths([sum(lengths.lengths)]), **settings)


def leaks_a_gradient(query, key, value, **settings):
    out = eager(query, key, value, **settings)
    return out + (value.sum() - value.sum().detach())


def not_causal(query, key, value, *, lengths, scale, **settings):
    parts = [x.split(list(lengths.lengths)) for x in (query, key, value)] if len(query) else [(query,)] * 3
    out = []
    for q, k, v in zip(*parts, strict=True):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        out.append(torch.einsum("hqk,khd->qhd", torch.einsum("qhd,khd->hqk", q * scale, k).softmax(-1), v))
    return torch.cat(out)


def window_too_wide(*args, window=None, **settings):
    return eager(*args, window=None if window is None else window + 1, **settings)


def bfloat16_attention(query, key, value, **settings):
    return eager(query, key, value.bfloat16().to(value.dtype), **settings)


def heads_in_another_order(query, key, value, **settings):
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat(1, groups, 1) for x in (key, value))
    return eager(query, key, value, **settings)


def softcap_without_gradient(query, key, value, *, softcap=None, **settings):
    if softcap is None:
        return eager(query, key, value, **settings)
    return eager(query, key.detach(), value, softcap=softcap, **settings)


def heads_first(*args, **settings):
    return eager(*args, **settings).transpose(0, 1)


def scales_the_query(query, *args, **settings):
    out = eager(query, *args, **settings)
    query.data.mul_(settings["scale"])
    return out


def sees_the_first_keys(query, key, value, *, lengths, key_lengths=None, **settings):
    """As if its queries were the first tokens of their sequences of keys."""
    if key_lengths is not None and len(query):
        parts = [x.split(key_lengths.lengths) for x in (key, value)]
        key, value = (torch.cat([p[:n] for p, n in zip(x, lengths.lengths, strict=True)]) for x in parts)
    return eager(query, key, value, lengths=lengths, **settings)


ATTENTION = [
    (leaks_across_sequences, "sequences apart", 2, "sequence 1 sees the others: the result there"),
    (leaks_a_gradient, "sequences apart", 2, "the gradient reaches their value"),
    (not_causal, "causal", 2, "tokens before place 1 of their sequence see those from there on"),
    (window_too_wide, "values", 2, "window *= 1"),
    (bfloat16_attention, "values", 1, r"in float64, the result\[0, 0, \d\] is"),
    (heads_in_another_order, "values", 1, "the result"),
    (softcap_without_gradient, "gradients", 2, "the gradient by key"),
    (sees_the_first_keys, "values", 1, "the result"),
    (heads_first, "shape", 1, "it returned float64"),
    (scales_the_query, "purity", 1, "it changed its argument query"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "law", "tokens", "words"), ATTENTION, ids=lambda x: getattr(x, "__name__", ""))
def test_each_mistake_in_attention_breaks_its_law(mistake, law, tokens, words):
    few = attrs.evolve(attention.OPERATION, sizes=attention.OPERATION.sizes[:-1])
    with pytest.raises(laws.LawViolation, match=words) as caught:
        laws.check_kernel(few, mistake, dtypes=(torch.float64,))
    assert caught.value.law == law
    assert f'{mistake.__name__} breaks the law "{law}"' in str(caught.value)
    assert len(caught.value.example["query"]) <= tokens


def test_every_law_is_broken_by_a_mistake():
    broken = {getattr(mistake, "values", mistake)[1] for mistake in LOG_PROBS}
    assert {law.name for law in (*laws_of(OPERATION), *SUM_LAWS, *LARGE_LAWS)} == broken
    assert {law.name for law in laws_of(attention.OPERATION)} == {law for _, law, _, _ in ATTENTION}


def test_features_and_dtypes_that_a_kernel_lacks_are_left_out():
    def plain(query, key, value, *, lengths, scale):
        assert query.dtype == torch.float32
        return eager(query, key, value, lengths=lengths, scale=scale)

    laws.check_kernel("attention", plain, lacks=attention.FEATURES, dtypes=(torch.float32,))
    assert frozenset().union(*attention.OPERATION.features) == set(attention.FEATURES)
    with pytest.raises(ValueError, match="dtypes must be some of"):
        laws.check_kernel("log_probs", reference, dtypes=(torch.float16,))
