"""A pool of vLLM engines for an actor in a pool: in processes of their own, one of which is killed."""

import os
import signal

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here")

from fppo.commands import actions
from fppo.fleet import HERE
from fppo.pipeline.replay import DIGESTS
from fppo.rollout import pool
from fppo.runs import jsonl
from tests.vllm.test_train import settings, write_task


def pid(here):
    return os.getpid()


def test_engines_in_a_pool_give_the_run_of_one_though_one_is_killed(tmp_path, monkeypatch):
    """The weights of every step reach both, also the one that comes in place of the lost: its log-probs stay the
    trainer's."""
    write_task(tmp_path)
    asked = {
        "placement__pools": {"a": {"ranks": 1}, "e": {"ranks": 2}},
        "placement__roles__actor": "a",
        "placement__roles__rollout": "e",
        "placement__engines__rows": 4,
        "rollout__vllm__cache_gb": 0.05,
        "rollout__vllm__max_rows": 4,
    }
    answer, asked_of = pool.EnginePool._answer, []

    def killing(self, replica, work, prompts):
        asked_of.append(replica.group.name)
        if len(asked_of) == 14:
            os.kill(replica.group.call(pid, HERE), signal.SIGKILL)
        return answer(self, replica, work, prompts)

    monkeypatch.setattr(pool.EnginePool, "_answer", killing)
    with pytest.warns(RuntimeWarning, match="ended by SIGKILL, perhaps for want of memory; others answer for it"):
        assert actions.train(settings(tmp_path, "pool", "vllm", **asked)) == 0
    assert set(asked_of) == {"e 0", "e 1"}
    lines = jsonl.read(tmp_path / "pool" / "metrics.jsonl")
    assert [line["step"] for line in lines[1:]] == [1, 2, 3]
    assert all(line["training/rollout_probs_diff_max"] < 1e-5 for line in lines[1:])
    assert len(jsonl.read(tmp_path / "pool" / DIGESTS)) == 3
