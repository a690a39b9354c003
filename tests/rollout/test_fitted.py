"""Decoding that runs out of memory goes on with fewer rows or tokens at once, and draws what it would have drawn."""

from contextlib import contextmanager
from functools import partial

import attrs
import pytest
import torch

from fppo import models, tree
from fppo._errors import RunFailed
from fppo.key import Key
from fppo.rollout.answered import answered
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.fitted import FittedSizes
from fppo.rollout.interrupt import InterruptibleEngine
from fppo.rollout.requests import Request
from fppo.rollout.scores import Scores
from fppo.runtime.mesh import Mesh
from fppo_kernels.collectives import Axis
from fppo_kernels.table import needs_cpp
from tests.limited import FailingAt, Limited
from tests.models.families import make
from tests.models.hybrids import HYBRIDS
from tests.rollout import test_exact
from tests.rollout.talks import same, talks, told
from tests.rollout.test_embedded import STOPS, engine_of, make_prompts

ASK = Ask(make_prompts((4, 9, 30, 6, 2, 7)), Sampling(n=3, max_tokens=40, stop_token_ids=STOPS), Key(3))


@attrs.frozen
class Confined:
    """An engine whose steps run within a dispatch mode."""

    engine: object
    mode: object

    @contextmanager
    def open(self, params, **changes):
        with self.engine.open(params, **changes) as requests:
            yield ConfinedRequests(requests, self.mode)


class ConfinedRequests:
    """Requests whose steps run within a mode. `heard` are the tokens of each request as they were told."""

    def __init__(self, inner, mode):
        self.inner, self.mode, self.heard = inner, mode, {}

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self, most=None):
        with self.mode:
            result = self.inner.step(most)
        for name, token in zip(result.drawn.names, result.drawn.tokens, strict=True):
            self.heard.setdefault(name, []).append(token)
        for one in result.finished:
            assert most is not None or self.heard.get(one.name, []) == one.tokens.tolist()
        return result


def peak_of(engine, params, ask=ASK):
    with Limited() as limited:
        engine.generate(params, ask)
    return limited.peak


def check_same(found, expected, atol=1e-10):
    """The same tokens, ends and masks, and log-probs but for `atol`."""
    for name in ("tokens", "attention_mask", "response_mask", "row_ids"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert [*found.finish] == [*expected.finish]
    for name in ("rollout_log_probs", "sampling_log_probs"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=atol)


def said(caplog):
    return [record for record in caplog.records if record.name == "fppo.rollout"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "lfm2"])
@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_a_rollout_under_a_limit_is_the_rollout_without_one(name, share, caplog):
    model, params = make(name, config=HYBRIDS.get(name))
    engine = engine_of(model, halve_on_oom=True)
    whole = engine.generate(params, ASK)
    assert not said(caplog), "nothing failed"
    least, most = peak_of(engine_of(model, max_rows=1, prefill_tokens=1), params), peak_of(engine, params)
    with Limited(limit := least + share * (most - least)) as limited:
        found = engine.generate(params, ASK)
    assert limited.failures == len(said(caplog)) > 0, "each failure is said"
    check_same(found, whole)
    caplog.clear()
    for _ in range(4):
        with Limited(limit) as limited:
            again = engine.generate(params, ASK)
        check_same(again, whole)
        if not limited.failures:
            return
    pytest.fail("the engine does not begin with what fitted")


def short(name, number=-1, **changes):
    """A model's engine that fails once, in the operation of this number, and its parameters."""
    model, params = make(name, config=HYBRIDS.get(name))
    return Confined(engine_of(model, halve_on_oom=True, **changes), FailingAt(number)), params


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 0.01, 0.1, 0.5])  # at the end one row is alone
@pytest.mark.parametrize("name", ["qwen2", "lfm2"])
def test_turns_go_on_wherever_a_step_fails(name, place):
    """With kept contexts, several operations behind each other, and tokens that are told as they are drawn."""
    rows, delay = talks(samples=2), lambda row, turn: (5 * row + turn) % 4
    engine, params = short(name)
    expected, _ = told(engine, params, rows, delay=delay)
    first = int(place * (engine.mode.calls - 20))
    for number in range(first, first + 16, 5):
        engine, _ = short(name, number)
        found, _ = told(engine, params, rows, delay=delay)
        same(found, expected, atol=1e-10)
        assert engine.engine._fitted != FittedSizes(), "an operation of a step fails"


def requests_of_all_kinds():
    """Requests with scores and stops, of which some share a prompt."""
    sampling = Sampling(max_tokens=9, stop_token_ids=STOPS)
    of_prompt, of_draws = Scores(prompt=True, draws=2), Scores(drawn_top=3)
    for row, scores in enumerate((of_prompt, None, of_draws, of_prompt, None)):
        ids = (4, 8, 11, 3) if row < 3 else (7, 6)
        yield Request(name=str(row), ids=ids, sampling=sampling, key=Key(1), row=row, scores=scores)


def numbers_of(one):
    return tree.tensors((one.log_probs, one.sampling_log_probs, one.prompt_scores, one.drawn_scores))


def answers(engine, params, most):
    with engine.open(params) as requests:
        requests.add([*requests_of_all_kinds()])
        found = {}
        while requests.counts.open:
            found |= {one.name: one for one in requests.step(most).finished}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("most", [None, 4])
