"""The embedded engine tells the experts that its routers chose; passes that choose them again give its log-probs."""

from functools import partial
from itertools import pairwise

import attrs
import pytest
import torch

from fppo import models, tree
from fppo.key import Key
from fppo.metrics import report
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.records import completed_experts, widened
from fppo.rollout.spread import SpreadEngine
from fppo.runtime.mesh import Sharding
from fppo.runtime.simulate import simulate
from fppo.steps.experts import rerouted
from fppo.steps.forward import Forward, compute_outputs
from fppo.steps.micro_batching import MicroBatching
from tests import tiny
from tests.models.families import make
from tests.rollout import test_turns
from tests.rollout.test_embedded import PAD, STOPS, engine_of, make_prompts

LIMITS = torch.tensor([7, 2, 6, 3, 7, 3])  # of which two ranks have those of unlike lengths
ASK = Ask(make_prompts(extra=1), Sampling(n=3, max_tokens=7, stop_token_ids=STOPS), Key(3), limits=LIMITS)
WAVES = {"max_rows": 12, "prefill_tokens": 9}
passed = partial(compute_outputs, micro_batching=MicroBatching(size=5), outputs=("log_probs", "routed"))


def sampled(name):
    model, params = make(name)
    return model, params, engine_of(model, routed=True, **WAVES).generate(params, ASK)


def ran(rows):
    """The tokens that the engine ran: all but the last of each row."""
    mask = rows.attention_mask.clone()
    for row in mask:
        row[row.nonzero()[-1]] = False
    return mask


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_the_engine_tells_what_it_chose_and_replayed_it_is_the_plain_pass(name):
    model, params, rows = sampled(name)
    plain = engine_of(model, **WAVES).generate(params, ASK)
    assert plain.routed is None
    assert tree.digest(tree.replace(rows, routed=None)) == tree.digest(plain)
    mask, forward = ran(rows), Forward(model)
    free, again = (passed(params, rows, forward=attrs.evolve(forward, replay=replay)) for replay in (False, True))
    assert rows.routed.dtype == torch.uint8
    assert rows.routed.shape == (*rows.tokens.shape, len(model.routers), 2)
    assert torch.equal(rows.routed[mask], free.routed[mask])
    assert torch.equal(again.routed[mask], free.routed[mask])
    # as of rows that wait for others to end
    beyond = completed_experts(torch.ones_like(rows.routed), rows.attention_mask)
    assert torch.equal(beyond.amax((-2, -1)).bool(), rows.attention_mask)
    last = rows.attention_mask & ~mask
    assert torch.equal(rows.routed[last], rows.routed[:, :-1][last[:, 1:]])
    torch.testing.assert_close(again.log_probs, rows.rollout_log_probs, rtol=0, atol=1e-11)
    assert report(rerouted(rows.routed, again.routed, rows.attention_mask)) == {
        "training/rerouted/tokens": 0.0,
        "training/rerouted/choices": 0.0,
    }


def test_a_policy_that_has_moved_chooses_the_engines_experts_and_says_which_it_would_have():
    model, params, rows = sampled("qwen3_moe")
    moved = {name: x + (0.7 if name.endswith("gate.weight") else 0.0) * x.flip(0) for name, x in params.items()}
    free, again = (passed(moved, rows, forward=Forward(model, replay=replay)) for replay in (False, True))
    by_hand = passed(moved, tree.replace(rows, routed=rows.routed.flip(-1)), forward=Forward(model, replay=True))
    assert (free.log_probs - again.log_probs).abs().max() > 1e-3
    torch.testing.assert_close(by_hand.log_probs, again.log_probs)  # in whatever order
    first = model.routers[0].layer  # what enters it is the same in both passes
    assert torch.equal(again.routed[:, :, first], free.routed[:, :, first])
    differs = [
        [set(told) != set(own) for told, own in zip(*token, strict=True)]
        for token in zip(rows.routed[ran(rows)].tolist(), again.routed[ran(rows)].tolist(), strict=True)
    ]
    shares = report(rerouted(rows.routed, again.routed, rows.attention_mask))
    assert shares["training/rerouted/tokens"] == pytest.approx(sum(map(any, differs)) / len(differs))
    assert shares["training/rerouted/choices"] == pytest.approx(sum(map(sum, differs)) / len(differs) / 2)
    assert 0 < shares["training/rerouted/choices"] < shares["training/rerouted/tokens"] < 1


