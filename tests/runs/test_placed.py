"""A run whose roles are in pools writes what one process writes, and each goes on with what the other has saved."""

import contextlib
import json
import random
import re
from collections import Counter
from types import MappingProxyType
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file

from fppo import models, tree
from fppo.assembly import pools
from fppo.assembly.run import assemble
from fppo.commands import actions, distributed
from fppo.commands.actions import CommandRank
from fppo.fleet import GroupDied
from fppo.fleet.group import RankLost
from fppo.models import lora_files
from fppo.pipeline import replay
from fppo.report import timeline
from fppo.report.diff import diff
from fppo.runs import jsonl, session
from fppo.runtime import checkpoint, digests
from fppo.settings import files
from tests import tiny_run
from tests.fleet.threads import Threads

APART = {
    "placement__pools": {"a": {"ranks": 1}, "c": {"ranks": 1}},
    "placement__roles__actor": "a",
    "placement__roles__critic": "c",
}


def engines(count, *, beside=MappingProxyType({}), rows=4, restarts=3):
    """So many of them, beside other pools."""
    return {
        "placement__pools": {**beside, "e": {"ranks": count}},
        "placement__roles__rollout": "e",
        "placement__engines__rows": rows,
        "placement__engines__restarts": restarts,
    }


@attrs.frozen
class Here:
    """A cluster of this process' threads, which `on_send(threads, request)` sees at work."""

    on_send: Any = None
    kind: type[Threads] = Threads

    def ranks(self, spec):
        made = self.kind(**(spec.sizes if spec.count > 1 else {}))
        made.on_send = self.on_send
        return made


def on_threads(**how):
    """A process whose pools are of its threads."""
    return CommandRank(open_cluster=lambda name: contextlib.nullcontext(Here(**how)))


THREADS = on_threads()


def train(task, directory, *, here=THREADS, **changes):
    asked = {"device": "cpu", "steps": 3, "actor__optimizer__schedule": "constant"} | changes
    assert actions.train(tiny_run.settings(task, output_dir=str(directory), **asked), here) == 0
    return directory


@pytest.fixture(scope="module")
def whole(task):
    """A run of one process."""
    return train(task, task / "whole")


def lines(directory):
    """Of metrics, without times, and of digests, without sketches of states: the controller has no whole one."""
    unlike = ("timing_s/", "perf/", "time")
    numbers = [
        {name: x for name, x in line.items() if not name.startswith(unlike)}
        for line in jsonl.read(directory / "metrics.jsonl")
    ]
    digested = list(jsonl.read(directory / "digests.jsonl"))
    return numbers, [line | {replay.SIZES: line[replay.SIZES]["batch"]} for line in digested]


def check_trace(directory):
    """What is known of who worked when is what the metrics say; the calls, by pool."""
    numbers = {line["step"]: line for line in jsonl.read(directory / "metrics.jsonl")}
    calls = {}
    for line in jsonl.read(directory / "trace" / "rank_00000.jsonl"):
        found, logged = Counter(), numbers.pop(line["step"])
        for stage, _, seconds in line["spans"]:
            found[f"timing_s/{stage}"] += seconds
        seconds = {x: y for x, y in logged.items() if x.startswith("timing_s/") and x != "timing_s/outside"}
        assert {x: found.pop(x, 0.0) for x in seconds} == pytest.approx(seconds)
        assert not found
        for call in line["calls"]:
            calls.setdefault(call["group"], Counter())[call["label"]] += 1
            end = call["start"] + call["seconds"]
            assert all(call["start"] <= start <= start + seconds <= end for start, seconds in call["ranks"])
            if call["label"] == "values":
                assert (call["there"] > 96, call["back"]) == (True, 96)  # 8 rows of 3 numbers
    assert not numbers
    return calls


@pytest.mark.slow
def test_it_writes_what_one_process_writes(task, whole, tmp_path, capsys):
    apart = train(task, tmp_path / "apart", **APART)
    assert lines(apart) == lines(whole)
    assert check_trace(whole) == {}
    calls = check_trace(apart)
    assert calls["a"]["update_actor"] == calls["c"]["update_critic"] == calls["c"]["values"] == 3
    events = json.loads(timeline.write(apart).read_text())["traceEvents"]
    shown = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    assert shown == {"controller", "pool a", "pool c"}
    assert sum(event["ph"] == "X" and event["name"] == "update_critic" for event in events) == 2 * 3
    compared = diff(whole, apart)
    assert (compared.differs, compared.lines[-1]) == (
        False,
        "equal in steps 0 to 3, bit for bit: batches, states and metrics",
    )
    assert compared.lines[0].startswith("settings that differ: placement.")
    assert tiny_run.sample_bytes(apart) == tiny_run.sample_bytes(whole)
    params = [models.load(x / session.MODEL)[1] for x in (whole, apart)]
    assert all(torch.equal(x, params[1][name]) for name, x in params[0].items())
    assert actions.replay(apart, 3, THREADS) == 0
    for directory in (whole, apart):
        capsys.readouterr()
        assert actions.evaluate(files.load(directory / files.SETTINGS)) == 0
        shown = capsys.readouterr().out
    assert "val-core/" in shown or "reward" in shown


