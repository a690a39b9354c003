"""The laws of updates, layouts, states and exact engines see each part that is off by little, in each call.

The updates are stand-ins without a model: sums over rows, so that a law's calls can be told apart.
"""

from types import SimpleNamespace

import attrs
import pytest
import torch

from fppo import laws, tree
from fppo.laws import exact, layout, updates
from fppo.laws.layout import MeshCase
from fppo.laws.updates import PROMPT, _UpdateOutcome
from fppo.losses import MODES
from fppo.metrics import Mean
from tests.laws.test_sharpness import LITTLE, reason

LAWS = {law.name: law for law in updates._LAWS}
PARTS = ("gradient", "second gradient", "parameter", "total", "count")
WORDS = dict(
    zip(PARTS, ("the gradient of a", "the gradient of b", "the new parameter a", "metric m, total", "metric m, count"))
)


def summed(batch, mode):
    """Sums over the rows' tokens: nothing of the order of rows, of padding and of the cut into micro-batches."""
    mask, seen = batch.response_mask, batch.attention_mask
    adv = batch.advantages.where(mask, 0.0).sum()
    tokens = (batch.tokens.where(seen, 0)).sum().double()
    grads = {"a": torch.stack([adv, tokens]), "b": 2 * tokens + MODES.index(mode)}
    metrics = {"m": Mean(adv.clone(), mask.sum().double()), "perf/saved": Mean(adv.clone(), adv.clone())}
    return _UpdateOutcome(grads, {"a": grads["a"] * 0.5}, metrics)


def changed(outcome, part, amount):
    grads, params, metrics = dict(outcome.grads), dict(outcome.params), dict(outcome.metrics)
    if part == "gradient":
        grads["a"] = grads["a"] + amount
    if part == "second gradient":
        grads["b"] = grads["b"] + amount
    if part == "parameter":
        params["a"] = params["a"] + amount
    if part in ("total", "count"):
        metrics["m"] = metrics["m"]._replace(**{part: getattr(metrics["m"], part) + amount})
    if part == "perf":
        metrics["perf/saved"] = Mean(torch.tensor(amount), torch.tensor(amount))
    return _UpdateOutcome(grads, params, metrics)


def off(part, when, amount=LITTLE):
    def run(batch, mode, size, budget, packed):
        outcome = summed(batch, mode)
        return changed(outcome, part, amount) if when(batch, size, budget, packed) else outcome

    return run


def example_of(rows=5, width=4, seed=1):
    return updates._example(("token-mean", "token-sum"), rows, width, seed)


