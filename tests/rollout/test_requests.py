"""Requests as they come: a row's tokens depend on its own key and tokens, not on when anything comes, and nothing is
read twice."""

from functools import cache, partial

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import models
from fppo.key import Key
from fppo.models.precision import KeepDouble
from fppo.rollout import drawn as drawing
from fppo.rollout import places
from fppo.rollout.engine import Sampling
from fppo.rollout.generated import opened
from fppo.rollout.records import tensor_of
from fppo.rollout.requests import QueueFull, Request
from fppo.runtime.mesh import Sharding
from fppo.runtime.simulate import simulate
from fppo_kernels.table import needs_cpp
from tests.models import vision
from tests.models.families import make, plain
from tests.models.hybrids import HYBRIDS
from tests.rollout.talks import only_generate, same, talks, told, with_samplings
from tests.rollout.test_embedded import STOPS, engine_of
from tests.rollout.test_exact import engine_of as exact_engine_of

CUT = Sampling(temperature=0.7, top_k=9, top_p=0.8, max_tokens=4, stop_token_ids=STOPS)


@cache
def reference(name, samples=1):
    """A model, rows, and their answers by an engine that reads whole contexts anew, one turn of all rows at a time."""
    model, params = make(name, config=HYBRIDS.get(name))
    rows = talks(samples=samples)
    expected, _ = told(only_generate(engine_of(model)), params, rows)
    return model, params, rows, expected


def read_once(rows, found):
    """The tokens that have to go through the model: equal prompts once, and all but the last token of each row."""
    prompts = {row.prompt: len(row.prompt) for row in rows}
    return sum(prompts.values()) + sum(len(found[row.row].ids) - 1 for row in rows)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    delays=st.lists(st.integers(0, 7), min_size=12, max_size=12),
    order=st.permutations(range(6)),
    max_rows=st.sampled_from((1, 2, 4, 1024)),
    graphs=st.booleans(),
    samples=st.sampled_from((1, 3)),
    chunk=st.sampled_from((1, 4, 128)),
)
def test_ids_do_not_depend_on_delays(delays, order, max_rows, graphs, samples, chunk):
    """Nor on when rows move to other columns, as they do often where there are few to spare."""
    model, params, rows, expected = reference("qwen2", samples)
    engine = engine_of(model, max_rows=max_rows, graphs=graphs, prefill_tokens=9)
    with pytest.MonkeyPatch.context() as patch:
        for module in (places, drawing):
            patch.setattr(module, "CHUNK", chunk)
        found, fed = told(engine, params, rows, order=order, delay=lambda row, turn: delays[2 * row + turn - 1])
    same(found, expected)
    assert fed == read_once(rows, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "mistral", "gpt2", "gemma3", "gpt_oss", "qwen3_moe"])
def test_log_probs_are_those_of_a_whole_forward_pass(name):
    """Also of windows, learned positions, sinks and experts, which have the models' own modules."""
    model, params, rows, expected = reference(name)
    found, fed = told(engine_of(model), params, rows, delay=lambda row, turn: (5 * row + turn) % 4)
    same(found, expected)
    assert fed == read_once(rows, found)
    module = plain(model, params)
    for row in rows:
        own = found[row.row]
        with torch.no_grad(), KeepDouble():
            logits = module(input_ids=torch.tensor([[*row.prompt, *own.ids]])).logits[0]
        place = len(row.prompt) - 1
        for turn, (tokens, log_probs) in enumerate(zip(own.tokens, own.log_probs, strict=True)):
            place += len(row.observations[turn - 1]) if turn else 0
            index = torch.tensor(tokens)[:, None]
            whole = logits[place : place + len(tokens)].log_softmax(-1).gather(1, index)[:, 0]
            torch.testing.assert_close(log_probs, whole, rtol=0, atol=1e-12)
            place += len(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "lfm2"])
def test_states_leave_with_their_rows(name):
    if name not in HYBRIDS:
        pytest.skip(f"no {name} among the hybrids")
    model, params, rows, expected = reference(name)
    found, fed = told(engine_of(model, max_rows=4), params, rows, delay=lambda row, turn: (5 * row + turn) % 4)
    same(found, expected, atol=1e-10)
    assert fed == read_once(rows, found)