def test_a_mutated_choice_is_noticed():
    model, params, rows = sampled("qwen3_moe")
    forward, count = Forward(model, replay=True), int(ran(rows).sum())
    width = rows.tokens.shape[1] - rows.response_mask.shape[1]
    places = [place for place in ran(rows).nonzero().tolist() if place[1] >= width - 1]
    assert any(column >= width for _, column in places)
    for row, column in (places[0], places[len(places) // 2], places[-1]):
        wrong = rows.routed.clone()
        wrong[row, column, 0] = torch.tensor([x for x in range(4) if x not in wrong[row, column, 0].tolist()])
        told = passed(params, tree.replace(rows, routed=wrong), forward=forward)
        gap = (told.log_probs - rows.rollout_log_probs).abs().amax(1)
        assert (gap > 1e-6).nonzero().flatten().tolist() == [row]
        shares = report(rerouted(wrong, told.routed, rows.attention_mask))
        assert shares["training/rerouted/tokens"] >= 1 / count


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes", [{"tensor": 2}, {"shard": 2}, {"expert": 2, "pipeline": 2}, {"expert": 2, "tensor": 2}]
)
def test_ranks_tell_what_one_process_tells(axes):
    model, params, expected = sampled("qwen3_moe")

    def on_rank(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding())
        placed = models.place(model, mesh)
        engine = engine_of(placed, mesh=mesh, routed=True, **WAVES)
        spread = SpreadEngine(engine=engine, mesh=mesh, pad_token_id=PAD, together=engine.together)
        return spread.generate(models.own_params(placed, params, mesh), ASK)

    for got in simulate(axes, on_rank):
        assert torch.equal(got.tokens, expected.tokens)
        assert torch.equal(got.routed, expected.routed)


class Numbered:
    """An engine whose experts are the number of the call that told them."""

    def __init__(self, inner):
        self.inner, self.calls = inner, 0

    def generate(self, params, ask):
        rollout, self.calls = self.inner.generate(params, ask), self.calls + 1
        number = torch.full_like(rollout.routed, self.calls)
        return tree.replace(rollout, routed=completed_experts(number, rollout.attention_mask))


@pytest.mark.slow
def test_a_token_of_several_turns_has_the_experts_of_the_turn_that_first_ran_it():
    model, params = make("qwen3_moe")
    answer = [{"role": "tool", "content": "h5"}]
    ask = attrs.evolve(ASK, sampling=test_turns.SAMPLING, limits=None)
    inner = engine_of(model, routed=True)
    rows, numbered = (
        test_turns.engine_of(engine, lambda talk: answer, max_turns=4).generate(params, ask)
        for engine in (inner, Numbered(inner))
    )
    free = passed(params, rows, forward=Forward(model))
    assert torch.equal(rows.routed[ran(rows)], free.routed[ran(rows)])
    width, turns = rows.tokens.shape[1] - rows.response_mask.shape[1], set()
    for row in range(len(rows.tokens)):
        seen = rows.attention_mask[row]
        chosen = torch.cat([torch.ones(width, dtype=torch.bool), rows.response_mask[row]])[seen].tolist()
        # the last token of a turn runs with what follows it, as the first of the next turn's context
        expected = [1 + sum(a and not b for a, b in pairwise(chosen[: place + 2])) for place in range(len(chosen))]
        assert numbered.routed[row, seen, 0, 0].tolist() == expected
        turns.add(expected[-1])
    assert len(turns) > 2
    assert not numbered.routed[~rows.attention_mask].any()


@pytest.mark.parametrize(("axes", "anew"), [({"shard": 3}, False), ({"replicate": 2}, True)])
def test_ranks_that_play_no_episode_tell_the_experts_of_the_others(axes, anew):
    """The first prompt alone, of several turns."""
    model, params = make("qwen3_moe")
    asked = make_prompts((4,))
    ask = attrs.evolve(ASK, prompts=asked, sampling=test_turns.SAMPLING, limits=None)

    def on_rank(mesh):
        how = {"max_turns": 3, "mesh": mesh}
        how |= {"thinking": "drop", "prompt": lambda talk: [3 + len(talk)] * 5} if anew else {}
        inner = engine_of(model, mesh=mesh, routed=True)
        return test_turns.engine_of(inner, lambda talk: [{"role": "tool", "content": "h5"}], **how).generate(
            params, ask
        )

    (expected,) = simulate({"shard": 1}, on_rank)
    assert expected.routed is not None
    assert int(expected.turn_ids.max()) > 0 or anew
    for found in simulate(axes, on_rank):
        assert tree.digest(found) == tree.digest(expected)


def test_what_cannot_be_told_is_named():
    dense, _ = tiny.model_and_params()
    with pytest.raises(ValueError, match="'qwen2' has no routers of experts that fppo knows: leave out routed"):
        engine_of(dense, routed=True)
    rows = sampled("qwen3_moe")[2]
    wide = widened(rows, rows.tokens.shape[1] + 2, rows.response_mask.shape[1] + 3, PAD)
    assert torch.equal(wide.routed[wide.attention_mask], rows.routed[rows.attention_mask])
    assert not wide.routed[~wide.attention_mask].any()
