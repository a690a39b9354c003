"""Changes that make fit what does not: which there are, how they are named, and that they do."""

from __future__ import annotations

import attrs
import pytest

from fppo.studies.plan.passes import Built
from fppo.studies.plan.plan import Plan, plan
from fppo.studies.plan.search import Remedy, _fitting, applied, families, remedies
from fppo.studies.plan.text import of_plan, rendered
from tests.studies.plan.cases import bare, config, mixture

ONE_HEAD = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 64}


def with_memory(planned, memory):
    """A plan on a machine with so much memory."""
    case = attrs.evolve(planned.case, hardware=attrs.evolve(planned.case.hardware, memory=memory))
    return attrs.evolve(planned, case=case)


@pytest.mark.slow
def test_what_does_not_fit_fits_with_each_remedy():
    free = plan(bare(mesh={"replicate": 2, "shard": 2}, stage=1, tokens=128))
    tight = with_memory(free, 0.93 * free.peak.total)
    assert free.fits > tight.fits
    found = remedies(tight)
    costs = [remedy.seconds_per_token for remedy in found]
    assert costs == sorted(costs)
    assert {"mesh.stage"} in [set(remedy.flags) for remedy in found]
    for remedy in found:
        assert remedy.plan.fits
        assert remedy.plan.case == applied(tight.case, remedy.flags)
        assert remedy.plan.tokens == tight.tokens or "mesh.sequence" in remedy.flags
    for remedy in (found[0], found[-1]):  # what they were planned with does not depend on what was planned before
        assert plan(remedy.plan.case).stages == remedy.plan.stages


def test_the_remedies_of_a_pool_name_its_own_axes():
    flags = {"mesh.shard": 4, "gpus": 8, "mesh.stage": 3, "model.checkpoint-layers": True}
    own = "placement.pools.p.shard=4 placement.pools.p.ranks=8 --mesh.stage 3 --model.checkpoint-layers True"
    planned = Plan(bare(), {}, {}, ())
    assert Remedy(flags, planned, pool="p").words == own
    assert Remedy(flags, planned).words == "--mesh.shard 4 --gpus 8 --mesh.stage 3 --model.checkpoint-layers True"


@pytest.mark.slow
def test_changes_are_put_together_where_none_is_enough():
    free = bare(layers=2, log_probs="reference", tokens=512, micro_batches=2)
    alone = min(plan(applied(free, family[-1]), only_if_fits=True).peak.total for family in families(free))
    (found,) = remedies(with_memory(plan(free), 0.98 * alone))
    assert len(found.flags) > 1
    assert found.plan.fits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "taken", "changes"),
    [
        ("tensor", "shard", {"config": config(num_hidden_layers=1, intermediate_size=8192)}),
        ("expert", "shard", {"config": mixture(chosen=1, num_experts=64, **ONE_HEAD)}),
        ("context", "replicate", {"config": config(**ONE_HEAD), "tokens": 512, "length": 512}),
    ],
)
def test_an_axis_makes_fit_what_no_other_change_does(axis, taken, changes, monkeypatch):
    """Meshes that the formula takes for too large are not planned."""
    free = bare(**{"mesh": {taken: 2}, "checkpoint_layers": True, "tokens": 64, **changes})
    flags = {f"mesh.{taken}": 1, f"mesh.{axis}": 2}
    needs = plan(applied(free, flags)).peak.total
    planned = plan(free)
    (found,) = remedies(with_memory(planned, 1.02 * needs))
    assert found.flags == flags
    assert found.plan.fits
    assert found.plan.tokens == planned.tokens
    monkeypatch.setattr("fppo.studies.plan.search.plan", None)
    assert (
        _fitting(attrs.evolve(free, hardware=attrs.evolve(free.hardware, memory=0.3 * needs)), flags, Built()) is None
    )


@pytest.mark.slow
def test_more_gpus_are_thought_of_last_and_nothing_is_said_if_nothing_helps():
    small = bare(tokens=64, checkpoint_layers=True)
    planned = plan(small)
    assert families(small) == []
    found = remedies(with_memory(planned, 0.7 * planned.peak.total))
    assert found
    assert all(remedy.plan.case.world > 1 and remedy.flags["gpus"] == remedy.plan.case.world for remedy in found)
    assert remedies(with_memory(planned, 100.0)) == []


def test_slices_of_mlps_are_a_remedy_of_passes_that_are_longer():
    case = bare(layers=1, tokens=8192)
    assert [{"model.mlp-slice-tokens": 4096}, {"model.mlp-slice-tokens": 1024}] in families(case)
    flags = {"model.mlp-slice-tokens": 1024}
    assert applied(case, flags).mlp_slice_tokens == 1024
    for other in (applied(case, flags), attrs.evolve(case, tokens=1024)):
        assert all("model.mlp-slice-tokens" not in family[0] for family in families(other))
    planned = plan(case)
    sliced = plan(applied(case, flags))
    assert sliced.peak.total < planned.peak.total
    words = rendered(of_plan(with_memory(planned, sliced.peak.total), [Remedy(flags, sliced)]), 200)
    assert "--model.mlp-slice-tokens 1024" in words
    assert "model.offload_activations" in words


def test_passes_without_a_gradient_are_made_as_small_as_an_updates():
    case = bare(tokens=128, forward_tokens=1024)
    assert [{"model.forward-token-budget": 128}] in families(case)
    assert applied(case, {"model.forward-token-budget": 128}).forward_tokens == 128
    assert all("model.forward-token-budget" not in family[0] for family in families(bare(tokens=128)))
