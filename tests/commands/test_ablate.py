"""`fppo ablate`: tables, files, a step replayed under each kernel, and mistakes."""

from __future__ import annotations

import json

import pytest

from fppo.commands import actions, cli
from fppo_kernels.log_probs.reference import reference
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "status"),
    [
        pytest.param("drops_entropy_gradient", 1, marks=pytest.mark.slow),
        pytest.param("my_reference", 0, marks=pytest.mark.slow),
        ("breaks", 1),
    ],
)
def test_a_kernel_that_breaks_a_law_or_raises_ends_the_command_with_1(capsys, kernel, status):
    given = [*SMALL[:4], "--law-seconds", "600", "--dtypes", "float32", "--implementations", "reference"]
    place = "tests.studies.ablate.test_ablation" if kernel == "drops_entropy_gradient" else __name__
    assert cli.main(["ablate", *given, "--with", f"{place}:{kernel}"]) == status
    assert ("FAILED" in (said := capsys.readouterr().out) or "ERROR" in said) is bool(status)


def my_reference(*args, **keywords):
    return reference(*args, **keywords)


def breaks(*args, **keywords):
    raise RuntimeError("it breaks")


def stops(*args, **keywords):
    raise KeyboardInterrupt


@pytest.mark.slow
def test_an_interrupted_table_has_what_was_measured_before(tmp_path, capsys):
    given = [
        *SMALL,
        "--implementations",
        "reference",
        "--with",
        f"{__name__}:stops",
        "--json",
        str(tmp_path / "a.json"),
    ]
    assert cli.main(["ablate", *given]) == 130
    assert "reference" in capsys.readouterr().out
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert rows[0]["implementation"] == "reference"


@pytest.mark.slow
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


@pytest.mark.slow
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


def chunked(*args, **keywords):
    """A kernel that is called as one of the table."""
    return my_reference(*args, **keywords)


@pytest.mark.slow
def test_an_own_kernel_called_as_one_of_the_table_has_its_whole_name(tmp_path):
    own = [f"{__name__}:my_reference", f"log_probs={__name__}:chunked"]
    given = [*SMALL, "--implementations", "reference", "--with", *own, "--json", str(tmp_path / "a.json")]
    assert cli.main(["ablate", *given]) == 0
    names = [row["implementation"] for row in json.loads((tmp_path / "a.json").read_text())["rows"]]
    assert names == ["reference", "my_reference", f"{__name__}:chunked"]


def strict(path):
    """A file of JSON without what only Python takes for numbers."""
    return json.loads(path.read_text(), parse_constant=pytest.fail)


@pytest.mark.slow
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
    assert (lost["stage"], lost["max_abs"], lost["relative"]) == (first["stage"], None, None)  # infinite


@pytest.mark.slow
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
