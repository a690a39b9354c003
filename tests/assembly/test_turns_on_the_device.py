"""A device that several roles use in turn: each gives its memory back before the next takes any."""

import weakref

import pytest

from fppo import tree
from fppo.assembly.run import assemble
from fppo.pipeline.step import ppo_step
from fppo.runtime.offload import Lane
from tests import tiny_run

STATE = {"model__offload": "all", "critic__offload": "all", "model__ref_offload": True}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"algorithm__advantage": "remax", "rollout__n": 2}], ids=["gae", "remax"])
def test_no_two_roles_that_wait_on_the_host_are_on_the_device_together(tmp_path, monkeypatch, changes):
    """Of what was copied for one role nothing is alive when the next one's copies begin, in any stage of a step."""
    tiny_run.write_task(tmp_path, layers=3)
    owners, copies, stages = {}, [], []
    fetch = Lane.fetch

    def noted(lane, tensors):
        role = owners[tensors[0].untyped_storage().data_ptr()]
        others = {owner for owner, ref in copies if ref() is not None and owner != role}
        assert not others, f"{others} are on the device where {role} comes"
        done = fetch(lane, tensors)()
        copies.extend((role, weakref.ref(x)) for x in done)
        stages.append(role)
        return lambda: done

    with assemble(tiny_run.settings(tmp_path, **STATE, **changes)) as assembly:
        run = assembly.run
        for _ in range(2):
            for role in ("actor", "critic", "ref"):
                for x in tree.tensors(getattr(run, role)):
                    owners[x.untyped_storage().data_ptr()] = role
            monkeypatch.setattr(Lane, "fetch", noted)
            run, _, _ = ppo_step(run, program=assembly.program, draw=assembly.draw, donate=True)
            monkeypatch.undo()
            assert not any(ref() is not None for _, ref in copies), "after a step the device holds no role"
    wanted = {role for role in ("actor", "critic", "ref") if getattr(run, role) is not None}
    assert wanted == set(stages)
    assert len(wanted) > 1