LENGTHS = example_of().inputs["attention_mask"].sum(1)
HALF = max(int(LENGTHS.max()), -(-int(LENGTHS.sum()) // 2))
FIRST = example_of().inputs["old_log_probs"][0, 0]
SEEN = {
    "micro-batch split": {
        "rows of 1": lambda b, size, budget, packed: size == 1,
        "rows of 3": lambda b, size, budget, packed: size == 3,
        "budget of 1": lambda b, size, budget, packed: budget == 1,
        "budget of a half": lambda b, size, budget, packed: budget == HALF,
        "whole": lambda b, size, budget, packed: size == 5,
    },
    "row order": {"moved": lambda b, *cut: b.old_log_probs[0, 0] != FIRST, "of 2": lambda b, size, *_: size == 2},
    "padding width": {
        f"{left} and {right}": lambda b, *cut, n=(left, right): (
            b.tokens.shape[1] - b.response_mask.shape[1] == PROMPT + n[0] and b.response_mask.shape[1] == 4 + n[1]
        )
        for left, right in ((0, 1), (2, 3))
    },
    "packing": {
        "as wide": lambda b, size, budget, packed: not packed and b.response_mask.shape[1] == 4,
        "wider": lambda b, size, budget, packed: not packed and b.response_mask.shape[1] == 6,
    },
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("name", "when"), [(name, when) for name, calls in SEEN.items() for when in calls])
def test_an_update_that_is_off_by_little_in_some_calls_is_seen(name, when, part):
    found = reason(LAWS[name], off(part, SEEN[name][when]), example_of())
    assert WORDS[part] in (found or "")


@pytest.mark.parametrize("name", LAWS)
def test_laws_of_updates_see_nothing_in_what_is_right_in_rounding_and_in_what_passes_saved(name):
    for run in (
        off("", lambda *x: False),
        off("gradient", lambda b, size, *_: size == 1, 1e-12),
        off("perf", lambda b, size, *_: size == 1),
    ):
        assert reason(LAWS[name], run, example_of()) is None


def test_padding_of_an_update_is_nan_and_outside_of_every_mask():
    seen = []

    def run(batch, mode, size, budget, packed):
        seen.append(batch)
        return summed(batch, mode)

    example = example_of()
    for name in ("padding width", "packing"):
        assert reason(LAWS[name], run, example) is None
    widths = {(b.tokens.shape[1], b.response_mask.shape[1]) for b in seen}
    assert widths == {(7, 4), (8, 5), (12, 7), (11, 6)}
    for batch in seen:
        left = batch.tokens.shape[1] - batch.response_mask.shape[1] - PROMPT
        assert not batch.attention_mask[:, :left].any()
        assert torch.equal(batch.attention_mask[:, left : left + 7], example.inputs["attention_mask"])
        assert torch.equal(batch.tokens[:, left : left + 7], example.inputs["tokens"])
        for column in ("advantages", "old_log_probs", "ref_log_probs", "values", "returns"):
            x = getattr(batch, column)
            assert torch.equal(x[:, :4], example.inputs[column])
            assert x[:, 4:].isnan().all()


def test_what_is_not_finite_is_named():
    law = LAWS["finite"]
    for value in (torch.nan, torch.inf):
        assert reason(law, off("gradient", lambda *x: True, value), example_of()) == "the gradient of a is not finite"
        assert (
            reason(law, off("second gradient", lambda *x: True, value), example_of())
            == "the gradient of b is not finite"
        )
    for value, seen in ((torch.nan, True), (torch.inf, True), (1e300, False)):
        norm = {"actor/grad_norm": Mean(torch.tensor(value, dtype=torch.float64), torch.ones(()))}
        run = lambda b, mode, *cut, n=norm: summed(b, mode)._replace(metrics=n)  # noqa: E731
        assert (reason(law, run, example_of()) == "the norm of the gradient is not finite") == seen


def test_examples_of_updates_have_every_mask_in_every_mode_and_ragged_prompts():
    modes = MODES
    met, firsts, kinds = set(), set(), set()
    for rows, width in updates.SIZES:
        for seed in range(max(3, len(modes))):
            example = updates._example(modes, rows, width, seed)
            mask, attention, tokens = (example.inputs[name] for name in ("mask", "attention_mask", "tokens"))
            ragged = bool((mask[:, 1:] & ~mask[:, :-1]).any())
            kind = "full" if mask.all() else "holes" if ragged or not mask[:, 0].all() else "ragged"
            met.add((example.mode, kind))
            kinds.add(kind)
            firsts |= {*attention[:, :PROMPT].sum(1).tolist()}
            assert attention[:, PROMPT - 1].all()  # a token before each response
            assert (attention[:, PROMPT:] | ~mask).all()
            assert not (attention[:, 1:PROMPT] < attention[:, : PROMPT - 1]).any()
            assert (tokens[attention] > 0).all()
            assert (tokens[~attention] == 0).all()
            assert tokens.max() < updates.VOCAB
            assert example.inputs["row_ids"].tolist() == list(range(rows))
    assert firsts == {1, 2, 3}
    assert kinds == {"full", "ragged", "holes"}
    assert {mode for mode, _ in met} == {*modes}


def test_a_record_of_an_example_has_its_columns():
    example = example_of()
    batch = updates._batch(example)
    for column in (
        "tokens",
        "attention_mask",
        "row_ids",
        "old_log_probs",
        "ref_log_probs",
        "values",
        "advantages",
        "returns",
    ):
        assert torch.equal(getattr(batch, column), example.inputs[column])
    assert torch.equal(batch.response_mask, example.mask)
    assert torch.equal(batch.rollout_log_probs, example.inputs["old_log_probs"])
    torch.testing.assert_close(batch.outcome, example.inputs["advantages"].where(example.mask, 0.0).sum(1))


def test_a_run_is_remembered_by_its_batch_its_mode_and_its_cut():
    calls = []

    def run(batch, *cut):
        calls.append(cut)
        return summed(batch, cut[0])

    known, batch = updates._remembered(run), updates._batch(example_of())
    cuts = [
        ("token-mean", 1, None, True),
        ("token-sum", 1, None, True),
        ("token-mean", None, 1, True),
        ("token-mean", 1, None, False),
    ]
    for cut in cuts * 2:
        known(batch, *cut)
    assert calls == cuts
    known(tree.replace(batch, advantages=batch.advantages + 1), *cuts[0])
    assert len(calls) == 5


def on_ranks(part="", when=lambda *x: False, amount=1e-6, ranks=None):
    """An update on a mesh: off in one part where `when(layout, number of the model, rank)` holds."""

    def run(example, case, number):
        size = layout._ranks(case.axes) if ranks is None else ranks
        outcome = summed(updates._batch(example), example.mode)
        outcome = outcome._replace(grads={name: x + number + 10 * case.layers for name, x in outcome.grads.items()})
        return [changed(outcome, part if when(case, number, rank) else "", amount) for rank in range(size)]

    return run


def settings_of(stage=None, recompute=False, virtual=1, **axes):
    return (dict.fromkeys(layout.AXES, 1) | axes, stage, recompute, virtual)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("rank", range(4))
def test_a_rank_whose_part_is_off_by_little_is_seen(rank, part):
    settings = [settings_of(), settings_of(replicate=4)]
    law, _ = layout._laws(settings, 2, 7)
    found = reason(law, on_ranks(part, lambda case, n, r: case.axes["replicate"] == 4 and r == rank), example_of())
    assert f"rank {rank}: {WORDS[part]}" in (found or "")
    assert "(seed 7)" in (found or "")
    again, _ = layout._laws(settings, 2, 7)
    assert reason(again, on_ranks(part, lambda case, n, r: r == rank > 0, 1e-12), example_of()) is None


def test_ranks_are_compared_with_one_process_of_the_same_model_and_layers():
    settings = [
        settings_of(pipeline=4),
        settings_of(pipeline=2, virtual=2),
        settings_of(expert=2),
        settings_of(shard=2),
    ]
    seen = []

    def run(example, case, number):
        seen.append((layout._ranks(case.axes), number, case.layers, case.size))
        return on_ranks()(example, case, number)

    law, _ = layout._laws(settings, 4, 0)
    assert reason(law, run, example_of()) is None
    wide = [(number, layers) for ranks, number, layers, _ in seen if ranks > 1]
    assert wide == [(1, 4), (1, 4), (2, 2), (1, 2)]
    alone = [x for x in seen if x[0] == 1]
    assert sorted(alone) == [(1, 1, 2, 5), (1, 1, 4, 5), (1, 2, 2, 5)]  # each once


def test_an_error_on_a_layout_is_a_breach_that_names_it():
    def run(example, case, number):
        if layout._ranks(case.axes) > 1:
            raise RuntimeError("lost a rank")
        return on_ranks()(example, case, number)

    law, _ = layout._laws([settings_of(replicate=2)], 1, 3)
    found = reason(law, run, example_of()) or ""
    assert "replicate 2" in found
    assert "(seed 3): it raised RuntimeError: lost a rank" in found


@pytest.mark.parametrize("kind", ["again", "ranks"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_the_same_bits_are_those_of_a_second_run_and_of_every_rank(rank, kind):
    calls = []

    def when(case, number, r):
        calls.append(r)
        return r == rank and (kind == "ranks" or len(calls) > 4)

    _, law = layout._laws([settings_of(replicate=4)], 1, 0)
    found = [reason(law, on_ranks("gradient", when, 1e-13), example_of(1, 1, 0)) for _ in range(4)]
    if kind == "ranks" and rank == 0:
        assert found[:3] == [None] * 3
        return
    assert found[:3] == [None] * 3
    assert "has other bits" in (found[3] or "")
    assert ("when run again" if kind == "again" else "than on rank 0") in (found[3] or "")


def test_layouts_take_turns_and_begin_again():
    turn = layout._turns(["a", "b", "c"], 2)
    assert [turn() for _ in range(4)] == [(1, ["a", "b"]), (2, ["c", "a"]), (3, ["b", "c"]), (4, ["a", "b"])]
    assert [layout._number(settings_of(expert=2)[0], count) for count in range(3)] == [2, 2, 2]
    assert [layout._number(settings_of(shard=2)[0], count) for count in range(4)] == [0, 1, 2, 0]


def test_a_layout_is_drawn_with_every_cut():
    example, generator = example_of(), torch.Generator().manual_seed(0)
    tokens = int(example.inputs["attention_mask"].sum())
    cases = [layout._draw(*settings_of(3, True, shard=2), example, generator) for _ in range(200)]
    assert {case.size for case in cases} == {None, 1, 2}
    assert all((case.size is None) != (case.token_budget is None) for case in cases)
    budgets = {case.token_budget for case in cases} - {None}
    assert min(budgets) >= 1
    assert max(budgets) <= tokens
    assert len(budgets) > tokens / 2
    assert {case.remove_padding for case in cases} == {True, False}
    assert 0.6 < sum(case.share_prompts for case in cases) / 200 < 0.9
    assert {(case.stage, case.checkpoint_layers, case.virtual_stages, case.layers, case.ring) for case in cases} == {
        (3, True, 1, 2, False)
    }
    for axis in ("sequence", "context", "tensor"):
        cut = [layout._draw(*settings_of(3, axis=1, **{axis: 2}), example, generator) for _ in range(20)]
        assert all(case.remove_padding and case.stage is None for case in cut)
        assert {case.ring for case in cut} == ({True, False} if axis == "context" else {False})
    assert layout._draw(*settings_of(2, expert=2), example, generator).stage == 2
    for settings, layers in (({"pipeline": 2}, 2), ({"pipeline": 4}, 4), ({"pipeline": 2, "virtual": 2}, 4)):
        assert layout._draw(*settings_of(**settings), example, generator).layers == layers


def test_meshes_are_all_that_fit_small_ones_first():
    found = layout.meshes(8)
    ranks = [layout._ranks(axes) for axes in found]
    assert ranks == sorted(ranks)
    assert {*ranks} == {2, 4, 8}
    assert len({tuple(axes.values()) for axes in found}) == len(found)
    for axes in found:
        assert axes["sequence"] * axes["tensor"] <= 4
        assert 1 in (axes["sequence"], axes["context"])
        assert {*axes.values()} <= {1, 2, 4}
    assert [next(name for name, size in axes.items() if size == 2) for axes in layout.meshes(2)] == list(layout.AXES)
    assert sum(axes["context"] == 2 and axes["tensor"] == 2 and axes["shard"] == 2 for axes in found) == 1
    assert layout._shards(settings_of(shard=2, expert=4, replicate=2)[0]) == 8


def test_a_layout_is_described_in_words():
    case = MeshCase(
        {"shard": 2, "tensor": 1}, stage=3, checkpoint_layers="selective", virtual_stages=2, size=2, ring=True
    )
    assert str(case) == (
        "on a mesh of shard 2 x tensor 1, sharding stage 3, micro-batches of 2, packed, all but attention recomputed, "
        "keys around a ring, 2 stages on each rank"
    )
    other = MeshCase({"shard": 1}, token_budget=9, remove_padding=False, checkpoint_layers=True, share_prompts=True)
    assert str(other) == (
        "on a mesh of shard 1, whole parameters, micro-batches of at most 9 tokens, padded, layers recomputed, "
        "prompts shared"
    )


def test_up_to_three_rows_share_a_prompt():
    example = layout._of_prompts(("token-mean",), 7, 3, 1)
    plain = updates._example(("token-mean",), 7, 3, 1)
    for name in ("tokens", "attention_mask"):
        x, y = example.inputs[name], plain.inputs[name]
        for row in range(7):
            assert torch.equal(x[row, :PROMPT], y[row // 3 * 3, :PROMPT])
            assert torch.equal(x[row, PROMPT:], y[row, PROMPT:])
    assert torch.equal(example.mask, plain.mask)
    assert len({tuple(row) for row in example.inputs["tokens"][:, :PROMPT].tolist()}) == 3


def test_every_stage_recomputation_and_interleaving_is_tried_where_it_fits(monkeypatch):
    taken = []
    monkeypatch.setattr(layout, "_runner", lambda *x: None)
    monkeypatch.setattr(layout, "_laws", lambda layouts, each, seed: taken.append((layouts, each, seed)) or ())
    for each in (None, 3):
        laws.check_layout_fn(lambda **x: None, max_ranks=4, each=each, seed=5, modes=("token-mean", "token-sum"))
    (layouts, every, seed), (other, few, _) = taken
    assert (few, seed) == (3, 5)
    assert layouts == other
    assert every * len(layout.SIZES) * 3 >= len(layouts) > (every - 1) * len(layout.SIZES) * 3
    kinds = {(tuple(axes.values()), stage, virtual) for axes, stage, _, virtual in layouts}
    assert len(kinds) == len(layouts)
    expected = {
        (tuple(axes.values()), stage, virtual)
        for axes in layout.meshes(4)
        for stage in (3, 2, 1, None)
        if stage is None or axes["shard"] * axes["expert"] > 1
        for virtual in ((1, 2) if axes["pipeline"] == 2 else (1,))
    }
    assert kinds == expected
    for stage in (3, 2, 1, None):
        assert {again for _, s, again, _ in layouts if s == stage} == {False, True, "selective"}


def counting(state):
    return {"x": state["x"] + 1, "n": state["n"] + 1}


def test_a_resume_is_tried_from_every_step_to_every_later_one():
    tried = []

    def load(handle):
        tried.append(int(handle["n"]))
        return tree.copy(handle)

    state = {"x": torch.zeros(2), "n": torch.tensor(0)}
    laws.check_resume(counting, state, save=tree.copy, load=load, steps=3)
    assert tried == [n for total in range(4) for n in range(total, -1, -1)]
    for wrong_n in range(4):
        lost = lambda handle, n=wrong_n: {**handle, "x": handle["x"] + (handle["n"] == n) * 1e-6}  # noqa: E731
        with pytest.raises(laws.LawViolation, match=r"after the resume \['x'\] has other bits") as caught:
            laws.check_resume(counting, state, save=tree.copy, load=lost, steps=3)
        assert (int(caught.value.example["n"]), int(caught.value.example["m"])) == (wrong_n, 0)
    with pytest.raises(laws.LawViolation, match=r"after the resume .* is missing"):
        laws.check_resume(counting, state, save=tree.copy, load=lambda handle: {"n": handle["n"]}, steps=0)
    with pytest.raises(laws.LawViolation, match=r"after the resume .* is new"):
        laws.check_resume(counting, state, save=tree.copy, load=lambda handle: {**handle, "y": torch.ones(1)}, steps=0)


def test_a_donation_is_held_leaf_by_leaf():
    def step(state, *, donate):
        result = {name: x + 1 for name, x in state.items()}
        if donate:
            state["b"].resize_(0)
        return result

    state = {"a": torch.ones(2), "b": torch.ones(3)}
    laws.check_donation(step, state)
    assert state["b"].shape == (3,)

    def overwrites(state, *, donate):
        result = step(state, donate=False)
        if donate:
            state["b"].add_(1e-6)
        return result

    with pytest.raises(laws.LawViolation, match=r"the donated \['b'\] was overwritten, not emptied"):
        laws.check_donation(overwrites, state)
    more = lambda state, *, donate: step(state, donate=donate) | ({"c": torch.ones(1)} if donate else {})  # noqa: E731
    with pytest.raises(laws.LawViolation, match=r"with donation \['c'\] is new"):
        laws.check_donation(more, state)


def test_purity_sees_python_s_generator_keywords_and_results_in_second_calls():
    import random

    with pytest.raises(laws.LawViolation, match="it drew from Python's global generator"):
        laws.check_purity(lambda x: x * (random.random() < 2), torch.ones(2))
    with pytest.raises(laws.LawViolation, match=r"it changed its argument: \[1\]\['y'\] has other bits"):
        laws.check_purity(lambda x, *, y: y.add_(1e-6), torch.ones(2), y=torch.ones(2))
    calls = iter(range(9))
    with pytest.raises(laws.LawViolation, match="a second call gave another result: the result has other bits"):
        laws.check_purity(lambda: torch.tensor(float(next(calls))))
    laws.check_purity(lambda x, *, y: [x + y], torch.ones(2), y=2)


def rollout(log_probs):
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    return SimpleNamespace(rollout_log_probs=log_probs, response_mask=mask, tokens=torch.arange(21).view(3, 7))


def test_log_probs_of_an_exact_engine_are_equal_to_the_bit_inside_the_mask():
    own = torch.linspace(-3, -0.1, 12).view(3, 4)
    assert exact._differ(rollout(own), own) is None
    assert exact._differ(rollout(own), own.where(rollout(own).response_mask, 7.0)) is None
    near = own.clone()
    near[1, 1] = torch.nextafter(near[1, 1], torch.tensor(0.0))
    found = exact._differ(rollout(own), near)
    assert found is not None
    assert found.startswith("1 of 6 log-probs differ, as that of token 1 of row 1: ")
    assert exact._differ(rollout(own), own.double()) is None
    assert exact._differ(rollout(own), near.double()) is not None
    assert exact._differ(rollout(own), own.where(own < -0.5, torch.nan)) is None  # outside


@attrs.frozen
class FakeEngine:
    log_probs: torch.Tensor
    when: object = None
    part: str = "log_probs"
    max_rows: int = 64
    prefill_tokens: int = 4096

    def generate(self, params, ask):
        rows = rollout(self.log_probs.clone())
        if self.when is not None and self.when == (self.max_rows, self.prefill_tokens):
            if self.part == "tokens":
                rows.tokens[2, 3] += 1
            else:
                rows.rollout_log_probs[0, 2] += 1e-6
        return rows


@pytest.mark.parametrize("part", ["tokens", "log_probs"])
@pytest.mark.parametrize("how", [(1, 1), (4, 8)])
def test_rows_do_not_depend_on_those_beside_them(how, part, monkeypatch):
    monkeypatch.setattr(exact, "_ask", lambda example: None)
    law = {law.name: law for law in exact._LAWS}["company"]
    own = torch.linspace(-3, -0.1, 12).view(3, 4)
    assert reason(law, exact.ExactCase(FakeEngine(own), {}), example_of()) is None  # type: ignore[arg-type]
    found = reason(law, exact.ExactCase(FakeEngine(own, how, part), {}), example_of())  # type: ignore[arg-type]
    words = "other tokens are drawn" if part == "tokens" else "log-probs differ"
    assert f"{how[0]} rows at a time, of {how[1]} prompt tokens a pass: " in (found or "")
    assert words in (found or "")


@pytest.mark.parametrize("cut", [(None, None), (1, None), (3, None), (None, 40)])
def test_passes_of_every_cut_take_rows_in_an_order_of_their_own(cut, monkeypatch):
    monkeypatch.setattr(exact, "_ask", lambda example: None)
    monkeypatch.setattr("fppo.batch.rows", lambda rows, order: rollout(rows.rollout_log_probs[order]))
    seen = []

    def run(case, rows, ask, size, budget, *, share=False):
        seen.append((size, budget, share, rows.rollout_log_probs[:, 0].tolist()))
        return rows.rollout_log_probs + (1e-6 if (size, budget) == cut else 0.0)

    monkeypatch.setattr(exact, "_pass", run)
    own = torch.linspace(-3, -0.1, 12).view(3, 4)
    laws_of = {law.name: law for law in exact._LAWS}
    case = exact.ExactCase(FakeEngine(own), {})  # type: ignore[arg-type]
    found = reason(laws_of["any pass"], case, example_of())
    assert "log-probs differ" in (found or "")
    words = f"{cut[0]} rows" if cut[0] else f"{cut[1]} tokens" if cut[1] else "all rows"
    assert f"in passes of {words}, in the order" in (found or "")
    for name, share in (("one pass", False), ("shared prompts", True)):
        seen.clear()
        found = reason(laws_of[name], case, example_of())
        assert (found is not None) == (cut == (None, None))
        assert [(x[0], x[1], x[2]) for x in seen] == [(None, None, share)]


def test_passes_of_one_engine_take_its_rows_in_several_orders(monkeypatch):
    orders = []
    monkeypatch.setattr(exact, "_ask", lambda example: None)
    monkeypatch.setattr(exact, "_pass", lambda case, rows, *cut: rows.rollout_log_probs)
    monkeypatch.setattr("fppo.batch.rows", lambda rows, order: orders.append(order) or rows)
    case = exact.ExactCase(FakeEngine(torch.linspace(-3, -0.1, 12).view(3, 4)), {})  # type: ignore[arg-type]
    law = {law.name: law for law in exact._LAWS}["any pass"]
    assert reason(law, case, example_of()) is None
    assert [sorted(order) for order in orders] == [[0, 1, 2]] * 4
    assert len({tuple(order) for order in orders}) > 1


def test_an_engine_is_asked_with_every_sampling():
    asks = [exact._ask(exact._example(20, 40, 3, 5, seed)) for seed in range(4)]
    assert {ask.sampling.temperature for ask in asks} == {1.0, 0.7, 1.6}
    assert [ask.sampling.greedy for ask in asks] == [False, False, True, False]
    assert [ask.sampling.top_k for ask in asks] == [None, 4, None, None]
    assert [ask.sampling.n for ask in asks] == [2, 3, 1, 3]
    assert [bool(ask.sampling.stop_token_ids) for ask in asks] == [True, False, True, False]
    assert len({ask.key for ask in asks}) == 4
    for seed in range(4):
        x = exact._example(20, 40, 3, 5, seed).inputs
        lengths = x["mask"].sum(1)
        assert lengths[0] == 5
        assert not (x["mask"][:, :-1] & ~x["mask"][:, 1:]).any()
        assert (x["tokens"][~x["mask"]] == 0).all()
        assert x["tokens"].max() < 20
    assert exact._example(20, 15, 3, 18, 0).inputs["tokens"].shape == (3, 3)
