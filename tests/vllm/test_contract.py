"""What an engine promises, kept by the embedded engine and by vLLM, in this process and in one of its own."""

import pytest
import torch

from fppo import batch as batches
from fppo import tree
from fppo.batch import Column
from fppo.data.stops import StopTexts
from fppo.key import Key
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.sampling import process_logits
from fppo.steps.forward import Forward, forward_micro_batch
from fppo_kernels.table import Kernels
from tests.models.families import plain
from tests.rollout.test_embedded import PAD, STOPS, make_prompts
from tests.vllm.families import make

KERNELS = Kernels.named()


def embedded():
    return EmbeddedEngine(model=make("qwen2")[0], kernels=KERNELS, pad_token_id=PAD)


@pytest.fixture(scope="module", params=["embedded", "vllm", "process"])
def engine(request, lent):
    if request.param == "embedded":
        yield embedded()
    else:
        with lent(options={"host": {"vllm": "local"}.get(request.param, request.param)}) as (started, _):
            yield started


CUT = Sampling(temperature=0.7, top_k=8, top_p=0.9, min_p=0.05, n=3, max_tokens=12, stop_token_ids=STOPS)


@pytest.mark.parametrize(
    "sampling",
    [CUT, Sampling(max_tokens=9, n=2), Sampling(greedy=True, temperature=0.5, max_tokens=7), Sampling(max_tokens=1)],
    ids=["cut", "whole", "greedy", "one"],
)
def test_the_record_is_that_of_the_embedded_engine(engine, sampling):
    _, params = make("qwen2", seed=2)
    prompts = make_prompts(extra=2)
    got = engine.generate(params, Ask(prompts, sampling, Key(3), version=5))
    expected = embedded().generate(params, Ask(prompts, sampling, Key(3), version=5))
    assert [path for path, _ in tree.leaves_with_paths(got)] == [path for path, _ in tree.leaves_with_paths(expected)]
    for (path, x), (_, y) in zip(tree.leaves_with_paths(got), tree.leaves_with_paths(expected), strict=True):
        if isinstance(x, Column):
            assert x == y, path
        else:
            assert x.dtype == y.dtype, path
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5 if x.is_floating_point() else 0, msg=path)


def test_ratios_are_one_where_the_distribution_is_cut(engine):
    """Log-probs are those of the training pass at its temperature; those sampled from, of the distribution cut."""
    model, params = make("qwen2", seed=2)
    rollout = engine.generate(params, Ask(make_prompts(), CUT, Key(8)))
    mask = rollout.response_mask
    out = forward_micro_batch(params, rollout, forward=Forward(model), temperature=0.7)
    ratio = (out.log_probs - rollout.rollout_log_probs).exp()[mask]
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)
    module = plain(model, params)
    for row in range(0, len(mask), 4):
        length = int(mask[row].sum())
        with torch.no_grad():
            logits = module(input_ids=rollout.tokens[row][rollout.attention_mask[row]][None]).logits[0]
        cut = process_logits(logits[-length - 1 : -1], CUT).log_softmax(-1)
        tokens = rollout.tokens[row, -mask.shape[1] :][:length, None]
        got = rollout.sampling_log_probs[row, :length]
        torch.testing.assert_close(got, cut.gather(1, tokens)[:, 0], rtol=0, atol=1e-5)
    assert (rollout.sampling_log_probs[mask] > rollout.rollout_log_probs[mask] - 1e-6).all()


def test_runs_repeat_bit_for_bit_and_keys_matter(engine):
    _, params = make("qwen2", seed=2)
    before, state = tree.digest(params), torch.random.get_rng_state()
    first = engine.generate(params, Ask(make_prompts(), CUT, Key(5)))
    again = engine.generate(params, Ask(make_prompts(), CUT, Key(5)))
    other = engine.generate(params, Ask(make_prompts(), CUT, Key(6)))
    assert tree.digest(first) == tree.digest(again)
    assert tree.digest(first) != tree.digest(other)
    assert tree.digest(params) == before
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_rest_of_the_batch_changes_nothing(engine):
    _, params = make("qwen2", seed=2)
    prompts = make_prompts()
    whole = engine.generate(params, Ask(prompts, CUT, Key(2)))
    for chosen in ([1], [5, 3, 0]):
        part = engine.generate(params, Ask(batches.rows(prompts, chosen), CUT, Key(2)))
        rows = [3 * i + j for i in chosen for j in range(3)]
        length = part.response_mask.shape[1]
        assert torch.equal(part.tokens[:, -length:], whole.tokens[rows, 7 : 7 + length])
        assert part.finish == Column(whole.finish[i] for i in rows)


