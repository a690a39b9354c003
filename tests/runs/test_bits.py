"""What bits hang on beside settings and code: a start keeps it, a replay and a resumed run go by it or say both."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fppo import losses
from fppo.commands import cli
from fppo.runs import bits
from fppo.settings import files
from fppo_kernels.table import needs_cpp
from tests import tiny_run

TAKEN = "computing on {} thread(s), as the run did, and not on {}: bits depend on the number"


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """A process whose environment gives no number of threads, and that has one of them afterwards."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield torch.set_num_threads
    torch.set_num_threads(1)


def fppo(capsys, *arguments: object, status: int = 0) -> str:
    """What a command prints, on both streams; it must end with this status."""
    capsys.readouterr()
    assert cli.main([str(word) for word in arguments]) == status
    return "".join(capsys.readouterr())


def task(tmp_path: Path, **changes) -> Path:
    tiny_run.write_task(tmp_path)
    files.save(tiny_run.settings(tmp_path, data__eval_path=[], **changes), tmp_path / "run.toml")
    return tmp_path / "run.toml"


def ground(run: Path, start: int = 0) -> dict[str, str]:
    return json.loads((run / "starts" / f"step_{start:08d}.json").read_text())["ground"]


def changed(run: Path, name: str, change) -> None:
    """A file of JSON lines, or of one, with each line changed."""
    place = run / name
    lines = [change(json.loads(line)) for line in place.read_text().splitlines()] if name.endswith("l") else None
    text = json.dumps(change(json.loads(place.read_text()))) if lines is None else "\n".join(map(json.dumps, lines))
    place.write_text(text + "\n")


@pytest.mark.slow
def test_a_replay_is_on_the_threads_of_each_start_and_a_resumed_run_too_or_says_both(
    tmp_path, threads, capsys, monkeypatch
):
    """On one machine with other numbers of threads; settings are the same in all starts."""
    given, run = task(tmp_path, steps=3, checkpoint__every=1, checkpoint__keep=9), tmp_path / "run"
    threads(2)
    fppo(capsys, "train", given, "--steps", 1)
    assert ground(run)["threads"] == "2"
    assert {"instruction set", "processor", "torch build", "oneDNN", "libraries"} <= {*ground(run)}
    threads(1)
    said = fppo(capsys, "train", given, "--steps", 2)
    assert "computing on 2 thread(s), as the run did, and not on 1" in said
    assert "OMP_NUM_THREADS sets another" in said
    assert torch.get_num_threads() == 2
    threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")  # read when torch was loaded
    said = fppo(capsys, "train", given, "--steps", 3)
    assert "going on from step 2 with other bits ahead: threads 2 -> 1; ATEN_CPU_CAPABILITY not set -> default" in said
    assert "other code" not in said
    assert (ground(run)["threads"], ground(run, 2)["threads"]) == ("2", "1")

    monkeypatch.delenv("ATEN_CPU_CAPABILITY")
    for step in (1, 2):  # the steps before the last start and after it, in one replay
        shutil.rmtree(run / "checkpoints" / f"step_{step:08d}")
    said = fppo(capsys, "replay", run, "--step", 3).splitlines()
    assert said[:2] == [
        "from the start",
        TAKEN.format(2, 1),
    ]
    assert said.index("step 2: equal, bit for bit") < said.index(TAKEN.format(1, 2))
    assert "bits may differ, for these are others than the run's: ATEN_CPU_CAPABILITY default -> not set" in said
    assert said[-1] == "step 3: equal, bit for bit"


