"""The embedded engine samples from the model itself: its log-probs are those of transformers' forward pass."""

import gc
import weakref
from collections import Counter

import attrs
import pytest
import torch

from fppo import batch as batches
from fppo import models, tree
from fppo.batch import Column, Prompts
from fppo.data.stops import StopTexts
from fppo.key import Key
from fppo.models.precision import KeepDouble
from fppo.rollout import embedded
from fppo.rollout.answered import answered
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.sampling import process_logits
from fppo.steps.forward import Forward, forward_micro_batch
from fppo_kernels import table
from fppo_kernels.table import Kernels
from tests.models.families import make, plain

KERNELS = Kernels.named()
LENGTHS = (4, 1, 7, 2, 5, 7)
STOPS = (5, 9, 20)
PAD = 0
CPU = torch.device("cpu")


def make_prompts(lengths=LENGTHS, *, seed=0, extra=0, row_ids=None):
    width = max(lengths) + extra
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    tokens = torch.randint(3, 31, mask.shape, generator=torch.Generator().manual_seed(seed)).where(mask, PAD)
    names = Column(f"row {i}" for i in range(len(lengths)))
    return Prompts(
        tokens=tokens,
        attention_mask=mask,
        row_ids=torch.arange(10, 10 + len(lengths)) if row_ids is None else row_ids,
        ids=names,
        ground_truth=names,
        source=names,
        extras=Column({"name": name} for name in names),
    )


def engine_of(model, **changes):
    return EmbeddedEngine(model=model, kernels=KERNELS, pad_token_id=PAD, **changes)


def plain_logits(module, rollout, row):
    """transformers' logits before each response token of a row, one unpadded sequence alone."""
    length = int(rollout.response_mask[row].sum())
    with torch.no_grad(), KeepDouble():
        logits = module(input_ids=rollout.tokens[row][rollout.attention_mask[row]][None]).logits[0]
    return logits[-length - 1 : -1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["llama", "qwen2", "mistral", "gemma2", "gemma3", "gpt2", "opt", "gpt_oss", "cohere", "smollm3", "qwen3_moe"],
)
@pytest.mark.parametrize(
    "sampling",
    [Sampling(max_tokens=9, stop_token_ids=STOPS), Sampling(temperature=0.7, top_k=9, top_p=0.8, n=2, max_tokens=6)],
    ids=["plain", "cut"],
)
def test_log_probs_are_those_of_transformers(name, sampling):
    model, params = make(name)
    module = plain(model, params)
    rollout = engine_of(model).generate(params, Ask(make_prompts(), sampling, Key(3)))
    assert rollout.rollout_log_probs.dtype == torch.float64
    for row, length in enumerate(rollout.response_mask.sum(1).tolist()):
        logits = plain_logits(module, rollout, row)
        tokens = rollout.tokens[row, -rollout.response_mask.shape[1] :][:length, None]
        full = (logits / sampling.temperature).log_softmax(-1).gather(1, tokens)[:, 0]
        cut = process_logits(logits, sampling).log_softmax(-1).gather(1, tokens)[:, 0]
        torch.testing.assert_close(rollout.rollout_log_probs[row, :length], full, rtol=0, atol=1e-10)
        torch.testing.assert_close(rollout.sampling_log_probs[row, :length], cut, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt2"])
def test_log_probs_of_float32(name):
    model, params = make(name, dtype=torch.float32)
    sampling = Sampling(temperature=0.9, max_tokens=8, stop_token_ids=STOPS)
    rollout = engine_of(model).generate(params, Ask(make_prompts(), sampling, Key(3)))
    assert rollout.rollout_log_probs.dtype == rollout.sampling_log_probs.dtype == torch.float32
    module = plain(model, params)
    for row, length in enumerate(rollout.response_mask.sum(1).tolist()):
        expected = (plain_logits(module, rollout, row) / 0.9).log_softmax(-1)
        tokens = rollout.tokens[row, -rollout.response_mask.shape[1] :][:length, None]
        got = rollout.rollout_log_probs[row, :length]
        torch.testing.assert_close(got, expected.gather(1, tokens)[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-5), (torch.bfloat16, 0.1)])