def test_the_controller_of_pools_is_one_process(task):
    with pytest.raises(ValueError, match="placement: pools start their own processes, and the controller is one"):
        distributed.placed(lambda *_: 0, tiny_run.settings(task, **APART), [], 2)


def losing(wanted):
    """A process of whose pools a rank is lost as it is sent a call: `wanted(sent)` says so of the labels sent so far.
    And these labels."""
    sent = []

    def on_send(threads, request):
        sent.append(request.label)
        if wanted(sent):
            threads.lose(0)

    return on_threads(on_send=on_send), sent


def lost(*calls):
    """Who is sent a call of a label, and is the so many-th to be, is lost."""
    return losing(lambda sent: (sent[-1], sent.count(sent[-1])) in calls)


@pytest.mark.slow
def test_engines_of_which_some_die_write_what_one_process_writes(task, whole, tmp_path, capsys):
    here, _ = lost(("generate", 3), ("take weights", 7))
    two = APART | engines(2, beside=APART["placement__pools"], rows=8)  # which makes a batch one request
    with pytest.warns(RuntimeWarning, match=r"'e [01]': rank 0 of 1 \(thread 0\) was lost in .*; others answer for it"):
        apart = train(task, tmp_path / "apart", here=here, **two)
    assert "e (rollout): 2 engines of 1 thread" in capsys.readouterr().out
    assert lines(apart) == lines(whole)
    assert tiny_run.sample_bytes(apart) == tiny_run.sample_bytes(whole)
    assert actions.replay(apart, 3, THREADS) == 0


@pytest.mark.slow
@pytest.mark.parametrize("base", ["float", "nf4"])
def test_adapters_in_pools_write_what_one_process_writes(task, tmp_path, base):
    """The policy's engine and the reference have a base of their own, and only factors go to an engine; in 16 bits a
    sum of them with the base would be another policy."""
    if base == "nf4":
        pytest.importorskip("bitsandbytes", reason="pip install 'fppo[quantised]'")
    asked = {"model__lora__rank": 2, "model__lora__base": base, "model__compute_dtype": "bfloat16", "steps": 2}
    one, apart = tmp_path / "one", tmp_path / "apart"
    pools = {"placement__roles__reference": "c"} | engines(1, beside=APART["placement__pools"], rows=8)
    for directory, more in ((one, {}), (apart, APART | pools)):
        train(task, directory, **asked, **more)
    assert lines(apart) == lines(one)
    stored = [load_file(x / session.MODEL / lora_files.WEIGHTS) for x in (one, apart)]
    assert tree.digest(stored[0]) == tree.digest(stored[1])
    train(task, apart, **asked | {"steps": 3})
    train(task, one, **asked | {"steps": 3}, **APART)
    assert lines(apart) == lines(one)


@pytest.mark.slow
def test_a_reference_that_is_the_start_of_an_adapter_may_be_elsewhere(task, tmp_path):
    """It is read there, as the policy is here, and none of it moves when the policy does."""
    train(task, tmp_path / "first", model__lora__rank=2, steps=2)
    asked = {"model__lora__path": str(tmp_path / "first" / session.MODEL), "steps": 2}
    one, apart = tmp_path / "one", tmp_path / "apart"
    pools = {"placement__roles__reference": "c"} | engines(1, beside=APART["placement__pools"], rows=8)
    for directory, more in ((one, {}), (apart, APART | pools)):
        train(task, directory, **asked, **more)
    assert lines(apart) == lines(one)
    assert jsonl.read(apart / "metrics.jsonl")[-2]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_engines_sample_ahead_and_when_all_are_lost_the_run_goes_back(task, tmp_path, capsys):
    asked = {"rollout__ahead": 1, "rollout__n": 2, "algorithm__advantage": "remax"}
    one = train(task, tmp_path / "one", **engines(1), **asked)
    here, sent = lost(("generate", 12), ("generate", 13))
    two = engines(2, beside={"a": {"ranks": 1}}, restarts=0) | {"placement__roles__actor": "a"}
    with pytest.warns(RuntimeWarning, match="others answer for it"):
        apart = train(task, tmp_path / "apart", here=here, **two, **asked)
    kept = [place for place, label in enumerate(sent) if label == "hold"]
    assert kept
    assert all(sent[place + 1] == "read weights" for place in kept)  # before the actor is at work again
    words = "all 2 engines are gone, after 0 starts again; the last: .*; starting the pools again"
    assert re.search(words, capsys.readouterr().err)
    assert lines(apart) == lines(one)


