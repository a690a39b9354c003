"""What a check is given reaches its laws, and the updates that it tries are of every kind that it says."""

import inspect
import math
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import attrs
import pytest
import torch

from fppo import laws, losses
from fppo.laws import context, estimators, layout, temporal, ulysses, updates, whole
from fppo.laws import exact as exact_laws
from fppo.laws import losses as of_losses
from fppo.laws import shared as shared_laws
from fppo.laws.verdicts import _suite as verdict_suite
from fppo.steps import actor
from fppo_kernels.attention.sdpa import sdpa
from tests import tiny
from tests.laws.test_sharpness import reason, right
from tests.models.families import make


def extras(*columns):
    return {"selected": columns[3]}


# the check, its suite, and other values of its options
CHECKS = {
    "policy": (
        of_losses,
        laws.check_policy_loss,
        of_losses.policy_suite,
        {"reinforce": ("row", None), "extras": (extras,), "reference": (right,), "dtype": (torch.float32,)},
    ),
    "value": (
        of_losses,
        laws.check_value_loss,
        of_losses.value_suite,
        {"squared": (False,), "outputs": (3,), "reference": (right,), "dtype": (torch.bfloat16,)},
    ),
    "whole": (
        whole,
        laws.check_whole_loss,
        whole.whole_suite,
        {"reference": (right,), "dtype": (torch.float32,), "values": (True,)},
    ),
    "advantages": (
        estimators,
        laws.check_advantages,
        estimators.advantages_suite,
        {
            **dict.fromkeys(("equal_rewards", "unequal_rewards", "higher_scores"), (False,)),
            "group_rows": (2, 3),
            "reference": (right,),
            "dtype": (torch.float32,),
        },
    ),
    "whiten": (estimators, laws.check_whiten, estimators.whiten_suite, {"shift_mean": (False,), "eps": (0.1,)}),
    "temporal": (
        temporal,
        laws.check_temporal,
        temporal.temporal_suite,
        {
            "columns": (("rewards", "values", "weights"),),
            "bridges": (False,),
            "reference": (right,),
            "dtype": (torch.float32,),
        },
    ),
}


def plain(x):
    """A function with what is bound to it, or what it closes over."""
    if isinstance(x, partial):
        return plain(x.func), tuple(map(plain, x.args)), tuple(sorted((k, plain(y)) for k, y in x.keywords.items()))
    if inspect.isfunction(x):
        return x.__code__, tuple(plain(cell.cell_contents) for cell in x.__closure__ or ())
    return x


def described(suite):
    """A suite law by law, and an example of it."""
    drawn = suite.example(4, 3, 1)
    columns = {**drawn.inputs, **drawn.extras, "weights": drawn.weights}
    return (
        [(law.name, law.statement, plain(law.breach), law.way_out, plain(law.mild), law.note) for law in suite.laws],
        {name: (x.dtype, x.tolist()) for name, x in columns.items()},
        suite.see,
        suite.sizes,
    )


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name, (*_, options) in CHECKS.items() for option in options]
)
def test_an_option_of_a_check_reaches_its_laws(name, option, monkeypatch):
    module, check, suite, options = CHECKS[name]
    taken = []
    monkeypatch.setattr(module, "check_suite", lambda fn, found: taken.append((fn, found)))
    assert {*inspect.signature(check).parameters} - {*inspect.signature(suite).parameters} <= {
        *("loss_fn", "estimator", "whiten")
    }
    assert {*options} == {*inspect.signature(suite).parameters}
    for value in options[option]:
        check(right, **{option: value})
        fn, found = taken.pop()
        assert fn is right
        assert described(found) == described(suite(**{option: value})) != described(suite())


def test_each_kind_of_verdicts_has_the_suite_of_its_check():
    expected = {
        "policy_loss": of_losses.policy_suite(),
        "value_loss": of_losses.value_suite(),
        "whole_loss": whole.whole_suite(),
        "whole_value_loss": whole.whole_suite(values=True),
        "advantages": estimators.advantages_suite(),
        "gae": temporal.gae_suite(),
        "temporal": temporal.temporal_suite(),
        "whiten": estimators.whiten_suite(),
    }
    for kind, suite in expected.items():
        assert described(verdict_suite(kind, None, 1, torch.float64)) == described(suite), kind
    assert described(verdict_suite("advantages", right, 2, torch.float32)) == described(
        estimators.advantages_suite(reference=right, group_rows=2, dtype=torch.float32)
    )


NAMES = {
    "value": (of_losses.value_suite(), ["values", "old_values", "returns", "mask"]),
    "several": (of_losses.value_suite(outputs=3), ["outputs", "old_values", "returns", "mask"]),
    "policy": (of_losses.policy_suite(), ["log_probs", "old_log_probs", "advantages", "mask"]),
}


