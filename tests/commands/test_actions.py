"""The actions of commands with stand-ins for the work: what they ask for, in which order, and their statuses."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest

from fppo._errors import UsageError
from fppo.commands import actions, cli, compare, distributed, serve_tinker, view
from fppo.commands.options import ServeOptions, ViewOptions
from fppo.fleet import GroupDied
from fppo.runtime.mesh import LOCAL, Axis, Mesh
from fppo.serve.service import Bounds
from fppo.settings import files
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


@pytest.mark.parametrize(("step", "status"), [(9, 0), (8, 130)])
def test_a_supervised_run_has_as_many_steps_as_its_rows_make(settings, monkeypatch, step, status):
    """On the ranks' own mesh and device."""
    asked, rank = [], actions.CommandRank(LOCAL, "device", "watch")
    noted = stopping_at(step, monkeypatch)

    def assemble(given, *, announce, **how):
        asked.append((given, how))
        return attrs.evolve(given, steps=9), "assembly"

    monkeypatch.setattr(actions, "assemble_supervised", assemble)
    assert actions.sft(settings, rank) == status
    assert asked == [(settings, {"mesh": LOCAL, "device": "device"})]
    assert len(noted) == (3 if status == 0 else 1)


@pytest.mark.parametrize("place", [0, 1])
def test_a_run_is_assembled_on_its_rank_and_the_first_one_speaks(settings, monkeypatch, capsys, place):
    asked, rank = [], actions.CommandRank(Mesh({"shard": Axis(2, place)}), watch="watch")
    noted = stopping_at(7, monkeypatch)

    def assemble(given, here, announce):
        announce(["a line", "another"])
        asked.append((given, here))
        return contextlib.nullcontext(SimpleNamespace(inputs=None))

    monkeypatch.setattr(actions, "_assemble", assemble)
    assert actions.train(settings, rank) == 0
    assert asked == [(settings, rank)]
    assert noted[1:] == [("export", "model"), *([] if place else [("report", "run")])]
    said = capsys.readouterr().out
    assert said.startswith("a line\nanother\nmodel: ") is (place == 0)
    assert (said == "") is (place == 1)


def test_a_run_that_lost_a_pool_goes_on_from_its_own_checkpoints(settings, monkeypatch, capsys):
    """Though its user said never: those are what it wrote before."""
    asked, written = [], []

    def trained(settings, here):
        asked.append(settings.resume)
        written.extend((2, 5) if len(asked) == 2 else ())
        if len(asked) < 3:
            raise GroupDied("a", "it is gone")
        return 0

    monkeypatch.setattr(actions, "_trained", trained)
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


@pytest.mark.parametrize(("step", "seed"), [(None, 9), (3, 0)])
def test_an_export_is_of_the_step_that_was_asked_for_with_the_settings_that_made_it(
    settings, tmp_path, monkeypatch, step, seed
):
    recorded(monkeypatch, (3, 6), settings)
    noted = []
    monkeypatch.setattr(
        actions.session, "check_target", lambda settings, target: noted.append(("target", settings.device))
    )
    monkeypatch.setattr(
        actions.saved, "export", lambda settings, target, at, role, *, merge: noted.append((at, role, merge))
    )
    monkeypatch.setattr(actions, "add_card", lambda card, target: noted.append(card))
    assert actions.export(tmp_path, tmp_path / "out", step, device="cpu") == 0
    target, exported, card = noted
    assert target == ("target", "cpu")
    assert exported == (step or 6, "actor", False)
    assert (card.step, card.role, card.form, card.name, card.settings.seed) == (
        step or 6,
        "actor",
        "whole",
        "out",
        seed,
    )
    assert card.run_dir == tmp_path
    with pytest.raises(UsageError, match="no checkpoint of step 5; there are those of"):
        actions.export(tmp_path, tmp_path / "out", 5)


@pytest.mark.parametrize(
    ("role", "critic_rank", "critic_path", "merge", "form", "begun"),
    [
        ("actor", 0, "c", False, "adapter", "m"),
        ("actor", None, None, True, "merged", "m"),
        ("critic", 0, "c", False, "whole", "c"),
        ("critic", 3, None, False, "adapter", "m"),
        ("critic", 3, "c", True, "merged", "c"),
    ],
)
def test_an_export_has_the_form_of_its_roles_own_adapter(
    tmp_path, monkeypatch, capsys, role, critic_rank, critic_path, merge, form, begun
):
    """And of a quantised base it is said what the adapter was trained on."""
    changes = {"model__path": "m", "model__critic_path": critic_path, "model__lora__critic_rank": critic_rank}
    settings = tiny_run.settings(tmp_path, **changes, model__lora__rank=4, model__lora__base="nf4")
    recorded(monkeypatch, (6,), settings)
    monkeypatch.setattr(actions.session, "check_target", lambda settings, target: None)
    exported, cards = [], []
    monkeypatch.setattr(actions.saved, "export", lambda *given, merge: exported.append((*given[1:], merge)))
    monkeypatch.setattr(actions, "add_card", lambda card, target: cards.append((card.form, card.role, target)))
    target = tmp_path / "out"
    assert actions.export(tmp_path, target, None, role, merge=merge) == 0
    assert exported == [(target, 6, role, merge)]
    assert cards == [(form, role, target)]
    said = capsys.readouterr()
    words = f"are those of {begun} rounded to nf4" if merge else f"was trained on {begun} in nf4"
    assert words in said.err
    assert said.out == f"{target}\n"


