"""`fppo ablate`: tables, files, a step replayed under each kernel, and mistakes."""

from __future__ import annotations

import contextlib
import json
import math
from types import SimpleNamespace

import attrs
import pytest

from fppo.commands import ablate, actions, cli
from fppo.pipeline import replay
from fppo.pipeline.swap import StageDifference
from fppo.settings.ablate import AblateSettings
from fppo_kernels.log_probs.reference import reference
from fppo_kernels.table import BUILTIN, Implementation, Kernels
from tests import tiny_run

SMALL = ["--shapes", "N=9,H=8,V=33", "--repeats", "1", "--law-seconds", "0", "--dtypes", "float32"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    tiny_run.write_task(directory)
    actions.train(tiny_run.settings(directory, steps=3, checkpoint__every=2, model__log_probs="reference"))
    return directory / "run"


@pytest.mark.slow
def test_a_table_a_file_and_a_chart(tmp_path, capsys):
    files = ["--json", str(tmp_path / "out" / "a.json"), "--png", str(tmp_path / "out" / "a.png")]
    own = ["--with", "tests.studies.ablate.test_ablation:drops_entropy_gradient"]
    assert cli.main(["ablate", *SMALL, "--implementations", "reference,chunked", *own, *files]) == 0  # no law was tried
    out = capsys.readouterr().out
    read = json.loads((tmp_path / "out" / "a.json").read_text())
    names = [row["implementation"] for row in read["rows"]]
    assert names == ["reference", "chunked", "drops_entropy_gradient"]
    assert all(name in out for name in names)
    assert (tmp_path / "out" / "a.png").stat().st_size > 10_000


@pytest.mark.parametrize(("kernel", "status"), [("drops_entropy_gradient", 1), ("my_reference", 0), ("breaks", 1)])
def test_a_kernel_that_breaks_a_law_or_raises_ends_the_command_with_1(capsys, kernel, status):
    given = [*SMALL[:4], "--law-seconds", "600", "--dtypes", "float32", "--implementations", "reference"]
    place = "tests.studies.ablate.test_ablation" if kernel == "drops_entropy_gradient" else __name__
    assert cli.main(["ablate", *given, "--with", f"{place}:{kernel}"]) == status
    assert ("FAILED" in (said := capsys.readouterr().out) or "ERROR" in said) is bool(status)


def my_reference(*args, **keywords):
    return reference(*args, **keywords)


def breaks(*args, **keywords):
    raise RuntimeError("it breaks")


def test_a_models_sizes_are_taken(tmp_path, capsys):
    config = {"hidden_size": 8, "vocab_size": 21, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = ["--op", "log_probs,attention", "--model", str(tmp_path), "--shapes", "N=5,R=2,L=4", *SMALL[2:]]
    assert cli.main(["ablate", *given, "--implementations", "reference", "sdpa"]) == 0
    out = capsys.readouterr().out
    assert "N=5 H=8 V=21" in out
    assert "R=2 L=4 heads=2 kv_heads=2 head_dim=4" in out
    given[5] = "R=2,L=4,kv_heads=1"  # the user's own goes before the model's
    assert cli.main(["ablate", *given, "--implementations", "sdpa"]) == 0
    assert "R=2 L=4 heads=2 kv_heads=1 head_dim=4" in capsys.readouterr().out


def test_a_replayed_step_is_bit_equal_under_the_same_kernel_and_parts_under_another(run, tmp_path, capsys):
    given = ["--replay", str(run), "--step", "3", "--json", str(tmp_path / "r.json")]
    names = ["--implementations", "reference", "chunked", "scan", "loop"]
    own = ["--with", "log_probs=tests.studies.ablate.test_ablation:drops_entropy_gradient"]
    assert cli.main(["ablate", "--op", "log_probs,gae", *names, *own, *given]) == 0
    out = capsys.readouterr().out
    assert "the run's own kernels: as recorded, bit for bit" in out
    assert "log_probs = reference (the run has it): bit-equal in every stage" in out
    assert "gae = loop: parts first in advantages, leaf advantages" in out
    read = json.loads((tmp_path / "r.json").read_text())
    found = {choice["implementation"]: choice for choice in read["choices"]}
    assert list(found) == ["reference", "chunked", "drops_entropy_gradient", "scan", "loop"]
    stages = {stage["stage"]: stage for stage in found["loop"]["stages"]}
    order = ["rollout", "old_log_probs", "ref_log_probs", "values", "advantages"]
    order += ["critic gradients", "critic state", "actor gradients", "actor state"]
    assert list(stages) == order
    assert all(stages[name]["leaf"] is None for name in order[:4])
    assert 0 < stages["advantages"]["relative"] < 1e-4
    assert stages["actor gradients"]["leaf"] == "model.embed_tokens.weight"
    assert stages["actor state"]["differing"] > 0
    assert all(stage["leaf"] is None for stage in found["reference"]["stages"])


def strict(path):
    """A file of JSON without what only Python takes for numbers."""
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def test_a_kernel_that_breaks_is_told_from_one_that_rounds(run, tmp_path):
    """Log-probs that are 1 off part in the rollout, by 1, and the gradients by far more than rounding; those that are
    no numbers are infinitely far, in words."""
    given = ["--replay", str(run), "--step", "2", "--json", str(tmp_path / "r.json"), "--implementations", "reference"]
    own = ["--with", *(f"tests.commands.test_ablate:{name}" for name in ("doubled", "nowhere"))]
    assert cli.main(["ablate", *own, *given]) == 0
    choices = {choice["implementation"]: choice for choice in strict(tmp_path / "r.json")["choices"]}
    first, lost = (
        next(stage for stage in choices[name]["stages"] if stage["leaf"] is not None) for name in ("doubled", "nowhere")
    )
    assert first["stage"] in ("rollout", "old_log_probs")
    assert first["max_abs"] > 0.1
    assert (lost["stage"], lost["max_abs"], lost["relative"]) == (first["stage"], "inf", "inf")


@pytest.mark.parametrize(
    ("changes", "sampled"),
    [
        ({"rollout__ahead": 1}, False),
        ({"rollout__n": 2, "rollout__filter__groups": True, "rollout__filter__max_draws": 2}, True),
        ({"rollout__from": "rollouts"}, True),
    ],
    ids=["ahead", "groups", "from"],
)
def test_any_batch_can_be_replayed_under_another_kernel(tmp_path, capsys, changes, sampled):
    """One that waited for its step has no rollout to compare; what is sampled for later steps is as recorded too."""
    tiny_run.write_task(tmp_path)
    if "rollout__from" in changes:
        actions.rollout(tiny_run.settings(tmp_path, steps=2))
        changes = {"rollout__from": str(tmp_path / "run" / "rollouts")}
    actions.train(tiny_run.settings(tmp_path, steps=2, model__log_probs="reference", **changes))
    given = ["--replay", str(tmp_path / "run"), "--step", "2", "--json", str(tmp_path / "r.json")]
    assert cli.main(["ablate", "--op", "log_probs", "--implementations", "reference", "chunked", *given]) == 0
    out = capsys.readouterr().out
    assert "the run's own kernels: as recorded, bit for bit" in out
    assert "log_probs = reference (the run has it): bit-equal in every stage" in out
    choices = json.loads((tmp_path / "r.json").read_text())["choices"]
    stages = [stage["stage"] for stage in choices[1]["stages"]]
    assert ("rollout" in stages) == sampled
    assert stages[-1] == "actor state"


def doubled(*args, **keywords):
    from fppo_kernels.log_probs.reference import reference

    out = reference(*args, **keywords)
    return out._replace(log_probs=2 * out.log_probs)


def nowhere(*args, **keywords):
    out = doubled(*args, **keywords)
    return out._replace(log_probs=out.log_probs * float("nan"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "log_prob"], "did you mean log_probs?"),
        (["--implementations", "chunkd"], "there is no such kernel; there are log_probs: reference, chunked"),
        (["--dtypes", "float31"], "did you mean float32?"),
        (["--shapes", "N=many"], "'N=many' is not a size; write sizes as N=256,H=512"),
        (["--shapes", "M=3"], "there is no size 'M'; log_probs has N, H, V"),
        (["--model", "no_such_model"], "there is no directory 'no_such_model'"),
        (["--model", "gpt2", "--shapes", "H=3"], "--shapes gives H or V, which --model gives too"),
        (["--with", "mine"], "not of the form module:function"),
        (["--with", "no_such_module:fn"], "does not import"),
        (["--with", "gae=math:sqrt"], "'gae' is not among the operations"),
        (["--op", "gae,pad", "--with", "math:sqrt"], "say which operation it is for, as gae=math:sqrt"),
        (["--with", "math:pi"], "is a float, not a function"),
        (["--device", "cuda:99"], "--device 'cuda:99': t"),
        (["--repeats", "0", "--law-seconds", "-1"], "2 problems"),
        (["--step", "3"], "--replay RUN and --step N go together"),
        (["--replay", "no_such_run", "--step", "3"], "no such file; give the output_dir of a run"),
    ],
)
def test_mistakes_are_one_message_that_names_what_there_is(arguments, message, capsys):
    assert cli.main(["ablate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_step_that_was_not_recorded_is_named(run, capsys):
    assert cli.main(["ablate", "--replay", str(run), "--step", "9"]) == 2
    assert "no record of step 9; the recorded steps are 1 to 3" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ablate", "bias"])
def test_help_shows_flags_as_they_are_given(capsys, command):
    assert cli.main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert "  --with TEXT ..." in said
    assert "--with-" not in said


def test_an_unknown_flag_suggests_the_nearest(capsys):
    with pytest.raises(SystemExit):
        cli.main(["ablate", "--implementation", "chunked"])
    assert "--implementations" in capsys.readouterr().err


@pytest.fixture
def computed(monkeypatch):
    """The calls that recompute a step: every assembly, every run of steps, every trace, and what was compared."""
    calls, recorded = [], {7: {"kind": "sums", "batch": 1}, 9: {"batch": 2}}

    @contextlib.contextmanager
    def assemble(settings, *, kernels=None):
        name = f"{settings.seed} {settings.rollout.save} {kernels}"
        calls.append(("assemble", name))
        yield SimpleNamespace(program=f"program {name}", draw=f"draw {name}")

    def iterate(run, **how):
        calls.append(("iterate", run.step, how))
        yield from ((SimpleNamespace(step=step), None, None) for step in range(run.step + 1, 20))

    def trace(run, **how):
        calls.append(("trace", run.step, how))
        return SimpleNamespace(after=f"after {run.step + 1}", experience="rows")

    def differs(step, old, new):
        calls.append(("difference", step, old, new))
        return replay.Difference(step, (replay.DifferingLeaf("batch", "tokens"),)) if "kind" in old else None

    monkeypatch.setattr(ablate, "assemble", assemble)
    monkeypatch.setattr(ablate, "iterate", iterate)
    monkeypatch.setattr(ablate.swap, "watch", lambda kernels: SimpleNamespace(kernels=f"watched {kernels}"))
    monkeypatch.setattr(ablate.swap, "trace", trace)
    monkeypatch.setattr(ablate.replay, "kind_recorded", lambda line: line.get("kind", "blake2b"))
    monkeypatch.setattr(ablate.replay, "digests_of", lambda after, rows, *, kind: {"of": (after, rows, kind)})
    monkeypatch.setattr(ablate.replay, "sizes_of", lambda after, rows: (after, rows))
    monkeypatch.setattr(ablate.replay, "first_difference", differs)
    return calls, recorded


@pytest.mark.parametrize(("step", "begin"), [(7, 6), (7, 3), (9, 3)])
def test_a_step_begins_from_the_steps_before_it_as_their_own_starts_made_them(
    computed, tmp_path, monkeypatch, step, begin
):
    """Under the run's own kernels, each with as many batches ahead as its start had."""
    calls, recorded = computed
    last = tiny_run.settings(tmp_path, seed=9, rollout__ahead=2)
    starts = [(tiny_run.settings(tmp_path, seed=1, rollout__ahead=1, rollout__save=True), 5), (last, step - 1)]
    monkeypatch.setattr(ablate, "beginning", lambda directory, at: {(tmp_path, step): begin}[directory, at])
    monkeypatch.setattr(ablate, "restored", lambda assembly, directory, at: SimpleNamespace(step=at))
    monkeypatch.setattr(
        ablate.starts, "spans", lambda directory, first, until: {(begin + 1, step - 1): starts}[first, until]
    )
    stood = []
    reference, text = ablate._reference(last, "own", tmp_path, step, recorded, stood.append)
    assert stood == [*([] if begin == step - 1 else [5, step - 1]), step]
    earlier = []
    for name, at, ahead in (("1 False None", begin, 1), ("9 False None", 5, 2)):
        how = {"program": f"program {name}", "draw": f"draw {name}", "ahead": ahead, "donate": True}
        earlier += [("assemble", name), ("iterate", at, how)]
    watched = SimpleNamespace(kernels="watched own")
    name = "9 False watched own"
    how = {"program": f"program {name}", "draw": f"draw {name}", "watched": watched, "ahead": 2}
    expected = [] if begin == step - 1 else earlier
    kind, after = recorded[step].get("kind", "blake2b"), f"after {step}"
    both = {"of": (after, "rows", kind), "sizes": (after, "rows")}
    assert calls == [
        *expected,
        ("assemble", name),
        ("trace", step - 1, how),
        ("difference", step, recorded[step], both),
    ]
    assert (reference.settings, reference.kernels, reference.run.step) == (last, "own", step - 1)
    assert reference.trace.after == f"after {step}"
    assert ("not as recorded, batch differs first in tokens; " in text) is (step == 7)
    assert ("as recorded, bit for bit" in text) is (step == 9)


@pytest.mark.parametrize("interrupted", [False, True])
def test_each_kernel_of_each_operation_is_compared_until_an_interrupt(tmp_path, monkeypatch, capsys, interrupted):
    """Earlier comparisons are in the file; the run's own kernel is marked."""
    table = {"gae": dict.fromkeys(("scan", "loop")), "pad": {"reference": None}}
    compared = []

    def compare(reference, op, implementation):
        if interrupted and op == "pad":
            raise KeyboardInterrupt
        compared.append((reference, op))
        return {"stages": []} if len(compared) != 2 else {"reason": f"it raised {math.inf}", "stages": [math.inf]}

    tools = SimpleNamespace(kernels="kernels")
    monkeypatch.setattr(ablate, "settings_of", lambda directory, step: SimpleNamespace(module_dirs=f"of {step}"))
    monkeypatch.setattr(ablate.session, "recorded", lambda directory: {4: "four"})
    monkeypatch.setattr(ablate, "kernels_named", lambda settings: settings.module_dirs)
    monkeypatch.setattr(ablate, "make_tools", lambda here, names, places: tools if names == places == "of 4" else None)
    monkeypatch.setattr(ablate, "kernel_table", lambda names: f"table {names}")
    monkeypatch.setattr(ablate, "_with_own", lambda asked, ops, own: {"table of 4": table}[own])
    reference = SimpleNamespace(kernels="own")
    monkeypatch.setattr(ablate, "_reference", lambda *given: (reference, f"as {given[1:4]}"))
    monkeypatch.setattr(ablate.operations, "default_of", lambda op, own, kernels: {"gae": "loop"}.get(op))
    monkeypatch.setattr(ablate, "_chosen", lambda asked, op, own: list(own[op]))
    monkeypatch.setattr(ablate, "_compared", compare)
    file = tmp_path / "out" / "x.json"
    asked = AblateSettings(op=("gae", "pad"), replay=str(tmp_path), step=4, json=str(file))
    assert ablate.ablate(asked) == (130 if interrupted else 1)  # one kernel raised
    assert compared == [(reference, "gae")] * 2 + ([] if interrupted else [(reference, "pad")])
    own = f"as {('kernels', tmp_path, 4)}"
    choices = [
        {"op": "gae", "implementation": "scan", "own": False, "reason": None, "stages": []},
        {"op": "gae", "implementation": "loop", "own": True, "reason": "it raised inf", "stages": ["inf"]},
        {"op": "pad", "implementation": "reference", "own": False, "reason": None, "stages": []},
    ]
    shown = choices[:2] if interrupted else choices
    expected = {"run": str(tmp_path), "step": 4, "own": own, "choices": shown, "interrupted": interrupted}
    assert json.loads(file.read_text()) == expected
    said = capsys.readouterr().out
    for line in (
        f"step 4 of {tmp_path}: recomputing",
        own,
        "gae = scan: bit-equal",
        "loop (the run has it): it raised",
    ):
        assert line in said
    assert ("interrupted: what is above was computed before" in said) is interrupted


@pytest.mark.parametrize(("known", "words"), [((4, 7), "the recorded steps are 4 to 7"), ((), "no step is recorded")])
def test_a_step_without_a_record_is_told_from_those_with_one(tmp_path, monkeypatch, known, words):
    monkeypatch.setattr(ablate, "settings_of", lambda directory, step: None)
    monkeypatch.setattr(ablate.session, "recorded", lambda directory: dict.fromkeys(known))
    with pytest.raises(ablate.UsageError, match=f"has no record of step 9; {words}"):
        ablate._replay(tmp_path, 9, AblateSettings(), ["gae"])


def chunked(*args, **keywords):
    """A kernel that is called as one of the table."""
    return doubled(*args, **keywords)


def test_an_own_kernel_called_as_one_of_the_table_has_its_whole_name():
    place = "tests.commands.test_ablate:"
    for name, shown in (("doubled", "doubled"), ("chunked", f"{place}chunked")):
        for own in (f"{place}{name}", f"log_probs={place}{name}"):
            found = ablate._with_own(AblateSettings(with_=(own,)), ["log_probs"], BUILTIN)
            assert list(found["log_probs"]) == [*BUILTIN["log_probs"], shown]
            assert found["log_probs"][shown].load() is globals()[name]
            chosen = ablate._chosen(AblateSettings(implementations=("reference",)), "log_probs", found)
            assert chosen == ["reference", shown]


@pytest.mark.parametrize("rows", [(), (SimpleNamespace(status="ok"),)])
def test_a_chart_is_saved_where_there_is_something_to_draw(tmp_path, monkeypatch, rows):
    """Beside other files, or in a directory of its own."""
    from fppo.studies.ablate import chart

    saved = []
    made = SimpleNamespace(rows=rows, interrupted=False, to_json=lambda: "{}")
    monkeypatch.setattr(ablate, "run_all", lambda ops, **_: made)
    monkeypatch.setattr(ablate.text, "table", lambda made, width: "table")
    monkeypatch.setattr(chart, "save", lambda made, path: saved.append((made, path, path.parent.is_dir())))
    for place in (tmp_path, tmp_path / "new" / "place"):
        assert ablate.ablate(AblateSettings(op=("gae",), device="cpu", png=str(place / "x.png"))) == 0
    places = [tmp_path / "x.png", tmp_path / "new" / "place" / "x.png"]
    assert saved == ([(made, place, True) for place in places] if rows else [])


@pytest.mark.parametrize("error", [None, ValueError("no\nmore"), KeyError()])
def test_a_kernel_is_compared_in_a_step_of_its_own_against_the_runs_own(tmp_path, monkeypatch, error):
    """Every other operation is as the run has it."""
    calls, own = [], Kernels.named()
    settings = tiny_run.settings(tmp_path)
    reference = ablate._Reference(settings=settings, kernels=own, run="run", trace="trace")

    @contextlib.contextmanager
    def assemble(given, *, kernels):
        calls.append((given, kernels))
        yield SimpleNamespace(program="program", draw="draw")

    def trace(run, **how):
        calls.append((run, how))
        if error is not None:
            raise error
        return "step"

    watched = []
    monkeypatch.setattr(
        ablate.swap, "watch", lambda kernels: watched.append(kernels) or SimpleNamespace(kernels="watched")
    )
    monkeypatch.setattr(ablate, "assemble", assemble)
    monkeypatch.setattr(ablate.swap, "trace", trace)
    part = StageDifference(stage="values", leaf="x", leaves=3, differing=1, max_abs=0.5, relative=0.25)
    monkeypatch.setattr(ablate.swap, "stage_differences", lambda *given: {("trace", "step"): [part]}[given])
    found = ablate._compared(reference, "log_probs", Implementation(doubled))
    (kernels,) = watched
    assert kernels.log_probs is doubled
    assert attrs.evolve(kernels, log_probs=own.log_probs) == own
    how = {"program": "program", "draw": "draw", "watched": SimpleNamespace(kernels="watched"), "reference": "trace"}
    assert calls == [(settings, "watched"), ("run", how)]
    if error is None:
        assert found == {"stages": [attrs.asdict(part)]}
    else:
        words = {ValueError: "it raised ValueError: no", KeyError: "it raised KeyError: "}
        assert found == {"reason": words[type(error)]}
    refused = Implementation(doubled, refuse=lambda: "elsewhere")
    assert ablate._compared(reference, "log_probs", refused) == {"reason": "cannot run here: elsewhere"}


@pytest.mark.parametrize("threads", [None, 3])
def test_an_ablation_is_on_as_many_threads_as_are_asked_for(monkeypatch, threads):
    """Set before anything is measured."""
    made = SimpleNamespace(rows=(), interrupted=False)
    log = []
    monkeypatch.setattr(ablate.torch, "set_num_threads", log.append)
    monkeypatch.setattr(ablate, "run_all", lambda ops, **_: log.append("ran") or made)
    monkeypatch.setattr(ablate.text, "table", lambda made, width: "table")
    assert ablate.ablate(AblateSettings(op=("gae",), device="cpu", threads=threads)) == 0
    assert log == [*([] if threads is None else [threads]), "ran"]


@pytest.mark.parametrize(
    ("name", "gpus", "expected"), [("auto", True, "cuda"), ("auto", False, "cpu"), ("x", True, "x")]
)
def test_a_kernel_runs_on_a_gpu_where_there_is_one_unless_it_is_told_otherwise(monkeypatch, name, gpus, expected):
    monkeypatch.setattr(ablate.torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(ablate, "named_device", lambda *given: given)
    assert ablate._device(name) == (expected, f"--device {expected!r}")
