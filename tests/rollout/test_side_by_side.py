"""Adapters side by side: each row is answered as by an engine that has its adapter alone."""

from functools import cache

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import models
from fppo.key import Key
from fppo.models import lora
from fppo.models.adapted import Lora
from fppo.models.precision import KeepDouble
from fppo.models.several import Adapter, fitted
from fppo.rollout import drawn as drawing
from fppo.rollout import places
from fppo.rollout.engine import Sampling
from fppo.rollout.requests import Request
from fppo.rollout.scores import Scores
from fppo.runtime.mesh import Mesh
from fppo_kernels.collectives import Axis
from tests.models.families import make, plain
from tests.models.hybrids import HYBRIDS
from tests.rollout.test_embedded import engine_of
from tests.rollout.test_exact import engine_of as exact_engine_of

SAMPLING = Sampling(max_tokens=6, stop_token_ids=(5, 9))
# adapters of other ranks, scales and weights, one with the vocabulary head
SPECS = {
    "one": Lora(2, 4.0),
    "two": Lora(3, 3.0, scaling="rslora"),
    "head": Lora(1, 2.0, ("all-linear", "HEAD")),
    "few": Lora(5, 5.0, ("LAST",)),
}


def adapted(name, spec, seed):
    """An adapted model of a family, and factors none of which is 0."""
    model, params = make(name)
    head, _ = models.heads.vocabulary_head(model)
    some = next(iter(lora.linear_weights(model)))
    targets = tuple({"HEAD": head, "LAST": some}.get(x, x).removesuffix(".weight") for x in spec.targets)
    model, adapter = lora.adapt(model, params, attrs.evolve(spec, targets=targets), key=Key(seed), dtype=torch.float64)
    g = torch.Generator().manual_seed(seed)
    return model, {n: x + 0.2 * torch.randn(x.shape, generator=g, dtype=torch.float64) for n, x in adapter.items()}


@cache
def family(name):
    """A base, and adapters of it by name."""
    return make(name), {own: adapted(name, spec, 3 + i) for i, (own, spec) in enumerate(SPECS.items())}


def request(row, adapter, ids=None, **changes):
    changes = {"sampling": SAMPLING, **changes}
    ids = (3, 4 + row % 5, 7, *range(10, 10 + row % 4)) if ids is None else ids
    return Request(name=f"{row}", ids=ids, key=Key(3), row=row, adapter=adapter, **changes)


def run(requests, found, steps=None):
    while requests.counts.open and steps != 0:
        found |= {one.name: one for one in requests.step().finished}
        steps = None if steps is None else steps - 1
    return found


def together(engine, params, adapters, asked, later=(), between=2):
    """The answers of one engine to requests, some of which come later."""
    with engine.open(params) as requests:
        for own, (model, factors) in adapters.items():
            requests.put(own, Adapter.of(model, factors), version=len(own))
        requests.add(asked)
        found = run(requests, {}, between)
        requests.add(later)
        return run(requests, found)


@cache
def alone(family_name, merges):
    """Answers to rows 0 to 11 by each adapter alone and by the base, by the adapter's name and the row."""
    (model, params), adapters = family(family_name)
    found = {}
    for own in (None, *adapters):
        on, weights = (model, params) if own is None else adapters[own]
        rows = [attrs.evolve(request(row, None), scores=Scores(prompt=True)) for row in range(12)]
        with engine_of(on, merges=merges).open(weights) as requests:
            requests.add(rows)
            found |= {(own, name): one for name, one in run(requests, {}).items()}
    return found


