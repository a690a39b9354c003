"""Scores of requests: those of a whole forward pass, whichever requests are read together."""

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import models
from fppo.key import Key, uniforms
from fppo.models.precision import KeepDouble
from fppo.rollout import scores as scoring
from fppo.rollout.engine import Sampling
from fppo.rollout.generated import opened
from fppo.rollout.requests import Request
from fppo.rollout.sampling import inverse_cdf
from fppo.rollout.scores import Scores
from fppo.runtime.mesh import Sharding
from fppo.runtime.simulate import simulate
from fppo_kernels.table import needs_cpp
from tests.models.families import make, plain
from tests.rollout.talks import only_generate
from tests.rollout.test_embedded import engine_of
from tests.rollout.test_exact import engine_of as exact_engine_of

PROMPT = (3, 14, 15, 9, 2, 6)
ALL = Scores(prompt=True, prompt_top=4, draws=3, drawn_top=2)


def request(name="a", ids=PROMPT, scores=ALL, *, row=7, **changes):
    changes = {"sampling": Sampling(max_tokens=4, temperature=0.6), "key": Key(5), **changes}
    return Request(name=name, ids=ids, scores=scores, row=row, **changes)


def answered(engine, params, requests, meanwhile=lambda opened: None):
    with opened(engine, params) as open_requests:
        open_requests.add(requests)
        meanwhile(open_requests)
        found = {one.name: one for one in open_requests.step().finished}
        while open_requests.counts.open:
            found |= {one.name: one for one in open_requests.step().finished}
    return found


def whole_pass(model, params, ids):
    """Logits [N, V] by transformers."""
    with torch.no_grad(), KeepDouble():
        return plain(model, params)(input_ids=torch.tensor([[*ids]])).logits[0]


def near(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_scores_of_a_prompt_are_those_of_a_whole_pass(data):
    """Whatever is scored, of however many positions at once, and whoever has the same prompt."""
    model, params = make("qwen2")
    length = data.draw(st.integers(1, 9))
    ids = tuple(data.draw(st.lists(st.integers(3, 30), min_size=length, max_size=length)))
    last = data.draw(st.none() | st.integers(1, length - 1)) if length > 1 else None
    cells = st.lists(st.integers(-1, 30), min_size=2 * (length - 1), max_size=2 * (length - 1))
    targets = data.draw(st.none() | cells.map(lambda x: torch.tensor(x, dtype=torch.int64).view(length - 1, 2)))
    draws = data.draw(st.integers(0, 2))
    own = Scores(prompt=True, last=last, prompt_top=data.draw(st.integers(0, 40)), targets=targets, draws=draws)
    others = [Scores(prompt=True), Scores(draws=2), None, own][: data.draw(st.integers(0, 4))]
    requests = [request(f"{i}", ids, each) for i, each in enumerate([own, *others])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "_NUMBERS", data.draw(st.sampled_from((1, 100, 1 << 24))))
        found = answered(engine_of(model, prefill_tokens=data.draw(st.sampled_from((1, 64)))), params, requests)
    log_p = whole_pass(model, params, ids)[:-1].log_softmax(-1)
    got = found["0"].prompt_scores
    begin = 1 if last is None else length - last
    expected = torch.full((length,), torch.nan, dtype=torch.float64)
    expected[begin:] = log_p[begin - 1 :].gather(1, torch.tensor(ids)[begin:, None])[:, 0]
    near(got.log_probs.double(), expected)
    assert (got.top is None) == (own.prompt_top == 0)
    if got.top is not None and length > 1:
        values, tokens = log_p[begin - 1 :].topk(min(own.prompt_top, 31))
        near(got.top.log_probs[begin:], values)
        assert torch.equal(got.top.ids[begin:], tokens)
        assert (got.top.ids[:begin] == -1).all()
        assert got.top.log_probs[:begin].isnan().all()
    if targets is not None:
        near(got.targets.double(), log_p.gather(1, targets.clamp(min=0)).where(targets >= 0, torch.nan))
    assert (got.draws is None) == (draws == 0)
    for j in range(draws if length > 1 else 0):
        numbers = uniforms([Key(5).fold("alternatives", j)], [7], torch.arange(1, length)[None])[0]
        logits = whole_pass(model, params, ids)[:-1]
        assert torch.equal(got.draws.ids[:, j], inverse_cdf((logits / 0.6).softmax(-1), numbers))
        near(got.draws.log_probs[:, j], log_p.gather(1, got.draws.ids[:, j, None])[:, 0])
    bare = [one for one, each in zip(requests, [own, *others], strict=True) if each is None]
    assert all(found[one.name].prompt_scores is None for one in bare)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.integers(2, 9), st.data())