def test_stop_tokens_end_a_response_and_belong_to_it(engine):
    _, params = make("qwen2", seed=2)
    everything = Sampling(max_tokens=50, stop_token_ids=tuple(range(61)))
    out = engine.generate(params, Ask(make_prompts(), everything, Key(1)))
    assert out.response_mask.shape == (6, 1)
    assert set(out.finish) == {"stop"}
    out = engine.generate(
        params, Ask(make_prompts(), Sampling(max_tokens=40), Key(1))
    )  # 2, the config's end, is a token
    assert out.response_mask.all()
    assert set(out.finish) == {"length"}


def test_texts_of_several_tokens_end_a_response_with_the_token_that_completes_one(engine):
    """Where the rows of one engine end, those of the other end too, and on_finished is told why."""
    _, params = make("qwen2", seed=2)
    pieces = tuple(b"ab" if i % 7 == 3 else bytes([97 + i % 5]) for i in range(61))
    texts = StopTexts((b"ba", b"cab", b"ee"), pieces)
    sampling = Sampling(n=4, max_tokens=30, stop_texts=texts, stop_token_ids=(29,))
    finished = {}
    ask = Ask(make_prompts(), sampling, Key(1), on_finished=lambda row, tokens, why: finished.setdefault(row, why))
    out = engine.generate(params, ask)
    expected = embedded().generate(params, Ask(make_prompts(), sampling, Key(1)))
    assert torch.equal(out.tokens, expected.tokens)
    assert torch.equal(out.response_mask, expected.response_mask)
    assert out.finish == expected.finish
    assert Column(finished[row] for row in range(24)) == expected.finish
    assert out.response_mask.sum(1).unique().numel() > 3
    torch.testing.assert_close(out.rollout_log_probs, expected.rollout_log_probs, rtol=0, atol=1e-5)


def test_more_rows_than_decode_together(engine):
    _, params = make("qwen2", seed=2)
    prompts = make_prompts((3, 6, 2, 6, 6) * 8)
    got = engine.generate(params, Ask(prompts, CUT, Key(2)))
    expected = embedded().generate(params, Ask(prompts, CUT, Key(2)))
    assert torch.equal(got.tokens, expected.tokens)
    torch.testing.assert_close(got.rollout_log_probs, expected.rollout_log_probs, rtol=0, atol=1e-5)


def test_the_rollout_may_take_part_in_autograd(engine):
    _, params = make("qwen2", seed=2)
    trained = {name: x.clone().requires_grad_() for name, x in params.items()}
    rollout = engine.generate(trained, Ask(make_prompts(), Sampling(max_tokens=3), Key(0)))
    tensors = [x for _, x in tree.leaves_with_paths(rollout) if isinstance(x, torch.Tensor)]
    assert not any(x.is_inference() or x.requires_grad for x in tensors)
    weight = torch.ones(1, requires_grad=True)
    (weight * rollout.rollout_log_probs).sum().backward()


def test_bad_input_is_refused(engine):
    _, params = make("qwen2", seed=2)
    prompts = make_prompts()
    with pytest.raises(ValueError, match=r"no tokens in prompts \[1\] of 2"):
        engine.generate(params, Ask(make_prompts((3, 0)), Sampling(), Key(0)))
    with pytest.raises(ValueError, match="no tokens in prompts"):
        engine.generate(params, Ask(batches.rows(prompts, []), Sampling(), Key(0)))
    right = tree.replace(prompts, attention_mask=prompts.attention_mask.flip(1))
    with pytest.raises(ValueError, match="pad them on the left"):
        engine.generate(params, Ask(right, Sampling(max_tokens=4), Key(0)))
    with pytest.raises(ValueError, match=r"stop_token_ids \[61\] are beyond .* 61 tokens"):
        engine.generate(params, Ask(prompts, Sampling(max_tokens=3, stop_token_ids=(2, 61)), Key(0)))
