"""`fppo train` on real processes with an expert axis: a tiny Qwen3-MoE has the numbers of one process."""

import pytest

from fppo.commands import cli
from fppo.runs import jsonl
from fppo.settings import files
from tests import tiny_run
from tests.distributed.ranks import Ranks


def numbers(directory):
    """The metrics by step, without what depends on the clock or the machine."""
    lines = jsonl.read(directory / "metrics.jsonl")
    return {line["step"]: {k: v for k, v in line.items() if not k.startswith(("timing_s/", "perf/"))} for line in lines}


@pytest.mark.slow
def test_a_run_on_an_expert_axis_has_the_numbers_of_one_process(tmp_path):
    """With replayed experts and their losses; it is resumed by one process from what both ranks have written."""
    tiny_run.write_task(tmp_path)
    tiny_run.write_mixture(tmp_path)
    shared = {
        "actor__optimizer__schedule": "constant",
        "algorithm__router_replay": "old_log_probs",
        "actor__experts__balance_coef": 0.01,
        "actor__experts__z_coef": 0.001,
    }

    def write(name, **changes):
        file = tmp_path / f"{name}.toml"
        files.save(tiny_run.settings(tmp_path, output_dir=str(tmp_path / name), **shared, **changes), file)
        return str(file)

    log = tmp_path / "log"
    assert cli.main(["train", write("one")]) == 0
    assert Ranks(["train", write("both", mesh__expert=2), "--steps", "3"], 2, log).end(300) == [0, 0], log.read_text()
    assert cli.main(["train", write("both")]) == 0
    found, expected = numbers(tmp_path / "both"), numbers(tmp_path / "one")
    assert any("actor/expert_load/0" in line for line in expected.values())
    for step, line in expected.items():
        same = {k: v for k, v in line.items() if isinstance(v, float) and k != "time"}
        assert {k: found[step][k] for k in same} == pytest.approx(same, rel=1e-3, abs=1e-4, nan_ok=True), step