def test_a_state_that_is_restored_is_that_of_the_newest_checkpoint_before(tmp_path, monkeypatch, settings):
    recorded(monkeypatch, (3, 6), settings)
    monkeypatch.setattr(actions.session, "load", lambda *given: given)
    assembly = SimpleNamespace(run="initial")
    found = [actions.restored(assembly, tmp_path, step) for step in (0, 2, 3, 5, 6, 9)]
    at = {step: (assembly, tmp_path / "checkpoints", step) for step in (3, 6)}
    assert found == ["initial", "initial", at[3], at[3], at[6], at[6]]


@pytest.mark.parametrize("public", [False, True])
def test_what_is_exported_is_uploaded_as_the_flags_say(settings, tmp_path, monkeypatch, public):
    recorded(monkeypatch, (6,), settings)
    pushed = []
    monkeypatch.setattr(actions.push, "check", lambda name, hub, *, public: pushed.append((name, public, "asked")))
    monkeypatch.setattr(actions.push, "push", lambda target, name, hub, *, public: pushed.append((name, public)))
    monkeypatch.setattr(actions.saved, "export", lambda *args, **_: None)
    monkeypatch.setattr(actions, "add_card", lambda card, target: pushed.append(card.name))
    assert actions.export(tmp_path, tmp_path / "out", None, push_to="me/mine", public=public) == 0
    assert pushed == [("me/mine", public, "asked"), "me/mine", ("me/mine", public)]


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


def test_settings_of_a_run_that_is_computed_again_save_nothing(tmp_path, monkeypatch):
    saving = tiny_run.settings(tmp_path, rollout__save=True)
    monkeypatch.setattr(actions.starts, "load", lambda directory, step=None: saving)
    assert not actions.settings_of(tmp_path, 3).rollout.save


