"""Records of a run by step: which settings, code, bases and counters belong to a step of it."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import pytest
import torch

from fppo.key import Key
from fppo.pipeline.program import Base, RunState
from fppo.runs import saved, starts
from fppo.runs.resuming import check_bases
from fppo.runtime import checkpoint
from fppo.steps.train_state import TrainState
from tests import tiny_run


@pytest.fixture
def begun(tmp_path):
    """A run that started anew, and went on from steps 3 and 5, each time with another seed."""
    (tmp_path / "run").mkdir()
    for start, seed in ((0, 10), (3, 13), (5, 15)):
        starts.record(tiny_run.settings(tmp_path, seed=seed), start)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (1, 7, [(10, 3), (13, 5), (15, 7)]),
        (3, 5, [(10, 3), (13, 5)]),
        (4, 5, [(13, 5)]),
        (5, 6, [(13, 5), (15, 6)]),
        (6, 6, [(15, 6)]),
        (1, 3, [(10, 3)]),
    ],
)
def test_steps_are_computed_again_in_spans_of_equal_settings(begun, first, last, expected):
    assert [(settings.seed, until) for settings, until in starts.spans(begun, first, last)] == expected


OWN = Base(source="a", digest="d", dtype="float32", adapter="rank 4")


@pytest.fixture
def adapted(tmp_path):
    """A checkpoint of a run with an adapter."""
    state = TrainState(params={"w": torch.ones(2)}, opt=None, step=12)
    run = RunState(actor=state, key=Key(5), step=3, bases={"actor": OWN, "critic": OWN})
    return checkpoint.begin_save(run, tmp_path, 3).wait()


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"adapter": "rank 8"}, r"model\.lora: the {role}'s adapter in .* is rank 4, but the settings give rank 8"),
        ({"dtype": "bfloat16"}, r"model\.compute_dtype or model\.lora\.base: the {role}'s .* in float32, .* bfloat16"),
        ({"digest": "e"}, r"{path}: the {role}'s adapter in .* on the weights of a, whose digest was d; .* have e"),
    ],
)
def test_an_adapter_goes_on_on_its_own_base_alone(adapted, role, changes, setting):
    check_bases({"actor": OWN, "critic": attrs.evolve(OWN, source="moved")}, adapted)
    check_bases(None, adapted)
    path = r"model\.path" if role == "actor" else r"model\.critic_path"
    with pytest.raises(ValueError, match=setting.format(role=role, path=path)):
        check_bases({role: attrs.evolve(OWN, **changes)}, adapted)


def test_a_policy_that_is_read_alone_has_the_counters_of_its_checkpoint(adapted):
    model = SimpleNamespace(shapes={"w": torch.Size((2,))}, extents={}, cuts={})
    found = saved.policy(model, adapted)
    assert (found.step, found.actor.step, found.key) == (3, 12, Key(5))
    assert torch.equal(found.actor.params["w"], torch.ones(2))
    assert found.actor.opt is None


def test_the_newest_checkpoint_is_the_last_that_is_not_after_a_step(tmp_path):
    assert saved.newest(tmp_path) is None
    state = TrainState(params={}, opt=None, step=0)
    for step in (2, 5):
        run = RunState(actor=state, key=Key(0), step=step)
        checkpoint.begin_save(run, tmp_path / "checkpoints", step).wait()
    assert [saved.newest(tmp_path, step) for step in (None, 7, 5, 4, 2, 1)] == [5, 5, 5, 2, 2, None]