@pytest.mark.parametrize("name", NAMES)
def test_batches_of_losses_are_near_and_far_with_every_mask_and_weights_inside_it(name):
    suite, names = NAMES[name]
    kinds, gaps = set(), {0: [], 1: []}
    for seed, example in suite.examples():
        assert [*example.inputs] == names
        first, old, third, mask = example.inputs.values()
        assert (example.weights > 0).equal(mask)
        assert {x.dtype for x in (first, old, third, example.weights)} == {torch.float64}
        kinds.add((mask.all().item(), mask.any(1).all().item(), bool((mask[:, 1:] & ~mask[:, :-1]).any())))
        if name == "several":
            assert first.shape == (*mask.shape, 3)
            continue
        assert (first < 0).all()
        assert (old < 0).all()
        gaps[seed % 2].append((first - old).abs().flatten())
    assert kinds >= {(True, True, False), (False, True, False), (False, False, True)}
    if name != "several":
        far, near = (torch.cat(gaps[i]).median() for i in (0, 1))
        assert near < 0.1 < 0.4 < far < 1.0
        assert any(bool((example.inputs[names[2]] < 0).any()) for _, example in suite.examples())


@attrs.frozen(eq=False)
class Spied:
    """An update that keeps what it is made of and called with."""

    forward: object
    loss_fn: object
    loop: object
    optimizer: object
    terms: object = actor.PLAIN
    seen: ClassVar[list] = []

    def __call__(self, state, batch):
        self.seen.append((self, batch))
        return state, {}


@pytest.fixture
def spied(monkeypatch):
    monkeypatch.setattr(actor, "UpdateActor", Spied)
    Spied.seen.clear()
    return Spied.seen


def test_the_actors_update_is_tried_with_every_term(spied):
    build, name = updates._actor_update(losses.gpg, None)
    assert name == "UpdateActor with gpg"
    dense = SimpleNamespace(model=SimpleNamespace(routers=()))
    made = build(forward=dense, loop="loop", optimizer="optimizer")
    assert (made.forward, made.loss_fn, made.loop, made.optimizer) == (dense, losses.gpg, "loop", "optimizer")
    terms = made.terms
    assert terms.temperature != 1.0
    assert min(terms.entropy_coef, terms.kl_coef, terms.nll_coef) > 0
    assert terms.kl_kind != "k1"
    own, _ = updates._actor_update(losses.gpg, actor.PolicyTerms(kl_coef=0.5))
    assert own(forward=dense, loop="loop", optimizer="optimizer").terms == actor.PolicyTerms(kl_coef=0.5)
    chosen = actor.SelectiveLoss(losses.kl_cov, losses.select_kl_cov)
    assert updates._actor_update(chosen, None)[1] == "UpdateActor with kl_cov"


@pytest.mark.parametrize("rows", [3, 4])
def test_routers_are_tried_with_their_losses_and_with_choices_replayed_or_not(rows, spied):
    from fppo.steps.forward import Forward

    model, _ = make("qwen3_moe")
    build, _ = updates._actor_update(losses.gpg, None)
    batch = tiny.experience(0, rows)
    build(forward=Forward(model), loop="loop", optimizer="optimizer")("state", batch)
    ((made, given),) = spied
    assert made.forward.replay == (rows == 4)
    assert made.terms.router_z_coef > 0
    assert (made.terms.balance_coef > 0) == (rows == 4)
    assert (made.terms.temperature, made.terms.kl_coef, made.terms.nll_coef) == (0.9, 0.1, 0.2)
    assert (given.routed is None) == (rows == 3)
    if rows == 4:
        experts = model.routers[0].experts
        assert given.routed.shape == (*batch.tokens.shape, len(model.routers), model.routers[0].chosen)
        assert given.routed.dtype == torch.uint8
        assert {*given.routed.unique().tolist()} == {*range(experts)}
        assert all(len({*choice}) == len(choice) for choice in given.routed.flatten(0, 2).tolist())


def noting(seen):
    """A builder of updates that change nothing, which notes what it is given."""

    def build(*, forward, loop, optimizer):
        seen.append((forward, loop, optimizer))
        return lambda state, batch: (state, {})

    return build