def test_what_cannot_start_is_not_tried_again(task, tmp_path):
    started = []

    class NoRoom(Threads):
        def start(self):
            started.append(self)
            raise RankLost("there is no room", again=False)

    here = on_threads(kind=NoRoom)
    with pytest.raises(GroupDied, match=r"group '[ac]' did not start: there is no room"):
        train(task, tmp_path / "run", here=here, **APART)
    assert len(started) == 2
    (tmp_path / "taken").mkdir()
    with (
        session.alone_in(tmp_path / "taken"),
        pytest.raises(ValueError, match="output_dir: another process is writing to"),
    ):
        train(task, tmp_path / "taken", here=here, **APART)
    assert len(started) == 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_whichever_rank_is_lost_at_whatever_moment_the_run_ends_as_if_it_had_not(task, whole, tmp_path, capsys, seed):
    moment = random.Random(seed).randrange(50)
    here, sent = losing(lambda sent: len(sent) == moment + 1)
    apart = train(task, tmp_path / "apart", here=here, **APART)
    assert f"was lost in {sent[moment]}: the thread is gone; starting the pools again (1" in capsys.readouterr().err
    assert lines(apart) == lines(whole)


@pytest.mark.slow
def test_one_process_and_pools_go_on_with_what_the_other_has_saved(task, whole, tmp_path):
    for steps, changes in ((1, APART), (2, {}), (3, APART)):
        parts = train(task, tmp_path / "parts", steps=steps, **changes)
    assert lines(parts)[1] == lines(whole)[1]
    other = str(parts / session.CHECKPOINTS / "step_00000002")
    fork = train(task, tmp_path / "fork", resume=other, **APART)
    assert lines(fork)[1] == lines(whole)[1][-1:]
    assert checkpoint.steps(fork / session.CHECKPOINTS) == [2, 3]
    saved = [checkpoint.path_of(run / session.CHECKPOINTS, 3) for run in (fork, whole)]
    assert checkpoint.notes_of(saved[0]) == checkpoint.notes_of(saved[1])
    assert {"prompts, as tokens", "prompts, as rewards read them"} <= checkpoint.notes_of(saved[0]).keys()


@pytest.mark.slow
def test_what_stages_and_shards_have_saved_is_whole_in_one_process_and_theirs_again(tmp_path):
    tiny_run.write_task(tmp_path, layers=2)
    two = APART | {"placement__pools": {"a": {"ranks": 2, "pipeline": 2}, "c": {"ranks": 2}}}
    directory = train(tmp_path, tmp_path / "run", steps=1, **two)
    recorded = next(line for line in lines(directory)[1] if line["step"] == 1)
    assert recorded["kind"] == "sums"
    with assemble(tiny_run.settings(tmp_path, device="cpu", output_dir=str(directory))) as assembly:
        run = session.load(assembly, directory / session.CHECKPOINTS, 1)
    assert digests.digest(run, "sums", device=torch.device("cpu")) == recorded["result"]
    settings = tiny_run.settings(tmp_path, device="cpu", output_dir=str(directory), **two)
    placed = settings.placement, settings.mesh, settings.device
    with (
        pools.groups_of(*placed, settings.model_roles, open_cluster=THREADS.open_cluster) as places,
        assemble(settings, places=places) as assembly,
    ):
        run = session.load(assembly, directory / session.CHECKPOINTS, 1)
        assert session.of_state(assembly)(run, "sums") == recorded["result"]
        assert len(run.actor.params) == 1 < len(run.critic.params)  # stages have parameters of their own


@pytest.mark.slow
def test_a_run_that_loses_a_pool_ends_as_if_it_had_not(task, whole, tmp_path, capsys):
    here, sent = lost(("update_critic", 2))
    apart = train(task, tmp_path / "apart", here=here, **APART)
    words = "group 'c': rank 0 of 1 (thread 0) was lost in update_critic: the thread is gone; starting the pools again"
    assert f"{words} (1 of 3 times), from the checkpoint of step 1" in capsys.readouterr().err
    assert lines(apart) == lines(whole)
    sent.clear()
    with pytest.raises(GroupDied, match="update_critic"):
        train(task, tmp_path / "never", here=here, placement__restarts=0, **APART)