def test_the_training_pass_agrees(dtype, tolerance):
    model, params = make("qwen2", dtype=torch.float32, compute_dtype=dtype)
    rollout = engine_of(model).generate(params, Ask(make_prompts(), Sampling(temperature=1.3, max_tokens=12), Key(0)))
    out = forward_micro_batch(params, rollout, forward=Forward(model), temperature=1.3)
    torch.testing.assert_close(rollout.rollout_log_probs, out.log_probs, rtol=0, atol=tolerance)


def test_the_record():
    model, params = make("qwen2")
    prompts = make_prompts(extra=2)
    sampling = Sampling(n=3, max_tokens=8, stop_token_ids=STOPS)
    out = engine_of(model).generate(params, Ask(prompts, sampling, Key(1), version=4))
    rows, length = out.response_mask.shape
    assert (rows, out.tokens.shape) == (18, (18, 9 + length))
    assert out.row_ids.tolist() == [10 * 3 + i for i in range(18)]
    assert out.groups.tolist() == [10 + i // 3 for i in range(18)]
    assert out.ids[4] == "row 1"
    assert out.extras[17] == {"name": "row 5"}
    assert out.versions.tolist() == [4] * 18
    assert torch.equal(out.tokens[::3, :9], prompts.tokens)
    assert torch.equal(out.tokens[2::3, :9], prompts.tokens)
    assert torch.equal(out.attention_mask[1::3, :9], prompts.attention_mask)
    assert torch.equal(out.attention_mask[:, 9:], out.response_mask)
    lengths = out.response_mask.sum(1).tolist()
    assert max(lengths) == length
    assert min(lengths) < length
    assert set(out.finish) == {"stop", "length"}
    for row, (count, finish) in enumerate(zip(lengths, out.finish, strict=True)):
        response = out.tokens[row, 9:].tolist()
        ended = [i for i, token in enumerate(response[:count]) if token in STOPS]
        assert ended == ([count - 1] if finish == "stop" else [])
        assert finish == "stop" or count == 8
        assert response[count:] == [PAD] * (length - count)
        assert out.response_mask[row].tolist() == [True] * count + [False] * (length - count)
        assert (out.rollout_log_probs[row, count:] == 0).all()
        assert (out.sampling_log_probs[row, count:] == 0).all()
        assert (out.rollout_log_probs[row, :count] < 0).all()
    samples = {tuple(response) for response in out.tokens[:3, 9:].tolist()}
    assert len(samples) > 1


def test_keys_and_values_are_freed_with_the_engine():
    """At once, not when Python looks for circles: the update needs the memory."""
    model, params = make("qwen2")
    gc.collect()
    gc.disable()
    try:
        with engine_of(model).open(params) as requests:
            answered(requests, Ask(make_prompts(), Sampling(max_tokens=2), Key(0)), pad_token_id=PAD, device=CPU)
            alive = weakref.ref(requests)
            del requests
        assert alive() is None
    finally:
        gc.enable()


def test_t_is_the_longest_response():
    model, params = make("qwen2")
    everything = Sampling(max_tokens=50, stop_token_ids=tuple(range(31)))
    out = engine_of(model).generate(params, Ask(make_prompts(), everything, Key(1)))
    assert out.response_mask.shape == (6, 1)
    assert set(out.finish) == {"stop"}
    nothing = Sampling(max_tokens=1)
    out = engine_of(model).generate(params, Ask(make_prompts(), nothing, Key(1)))
    assert out.response_mask.shape == (6, 1)
    assert set(out.finish) == {"length"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_the_rest_of_the_batch_changes_nothing(name):
    """Rows alone, in another order, in waves, or prefilled one by one are what they are in the whole batch."""
    model, params = make(name)
    sampling = Sampling(n=2, max_tokens=40, stop_token_ids=(5,))
    prompts = make_prompts()
    whole = engine_of(model).generate(params, Ask(prompts, sampling, Key(2)))
    variants = [
        (engine_of(model), [1]),
        (engine_of(model), [5, 3, 0]),
        (engine_of(model, max_rows=4), list(range(6))),
        (engine_of(model, max_rows=1, prefill_tokens=1), list(range(6))),
        (engine_of(model, prefill_tokens=8), list(range(6))),
    ]
    for engine, chosen in variants:
        part = engine.generate(params, Ask(batches.rows(prompts, chosen), sampling, Key(2)))
        rows = [2 * i + j for i in chosen for j in range(2)]
        length = int(whole.response_mask[rows].sum(1).max())
        assert part.response_mask.shape[1] == length
        assert torch.equal(part.tokens, torch.cat([whole.tokens[rows, :7], whole.tokens[rows, 7 : 7 + length]], 1))
        assert torch.equal(part.response_mask, whole.response_mask[rows, :length])
        assert part.finish == Column(whole.finish[i] for i in rows)
        torch.testing.assert_close(part.rollout_log_probs, whole.rollout_log_probs[rows, :length], rtol=0, atol=1e-10)


def test_a_row_at_its_limit_gets_no_more_where_it_stays_among_the_others():
    model, params = make("qwen2")
    limits = torch.tensor([6] * 13 + [2] + [6] * 6)
    reported: dict[int, list[int]] = {}
    rollout = engine_of(model).generate(
        params,
        Ask(
            make_prompts((3,) * 20),
            Sampling(max_tokens=6),
            Key(4),
            limits=limits,
            on_finished=lambda row, tokens, _: reported.update({row: tokens}),
        ),
    )
    assert torch.equal(rollout.response_mask.sum(1), limits)
    assert (rollout.tokens[13, 5:] == PAD).all()
    assert [len(reported[row]) for row in range(20)] == limits.tolist()


@pytest.mark.parametrize("rows", [1, 4, 7])
def test_a_bound_in_bytes_holds_for_keys_and_values_and_changes_nothing_else(rows):
    """One row of 7 + 9 tokens has 2 layers of keys and values of 2 heads of 4 float64 numbers."""
    model, params = make("qwen2")
    ask = Ask(make_prompts(), Sampling(n=3, max_tokens=9, stop_token_ids=(5,)), Key(2))
    whole = engine_of(model).generate(params, ask)
    one, sizes = 16 * 2 * 2 * 2 * 4 * 8, []

    def decodes(query, keys, values, *given, **keywords):
        sizes.append(len(model.layers) * (keys.nbytes + values.nbytes))
        return KERNELS.decode_attention(query, keys, values, *given, **keywords)

    kernels = attrs.evolve(KERNELS, decode_attention=decodes)
    bounded = attrs.evolve(engine_of(model, cache_bytes=rows * one + 1), kernels=kernels).generate(params, ask)
    assert (rows - 1) * one < max(sizes) <= rows * one
    assert torch.equal(bounded.tokens, whole.tokens)
    assert bounded.finish == whole.finish
    torch.testing.assert_close(bounded.rollout_log_probs, whole.rollout_log_probs, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match=f"cache_bytes = 7: request '0' may have 13 tokens, {one * 13 // 16:,} bytes"):
        engine_of(model, cache_bytes=7).generate(params, ask)


@pytest.mark.parametrize(
    ("how", "passes"), [({}, [26]), ({"prefill_tokens": 8}, [5, 7, 7, 7]), ({"max_rows": 3}, [12, 14])]
)
def test_a_pass_over_prompts_has_no_more_tokens_than_asked_and_a_step_no_more_rows(how, passes):
    """The cache has room for more rows."""
    model, params = make("llama")
    read, rows = [], []

    def reads(query, *given, **keywords):
        read.append(len(query))
        return KERNELS.attention(query, *given, **keywords)

    def decodes(query, *given, **keywords):
        rows.append(len(query))
        return KERNELS.decode_attention(query, *given, **keywords)

    kernels = attrs.evolve(KERNELS, attention=reads, decode_attention=decodes)
    engine = EmbeddedEngine(model=model, kernels=kernels, pad_token_id=PAD, cache_bytes=1 << 30, **how)
    engine.generate(params, Ask(make_prompts(), Sampling(max_tokens=2), Key(0)))
    assert [size for size in read if size > 1][:: len(model.layers)] == passes
    assert max(rows) == how.get("max_rows", 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma2"])
def test_long_responses_outgrow_the_first_cache(name):
    """The cache grows, and rows leave before and after."""
    model, params = make(name)
    sampling = Sampling(max_tokens=290, stop_token_ids=(5,), top_k=25)
    prompts = make_prompts((3, 6, 2, 6, 6) * 16)
    rollout = engine_of(model).generate(params, Ask(prompts, sampling, Key(0)))
    lengths = rollout.response_mask.sum(1)
    assert lengths.max() > 140
    assert lengths.min() < 10
    module = plain(model, params)
    for row in lengths.topk(3).indices.tolist():
        tokens = rollout.tokens[row, -rollout.response_mask.shape[1] :][: lengths[row], None]
        scaled = process_logits(plain_logits(module, rollout, row), attrs.evolve(sampling, top_k=None))
        alone = scaled.log_softmax(-1).gather(1, tokens)[:, 0]
        got = rollout.rollout_log_probs[row, : lengths[row]]
        torch.testing.assert_close(got, alone, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("stops", [STOPS, ()])
def test_limits_of_single_prompts_cut_their_responses_alone(stops):
    model, params = make("gpt2")
    limits = torch.tensor([3, 60, 9, 1, 12, 40])
    sampling = Sampling(n=3, max_tokens=50, stop_token_ids=stops)
    whole = engine_of(model).generate(params, Ask(make_prompts(), sampling, Key(4)))
    cut = engine_of(model, max_rows=6).generate(params, Ask(make_prompts(), sampling, Key(4), limits=limits))
    length = cut.response_mask.shape[1]
    most = limits.repeat_interleave(3)[:, None]
    kept = whole.response_mask[:, :length] & (torch.arange(length) < most)
    assert torch.equal(cut.response_mask, kept)
    assert torch.equal(cut.tokens[:, 7:], whole.tokens[:, 7 : 7 + length].where(kept, PAD))
    expected = whole.rollout_log_probs[:, :length].where(kept, 0.0)
    torch.testing.assert_close(cut.rollout_log_probs, expected, rtol=0, atol=1e-10)
    ended = [int(mask.sum()) == int(full.sum()) for mask, full in zip(kept, whole.response_mask, strict=True)]
    reasons = [a if same else "length" for a, same in zip(whole.finish, ended, strict=True)]
    assert list(cut.finish) == reasons
    # a row may reach 7 + 57 of 64 positions, not the longest prompt with the highest limit
    engine_of(model).generate(
        params, Ask(make_prompts((7, 4)), Sampling(max_tokens=60), Key(0), limits=torch.tensor([57, 60]))
    )
    for wrong in ([3, 0], [3]):
        with pytest.raises(ValueError, match="give 1 or more tokens for each of 2 prompts"):
            engine_of(model).generate(params, Ask(make_prompts((3, 1)), sampling, Key(0), limits=torch.tensor(wrong)))


def test_runs_repeat_bit_for_bit_and_keys_matter():
    model, params = make("qwen2", dtype=torch.float32)
    sampling = Sampling(n=2, max_tokens=10, stop_token_ids=STOPS, top_p=0.9)
    before = tree.digest(params)
    state = torch.random.get_rng_state()
    first = engine_of(model).generate(params, Ask(make_prompts(), sampling, Key(5)))
    torch.manual_seed(1)
    again = engine_of(model).generate(params, Ask(make_prompts(), sampling, Key(5)))
    other = engine_of(model).generate(params, Ask(make_prompts(), sampling, Key(6)))
    assert tree.digest(first) == tree.digest(again)
    assert tree.digest(first) != tree.digest(other)
    assert tree.digest(params) == before
    torch.random.set_rng_state(state)
    engine_of(model).generate(params, Ask(make_prompts(), sampling, Key(5)))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(x.is_meta for x in [*model.skeleton.parameters(), *model.skeleton.buffers()])


def test_it_decodes_with_the_kernels_inside_the_layers():
    model, params = make("qwen2")
    calls = Counter()

    def linear(*args):
        calls[args[1].shape] += 1
        return KERNELS.linear(*args)

    ask = Ask(make_prompts(), Sampling(max_tokens=3), Key(5))
    engine = attrs.evolve(engine_of(model), kernels=attrs.evolve(KERNELS, linear=linear))
    assert tree.digest(engine.generate(params, ask)) == tree.digest(engine_of(model).generate(params, ask))
    assert calls[31, 16] == 3  # the head, once in each pass
    # the prompts by modules, then two tokens by fewer operations
    assert sum(calls.values()) == 3 + 7 * 2 + 2 * 4 * 2


@pytest.mark.parametrize(
    ("name", "graphs"), [("llama", True), ("mistral", False), ("gemma2", False), ("gpt_oss", False)]
)
def test_every_kernel_of_decoding_gives_the_same(name, graphs):
    model, params = make(name)
    ask, rollouts = Ask(make_prompts(), Sampling(max_tokens=9), Key(5)), []
    for kernel, reason in table.available("decode_attention").items():
        if reason is None:
            kernels = Kernels.named(decode_attention=kernel)
            rollouts.append(attrs.evolve(engine_of(model, graphs=graphs), kernels=kernels).generate(params, ask))
    first, *others = rollouts
    for other in others:
        assert torch.equal(first.tokens, other.tokens)
        torch.testing.assert_close(other.rollout_log_probs, first.rollout_log_probs, rtol=0, atol=1e-10)


def test_greedy_takes_the_likeliest_token_of_transformers():
    model, params = make("llama")
    sampling = Sampling(greedy=True, max_tokens=7, temperature=0.5)
    rollout = engine_of(model).generate(params, Ask(make_prompts(), sampling, Key(0)))
    assert tree.digest(rollout) == tree.digest(engine_of(model).generate(params, Ask(make_prompts(), sampling, Key(9))))
    module = plain(model, params)
    for row in range(6):
        logits = plain_logits(module, rollout, row)
        assert torch.equal(rollout.tokens[row, -7:], logits.argmax(-1))
        expected = (logits / 0.5).log_softmax(-1).amax(-1)
        torch.testing.assert_close(rollout.rollout_log_probs[row], expected, rtol=0, atol=1e-10)
    assert (rollout.sampling_log_probs == 0).all()


def test_the_rollout_may_take_part_in_autograd():
    model, params = make("qwen2", dtype=torch.float32)
    trained = {name: x.clone().requires_grad_() for name, x in params.items()}
    rollout = engine_of(model).generate(trained, Ask(make_prompts(), Sampling(max_tokens=3), Key(0)))
    tensors = [x for _, x in tree.leaves_with_paths(rollout) if isinstance(x, torch.Tensor)]
    assert not any(x.is_inference() or x.requires_grad for x in tensors)
    weight = torch.ones(1, requires_grad=True)
    (weight * rollout.rollout_log_probs).sum().backward()
    out = models.hidden_states(
        model, trained, rollout.tokens[0], torch.arange(10), attend=models.padded_attention(torch.ones(1, 10).bool())
    )
    out.sum().backward()
    assert trained["model.norm.weight"].grad is not None


def test_bad_input_is_refused():
    model, params = make("gpt2")
    engine, prompts = engine_of(model), make_prompts()
    with pytest.raises(ValueError, match=r"7 tokens; with max_tokens = 58 .* 65, but .* at most 64: lower"):
        engine.generate(params, Ask(prompts, Sampling(max_tokens=58), Key(0)))
    engine.generate(params, Ask(prompts, Sampling(max_tokens=57), Key(0)))
    with pytest.raises(ValueError, match=r"no tokens in prompts \[1\] of 2"):
        engine.generate(params, Ask(make_prompts((3, 0)), Sampling(), Key(0)))
    with pytest.raises(ValueError, match="no tokens in prompts"):
        engine.generate(params, Ask(batches.rows(prompts, []), Sampling(), Key(0)))
    right = tree.replace(prompts, attention_mask=prompts.attention_mask.flip(1))
    with pytest.raises(ValueError, match="pad them on the left"):
        engine.generate(params, Ask(right, Sampling(), Key(0)))
    with pytest.raises(ValueError, match=r"stop_token_ids \[31\] are beyond .* 31 tokens"):
        engine.generate(params, Ask(prompts, Sampling(max_tokens=3, stop_token_ids=(2, 31)), Key(0)))


@pytest.mark.parametrize(("name", "longest", "limit"), [("gpt2", 40, 40), ("gpt2", 90, 64), ("qwen2", 40, 40)])
def test_a_row_is_bounded_by_the_first_of_its_limits(name, longest, limit, monkeypatch):
    """Learned positions, and the longest row for which a model reads positions alike."""
    model, params = make(name)
    monkeypatch.setattr(embedded, "longest_row", lambda config: longest)
    with engine_of(model).open(params) as requests:
        assert requests.limit == limit
    ask = Ask(make_prompts((7, 4)), Sampling(max_tokens=limit - 7), Key(0))
    engine_of(model).generate(params, ask)
    with pytest.raises(ValueError, match=f"its row may reach {limit + 1}, but"):
        engine_of(model).generate(params, attrs.evolve(ask, sampling=Sampling(max_tokens=limit - 6)))


def test_rotary_positions_may_go_beyond_the_config():
    model, params = make("qwen2")
    rollout = engine_of(model).generate(params, Ask(make_prompts(), Sampling(max_tokens=70), Key(0)))
    assert rollout.response_mask.shape[1] == 70


@pytest.mark.slow
def test_a_text_of_several_tokens_ends_a_response_with_the_token_that_completes_it():
    """Whatever the tokens: each row is that of no stops, cut where its text first holds one of the texts."""
    pieces = tuple(b"ab" if i % 7 == 3 else bytes([97 + i % 5]) for i in range(31))
    texts = StopTexts((b"ba", b"cab", b"ee"), pieces)
    model, params = make("llama")
    prompts, finished = make_prompts(), {}
    free = Sampling(n=3, max_tokens=24)
    cut = attrs.evolve(free, stop_texts=texts, stop_token_ids=(29,))
    engine = engine_of(model, max_rows=9)
    whole = engine.generate(params, Ask(prompts, free, Key(3)))
    ask = Ask(prompts, cut, Key(3), on_finished=lambda row, tokens, why: finished.__setitem__(row, (tokens, why)))
    rollout = engine.generate(params, ask)
    stopped = 0
    for row in range(len(whole.tokens)):
        ids = whole.tokens[row][-24:].tolist()
        read = [b"".join(pieces[i] for i in ids[:end]) for end in range(1, 25)]
        ends = [any(text in read[i] for text in texts.texts) or ids[i] == 29 for i in range(24)]
        length = ends.index(True) + 1 if True in ends else 24
        width = rollout.response_mask.shape[1]
        own = rollout.tokens[row][-width:][rollout.response_mask[row]].tolist()
        assert own == ids[:length]
        assert rollout.finish[row] == ("stop" if True in ends else "length")
        assert finished[row] == (own, rollout.finish[row])
        stopped += True in ends
    assert stopped > 0
    assert len({len(tokens) for tokens, _ in finished.values()}) > 2
