"""The actions of commands with stand-ins for the work: what they ask for, in which order, and their statuses."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest

from fppo._errors import UsageError
from fppo.commands import actions, compare, serve_tinker
from fppo.commands.options import ServeOptions
from fppo.fleet import GroupDied
from fppo.runtime.mesh import Axis, Mesh
from fppo.serve.service import Bounds
from fppo.settings.compare import CompareSettings
from tests import tiny_run


@pytest.fixture
def settings(tmp_path):
    """Refusals of a run that keeps nothing yet."""
    return tiny_run.settings(tmp_path, steps=7)


def stopping_at(step, monkeypatch, made=None):
    """Training ends at this step, and exports and reports are only noted."""
    noted = []
    assembled = SimpleNamespace(inputs=None) if made is None else made

    def train(settings, assembly, watch, *, at_end):
        noted.append((settings.resume, assembly is assembled, watch))
        run = SimpleNamespace(step=step)
        if step == settings.steps:
            at_end(run)
        return run

    monkeypatch.setattr(actions.session, "run_training", train)
    monkeypatch.setattr(actions.session, "export", lambda assembly, run, target: noted.append(("export", target.name)))
    monkeypatch.setattr(actions.report, "write_report", lambda directory: noted.append(("report", directory.name)))
    monkeypatch.setattr(actions, "_assemble", lambda *args, **_: contextlib.nullcontext(assembled))
    monkeypatch.setattr(actions, "assemble_supervised", lambda settings, **_: (settings, assembled))
    return noted


@pytest.mark.parametrize("command", [actions.train, actions.sft])
@pytest.mark.parametrize(("step", "status"), [(7, 0), (6, 130)])
def test_a_run_that_stops_early_is_not_exported_and_says_so_by_its_status(
    settings, monkeypatch, capsys, command, step, status
):
    noted = stopping_at(step, monkeypatch)
    assert command(settings, actions.CommandRank(watch="watch")) == status
    assert noted[0] == ("auto", True, "watch")
    assert noted[1:] == ([("export", "model"), ("report", "run")] if status == 0 else [])


def test_a_run_that_lost_a_pool_goes_on_from_its_own_checkpoints(settings, monkeypatch, capsys):
    """Though its user said never: those are what it wrote before."""
    asked, written = [], []

    def trained(settings, assembly, watch, *, at_end):
        asked.append(settings.resume)
        written.extend((2, 5) if len(asked) == 2 else ())
        if len(asked) < 3:
            raise GroupDied("a", "it is gone")
        return SimpleNamespace(step=settings.steps)

    stopping_at(7, monkeypatch)
    monkeypatch.setattr(actions.session, "run_training", trained)
    monkeypatch.setattr(actions.checkpoint, "steps", lambda directory: written)
    given = attrs.evolve(settings, resume="never", placement=attrs.evolve(settings.placement, restarts=2))
    assert actions.train(given) == 0
    assert asked == ["never", "auto", "auto"]
    said = capsys.readouterr().err
    assert "starting the pools again (1 of 2 times), from the start" in said
    assert "starting the pools again (2 of 2 times), from the checkpoint of step 5" in said


@pytest.mark.parametrize(("done", "status"), [(7, 0), (3, 130)])
def test_batches_that_were_not_sampled_are_said_by_the_status(settings, monkeypatch, capsys, done, status):
    stopping_at(7, monkeypatch)
    monkeypatch.setattr(actions.sampling, "run_sampling", lambda settings, assembly: done)
    assert actions.rollout(settings) == status
    assert f"--steps {done}\n" in capsys.readouterr().out


@pytest.mark.parametrize("changes", [{"rollout__save": True}, {"rollout__from": "x"}])
def test_sampling_alone_refuses_what_is_for_training(tmp_path, changes):
    with pytest.raises(UsageError, match="fppo rollout always samples and saves"):
        actions.rollout(tiny_run.settings(tmp_path, **changes))


def test_an_evaluation_is_of_the_policy_on_the_base_that_it_was_trained_on(settings, monkeypatch, capsys):
    """The newest checkpoint is taken, or the one that resume names."""
    checked, shown = [], SimpleNamespace(step=5)
    here = actions.CommandRank(Mesh({"shard": Axis(2, 0)}), "own device")
    bare = attrs.evolve(settings, seed=77)
    monkeypatch.setattr(actions.saved, "bare", lambda given: attrs.evolve(given, seed=77))
    monkeypatch.setattr(actions.session, "say_misnamed", lambda *given: checked.append(given))
    evaluator = SimpleNamespace(
        bases="bases", model="model", device="device", evaluate="evaluate", tokenizer="tokenizer"
    )

    def assemble(given, **how):
        assert (given, how) == (attrs.evolve(bare, resume=given.resume), {"mesh": here.mesh, "device": "own device"})
        return contextlib.nullcontext(evaluator)

    def kept(evaluate, place, tokenizer, mesh):
        assert (evaluate, tokenizer, mesh) == ("evaluate", "tokenizer", here.mesh)
        assert place(3) == place(9) == Path(settings.output_dir) / "evaluations" / "step_00000005_eval_1.jsonl"
        return lambda run: {"of": run}

    monkeypatch.setattr(actions, "assemble_evaluation", assemble)
    monkeypatch.setattr(actions, "check_bases", lambda bases, path: checked.append((bases, path.name)))
    monkeypatch.setattr(actions.saved, "newest", lambda directory: 5)
    monkeypatch.setattr(
        actions.saved, "policy", lambda model, path, **how: checked.append((model, path.name, how)) or shown
    )
    monkeypatch.setattr(actions.evaluations, "kept", kept)
    monkeypatch.setattr(
        actions.evaluations, "write_numbers", lambda report, path: checked.append((report["of"] is shown, path.name))
    )
    monkeypatch.setattr(actions.evaluations, "table", lambda report: [])
    assert actions.evaluate(settings, here) == 0
    assert actions.evaluate(attrs.evolve(settings, resume="x/step_00000003"), here) == 0
    said = (Path(settings.output_dir) / "checkpoints", here.mesh)
    how, numbers = {"mesh": here.mesh, "device": "device"}, (True, "step_00000005_eval_1.json")
    assert checked == [
        each
        for name in ("step_00000005", "step_00000003")
        for each in (said, ("bases", name), ("model", name, how), numbers)
    ]
    monkeypatch.setattr(actions.saved, "newest", lambda directory: None)
    with pytest.raises(UsageError, match="there is no checkpoint in"):
        actions.evaluate(settings)


def recorded(monkeypatch, steps, settings):
    """A run with checkpoints of these steps, whose settings changed at step 4."""
    monkeypatch.setattr(
        actions.saved,
        "newest",
        lambda directory, step=None: max((each for each in steps if step is None or each <= step), default=None),
    )
    later = attrs.evolve(settings, seed=9)
    monkeypatch.setattr(actions.starts, "load", lambda directory, step=None: settings if step and step < 4 else later)
    monkeypatch.setattr(actions.checkpoint, "steps", lambda directory: list(steps))
    monkeypatch.setattr(actions.checkpoint, "misnamed", lambda directory: [])
    monkeypatch.setattr(actions.session, "say_misnamed", lambda *args: None)


def test_a_step_is_computed_again_from_the_checkpoint_before_it(settings, tmp_path, monkeypatch):
    recorded(monkeypatch, (3, 6), settings)
    monkeypatch.setattr(actions.starts, "spans", lambda directory, first, last: [(settings, last)])
    monkeypatch.setattr(actions.starts, "first", lambda directory: 0)
    assert [actions.beginning(tmp_path, step) for step in (1, 3, 4, 6, 7)] == [0, 0, 3, 3, 6]
    monkeypatch.setattr(actions.starts, "first", lambda directory: 2)
    with pytest.raises(UsageError, match="began from the checkpoint of step 2, and has none before step 3"):
        actions.beginning(tmp_path, 3)
    interrupted = attrs.evolve(settings, rollout=attrs.evolve(settings.rollout, interrupt=2))
    monkeypatch.setattr(
        actions.starts, "spans", lambda directory, first, last: [(settings, first), (interrupted, last)]
    )
    with pytest.raises(UsageError, match=r"with rollout\.interrupt the clock decided"):
        actions.beginning(tmp_path, 7)


def test_compared_runs_have_seeds_in_a_row_and_directories_of_their_own(settings, tmp_path):
    asked = CompareSettings(vary=("critic.epochs=1,2",), seeds=2, out=str(tmp_path / "out"), metrics=())
    found = compare.plan(attrs.evolve(settings, seed=4), asked)
    assert {name: list(seeds) for name, seeds in found.items()} == {
        "critic.epochs=1": [4, 5],
        "critic.epochs=2": [4, 5],
    }
    each = [own for seeds in found.values() for own in seeds.values()]
    assert [(own.seed, own.critic.epochs) for own in each] == [(4, 1), (5, 1), (4, 2), (5, 2)]
    assert len({own.output_dir for own in each}) == 4
    assert all(Path(own.output_dir).parent.parent == tmp_path / "out" for own in each)


def keys_file(tmp_path, text):
    (tmp_path / "keys").write_text(text)
    return ServeOptions(targets=("m",), keys=str(tmp_path / "keys"))


def test_keys_of_clients_are_the_lines_of_their_file(tmp_path):
    given = keys_file(tmp_path, "# of ours\ntml-first\n\n  tml-second \n")
    assert serve_tinker.keys_of(given, "tml-server") == (["tml-server", "tml-first", "tml-second"], False)
    (new,), is_new = serve_tinker.keys_of(ServeOptions(targets=("m",)), None)
    assert is_new
    assert new.startswith("tml-")
    for text, place in (("tml-fine\nother-key\n", "key 2 of --keys"), ("tml-abc\n", "key 1 of --keys")):
        with pytest.raises(UsageError, match=place):
            serve_tinker.keys_of(keys_file(tmp_path, text), "tml-server")
    with pytest.raises(UsageError, match="FPPO_API_KEY"):
        serve_tinker.keys_of(ServeOptions(targets=("m",)), "server-key")


def test_a_served_base_draws_by_the_seed_and_the_bounds_of_the_flags(tmp_path):
    engine = SimpleNamespace(kernels="kernels")
    policy = SimpleNamespace(
        params={},
        model=SimpleNamespace(vision=None),
        engine=engine,
        texts="texts",
        sampling=SimpleNamespace(stop_token_ids=(5,)),
        tokenizer=SimpleNamespace(save_pretrained="write"),
    )
    base = serve_tinker.served_base(ServeOptions(targets=("m",), seed=3), str(tmp_path), policy, Bounds(row_tokens=77))
    assert (base.base.name, base.base.limit, base.base.kernels) == (str(tmp_path), 77, "kernels")
    assert base.base.tokenizer_id == str(tmp_path.resolve())
    assert (base.rules.seed, base.rules.limit, base.rules.stop_token_ids, base.rules.texts) == (3, 77, (5,), "texts")
    assert (base.rules.images, base.engine, base.write_tokenizer) == (None, engine, "write")