@pytest.mark.parametrize("place", [0.2, 0.7])
def test_scores_and_experts_are_those_of_a_run_that_fits(most, place):
    changes = {"max_rows": 4, "routed": True}
    engine, params = short("qwen3_moe", **changes)
    expected = answers(engine, params, most)
    first = int(place * engine.mode.calls)
    for number in range(first, first + 60, 29):
        found = answers(short("qwen3_moe", number, **changes)[0], params, most)
        for name, one in expected.items():
            other = found[name]
            assert other.end == one.end
            for part in ("tokens", "versions", "experts"):
                assert torch.equal(getattr(other, part), getattr(one, part)), part
            for x, y in zip(numbers_of(other), numbers_of(one), strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=1e-10, equal_nan=True)


@pytest.mark.slow
@pytest.mark.skipif(needs_cpp() is not None, reason="needs a C++ compiler")
def test_an_exact_engine_stays_exact():
    engine, params = test_exact.engine_of("qwen3")
    engine = attrs.evolve(engine, halve_on_oom=True)
    whole, most = engine.generate(params, ASK), peak_of(engine, params)
    with Limited(0.4 * most) as limited:
        found, again = engine.generate(params, ASK), engine.generate(params, ASK)
    assert limited.failures
    assert tree.digest(found) == tree.digest(again) == tree.digest(whole), "also of a run that begins anew"


@pytest.mark.slow
def test_a_row_that_does_not_fit_by_itself_is_named_with_what_helps():
    model, params = make("qwen2")
    one = Ask(make_prompts((60,)), Sampling(max_tokens=300), Key(3))
    most = peak_of(engine_of(model, max_rows=1), params, one)
    with Limited(0.5 * most), pytest.raises(RunFailed, match=r"request '0': one row of \d+ tokens, .* 360") as error:
        engine_of(model, halve_on_oom=True).generate(params, one)
    assert "rollout.max_tokens" in str(error.value)
    with Limited(0.5 * most), pytest.raises(torch.OutOfMemoryError):
        engine_of(model).generate(params, one)


def test_a_step_that_fails_is_repeated():
    model, params = make("qwen2")
    ask = attrs.evolve(ASK, prompts=make_prompts((4, 9, 6)), sampling=Sampling(n=2, max_tokens=4))
    whole, engine = engine_of(model).generate(params, ask), engine_of(model, halve_on_oom=True)
    with engine.open(params) as requests, FailingAt(150) as mode:
        found = answered(requests, ask, pad_token_id=0, device=torch.device("cpu"))
    assert mode.calls > 150
    check_same(found, whole)
    assert engine._fitted != FittedSizes()


def test_a_row_that_cannot_be_prefilled_whole_is_prefilled_in_part():
    model, params = make("qwen2")
    one = Ask(make_prompts((40, 25)), Sampling(n=2, max_tokens=6), Key(3))
    engine = engine_of(model, halve_on_oom=True)
    whole = engine.generate(params, one)
    engine._fitted.row_tokens = 7
    check_same(engine.generate(params, one), whole)


def test_other_errors_are_not_repeated():
    model, params = make("qwen2")

    def wrong(*args, **kwargs):
        raise RuntimeError("a mistake")

    engine = engine_of(model, halve_on_oom=True)
    broken = attrs.evolve(engine, kernels=attrs.evolve(engine.kernels, attention=wrong))
    with pytest.raises(RuntimeError, match="a mistake"):
        broken.generate(params, ASK)


@pytest.mark.slow
def test_pieces_of_responses_are_sampled_by_the_sizes_that_were_found():
    model, params = make("qwen2")
    engine = engine_of(model, halve_on_oom=True)
    pieces = InterruptibleEngine(engine=engine, every=5, pad_token_id=0)
    ask = attrs.evolve(ASK, newer=lambda: None)
    whole, most = pieces.generate(params, ask), peak_of(pieces, params, ask)
    with Limited(0.5 * most) as limited:
        found = pieces.generate(params, ask)
    assert limited.failures
    check_same(found, whole)


def test_ranks_that_decode_together_are_refused():
    model, _ = make("qwen2")
    mesh = Mesh({"tensor": Axis(2, 0)})
    with pytest.raises(ValueError, match="2 ranks of a tensor axis decode together"):
        engine_of(models.place(model, mesh), halve_on_oom=True, mesh=mesh)


@pytest.mark.parametrize(
    ("prefilled", "rows", "cuts", "expected"),
    [
        ([9, 8], 6, True, FittedSizes(prefill_tokens=8)),
        ([9], 6, True, FittedSizes(cache_bytes=300)),
        ([], 6, True, FittedSizes(cache_bytes=300)),
        ([9], 1, True, FittedSizes(row_tokens=4)),
        ([9], 1, False, None),
        ([1], 1, True, None),
        ([], 1, True, None),
    ],
)
def test_what_may_help_is_halved(prefilled, rows, cuts, expected):
    sizes = FittedSizes()
    found = partial(sizes.halve, prefilled, rows=rows, row_bytes=100, cuts=cuts)()
    assert found == (expected is not None)
    assert sizes == (expected or FittedSizes())