@pytest.mark.slow
def test_each_request_has_a_sampling_of_its_own():
    model, params, rows, _ = reference("qwen2")
    greedy, hot = Sampling(greedy=True, max_tokens=3), Sampling(temperature=1.7, max_tokens=6)
    others = attrs.evolve(hot, top_p=0.2), attrs.evolve(CUT, top_k=2), attrs.evolve(hot, min_p=0.8)
    rows = with_samplings(rows, CUT, greedy, hot, *others)
    expected, _ = told(only_generate(engine_of(model)), params, rows)
    found, _ = told(engine_of(model), params, rows, delay=lambda row, turn: row % 3)
    same(found, expected)


def test_an_update_gives_each_token_the_log_prob_of_its_own_policy():
    """Those before and after it are drawn as whole contexts under each policy's parameters say."""
    model, params, rows, _ = reference("qwen2")
    noise = torch.Generator().manual_seed(1)
    newer = {name: x + 0.1 * torch.randn(x.shape, generator=noise).double() for name, x in params.items()}
    rows = with_samplings(rows, Sampling(max_tokens=8))

    def meanwhile(requests, step):
        if step == 5:
            requests.update(newer, 7)

    found, _ = told(engine_of(model), params, rows, delay=lambda row, turn: row % 3, version=4, meanwhile=meanwhile)
    modules = {4: plain(model, params), 7: plain(model, newer)}
    seen = set()
    for row in rows:
        own, place = found[row.row], len(row.prompt) - 1
        whole = torch.tensor([[*row.prompt, *own.ids]])
        with torch.no_grad(), KeepDouble():
            of = {version: module(input_ids=whole).logits[0].log_softmax(-1) for version, module in modules.items()}
        for turn, (tokens, log_probs, versions) in enumerate(zip(own.tokens, own.log_probs, own.versions, strict=True)):
            place += len(row.observations[turn - 1]) if turn else 0
            for token, log_prob, version in zip(tokens, log_probs.tolist(), versions, strict=True):
                assert log_prob == pytest.approx(float(of[version][place, token]), abs=1e-12)
                seen.add((turn, version))
                place += 1
    assert {version for _, version in seen} == {4, 7}


def request(name="a", ids=(3, 4), **changes):
    fixed = {"sampling": Sampling(max_tokens=4), "key": Key(0)}
    return Request(name=name, ids=ids, **{**fixed, **changes})


@pytest.mark.parametrize("whole", [True, False], ids=["own", "generated"])
def test_what_is_wrong_with_a_request_is_said_at_once(whole):
    model, params = make("qwen2")
    engine = engine_of(model) if whole else only_generate(engine_of(model))
    with opened(engine, params, most_waiting=3) as requests:
        requests.add([request("a", keep=True)])
        for wrong, text in (
            ([request("a")], "'a': that name is open"),
            ([request("b"), request("b")], "'b': that name is open"),
            ([request("b", after="a")], "after = 'a' is not kept, or has not ended"),
        ):
            with pytest.raises((ValueError, QueueFull), match=text):
                requests.add(wrong)
        with pytest.raises(QueueFull, match="4 requests would wait, and at most 3"):
            requests.add([request("b"), request("c"), request("d")])
        assert requests.counts.open == 1
        requests.cancel(["a", "nobody"])
        assert [x.end for x in requests.step().finished] == ["cancelled"]
        requests.release(["a"])
        assert requests.counts == (0, 0, 0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ids": (3, 31)}, "'b': tokens that the model's vocabulary of 31 tokens"),
        ({"ids": (3, -1, 4)}, "'b': tokens that the model's vocabulary of 31 tokens"),
        ({"sampling": Sampling(max_tokens=63)}, "'b' has 2 tokens; with max_tokens = 63 .* may reach 65.*at most 64:"),
        ({"sampling": Sampling(stop_token_ids=(40,))}, r"stop_token_ids \[40\]"),
    ],
)
def test_what_a_model_cannot_do_is_said_at_once(changes, text):
    model, params = make("gpt2")
    with opened(engine_of(model), params) as requests, pytest.raises(ValueError, match=text):
        requests.add([request("b", **changes)])