def test_exact_quickstarts_are_exact(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(
        actions, "quickstart", lambda directory, seed, run: run(tiny_run.settings(tmp_path, output_dir=str(directory)))
    )
    monkeypatch.setattr(distributed, "run", lambda command, settings, *args: trained.append(settings) or 0)
    for number, flags in enumerate(([], ["--exact"])):
        directory = tmp_path / str(number)
        directory.mkdir()
        assert cli.main(["quickstart", "--output-dir", str(directory), *flags]) == 0
        saved = files.from_dict(files.read_toml(directory / "quickstart.toml"))
        assert saved.rollout.exact is trained[-1].rollout.exact is bool(flags)


@pytest.mark.parametrize("status", [0, 130])
def test_a_quickstart_is_warmed_up_once_and_trained_by_its_own_seed(tmp_path, monkeypatch, capsys, status):
    """One that was stopped says nothing of its end."""
    seen = []

    def prepare(directory, seed, on_step):
        (directory / actions.task.MODEL).mkdir()
        seen.append(("warmed up", seed))

    monkeypatch.setattr(actions.task, "prepare", prepare)
    monkeypatch.setattr(actions.report, "held_out_change", lambda directory: (0.25, 0.5))
    for _ in range(2):
        assert (
            actions.quickstart(tmp_path / "q", 7, lambda own: seen.append((own.output_dir, own.seed)) or status)
            == status
        )
    assert seen == [("warmed up", 7), *[(str(tmp_path / "q"), 7)] * 2]
    assert ("held-out exact match: 25.0% before PPO, 50.0% after\n" in capsys.readouterr().out) is (status == 0)


def test_a_page_has_as_many_megabytes_as_are_asked_for(tmp_path, monkeypatch, capsys):
    asked = []
    page = tmp_path / "page.html"
    page.write_bytes(bytes(2_500_000))
    monkeypatch.setattr(view.viewed, "find_runs", lambda runs: [tmp_path])
    monkeypatch.setattr(view.view_page, "export", lambda runs, target, *, most_bytes: asked.append(most_bytes) or page)
    assert view.view(ViewOptions(runs=("r",), export=str(page), export_mb=1.5)) == 0
    assert asked == [1.5e6]
    assert "(2.5 MB)" in capsys.readouterr().out


@pytest.mark.parametrize(("newest", "done"), [(None, False), (6, False), (7, True)])
def test_a_compared_run_is_done_after_its_last_step(settings, tmp_path, monkeypatch, newest, done):
    directory = Path(settings.output_dir)
    assert not compare._done(settings)
    directory.mkdir(parents=True)
    files.save(settings, directory / compare.ASKED)
    monkeypatch.setattr(compare.saved, "newest", lambda directory: newest)
    assert compare._done(settings) is done
    with pytest.raises(UsageError, match=r"holds a run with other settings \(steps 7 -> 8\)"):
        compare._done(attrs.evolve(settings, steps=8))


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


def test_a_metric_that_one_variant_logs_may_be_compared(tmp_path):
    none = {"data__eval_path": []}
    without = tiny_run.settings(tmp_path, algorithm__advantage="reinforce_plus_plus", **none)
    both = [tiny_run.settings(tmp_path, **none), without]
    for each in (both, both[::-1]):
        assert compare._metric_problems(each, ("critic/vf_loss",)) == []
    (text,) = compare._metric_problems([without, without], ("critic/vf_loss",))
    assert text.startswith("--metrics critic/vf_loss: ")
    held = tiny_run.settings(tmp_path)
    for each in ([held, *both], [*both, held]):
        assert compare._metric_problems(each, ()) == []
    (text,) = compare._metric_problems(both, ())
    assert "there are no held-out prompts" in text


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


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_is_assembled_on_its_meshes_and_the_pools(settings, monkeypatch, capsys, first):
    """The first one names packages of untested versions."""
    asked, given = {}, []
    monkeypatch.setattr(actions.origins, "untested_here", lambda: ["a 1 is new", "b 2 is old"])

    def assemble(settings, **named):
        asked.update(named, settings=settings)
        return contextlib.nullcontext("assembly")

    monkeypatch.setattr(
        actions, "groups_of", lambda *sections: given.append(sections) or contextlib.nullcontext("places")
    )
    monkeypatch.setattr(actions, "assemble", assemble)
    monkeypatch.setattr(actions, "is_first", lambda mesh: first and mesh == "mesh")
    with actions._assemble(settings, actions.CommandRank("mesh", "device", "watch", "sampling"), print) as made:
        assert made == "assembly"
    assert capsys.readouterr().err == ("a 1 is new; b 2 is old\n" if first else "")
    assert given == [(settings.placement, settings.mesh, settings.device, settings.model_roles)]
    assert asked == {
        "settings": settings,
        "mesh": "mesh",
        "sampling_mesh": "sampling",
        "device": "device",
        "places": "places",
        "announce": print,
    }


@pytest.mark.parametrize(("flags", "device"), [([], None), (["--device", "cpu"], "cpu")])
def test_a_replay_is_on_the_device_of_its_flag(settings, monkeypatch, flags, device):
    """Or on the run's own; ranks have theirs."""
    asked, own = [], attrs.evolve(settings, device="auto")
    monkeypatch.setattr(actions, "settings_of", lambda directory, step=None: own)
    monkeypatch.setattr(actions, "replay", lambda directory, step, here: asked.append((step, str(here.device))) or 0)
    runs = []
    monkeypatch.setattr(distributed, "run", lambda command, settings, *args: runs.append((command, settings)) or 0)
    assert cli.main(["replay", "r", "--step", "7", *flags]) == 0
    ((command, given),) = runs
    assert given.device == (device or "auto")
    command(given, actions.ALONE)
    command(given, actions.CommandRank(device="cuda:1"))
    assert asked == [(7, str(device)), (7, "cuda:1")]


@pytest.mark.parametrize("made_by", [None, actions.SFT])
def test_steps_are_made_again_by_the_command_that_made_them(tmp_path, monkeypatch, made_by):
    """Each state is given up to the next, and nothing is saved."""
    settings = tiny_run.settings(tmp_path, rollout__save=True, rollout__ahead=3)
    rank, noted = actions.CommandRank("mesh", "device"), []
    supervised, assembly = SimpleNamespace(imitation="imitation"), SimpleNamespace(program="program", draw="draw")

    def assemble_supervised(settings, **how):
        noted.append((settings, how))
        return "others", supervised

    def assemble(settings, here):
        noted.append((settings, here))
        return contextlib.nullcontext(assembly)

    monkeypatch.setattr(actions, "assemble_supervised", assemble_supervised)
    monkeypatch.setattr(actions, "_assemble", assemble)
    with actions._steps_again(settings, made_by, rank) as (made, steps):
        pass
    unsaved = files.replace(settings, {"rollout.save": False})
    if made_by is None:
        assert (made, noted) == (assembly, [(unsaved, rank)])
        how = {"program": "program", "draw": "draw", "ahead": 3, "donate": True}
        assert (steps.func, steps.args, steps.keywords) == (actions.iterate, (), how)
    else:
        assert (made, noted) == (supervised, [(settings, {"mesh": "mesh", "device": "device"})])
        how = {"imitation": "imitation", "mesh": "mesh", "donate": True}
        assert (steps.func, steps.args, steps.keywords) == (actions.imitate_steps, (), how)