def test_logits_begin_at_the_first_position_that_is_scored(length, data):
    cells = st.lists(st.lists(st.integers(-1, 3), min_size=2, max_size=2), min_size=length - 1, max_size=length - 1)
    targets = data.draw(st.none() | cells)
    prompt, top, draws = data.draw(st.booleans()), data.draw(st.integers(0, 1)), data.draw(st.integers(0, 1))
    last = data.draw(st.none() | st.integers(1, length - 1)) if prompt or top else None
    given = None if targets is None else torch.tensor(targets)
    scores = Scores(prompt=prompt, prompt_top=top, draws=draws, last=last, targets=given)
    scored = {length}
    for place in range(1, length):
        own = (prompt or top) and (last is None or place >= length - last)
        if own or draws or (targets is not None and max(targets[place - 1]) >= 0):
            scored.add(place)
    assert scores.begin(length) == min(scored)


def test_alternatives_are_drawn_by_the_key_the_row_and_the_position():
    """At the request's temperature; their log-probs are without it."""
    model, params = make("qwen2")
    got = answered(engine_of(model), params, [request()])["a"].prompt_scores.draws
    logits = whole_pass(model, params, PROMPT)[:-1]
    assert got.ids.shape == (len(PROMPT) - 1, 3)
    for j in range(3):
        numbers = uniforms([Key(5).fold("alternatives", j)], [7], torch.arange(1, len(PROMPT))[None])[0]
        assert torch.equal(got.ids[:, j], inverse_cdf((logits / 0.6).softmax(-1), numbers))
    near(got.log_probs, logits.log_softmax(-1).gather(1, got.ids))
    more = answered(engine_of(model), params, [request(scores=Scores(draws=5))])["a"].prompt_scores.draws
    assert torch.equal(more.ids[:, :3], got.ids)
    cold = request(sampling=Sampling(greedy=True, max_tokens=1))
    likeliest = answered(engine_of(model), params, [cold])["a"].prompt_scores.draws.ids
    assert torch.equal(likeliest, logits.argmax(-1, keepdim=True).expand(-1, 3))


@pytest.mark.slow
def test_alternatives_follow_the_distribution():
    """By a chi-square statistic with 30 degrees of freedom, far below what another temperature gives."""
    model, params = make("qwen2")
    got = answered(engine_of(model), params, [request(scores=Scores(draws=4000))])["a"].prompt_scores.draws.ids
    expected = 4000 * (whole_pass(model, params, PROMPT)[:-1] / 0.6).softmax(-1)
    counts = torch.stack([row.bincount(minlength=31) for row in got])
    assert ((counts - expected) ** 2 / expected).sum(-1).max() < 70


def test_scores_of_draws_are_without_temperature():
    """Each request has as many as it asks for, also where others draw by other samplings, or tell nothing."""
    model, params = make("qwen2")
    requests = [
        request("a", scores=Scores(drawn_top=3)),
        request("b", scores=None, row=8),
        request("c", scores=Scores(drawn_top=99), row=9, sampling=Sampling(max_tokens=5, top_k=4)),
    ]
    found = answered(engine_of(model), params, requests)
    for name, top in (("a", 3), ("c", 31)):
        own = found[name]
        log_p = whole_pass(model, params, [*PROMPT, *own.tokens.tolist()])[len(PROMPT) - 1 : -1].log_softmax(-1)
        near(own.drawn_scores.log_probs, log_p.gather(1, own.tokens[:, None])[:, 0])
        values, ids = log_p.topk(top)
        near(own.drawn_scores.top.log_probs, values)
        assert torch.equal(own.drawn_scores.top.ids, ids)
    assert found["b"].drawn_scores is None
    unscored = answered(engine_of(model), params, [attrs.evolve(one, scores=None) for one in requests])
    for name, one in found.items():
        assert torch.equal(one.tokens, unscored[name].tokens)
        assert torch.equal(one.log_probs, unscored[name].log_probs)


def test_a_row_that_waits_has_its_scores_too():
    """Its prompt was read for one that came with it."""
    model, params = make("qwen2")
    alone = answered(engine_of(model), params, [request("b", scores=Scores(draws=2), row=3)])["b"]
    found = answered(engine_of(model, max_rows=1), params, [request("a"), request("b", scores=Scores(draws=2), row=3)])
    assert torch.equal(found["b"].prompt_scores.draws.ids, alone.prompt_scores.draws.ids)
    assert found["a"].prompt_scores.log_probs is not None


