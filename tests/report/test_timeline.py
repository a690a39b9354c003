"""Who worked when: each bar once, in its line, with its numbers; and nothing of a viewer's own reading."""

import json
from itertools import pairwise

import pytest

from fppo.report import timeline, viewed
from fppo.runs.jsonl import JsonLines
from tests.report.test_report import EVIL, write_run

T = 1.7e9


def line(step, at, *calls):
    spans = [["step", at, 2.0], ["gen", at + 0.1, 0.5], ["update_actor", at + 1.0, 0.9], ["digests", at + 1.95, 0.01]]
    return {"step": step, "spans": spans, "calls": list(calls)}


def call(group, label, start, seconds, *ranks):
    return {
        "group": group,
        "label": label,
        "start": start,
        "seconds": seconds,
        "ranks": ranks,
        "there": 4000,
        "back": 7,
    }


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path, steps=5, samples=False)
    log = JsonLines(tmp_path / "trace" / "rank_00000.jsonl")
    for step in range(1, 6):
        at = T + 2 * step
        two = call("a", "update_actor", at + 1.0, 0.8, [at + 1.1, 0.5], [at + 1.1, 0.7])
        log.write(line(step, at, two, call("a", EVIL, at + 1.7, 0.2, [at + 1.75, 0.1], [at + 1.75, 0.1])))
    log.close()
    return tmp_path


def test_a_trace_has_a_line_for_each_role_and_rank(run):
    path = timeline.write(run)
    assert path == run / "trace" / "trace.json"
    events = json.loads(path.read_text())["traceEvents"]
    names = {(x["pid"], x.get("tid")): x["args"]["name"] for x in events if x["name"].endswith("_name")}
    found = {}
    for event in (x for x in events if x["ph"] == "X"):
        place = names[event["pid"], None], names[event["pid"], event["tid"]]
        found.setdefault(place, []).append(event)
    roles = [("controller", x) for x in ("step", "rollout", "actor", "other")]
    assert list(found) == [*roles, ("pool a", "rank 0"), ("pool a", "rank 1")]
    assert {place: len(each) for place, each in found.items()} == dict.fromkeys(roles, 5) | {
        ("pool a", "rank 0"): 10,
        ("pool a", "rank 1"): 10,
    }
    for each in found.values():
        assert all(x["ts"] + x["dur"] <= y["ts"] + 1e-3 for x, y in pairwise(each))  # of microseconds
    first, second = (found["pool a", f"rank {rank}"][0] for rank in (0, 1))
    assert first["name"] == "update_actor"
    assert first["ts"] == pytest.approx(1.1e6, abs=1)
    assert first["args"] == {
        "step": 1,
        "seconds": 0.5,
        "waited": pytest.approx(0.3),
        "bytes there": 4000,
        "bytes back": 7,
    }
    assert (second["dur"], second["args"]["waited"]) == (pytest.approx(0.7e6, abs=1), pytest.approx(0.1))
    late = found["pool a", "rank 1"][1]
    assert (late["ts"], late["dur"]) == (pytest.approx(1.8e6, abs=1), pytest.approx(0.05e6, abs=1))


def test_the_viewer_gets_the_last_steps(run):
    work = viewed.state_of(run, "")["work"]
    assert {bar["step"] for bar in work} == {3, 4, 5}
    (last,) = (bar for bar in work if (bar["step"], bar["line"], bar["name"]) == (5, "rank 1", "update_actor"))
    assert last["seconds"] == 0.7
    assert last["more"] == {"waited": pytest.approx(0.1), "bytes there": 4000, "bytes back": 7}
    assert {bar["name"]: bar["kind"] for bar in work if bar["process"] == "controller"} == {
        "step": "other",
        "gen": "rollout",
        "update_actor": "actor",
        "digests": "other",
    }


def test_ranks_of_one_mesh_are_beside_each_other(run):
    log = JsonLines(run / "trace" / "rank_00001.jsonl")
    log.write(line(5, T + 10))
    log.close()
    last = timeline.read(run, last=1)
    assert {(bar.process, bar.step) for bar in last} == {("rank 0", 5), ("rank 1", 5), ("pool a", 5)}
    assert [bar.name for bar in last if bar.process == "rank 1"] == ["step", "gen", "update_actor", "digests"]


def test_a_run_without_one_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no traces; give the output_dir of a run"):
        timeline.write(tmp_path)