def same(got, expected, atol=1e-12):
    assert torch.equal(got.tokens, expected.tokens)
    assert got.end == expected.end
    torch.testing.assert_close(got.log_probs, expected.log_probs, rtol=0, atol=atol)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    owners=st.lists(st.sampled_from([None, *SPECS]), min_size=12, max_size=12),
    cut=st.integers(0, 12),
    between=st.integers(0, 7),
    max_rows=st.sampled_from((1, 3, 1024)),
    chunk=st.sampled_from((1, 128)),
    prefill=st.sampled_from((9, 1024)),
    graphs=st.booleans(),
    merges=st.booleans(),
    drafts=st.sampled_from((0, 0, 3)),
)
def test_each_row_is_answered_as_by_its_adapter_alone(
    owners, cut, between, max_rows, chunk, prefill, graphs, merges, drafts
):
    """Whatever others are beside it, whenever they come, merged or not; its prompt is scored by its adapter, too."""
    (model, params), adapters = family("qwen2")
    asked = [request(row, own, scores=Scores(prompt=True)) for row, own in enumerate(owners)]
    texts = [[*asked[int(name)].ids, *one.tokens.tolist()] for (_, name), one in alone("qwen2", merges).items()]

    def draft(row, ids, most):  # another adapter's tokens, or right
        return next((text[len(ids) : len(ids) + most] for text in texts if text[: len(ids)] == [*ids]), [])

    graphs = graphs and not drafts
    engine = engine_of(model, max_rows=max_rows, prefill_tokens=prefill, graphs=graphs)
    engine = attrs.evolve(engine, draft_tokens=drafts, drafter=lambda: draft)
    with pytest.MonkeyPatch.context() as patch:
        for module in (places, drawing):
            patch.setattr(module, "CHUNK", chunk)
        found = together(engine, params, adapters, asked[:cut], asked[cut:], between)
    for row, own in enumerate(owners):
        got, expected = found[f"{row}"], alone("qwen2", merges)[own, f"{row}"]
        same(got, expected)
        torch.testing.assert_close(
            got.prompt_scores.log_probs, expected.prompt_scores.log_probs, rtol=0, atol=1e-12, equal_nan=True
        )
        assert set(got.versions.tolist()) <= {0 if own is None else len(own)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma2", "gemma3", "phi3", "gpt_neox", "opt", "cohere"])
def test_families_answer_side_by_side(name):
    """By their own modules too, with weights stored either way, tied and capped heads."""
    (model, params), adapters = family(name)
    owners = [None, *SPECS, *SPECS]
    asked = [request(row, own) for row, own in enumerate(owners)]
    found = together(engine_of(model), params, adapters, asked[:4], asked[4:])
    for row, own in enumerate(owners):
        same(found[f"{row}"], alone(name, None)[own, f"{row}"])


def test_a_decoder_adds_what_modules_add():
    (model, params), adapters = family("qwen3")
    asked = [request(row, own) for row, own in enumerate([None, *SPECS, *SPECS])]
    found = together(engine_of(model), params, adapters, asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fppo.rollout.embedded.decoder_of", lambda *args, **how: None)
        expected = together(engine_of(model), params, adapters, asked)
    for name, one in found.items():
        same(one, expected[name])


def test_equal_prompts_of_two_adapters_are_read_apart_and_of_one_once():
    (model, params), adapters = family("qwen2")
    ids = (3, 4, 5, 6)
    asked = [request(row, own, ids) for row, own in enumerate(["one", "one", "two", None, None])]
    found = together(engine_of(model), params, adapters, asked)
    fed = [found[f"{row}"].fed - len(found[f"{row}"].tokens) + 1 for row in range(5)]
    assert fed == [4, 0, 4, 4, 0]


def cached_answer(modules, changes, ids, tokens):
    """The log-probs of tokens behind `ids` by a model whose weights change after so many of them, with the keys and
    values of those before."""
    cache, found, of = None, [], modules[0]
    new = [*ids]
    for i, token in enumerate(tokens):
        of = modules[sum(i >= change for change in changes)]
        with torch.no_grad(), KeepDouble():
            out = of(input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True)
        cache, new = out.past_key_values, [token]
        found.append(out.logits[0, -1].log_softmax(-1)[token])
    return torch.stack(found)


def test_what_is_put_in_flight_goes_on_with_what_was_read():
    """Tokens behind it are drawn by the newer factors, on the keys and values of the older ones."""
    (model, params), adapters = family("qwen2")
    (on, first), (_, other) = adapters["one"], adapted("qwen2", SPECS["one"], 20)
    asked = [request(row, own, sampling=Sampling(max_tokens=7)) for row, own in enumerate(["a", "b", "a", None])]
    with engine_of(model).open(params) as requests:
        for name in ("a", "b"):
            requests.put(name, Adapter.of(on, first), version=1)
        requests.add(asked)
        found = run(requests, {}, 3)
        requests.put("a", Adapter.of(on, other), version=2)
        found = run(requests, found)
        requests.add([request(9, "a", sampling=Sampling(max_tokens=7))])
        found = run(requests, found)
    modules = [plain(model, lora.merged(on, x)) for x in (first, other)]
    for row in (0, 2):
        got = found[f"{row}"]
        assert got.versions.tolist() == [1, 1, 1, 2, 2, 2, 2]
        expected = cached_answer(modules, [3], asked[row].ids, got.tokens.tolist())
        torch.testing.assert_close(got.log_probs, expected, rtol=0, atol=1e-12)
    assert found["1"].versions.tolist() == [1] * 7
    assert found["9"].versions.tolist() == [2] * 7
    whole = cached_answer(modules[1:], [], request(9, "a").ids, found["9"].tokens.tolist())
    torch.testing.assert_close(found["9"].log_probs, whole, rtol=0, atol=1e-12)
    with engine_of(model).open(params) as requests:
        requests.put("b", Adapter.of(on, first))
        requests.add([asked[1], asked[3]])
        beside = run(requests, {})
    for row in (1, 3):
        same(found[f"{row}"], beside[f"{row}"])


def test_factors_are_copied_when_they_are_put():
    """The trainer may overwrite its own."""
    (model, params), adapters = family("qwen2")
    on, factors = adapters["one"]
    own = {name: x.clone() for name, x in factors.items()}
    with engine_of(model).open(params) as requests:
        requests.put("one", Adapter.of(on, own))
        for x in own.values():
            x.fill_(torch.nan)
        requests.add([request(0, "one")])
        same(run(requests, {})["0"], alone("qwen2", None)["one", "0"])


def test_a_broken_adapter_breaks_its_own_rows_alone():
    (model, params), adapters = family("qwen2")
    on, factors = adapters["one"]
    broken = {name: torch.full_like(x, torch.nan) for name, x in factors.items()}
    adapters = {**adapters, "broken": (on, broken)}
    asked = [request(row, own) for row, own in enumerate(["broken", None, "two", "broken", "one"])]
    found = together(engine_of(model), params, adapters, asked)
    for row, own in ((1, None), (2, "two"), (4, "one")):
        same(found[f"{row}"], alone("qwen2", None)[own, f"{row}"])


def test_a_newer_base_is_read_anew_under_its_adapters():
    (model, params), adapters = family("qwen2")
    (on, factors) = adapters["one"]
    newer = {name: x * 1.1 for name, x in params.items()}
    with engine_of(model).open(params) as requests:
        requests.put("one", Adapter.of(on, factors))
        requests.add([request(0, "one", sampling=Sampling(max_tokens=6))])
        run(requests, {}, 2)
        requests.update(newer, 5)
        got = run(requests, {})["0"]
    both = attrs.evolve(on, frozen=attrs.evolve(on.frozen, params=newer))
    module = plain(model, lora.merged(both, factors))
    expected = cached_answer([module], [], request(0, "one").ids, got.tokens.tolist())
    torch.testing.assert_close(got.log_probs[2:], expected[2:], rtol=0, atol=1e-12)


def test_a_request_goes_on_by_the_same_adapter():
    (model, params), adapters = family("qwen2")
    on, factors = adapters["one"]
    with engine_of(model).open(params) as requests:
        requests.put("one", Adapter.of(on, factors))
        requests.add([request(0, "one", keep=True)])
        first = run(requests, {})["0"]
        after = Request(name="b", ids=(7, 8), after="0", key=Key(3), row=5, adapter="one", sampling=SAMPLING)
        with pytest.raises(ValueError, match="'b': after = '0' was by adapter 'one', not by None"):
            requests.add([attrs.evolve(after, adapter=None)])
        requests.add([after])
        with pytest.raises(ValueError, match=r"adapter 'one': 1 requests with it are open, \['b'\]"):
            requests.drop("one")
        got = run(requests, {})["b"]
        whole = (*request(0, None).ids, *first.tokens.tolist(), 7, 8)
        requests.add([Request(name="c", ids=whole, key=Key(3), row=5, adapter="one", sampling=SAMPLING)])
        same(got, run(requests, {})["c"])
        requests.drop("one")
        assert requests.counts.kept == 0
        with pytest.raises(ValueError, match="'c': there is no adapter 'one': `put` it first"):
            requests.add([attrs.evolve(after, name="c", after=None)])


def test_adapters_that_cannot_run_beside_others_are_refused():
    (model, params), adapters = family("qwen2")
    on, factors = adapters["one"]
    other, far = adapted("llama", SPECS["one"], 3)
    experts, base = make("qwen3_moe")
    stacks, of_stacks = lora.adapt(experts, base, SPECS["one"], key=Key(0))
    states, of_states = make("qwen3_next", config=HYBRIDS["qwen3_next"])
    exact, exactly = exact_engine_of("qwen3")
    short = {n: x[..., :-1] if n.endswith("q_proj.weight.lora_A") else x for n, x in factors.items()}
    for engine, weights, adapter, text in (
        (engine_of(on), factors, Adapter.of(on, factors), "'x': the engine's model is adapted itself"),
        (engine_of(experts), base, Adapter.of(stacks, of_stacks), r"'x': weights \[.*experts.* are of experts"),
        (engine_of(experts), base, Adapter.of(other, far), "'x': the engine's model has no weights"),
        (engine_of(model), params, Adapter.of(on, short), "'x': factors .* of model.layers.0.self_attn.q_proj.weight"),
        (engine_of(states), of_states, Adapter.of(on, factors), "'x': model type 'qwen3_next' carries states"),
        (exact, exactly, Adapter.of(on, factors), "'x': an exact engine runs no adapters"),
    ):
        with engine.open(weights) as requests, pytest.raises(ValueError, match=text):
            requests.put("x", adapter)
    with pytest.raises(ValueError, match="the model has no adapter"):
        Adapter.of(model, params)


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_adapters_run_beside_a_whole_model_alone(axis):
    (model, _), adapters = family("qwen2")
    adapter, cpu = Adapter.of(*adapters["one"]), torch.device("cpu")
    assert fitted(model, adapter, "x", cpu, torch.float32).factors.keys() == adapter.factors.keys()
    placed = models.place(model, Mesh({axis: Axis(2, 0)}))
    with pytest.raises(ValueError, match="adapter 'x': adapters side by side run on one rank, not on parts of a model"):
        fitted(placed, adapter, "x", cpu, torch.float32)