def ended(requests):
    """All requests, answered to their ends."""
    found = []
    while requests.counts.open:
        found += requests.step().finished
    return {each.name: each for each in found}


@pytest.mark.parametrize("whole", [True, False], ids=["own", "generated"])
def test_draws_go_on_from_a_position(whole):
    """A row whose first tokens come as a prompt draws the others as the row that drew these; others may begin at 0."""
    model, params = make("qwen2")
    engine = engine_of(model) if whole else only_generate(engine_of(model))
    asked = partial(request, sampling=Sampling(max_tokens=6), row=5)
    with opened(engine, params) as requests:
        requests.add([asked("all")])
        drawn = ended(requests)["all"].tokens.tolist()
        rest = [asked(f"from {n}", (3, 4, *drawn[:n]), position=n) for n in (2, 4)]
        requests.add([asked("again"), *rest])
        found = {name: each.tokens.tolist() for name, each in ended(requests).items()}
    assert found["again"] == drawn
    for n in (2, 4):
        assert found[f"from {n}"][: 6 - n] == drawn[n:]


@pytest.mark.parametrize("whole", [True, False], ids=["own", "generated"])
def test_each_request_has_a_most_of_its_own(whole):
    """Requests of one key and sampling are answered together, and each has at most its tokens."""
    model, params = make("qwen2")
    asked = [request(str(most), sampling=Sampling(max_tokens=most), row=most) for most in (2, 6, 3)]
    with opened(engine_of(model) if whole else only_generate(engine_of(model)), params) as requests:
        requests.add(asked)
        assert {name: len(each.tokens) for name, each in ended(requests).items()} == {"2": 2, "6": 6, "3": 3}


@pytest.mark.parametrize("rows", [(0, 1), (1, 2), (2, 3), (0, 2)])
def test_rows_of_one_prompt_draw_by_their_numbers_whoever_answers(rows):
    """Also where they are not all samples of one prompt, as an engine that answers prompts at once numbers these."""
    model, params = make("qwen2")
    found = []
    for engine in (engine_of(model), only_generate(engine_of(model))):
        with opened(engine, params) as requests:
            requests.add([request(str(row), row=row) for row in rows])
            found.append({name: each.tokens.tolist() for name, each in ended(requests).items()})
    assert found[0] == found[1]


def test_a_row_that_goes_on_counts_with_all_its_tokens_towards_the_longest():
    model, params = make("gpt2")
    with opened(engine_of(model), params) as requests:
        requests.add([request("a", (3, 4) * 20, keep=True)])
        had = 40 + len(ended(requests)["a"].tokens)
        most = Sampling(max_tokens=64 - had - 2)
        requests.add([request("b", (7, 8), after="a", sampling=most)])  # exactly as long as may be
        with pytest.raises(ValueError, match=rf"'c' has {had + 2} tokens.* may reach 65.*at most 64:"):
            requests.add([request("c", (7, 8), after="a", sampling=attrs.evolve(most, max_tokens=65 - had - 2))])


def test_a_kept_row_is_read_anew_behind_an_update():
    model, params = make("qwen2")
    noise = torch.Generator().manual_seed(1)
    newer = {name: x + 0.1 * torch.randn(x.shape, generator=noise).double() for name, x in params.items()}
    with opened(engine_of(model), params) as requests:
        requests.add([request("a", keep=True)])
        first = ended(requests)["a"].tokens.tolist()
        requests.update(newer, 1)
        requests.add([request("b", (7, 8), after="a", row=2)])
        found = ended(requests)["b"]
    with opened(engine_of(model), newer) as requests:
        requests.add([request("b", (3, 4, *first, 7, 8), row=2)])
        expected = ended(requests)["b"]
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-12)