@pytest.mark.slow
def test_a_replay_says_the_size_of_a_difference_and_fails_no_step_for_a_rounding_that_metrics_read(tmp_path, capsys):
    given, run = task(tmp_path, steps=2, checkpoint__every=0), tmp_path / "run"
    fppo(capsys, "train", given)

    def by(line, part, leaf, apart):
        """As if the record had been made with this difference."""
        line[part][leaf] = "another"
        line["sizes"][part][leaf][2] += apart
        return line

    def rounded(line):
        return by(line, "batch", ".rollout_log_probs", 1e-6) if line["step"] == 1 else line

    changed(run, "digests.jsonl", rounded)
    changed(run, "starts/step_00000000.json", lambda x: x | {"ground": {**x["ground"], "instruction set": "AVX2"}})
    said = fppo(capsys, "replay", run, "--step", 2)
    here = torch.backends.cpu.get_cpu_capability()
    assert here == "AVX2" or f"others than the run's: instruction set AVX2 -> {here}\n" in said
    (line,) = (x for x in said.splitlines() if x.startswith("step 1: "))
    assert line.startswith("step 1: batch differs first in .rollout_log_probs, by about ")
    assert line.endswith("a rounding that metrics alone read, for the state after the step is equal, bit for bit")
    assert "step 2: equal, bit for bit" in said

    changed(run, "digests.jsonl", lambda line: by(line, "batch", ".values", 10.0) if line["step"] == 2 else line)
    said = fppo(capsys, "replay", run, "--step", 2, status=1)
    assert "step 2: batch differs first in .values, by about " in said
    changed(run, "starts/step_00000000.json", lambda x: {name: y for name, y in x.items() if name != "ground"})
    said = fppo(capsys, "ablate", "--op", "gae", "--implementations", "scan", "--replay", run, "--step", 2)
    assert "the run did not record its threads, processor and builds" in said
    assert "not as recorded, batch differs first in .values, by about " in said


@pytest.mark.slow
def test_a_comparison_has_sizes_and_says_where_the_two_were_computed(tmp_path, capsys):
    given, run, other = task(tmp_path, steps=2), tmp_path / "run", tmp_path / "other"
    fppo(capsys, "train", given)
    shutil.copytree(run, other)
    changed(other, "starts/step_00000000.json", lambda x: x | {"ground": {**x["ground"], "threads": "2"}})
    for step, part, leaf, apart, words in (
        (1, "batch", ".rollout_log_probs", 1e-6, "steps 1 differ in .rollout_log_probs (by about"),
        (2, "result", ".actor.params[", 1.0, "first in what update_actor made: .actor.params["),
    ):

        def by(line, step=step, part=part, leaf=leaf, apart=apart):
            if line["step"] == step:
                leaf = next(name for name in line["sizes"][part] if name.startswith(leaf))
                line[part][leaf] = "another"
                line["sizes"][part][leaf][2] += apart
            return line

        changed(other, "digests.jsonl", by)
        said = fppo(capsys, "diff", run, other, status=1)
        assert words in said
        assert "bits of the two need not be equal: threads 1 -> 2" in said
    assert "the first step to differ is 2 (" in said
    assert "of the state after it differ, by at most about " in said


def test_what_is_unlike_is_named_by_what_was_and_what_is():
    assert bits.unlike({}, {"threads": "2"}) == []
    assert bits.unlike({"threads": "1", "a": "x"}, {"threads": "2", "b": "y"}) == [
        "threads 1 -> 2",
        "a x -> not set",
        "b not set -> y",
    ]
    for recorded in ({}, {"threads": "0"}, {"threads": "many"}, {"threads": "1"}):
        assert bits.take_threads(recorded) is None
        assert torch.get_num_threads() == 1


NARROW = {"calls": 0, "enough": 0, "stop": -1}


def narrow(log_probs, old_log_probs, advantages, mask):
    """A policy loss with memory for more than two rows only in its first calls, which is stopped at one of them."""
    NARROW["calls"] += 1
    if NARROW["calls"] == NARROW["stop"]:
        raise RuntimeError("stopped")
    if len(mask) > 2 and NARROW["calls"] > NARROW["enough"]:
        raise torch.OutOfMemoryError("more than two rows")
    return losses.ppo_clip(log_probs, old_log_probs, advantages, mask)


