"""An engine on every rank of a mesh: together they give the rollout of one process, and each end is told of once."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import tree
from fppo.batch import Column, Prompts
from fppo.key import Key
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.requests import Request
from fppo.rollout.spread import SpreadEngine, merged_shares
from fppo.runtime.mesh import AXES, place_on
from fppo.runtime.simulate import simulate
from fppo.steps.ranks import deal
from tests.rollout.test_generated import Generating


class Telling(Generating):
    """An engine that tells of the ends of rows, and notes the prompts that it was asked."""

    def generate(self, params, ask):
        made = super().generate(params, ask)
        width = made.response_mask.shape[1]
        for row, (tokens, mask) in enumerate(zip(made.tokens[:, -width:], made.response_mask, strict=True)):
            if ask.on_finished is not None:
                ask.on_finished(row, tokens[mask].tolist(), made.finish[row])
        return made


def prompts_of(asked):
    width = max(map(len, asked)) + 1
    names = Column(f"p{i}" for i in range(len(asked)))
    return Prompts(
        tokens=torch.tensor([[0] * (width - len(x)) + x for x in asked]),
        attention_mask=torch.tensor([[False] * (width - len(x)) + [True] * len(x) for x in asked]),
        row_ids=torch.tensor([7 + 2 * i for i in range(len(asked))]),
        ids=names,
        ground_truth=names,
        source=names,
        extras=Column({"name": name} for name in names),
    )


MESHES = st.sampled_from(
    [({"shard": 2}, ()), ({"replicate": 3}, ()), ({"tensor": 2}, ("tensor",)), ({"shard": 2, "tensor": 2}, ("tensor",))]
)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(4, 16), min_size=1, max_size=3), st.integers(1, 6)), min_size=1, max_size=6
    ),
    st.integers(1, 2),
    MESHES,
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_ranks_give_together_what_one_process_gives(asked, n, mesh_of, routed, versioned, listens):
    """Some ranks have no prompt, and some responses are the longest on one rank alone."""
    (axes, together), params = mesh_of, {"x": torch.tensor(0.0)}
    sampling = Sampling(n=n, max_tokens=6, stop_token_ids=(3, 5, 9))
    limits = torch.tensor([most for _, most in asked])
    ask = Ask(prompts_of([ids for ids, _ in asked]), sampling, Key(4), version=3, limits=limits)

    def told_by(generate):
        heard = []
        listening = attrs.evolve(ask, on_finished=(lambda *what: heard.append(what)) if listens else None)
        return generate(params, listening), heard

    whole, ends = told_by(Telling(routed=routed, versioned=versioned).generate)

    def on_rank(mesh):
        inner = Telling(routed=routed, versioned=versioned)
        spread = SpreadEngine(engine=inner, mesh=mesh, pad_token_id=0, together=together)
        return *told_by(spread.generate), inner.asked[0], mesh

    every = simulate(axes, on_rank)
    for rollout, *_ in every:
        assert tree.digest(rollout) == tree.digest(whole)
    assert sorted(end for _, heard, *_ in every for end in heard) == sorted(ends)
    shares = deal(len(asked), every[0][3])
    for _, _, own, mesh in every:
        mine = shares[place_on(mesh, AXES)]
        numbers = [(number - 7) // 2 for number in own.prompts.row_ids.tolist()]
        assert {*mine} <= {*numbers} or not mine
        assert torch.equal(own.limits, limits[numbers])
        assert numbers == (merged_shares(shares, mesh, together) or [0])


@settings(max_examples=30)
@given(st.integers(1, 12), st.sampled_from([("tensor",), ("shard",), ("shard", "tensor"), ()]))
def test_ranks_that_differ_on_some_axes_alone_ask_the_same(count, axes):
    def on_rank(mesh):
        shares = deal(count, mesh)
        return [mesh[name].rank for name in ("shard", "tensor")], shares, merged_shares(shares, mesh, axes)

    every = simulate({"shard": 2, "tensor": 2}, on_rank)
    for place, shares, found in every:
        others = [
            number
            for (other, _, _), share in zip(every, shares, strict=True)
            if all(a == b or name in axes for a, b, name in zip(place, other, ("shard", "tensor"), strict=True))
            for number in share
        ]
        assert found == sorted(others)


def test_requests_of_an_engine_that_cannot_be_open_are_answered_on_all_ranks_together():
    def on_rank(mesh):
        spread = SpreadEngine(engine=Telling(routed=False, versioned=False), mesh=mesh, pad_token_id=0)
        with spread.open({"x": torch.tensor(0.0)}, version=6, most_waiting=5) as requests:
            how = {"sampling": Sampling(max_tokens=3), "key": Key(0)}
            requests.add([Request(name=f"{row}", ids=(4 + row,), row=row, **how) for row in range(3)])
            _, finished = requests.step()
            return requests.together, [(one.name, one.tokens.tolist(), one.versions.tolist()) for one in finished]

    ((alone, expected),) = simulate({"shard": 1}, on_rank)
    assert alone == ()
    assert {version for *_, versions in expected for version in versions} == {6}
    for axes, found in simulate({"shard": 2}, on_rank):
        assert axes == AXES
        assert sorted(found) == sorted(expected)