def test_a_cancelled_request_has_what_was_found():
    model, params = make("qwen2")

    def meanwhile(requests):
        requests.step()
        requests.cancel(["a"])

    both = [request("a"), request("b", scores=Scores(prompt=True))]
    found = answered(engine_of(model, max_rows=1), params, both, meanwhile)
    assert found["a"].end == "cancelled"
    assert found["a"].drawn_scores.top.ids.shape == (1, 2)
    assert found["a"].prompt_scores.draws is not None
    assert found["b"].prompt_scores.log_probs.isnan().sum() == 1

    waiting = answered(engine_of(model), params, [request("a")], lambda requests: requests.cancel(["a"]))["a"]
    assert waiting.prompt_scores is None
    assert waiting.drawn_scores.log_probs.shape == (0,)


def test_ranks_that_cut_the_vocabulary_score_as_one():
    model, params = make("qwen2")
    targets = torch.tensor([[4, -1], [30, 16], [15, 3], [0, 1], [-1, -1]])
    asked = request(scores=Scores(prompt=True, prompt_top=3, targets=targets, draws=2, drawn_top=3))
    expected = answered(engine_of(model), params, [asked])["a"]

    def on_rank(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding())
        placed = models.place(model, mesh)
        return answered(engine_of(placed, mesh=mesh), models.own_params(placed, params, mesh), [asked])["a"]

    for found in simulate({"tensor": 2}, on_rank):
        for a, b in ((found.prompt_scores, expected.prompt_scores), (found.drawn_scores, expected.drawn_scores)):
            torch.testing.assert_close(a._asdict(), b._asdict(), rtol=0, atol=1e-10, equal_nan=True)


@pytest.mark.skipif(needs_cpp() is not None, reason="needs a C++ compiler")
def test_an_exact_engine_scores_prompts_as_it_scores_draws():
    engine, params = exact_engine_of("qwen3")
    sampling = Sampling(max_tokens=5)
    first = answered(engine, params, [request(sampling=sampling, scores=None)])["a"]
    ids = (*PROMPT, *first.tokens.tolist())
    again = answered(engine, params, [request(ids=ids, scores=Scores(prompt=True), sampling=sampling)])["a"]
    assert torch.equal(again.prompt_scores.log_probs[len(PROMPT) :], first.log_probs)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"draws": -1}, "scores.draws = -1: give 0 or more"),
        ({"last": 2}, "scores.last = 2: set prompt or prompt_top"),
        ({"last": 6, "prompt": True}, r"'a': scores.last = 6: a prompt of 6 has 1 to 5 to score"),
        (
            {"targets": torch.zeros(4, 1, dtype=torch.int64)},
            "'a': scores.targets has 4 rows, and a prompt of 6 tokens 5",
        ),
        ({"targets": torch.zeros(5, 1)}, "scores.targets: give int64 ids"),
        ({"targets": torch.full((5, 1), -2)}, "scores.targets: give int64 ids"),
    ],
)
def test_scores_that_do_not_fit_are_refused(how, text):
    with pytest.raises(ValueError, match=text):
        request(scores=Scores(**how))


def test_scores_that_an_engine_does_not_have_are_refused():
    model, params = make("qwen2")
    with pytest.raises(ValueError, match="'a': scores of a prompt come with a whole prompt, not after another"):
        request(after="b")
    request(after="b", scores=Scores(drawn_top=1))
    with opened(engine_of(model), params) as requests:
        targets = torch.full((5, 1), 31)
        with pytest.raises(ValueError, match=r"'a': scores.targets has ids that the model's vocabulary of 31 tokens"):
            requests.add([request(scores=Scores(targets=targets))])
    with opened(only_generate(engine_of(model)), params) as requests:
        with pytest.raises(ValueError, match="'a': scores is for the embedded engine"):
            requests.add([request()])
        with pytest.raises(ValueError, match="'a': adapter is for the embedded engine"):
            requests.add([request(scores=None, adapter="x")])


def test_a_prompt_of_one_token_has_nothing_to_score():
    model, params = make("qwen2")
    how = {"prompt": True, "prompt_top": 2, "draws": 3, "targets": torch.zeros(0, 1, dtype=torch.int64)}
    asked = Request(name="a", ids=(3,), sampling=Sampling(max_tokens=1), key=Key(0), scores=Scores(**how))
    with opened(engine_of(model), params) as requests:
        requests.add([asked])
        (found,) = requests.step().finished
    scores = found.prompt_scores
    assert (scores.log_probs.isnan().tolist(), scores.top.ids.tolist()) == ([True], [[-1, -1]])
    assert scores.top.log_probs.isnan().all()
    assert (scores.targets.shape, scores.draws.ids.shape) == ((0, 1), (0, 3))


def test_images_come_with_a_whole_prompt():
    with pytest.raises(ValueError, match="request 'a': images come with a whole prompt, not after 'b'"):
        request(scores=None, after="b", inputs=object())