def test_an_update_finds_rows_that_read_and_prompts_that_wait():
    """An observation that is read by steps is read anew, once; samples of a prompt that was read begin anew, too."""
    model, params = make("qwen2")
    noise = torch.Generator().manual_seed(1)
    newer = {name: x + 0.1 * torch.randn(x.shape, generator=noise).double() for name, x in params.items()}
    long = Sampling(max_tokens=5)
    with opened(engine_of(model, max_rows=1), params) as requests:
        requests.add([request("a", sampling=long, keep=True)])
        first = ended(requests)["a"].tokens.tolist()
        requests.add([request("b", (7, 8, 9, 5), after="a", row=2, sampling=long)])
        requests.step()
        requests.update(newer, 1)
        reading = ended(requests)["b"]
        requests.add([request(name, row=row, sampling=long) for row, name in enumerate("cd")])
        requests.step()  # the prompt is read, and the second sample waits
        requests.update(params, 2)
        samples = ended(requests)
    with opened(engine_of(model), newer) as requests:
        requests.add([request("b", (3, 4, *first, 7, 8, 9, 5), row=2, sampling=long)])
        expected = ended(requests)["b"]
    with opened(engine_of(model), params) as requests:
        requests.add([request("d", row=1, sampling=long)])
        alone = ended(requests)["d"]
    for found, own in ((reading, expected), (samples["d"], alone)):
        assert torch.equal(found.tokens, own.tokens)
        torch.testing.assert_close(found.log_probs, own.log_probs, rtol=0, atol=1e-12)


def test_requests_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="'a' has no tokens"):
        request(ids=())
    with pytest.raises(ValueError, match=r"sampling.n = 2"):
        request(sampling=Sampling(n=2))


def test_a_request_goes_on_after_one_that_was_cancelled_and_several_after_one():
    """By the tokens that it had, which nobody reads twice."""
    model, params = make("qwen2")
    long = Sampling(max_tokens=9)
    with opened(engine_of(model), params) as requests:
        requests.add([request("a", sampling=long, keep=True)])
        for _ in range(3):
            requests.step()
        requests.cancel(["a"])
        result = requests.step()
        (first,) = result.finished
        assert len(first.tokens) == 3
        requests.add([request(name, (7, 8), after="a", row=5) for name in ("b", "c")])
        requests.release(["a"])
        ended = []
        while requests.counts.open:
            ended += requests.step().finished
    whole = (3, 4, *first.tokens.tolist(), 7, 8)
    with opened(engine_of(model), params) as requests:
        requests.add([request("whole", whole, row=5)])
        alone = []
        while requests.counts.open:
            alone += requests.step().finished
    assert len(ended) == 2
    for each in ended:
        assert torch.equal(each.tokens, alone[0].tokens)
        torch.testing.assert_close(each.log_probs, alone[0].log_probs, rtol=0, atol=1e-12)
        assert each.fed == 1 + 2 + 3


def test_what_would_not_fit_waits_and_what_never_fits_is_refused():
    model, params, rows, expected = reference("qwen2", 3)
    one = 2 * 2 * 4 * 8 * 2  # bytes of a token: two layers' keys and values, 2 heads of 4 numbers
    counts = []
    found, _ = told(
        engine_of(model, cache_bytes=45 * one),
        params,
        rows,
        delay=lambda row, turn: 3,
        meanwhile=lambda requests, step: counts.append(requests.counts),
    )
    same(found, expected)
    assert max(count.drawing for count in counts) < 6
    assert any(count.waiting for count in counts)
    small = engine_of(model, cache_bytes=20 * one)
    with opened(small, params) as requests, pytest.raises(ValueError, match="cache_bytes = "):
        requests.add([request(sampling=Sampling(max_tokens=40))])