@pytest.mark.slow
@pytest.mark.parametrize("modes", [losses.MODES, ("token-mean",)])
def test_a_check_of_updates_tries_every_mode_on_every_cut(modes):
    seen = []
    laws.check_update_fn(noting(seen), head="value", outputs=4, modes=modes, name="mine")
    assert {loop.weight_mode for _, loop, _ in seen} == {*modes}
    assert all((loop.horizon == 7) == (loop.weight_mode == "seq-mean-token-sum-norm") for _, loop, _ in seen)
    assert {loop.epochs for _, loop, _ in seen} == {1}
    cuts = {(x.size is None, x.token_budget is None) for x in (loop.micro_batching for _, loop, _ in seen)}
    assert cuts == {(True, False), (False, True)}
    assert {forward.remove_padding for forward, *_ in seen} == {True, False}
    assert {(forward.model.head, forward.model.outputs) for forward, *_ in seen} == {("value", 4)}
    forward, _, optimizer = seen[0]
    params, grads = {"a": torch.ones(3).double()}, {"a": torch.tensor([1.0, -2.0, 0.5]).double()}
    after, moments, _ = optimizer.update(params, grads, optimizer.init(params), 0, mesh=forward.mesh, donate=False)
    assert torch.equal(moments.mu["a"], grads["a"])  # the gradient itself
    assert float((after["a"] - params["a"]).abs().min()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_check_of_layouts_tries_every_mode_on_its_meshes(head):
    seen = []
    laws.check_layout_fn(noting(seen), head=head, modes=("token-sum",), max_ranks=2, each=1, name="mine")
    assert {loop.weight_mode for _, loop, _ in seen} == {"token-sum"}
    meshes = {tuple(forward.mesh[axis].size for axis in layout.AXES) for forward, *_ in seen}
    assert {math.prod(sizes) for sizes in meshes} == {1, 2}
    assert len(meshes) > 4
    assert {forward.model.config.model_type for forward, *_ in seen} == {"qwen2", "llama", "glm4_moe"}
    assert {forward.model.head for forward, *_ in seen} == {head}
    assert {bool(forward.share_prompts) for forward, *_ in seen} == {True, False}
    biased = {forward.model.config.model_type for forward, loop, _ in seen if loop.balance_rate > 0}
    assert biased == ({"glm4_moe"} if head == "lm" else set())
    forward, _, optimizer = seen[0]
    ones = {"a": torch.full((4,), 3.0)}
    _, moments, _ = optimizer.update(ones, ones, optimizer.init(ones), 0, mesh=forward.mesh, donate=False)
    assert float(moments.mu["a"].norm()) == pytest.approx(1.0, rel=1e-5)  # clipped


def of_ranks(part=None, rank=0, amount=0.0):
    """Results and shares of two ranks; one part of one is off."""

    def on_ranks(subject, attention, example):
        out, leaves = ulysses._whole(attention, example)
        found = []
        for number in range(2):
            shares = {name: (0.25 + 0.5 * number) * x for name, x in leaves.items()}
            own = out + amount * (part == "result" and number == rank)
            if part in shares and number == rank:
                shares[part] = shares[part] + amount
            found.append((own, shares))
        return found

    return on_ranks


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("part", ["result", "query", "key", "value", "sinks"])
def test_every_ranks_result_and_every_share_of_a_gradient_count(part, rank):
    example = ulysses._example(2, 2, 2, 3, 4, 4)
    assert "sinks" in example.extras
    for tolerance in (1e-10, 1e-12):
        for amount, seen in ((1e3 * tolerance, True), (0.0, False)):
            values, shares = ulysses.laws_of_ranks(sdpa, of_ranks(part, rank, amount), tolerance)
            words = [reason(law, None, example) for law in (values, shares)]
            assert (words[0] is not None) == (seen and part == "result")
            assert (words[1] is not None) == (seen and part != "result")
            if seen:
                assert (
                    f"the result on rank {rank}" if part == "result" else f"the gradient by {part}, summed"
                ) in "".join(filter(None, words))
    assert (ulysses.TOLERANCE, context.TOLERANCE) == (1e-10, 1e-12)


def test_rows_that_ranks_cut_have_heads_windows_caps_sinks_and_a_length_that_divides():
    kinds, cut = set(), set()
    for n in ulysses.RANKS:
        for rows, width in ((1, 5), (3, 2), (4, 7)):
            for seed in range(len(ulysses._CASES)):
                x = ulysses._example(n, n, n, rows, width, seed)
                q, k, v = x.inputs.values()
                assert len(q) % n == 0 == int(x.extras["lengths"].sum()) % n
                assert q.shape[1] % k.shape[1] == 0
                assert v.shape[2] != q.shape[2]
                kinds.add(
                    (
                        k.shape[1] < q.shape[1],
                        k.shape[1] < n,
                        *(name in x.extras for name in ("window", "softcap", "sinks")),
                    )
                )
                ends = x.extras["lengths"].cumsum(0)
                cut.add(bool((ends % (len(q) // n) != 0).any()))
                dealt = context._dealt(n, rows, width, seed)
                assert int(dealt.extras["blocks"]) in context.BLOCKS
                assert len(dealt.inputs["query"]) % (n * max(context.BLOCKS)) == 0
    assert True in cut
    for place in range(5):
        assert {kind[place] for kind in kinds} == {True, False}
    assert {int(context._dealt(2, rows, 4, seed).extras["blocks"]) for rows in (1, 3) for seed in range(6)} == {1, 2, 4}
    assert {*ulysses.RANKS} == {2, 4}


def test_forests_of_a_law_of_shared_pieces_are_a_prompt_with_responses_or_of_any_shape():
    shapes, heads = set(), set()
    for seed, case in enumerate(shared_laws._SHARED_CASES):
        assert not case.before
        x = shared_laws._example(torch.float64, "cpu", 4, shared_laws._SHARED_CASES, 8, 6, seed)
        sizes, parents = x.extras["pieces"].T.tolist()
        assert parents[0] == -1
        assert all(-1 <= parent < number for number, parent in enumerate(parents))
        assert all(1 <= size <= 6 for size in sizes)
        assert len({*sizes}) > 1
        if seed % 2 == 0:
            assert parents[1:] == [0] * 7
        else:
            shapes.add(max(parents) > 0)
        heads.add((case.kv_heads, case.groups))
        assert ("window" in x.extras, "softcap" in x.extras, "sinks" in x.extras) == (
            case.window is not None,
            case.softcap is not None,
            case.sinks,
        )
    assert True in shapes
    assert {(1, 1), (1, 2), (2, 2)} <= heads
    assert (0, 0) in shared_laws.SIZES
    assert max(rows for rows, _ in shared_laws.SIZES) == 8


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize("part", ["result", "query", "key", "value", "sinks"])
def test_shared_pieces_are_held_to_their_tolerance_in_values_and_every_gradient(part, dtype, bound):
    from fppo_kernels.shared import shared_attention

    seed = next(i for i, case in enumerate(shared_laws._SHARED_CASES) if case.sinks)
    example = shared_laws._example(dtype, "cpu", 4, shared_laws._SHARED_CASES, 3, 2, seed)
    example = example._replace(weights=torch.full_like(example.weights, 1 / example.weights.numel()))
    values, gradients, again = shared_laws._LAWS

    def attend(amount):
        def of(made):
            def kernel(query, key, value, *, sinks=None, **how):
                out = shared_attention(sdpa, made)(query, key, value, sinks=sinks, **how)
                if part == "result":
                    return out + amount
                x = {"query": query, "key": key, "value": value, "sinks": sinks}[part]
                return out + amount * (x - x.detach()).sum()

            return kernel

        return of

    for amount, seen in ((20 * bound, True), (0.0, False)):
        found = [reason(law, attend(amount), example) for law in (values, gradients)]
        assert [x is not None for x in found] == ([seen, False] if part == "result" else [False, seen])
        assert reason(again, attend(amount), example) is None
        if seen:
            assert ("the result" if part == "result" else f"the gradient by {part}") in "".join(filter(None, found))


@pytest.mark.parametrize("cut", [{"size": 1}, {"size": 3}, {"token_budget": 40}])
def test_passes_of_every_cut_are_held_against_an_exact_engine(cut, monkeypatch):
    """Rows whose log-probs are right but in passes of one cut."""
    count = 7
    mask = torch.ones(count, 2, dtype=torch.bool)
    rows = SimpleNamespace(tokens=torch.zeros(count, 4), response_mask=mask, rollout_log_probs=torch.zeros(count, 2))
    engine = SimpleNamespace(generate=lambda params, ask: rows, model=None, kernels=None, mesh=None)
    monkeypatch.setattr(exact_laws, "_ask", lambda example: SimpleNamespace(sampling=SimpleNamespace(temperature=0.5)))
    monkeypatch.setattr("fppo.batch.rows", lambda rollout, order: rollout)
    monkeypatch.setattr("fppo.steps.Forward", lambda *args, **how: None)

    def passes(params, given, *, forward, micro_batching, temperature):
        wrong = {name for name in ("size", "token_budget") if getattr(micro_batching, name) == cut.get(name, -1)}
        return torch.full((count, 2), 1e-6 if wrong else 0.0)

    monkeypatch.setattr("fppo.steps.compute_log_probs", passes)
    one, every = exact_laws._LAWS[:2]
    case, example, draw = exact_laws.ExactCase(engine, {}), None, torch.Generator()  # pyright: ignore
    assert one.breach(case, example, draw) is None  # pyright: ignore
    words = "40 tokens" if "token_budget" in cut else f"{cut['size']} rows"
    assert f"in passes of {words}, in the order" in (every.breach(case, example, draw) or "")  # pyright: ignore
