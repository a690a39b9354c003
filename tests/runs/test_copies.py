"""A run's copies at a remote address: the newest complete checkpoint is there whatever happens, and goes on as the run
itself would."""

import json
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch

from fppo import tree
from fppo.commands import actions, cli
from fppo.runs import copies, jsonl, session
from fppo.runs.copies import Copies
from fppo.runtime import checkpoint
from fppo.runtime.mesh import AXES, LOCAL, is_first, place_on
from fppo.runtime.remote import Remote, RemoteError
from fppo.runtime.simulate import simulate
from fppo.settings import compare, files, places
from fppo.settings.train import TrainSettings
from tests import dying, tiny_run
from tests.distributed.processes import server


def _state(step):
    return {"w": torch.full((5, 3), 0.1 * step), "step": step}


def _write(directory: Path, step: int, *, keep: int = 9) -> Path:
    """What a run has on disk after a step."""
    for place in ("starts", "samples", "configs/actor"):
        (directory / place).mkdir(parents=True, exist_ok=True)
    (directory / "settings.toml").write_text("steps = 9\n")
    (directory / "starts" / "step_00000000.toml").write_text("steps = 9\n")
    (directory / "configs" / "actor" / "config.json").write_text("{}")
    (directory / "samples" / f"{step:06d}.parquet").write_bytes(b"rows" * step)
    with (directory / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": step}) + "\n")
    return checkpoint.begin_save(_state(step), directory / "checkpoints", step, keep=keep).wait()


@pytest.fixture
def run(tmp_path):
    for step in (1, 2, 3):
        _write(tmp_path / "run", step)
    return tmp_path / "run"


def _is_like_local(place: Path, run: Path, target: Path) -> int:
    """Fetch the newest complete checkpoint; it and all beside it are those of the run. Returns its step, 0 if there is
    none."""
    remote = dying.remote(place)
    copies.fetch_newest(target, remote, resume="auto")
    step = max(checkpoint.steps(target / "checkpoints"), default=0)
    assert step == max(copies.complete(remote), default=0)
    if step:
        assert tree.digest(checkpoint.load(_state(0), target / "checkpoints", step)) == tree.digest(_state(step))
        for name in ("settings.toml", "starts/step_00000000.toml", "configs/actor/config.json", "metrics.jsonl"):
            assert (target / name).read_bytes() == (run / name).read_bytes()
        held = {path.name: path.read_bytes() for path in (run / "samples").iterdir() if int(path.stem) <= step}
        assert {path.name: path.read_bytes() for path in (target / "samples").iterdir()} == held
    return step


@pytest.mark.parametrize("points", [(6, 99), pytest.param(range(100), marks=pytest.mark.slow)], ids=["some", "all"])
def test_wherever_a_copy_dies_the_newest_complete_checkpoint_is_that_of_the_run(run, tmp_path, points):
    """Bit for bit, with one checkpoint kept and the last copy left where it died."""
    found = set()
    for last in points:
        place, died = tmp_path / f"place_{last}", False
        copies.copy(run, dying.remote(place), 1, keep=1)
        try:
            copies.copy(run, dying.remote(place, last), 2, keep=1)
        except RemoteError:
            died = True
        step = _is_like_local(place, run, tmp_path / f"target_{last}")
        assert step == 2 or (died and step == 1)
        found.add(step)
        copies.copy(run, dying.remote(place), 3, keep=1)  # the next one leaves nothing of what died
        assert list(copies.checkpoints(dying.remote(place))) == [3]
        assert _is_like_local(place, run, tmp_path / f"after_{last}") == 3
        if not died:
            assert found == {1, 2}
            return
    pytest.fail("no copy was whole")


def _copy_until_killed(run, place, last):
    copies.copy(run, dying.remote(place, last, kills=True), 2, keep=1)


@pytest.mark.slow
@pytest.mark.parametrize("last", [5, 12])
def test_a_killed_copy_is_never_taken_for_complete(run, tmp_path, last):
    place = tmp_path / "place"
    copies.copy(run, dying.remote(place), 1, keep=1)
    process = server().Process(target=_copy_until_killed, args=(run, place, last))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert _is_like_local(place, run, tmp_path / "target") == 1
    copies.copy(run, dying.remote(place), 2, keep=1)
    assert list(copies.checkpoints(dying.remote(place))) == [2]


def test_a_fetch_that_dies_leaves_no_checkpoint_and_is_repeated(run, tmp_path):
    place = tmp_path / "place"
    copies.copy(run, dying.remote(place), 3, keep=1)
    for last in range(100):
        target = tmp_path / f"target_{last}"
        try:
            copies.fetch_newest(target, dying.remote(place, last), resume="auto")
        except RemoteError:
            assert checkpoint.steps(target / "checkpoints") == []
            assert _is_like_local(place, run, target) == 3
            continue
        assert last > 5
        return
    pytest.fail("no fetch was whole")


def test_old_checkpoints_are_removed_there_as_here(run, tmp_path):
    remote = dying.remote(tmp_path / "place")
    for step in (1, 2, 3):
        copies.copy(run, remote, step, keep=2)
    assert list(copies.checkpoints(remote)) == [2, 3]
    assert copies.copy(run, remote, 3, keep=2) == 0  # nothing is copied again
    assert (tmp_path / "place" / "checkpoints" / "step_00000003" / "complete.json").exists()


def test_samples_there_follow_those_here(run, tmp_path):
    """Those left out to save space, and those of steps that are made again, go."""
    remote = dying.remote(tmp_path / "place")
    copies.copy(run, remote, 2, keep=1)
    assert remote.sizes("samples") == {"000001.parquet": 4, "000002.parquet": 8}
    (run / "samples" / "000001.parquet").unlink()
    remote.put("samples/000003.parquet", b"torn")
    remote.put("samples/000009.parquet", b"of a step that is made again")
    remote.put("samples/mine.txt", b"mine")
    copies.copy(run, remote, 3, keep=1)
    assert remote.sizes("samples") == {"000002.parquet": 8, "000003.parquet": 12, "mine.txt": 4}


def test_another_runs_checkpoints_are_neither_replaced_nor_taken(run, tmp_path):
    remote, other = dying.remote(tmp_path / "place"), tmp_path / "other"
    copies.copy(run, remote, 2, keep=1)
    for step in (1, 2):
        _write(other, step)
    with pytest.raises(RemoteError, match="another run's checkpoint of step 2"):
        copies.copy(other, remote, 2, keep=1)
    with pytest.raises(ValueError, match="another run's checkpoint of step 2"):
        copies.fetch_newest(other, remote, resume="auto")
    shutil.rmtree(other / "checkpoints" / "step_00000002")
    with pytest.raises(ValueError, match=r"the checkpoint of step 2, and .* none after step 1: remove these"):
        copies.fetch_newest(other, remote, resume="auto")
    with pytest.raises(ValueError, match="step 2, and resume = 'never'"):
        copies.fetch_newest(tmp_path / "new", remote, resume="never")
    assert not (tmp_path / "new" / "checkpoints").exists()
    copies.fetch_newest(run, remote, resume="auto")  # its own, and it is further
    assert checkpoint.steps(run / "checkpoints") == [1, 2, 3]


def test_settings_of_ones_own_are_not_replaced(run, tmp_path):
    remote, target = dying.remote(tmp_path / "place"), tmp_path / "target"
    copies.copy(run, remote, 3, keep=1)
    target.mkdir()
    (target / "settings.toml").write_text("steps = 20\n")
    copies.fetch_newest(target, remote, resume="auto")
    assert (target / "settings.toml").read_text() == "steps = 20\n"


class Slow(dying.Dying):
    """Writes nothing before `go` is set."""

    def __init__(self) -> None:
        super().__init__(10**9)
        self.go = threading.Event()

    def put_file(self, path1, path2, callback=None, **how):
        self.go.wait(60)
        super().put_file(path1, path2, callback, **how)


def test_while_a_copy_is_slow_only_the_newest_waits_and_none_is_removed_under_it(tmp_path):
    directory, fs = tmp_path / "run", Slow()
    remote = Remote("slow://x", fs, str(tmp_path / "place"), pauses=())
    with Copies(directory, remote, keep=1) as copying:
        for step in (1, 2, 3):
            copying.written(_write(directory, step))
        during, numbers = checkpoint.steps(directory / "checkpoints"), copying.numbers()
        fs.go.set()
        copying.finish()
    assert (during, numbers) == ([1, 3], {})
    assert checkpoint.steps(directory / "checkpoints") == [3]
    assert list(copies.checkpoints(remote)) == [3]
    assert _is_like_local(tmp_path / "place", directory, tmp_path / "target") == 3


def test_a_failed_copy_is_said_and_the_next_checkpoint_is_another_try(tmp_path, capsys):
    directory, remote = tmp_path / "run", dying.remote(tmp_path / "place", 3)
    copying = Copies(directory, remote, keep=2)
    copying.written(_write(directory, 1))
    with pytest.raises(RemoteError, match=r"step 1 is whole in .*/run/checkpoints, and the same command copies it"):
        copying.finish()
    assert "the checkpoint of step 1 is not copied to dying://" in capsys.readouterr().err
    remote.fs.last = 10**9
    copying.written(_write(directory, 2))
    copying.finish()
    assert list(copies.complete(remote)) == [2]


@pytest.mark.parametrize("error", [RuntimeError("mine"), SystemExit(3)])
def test_a_run_that_fails_still_copies_its_newest_checkpoint(tmp_path, error):
    directory, remote = tmp_path / "run", dying.remote(tmp_path / "place")

    def train():
        with Copies(directory, remote, keep=2):
            _write(directory, 1)
            raise error

    with pytest.raises(type(error)):
        train()
    assert list(copies.complete(remote)) == [1]


def test_a_copy_is_made_also_where_no_thread_can_be_started(tmp_path):
    directory, remote = tmp_path / "run", dying.remote(tmp_path / "place")
    path, before = _write(directory, 1), threading.stack_size(2**47 - 4096)  # no address space has room for it
    try:
        Copies(directory, remote, keep=1).written(path)
    finally:
        threading.stack_size(before)
    assert list(copies.complete(remote)) == [1]


def test_a_copy_says_how_long_it_took(tmp_path):
    directory, copying = tmp_path / "run", Copies(tmp_path / "run", dying.remote(tmp_path / "place"), keep=1)
    copying.written(_write(directory, 1))
    numbers: dict[str, float] = {}
    while not numbers:
        numbers = copying.numbers()
    assert numbers.keys() == {"perf/copied_gb", "perf/copy_seconds"}
    assert copying.numbers() == {}


def test_each_run_of_a_comparison_has_a_place_of_its_own():
    settings = files.replace(TrainSettings(), {"checkpoint.remote": "s3://bucket/all/"})
    (variant,) = compare.variants(["critic.loss=mse"])
    found = compare.changed(settings, variant, 1, f"runs/c/{variant.directory}/seed_1")
    assert found.checkpoint.remote == f"s3://bucket/all/{variant.directory}/seed_1"
    assert compare.changed(TrainSettings(), variant, 1, "runs/c/x/seed_1").checkpoint.remote is None


def test_an_address_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    (tmp_path / "file").write_text("mine")
    for address, text in ((f"file://{tmp_path}/file/run", "NotADirectory"), ("ss3://x", "did you mean s3")):
        settings = files.replace(TrainSettings(), {"checkpoint.remote": address})
        (problem,) = places.remote_problems(settings)
        assert problem.path == "checkpoint.remote"
        assert text in problem.text
    assert [*places.remote_problems(TrainSettings())] == []


@pytest.mark.slow
def test_commands_refuse_what_cannot_be_written(task, tmp_path, capsys):
    files.save(tiny_run.settings(task, output_dir=str(tmp_path / "run")), tmp_path / "run.toml")
    for command in ("train", "check", "sft"):
        assert cli.main([command, str(tmp_path / "run.toml"), "--checkpoint.remote", "ss3://x"]) == 2
        assert "checkpoint.remote = 'ss3://x': fsspec knows no ss3://" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def _digests(directory: Path):
    return {line["step"]: line["state"] for line in jsonl.read(directory / "digests.jsonl")}


def _numbers(directory: Path):
    lines = jsonl.read(directory / "metrics.jsonl")
    return [{name: x for name, x in line.items() if not name.startswith(tiny_run.UNLIKE)} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("address", ["memory://{}/place", "file://{}/place"])
def test_a_run_goes_on_from_its_copies_bit_for_bit(task, tmp_path, capsys, address):
    """With its records and its samples, as if its directory had not been lost."""
    given = {"actor__optimizer__schedule": "constant", "checkpoint__keep": 1, "eval__before": False}
    given |= {"checkpoint__remote": address.format(tmp_path), "output_dir": str(tmp_path / "run")}
    assert actions.train(tiny_run.settings(task, **given, steps=2)) == 0
    shutil.rmtree(tmp_path / "run")
    assert actions.train(tiny_run.settings(task, **given, steps=4)) == 0
    assert "fetched the checkpoint of step 2 from " in capsys.readouterr().err
    remote = Remote.at(address.format(tmp_path))
    assert list(copies.checkpoints(remote)) == [4]
    given["checkpoint__remote"] = None
    whole = tiny_run.settings(task, **given | {"output_dir": str(tmp_path / "whole")}, steps=4)
    assert actions.train(whole) == 0
    assert _digests(tmp_path / "run") == _digests(tmp_path / "whole")
    assert _numbers(tmp_path / "run")[2:] == _numbers(tmp_path / "whole")[2:]
    assert tiny_run.sample_bytes(tmp_path / "run") == tiny_run.sample_bytes(tmp_path / "whole")
    held = {path.name: path.stat().st_size for path in (tmp_path / "run" / "samples").glob("*.parquet")}
    assert remote.sizes("samples") == held


@pytest.mark.slow
def test_a_run_whose_last_copy_fails_does_not_end_as_success_and_the_same_command_copies_it(task, tmp_path, capsys):
    """Its model is exported, and its checkpoint is whole."""
    place = tmp_path / "place"
    files.save(tiny_run.settings(task, output_dir=str(tmp_path / "run"), steps=1), tmp_path / "run.toml")
    given = ["train", str(tmp_path / "run.toml"), "--checkpoint.remote", f"file://{place}"]
    (place / "checkpoints").mkdir(parents=True)
    (place / "checkpoints" / "step_00000001").write_text("in the way")
    assert cli.main(given) == 2
    assert f"the checkpoint of step 1 is whole in {tmp_path / 'run'}" in capsys.readouterr().err
    assert (tmp_path / "run" / "model" / "config.json").exists()
    (place / "checkpoints" / "step_00000001").unlink()
    assert cli.main(given) == 0
    assert list(copies.complete(Remote.at(f"file://{place}"))) == [1]


@pytest.mark.slow
def test_a_policy_is_exported_from_its_copies(task, tmp_path, capsys):
    given = {"checkpoint__remote": f"file://{tmp_path}/place", "output_dir": str(tmp_path / "run"), "steps": 2}
    assert actions.train(tiny_run.settings(task, **given)) == 0
    shutil.move(tmp_path / "run", tmp_path / "away")
    assert cli.main(["export", f"file://{tmp_path}/place", str(tmp_path / "model")]) == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("model", "away/model")]
    assert weights[0] == weights[1]
    assert cli.main(["export", f"file://{tmp_path}/place", str(tmp_path / "model"), "--step", "7"]) == 2
    assert "no complete checkpoint of step 7; there are those of [1, 2]" in capsys.readouterr().err


def test_ranks_meet_while_the_first_one_works():
    """However long that takes, no collective waits for it; its error is its own."""
    met, at_work = threading.Barrier(2), []

    def rank(mesh):
        def work():
            at_work.append(place_on(mesh, AXES))
            met.wait(60)
            if is_first(mesh):
                raise RemoteError("full")

        try:
            copies.meanwhile(work, mesh, torch.device("cpu"))
        except RemoteError as error:
            return str(error)
        return None

    assert list(simulate({"shard": 2}, rank)) == ["full", None]
    assert sorted(at_work) == [0, 1]


def test_a_run_without_a_remote_address_fetches_nothing(tmp_path):
    settings = files.replace(TrainSettings(), {"output_dir": str(tmp_path / "run")})
    session.fetch(settings, LOCAL, torch.device("cpu"))
    assert not (tmp_path / "run").exists()