class Schedule:
    """Who draws when, by the documentation: rows that come back go first, one row always may begin, and prompts leave
    room for all that is kept."""

    def __init__(self, budget, max_rows, chunk):
        self.budget, self.max_rows, self.chunk = budget, max_rows, chunk
        self.coming, self.fresh, self.live, self.kept = [], [], [], {}

    def fits(self, row, others, fresh):
        count = len(self.live) + len(others)
        if count >= self.max_rows or not count or self.budget is None:
            return count < self.max_rows
        longest = max(each["whole"] for each in (*self.live, *others, row))
        one = longest + (max(self.chunk, longest // 2) if self.live else 0)
        if fresh:
            return (count + 1 + len(self.kept) + len(self.coming)) * one <= self.budget
        held = sum(self.kept.values()) + sum(each["read"] for each in self.coming)
        return (count + 1) * one + held <= self.budget

    def step(self):
        """The requests that end in a step."""
        dealt, blocked = [], set()
        while True:
            queues = [(fresh, rows) for fresh, rows in ((False, self.coming), (True, self.fresh)) if rows]
            found = next((each for each in queues if each[0] not in blocked), None)
            if found is None:
                break
            fresh, rows = found
            if self.fits(rows[0], dealt, fresh):
                dealt.append(rows.pop(0))
            else:
                blocked.add(fresh)
        self.live += dealt
        ended = []
        for row in [*self.live]:
            row["before"] -= 1
            if row["before"] < 0:
                row["left"] -= 1
            if not row["left"]:
                self.live.remove(row)
                ended.append(row["name"])
                if row["keep"]:
                    self.kept[row["name"]] = row["whole"] - 1  # all but the last token have been read
        return ended


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["fresh", "fresh", "after", "after", "release"]),
        st.integers(1, 12),
        st.integers(1, 5),
        st.booleans(),
    ),
    min_size=1,
    max_size=10,
)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(ARRIVALS, st.sampled_from([None, 44, 70, 130]), st.sampled_from([2, 3, 1024]))
def test_rows_draw_as_soon_as_they_fit_beside_all_that_is_held(arrivals, budget, max_rows):
    model, params = make("qwen2")
    one = 2 * 2 * 4 * 8 * 2  # bytes of a token: two layers' keys and values, 2 heads of 4 numbers
    engine = engine_of(model, max_rows=max_rows, cache_bytes=None if budget is None else budget * one)
    expected, found, wholes = Schedule(budget, max_rows, 4), {}, {}
    with pytest.MonkeyPatch.context() as patch, opened(engine, params) as requests:
        patch.setattr(places, "CHUNK", 4)

        def step():
            finished = requests.step().finished
            assert sorted(each.name for each in finished) == sorted(expected.step())
            found.update({each.name: each for each in finished})
            waiting = len(expected.coming) + len(expected.fresh)
            assert requests.counts == (waiting, len(expected.live), len(expected.kept))

        for number, (gap, kind, length, most, keep) in enumerate(arrivals):
            for _ in range(gap):
                step()
            last = next(iter(expected.kept), None)
            if kind == "release":
                requests.release([last or "nobody"])
                expected.kept.pop(last, None)
                continue
            after = last if kind == "after" else None
            own = {"name": f"{number}", "sampling": Sampling(max_tokens=most), "row": number, "keep": keep}
            before = 0 if after is None else wholes[after]
            asked = request(ids=tuple(3 + (number + i) % 9 for i in range(length)), after=after, **own)
            if budget is not None and before + length + most > budget:
                with pytest.raises(ValueError, match="cache_bytes = "):
                    requests.add([asked])
                continue
            requests.add([asked])
            requests.release([] if after is None else [after])
            wholes[f"{number}"] = whole = before + length + most
            # up to 8 tokens, of which the first is the last one drawn, are read one in each step
            slow = after is not None and length + 1 <= 8
            row = {"name": f"{number}", "whole": whole, "left": most, "keep": keep, "before": length if slow else 0}
            if after is None:
                expected.fresh.append(row)
            else:
                expected.coming.append(row | {"read": expected.kept.pop(after)})
        while expected.live or expected.coming or expected.fresh:
            step()
        assert requests.counts.open == 0
    assert {name: len(each.tokens) for name, each in found.items()} == {
        f"{number}": most for number, (_, _, _, most, _) in enumerate(arrivals) if f"{number}" in wholes
    }


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"shard": 2}])
def test_ranks_that_cut_the_model_answer_as_one(axes):
    model, params, rows, expected = reference("qwen2")

    def on_rank(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding())
        placed = models.place(model, mesh)
        own = models.own_params(placed, params, mesh)
        return told(engine_of(placed, mesh=mesh), own, rows, delay=lambda row, turn: (3 * row + turn) % 5)[0]

    for found in simulate(axes, on_rank):
        same(found, expected, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "idefics3"])