def test_a_run_that_is_stopped_while_it_repeats_a_mini_batch_goes_on_bit_for_bit(tmp_path, threads, capsys):
    """There is enough memory in the first step, of four mini-batches, and no more from the second one on. What fitted
    is in the state: after a start in the third one nothing is repeated."""
    changes = {"steps": 3, "actor__token_budget": "auto", "checkpoint__keep": 9, "check": False}
    given = task(tmp_path, actor__loss=f"{__name__}:narrow", **changes)
    NARROW.update(calls=0, enough=4, stop=-1)
    fppo(capsys, "train", given, "--output-dir", tmp_path / "whole")
    for stop in (6, NARROW["calls"] - 1):
        run = tmp_path / f"stopped_{stop}"
        NARROW.update(calls=0, enough=4, stop=stop)
        with pytest.raises(RuntimeError, match="stopped"):
            cli.main(["train", str(given), "--output-dir", str(run)])
        NARROW.update(calls=0, enough=0, stop=-1)
        fppo(capsys, "train", given, "--output-dir", run)
        assert NARROW["calls"] == (9 + 8 if stop == 6 else 8), "one pass is repeated where there was no memory"
        assert "equal" in fppo(capsys, "diff", tmp_path / "whole", run)


def test_a_run_that_ended_for_lack_of_memory_goes_on_with_a_budget_that_finds_its_size_and_back(
    tmp_path, threads, capsys
):
    given = task(tmp_path, steps=1, actor__loss=f"{__name__}:narrow", critic__token_budget=64, check=False)
    NARROW.update(calls=0, enough=4, stop=-1)
    fppo(capsys, "train", given)
    with pytest.raises(torch.OutOfMemoryError) as error:
        cli.main(["train", str(given), "--steps", "2"])
    assert any('token_budget = "auto"' in note for note in error.value.__notes__)
    fppo(capsys, "train", given, "--steps", 2, "--actor.token-budget", "auto", "--critic.token-budget", "auto")
    fppo(capsys, "train", given, "--steps", 3, "--actor.token-budget", 14)
    assert (tmp_path / "run" / "model").is_dir()


class NarrowDecoding(TorchDispatchMode):
    """Decoding with memory for more than five rows only in its first `enough` passes over so many. `failed` counts the
    passes for which there was none, and `passes` those after the first of them, at one of which it is stopped."""

    def __init__(self, enough: int, stop: int = -1) -> None:
        super().__init__()
        self.enough, self.stop, self.passes, self.failed = enough, stop, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.embedding.default and torch.is_inference_mode_enabled():
            self.passes += self.failed > 0
            if self.passes == self.stop:
                raise RuntimeError("stopped")
            self.enough -= len(args[1]) > 5
            if self.enough < 0 and len(args[1]) > 5:
                self.failed += 1
                raise torch.OutOfMemoryError("more than five rows")
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.skipif(needs_cpp() is not None, reason="needs a C++ compiler")
def test_a_run_that_is_stopped_while_it_decodes_rows_again_or_later_goes_on_bit_for_bit(tmp_path, threads, capsys):
    """There is memory for all rows in the first step alone. What fitted is not in the state: a later start finds it
    again, and an exact engine's bits do not depend on it."""
    changes = {"rollout__cache_gb": "auto", "rollout__exact": True, "eval__before": False, "checkpoint__keep": 9}
    given, whole = task(tmp_path, steps=3, check=False, **changes), tmp_path / "whole"
    with NarrowDecoding(enough=2) as narrow:  # of the first step, of three tokens
        fppo(capsys, "train", given, "--output-dir", whole)
    assert narrow.failed == 1, "the third step begins with what fitted in the second"
    for stop in (2, narrow.passes - 4):  # in the second step, and in the third
        run = tmp_path / f"stopped_{stop}"
        with pytest.raises(RuntimeError, match="stopped"), NarrowDecoding(2, stop):
            cli.main(["train", str(given), "--output-dir", str(run)])
        with NarrowDecoding(0) as again:
            fppo(capsys, "train", given, "--output-dir", run)
        assert again.failed, "rows are decoded again where there is no memory"
        assert "equal in steps 1 to 3, bit for bit" in fppo(capsys, "diff", whole, run)