def test_images_stay_with_their_rows(name):
    """Positions of three axes go on behind them, also where a row comes back at another column, and what is added
    behind the first layers is there."""
    _, model, params = vision.make(name)
    g = torch.Generator().manual_seed(5)
    plain = talks(4, 3, longest=20, seed=18, size=20)
    shown = [vision.prompt(name, count, g, 3 + i) for i, count in enumerate((1, 0, 2, 1))]
    rows = [row._replace(prompt=tuple(ids), inputs=inputs) for row, (ids, inputs) in zip(plain, shown, strict=True)]
    # a response that holds what stands for an image cannot be read as a prompt
    rows = with_samplings(rows, Sampling(greedy=True, max_tokens=3))
    expected, _ = told(only_generate(engine_of(model)), params, rows)
    found, fed = told(engine_of(model), params, rows, delay=lambda row, turn: (5 * row + turn) % 4)
    same(found, expected, atol=1e-10)
    assert fed == read_once(rows, found)


@pytest.mark.skipif(needs_cpp() is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("longest", [3, 14])
def test_exact_log_probs_stay_exact(longest):
    """Bit for bit, whether an observation is read by steps or in a pass, and whoever shares it."""
    engine, params = exact_engine_of("qwen3")
    rows = with_samplings(talks(6, 3, longest=longest, seed=4), Sampling(max_tokens=6, temperature=0.7))
    expected, _ = told(only_generate(engine), params, rows)
    found, _ = told(engine, params, rows, delay=lambda row, turn: (5 * row + turn) % 4)
    same(found, expected, atol=0)


@pytest.mark.skipif(needs_cpp() is not None, reason="needs a C++ compiler")
def test_exact_log_probs_are_the_newer_policys_after_an_update():
    engine, params = exact_engine_of("qwen3")
    newer, found = {name: x.flip(0) * 1.5 for name, x in params.items()}, []
    for first in (params, newer):
        with opened(engine, first) as requests:
            requests.add([request("a")])
            ended(requests)
            requests.update(newer, 1)
            requests.add([request("b")])
            found.append(ended(requests)["b"])
    assert torch.equal(found[0].tokens, found[1].tokens)
    assert torch.equal(found[0].log_probs, found[1].log_probs)


def test_experts_are_those_of_whole_contexts():
    model, params = make("qwen3_moe")

    def collected(engine):
        with opened(engine, params) as requests:
            requests.add([request("a", sampling=Sampling(max_tokens=3), keep=True)])
            found = []
            while requests.counts.open:
                found += requests.step().finished
            requests.add([request("b", (7, 8), after="a")])
            while requests.counts.open:
                found += requests.step().finished
        return found

    own, whole = collected(engine_of(model, routed=True)), collected(only_generate(engine_of(model, routed=True)))
    for a, b in zip(own, whole, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.experts, b.experts)
    assert [len(x.experts) for x in own] == [2 + 2, 1 + 2 + 3]


def test_an_update_leaves_the_experts_of_each_token_once():
    """Rows under way are read anew: experts of the first reading would stand before those of the second."""
    model, params = make("qwen3_moe")
    engine = engine_of(model, routed=True)
    with engine.open(params) as requests:
        requests.add([request("a", sampling=Sampling(max_tokens=4))])
        requests.step()
        requests.step()
        requests.update(params, 1)
        found = []
        while requests.counts.open:
            found += requests.step().finished
    with opened(only_generate(engine), params) as requests:
        requests.add([request("a", sampling=Sampling(max_tokens=4))])
        (expected,) = requests.step().finished
    assert torch.equal(found[0].tokens, expected.tokens)
    assert torch.equal(found[0].experts, expected.experts)


@given(st.lists(st.floats(width=32) | st.integers(-(2**31), 2**31 - 1), max_size=4))
def test_lists_become_the_tensors_that_torch_makes_of_them(values):
    whole = [int(x) for x in values if x == x and abs(x) < 2**31]
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(tensor_of(values, dtype).nan_to_num(7), torch.tensor(values, dtype=dtype).nan_to_num(7))
    for dtype in (torch.int32, torch.int64):
        made = tensor_of(whole, dtype)
        assert made.dtype == dtype
        assert made.tolist() == whole
