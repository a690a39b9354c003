"""User code that ends the process, and somebody else's text: neither passes for a run that is done, or reaches a
terminal as it is."""

import contextlib
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fppo import advantages, losses
from fppo._errors import RunFailed, no_exit, printable, words_of
from fppo.commands import cli, ends
from fppo.report.charts import Panel, write_png
from fppo.rewards import inline_reward
from fppo.runtime.failure import Limits, Monitor
from fppo.runtime.stores import listening
from fppo.runtime.watch import Watch
from fppo.settings import files
from fppo.steps import memory
from tests import tiny_run

ESCAPE = "\x1b]0;gone\x07\x1b[2J"


@pytest.fixture
def task(tmp_path):
    tiny_run.write_task(tmp_path)
    settings = tiny_run.settings(tmp_path, steps=2, rollout__n=2, eval__before=False, check=False)
    files.save(settings, tmp_path / "run.toml")
    return tmp_path


def _train(task, *overrides):
    return cli.main(["train", str(task / "run.toml"), *overrides])


def _leave():
    sys.exit(0)


def exiting_loss(log_probs, old_log_probs, advantages, mask):
    _leave()
    return losses.ppo_clip(log_probs, old_log_probs, advantages, mask)


def exiting_advantage(rows, rewards):
    quit()
    return advantages.grpo(rewards.sum(1), rows.response_mask, rows.groups)


def exiting_optimizer(rate):
    raise SystemExit


def exiting_rows():
    yield {"prompt": "1+1=", "answer": "2"}
    sys.exit()


def exiting_sampler(prompts, epoch, key):
    sys.exit(0)


@inline_reward
def exiting_reward(sample):
    sys.exit(0)


def exiting_tool(conversation):
    sys.exit(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ("--actor.loss.name {}:exiting_loss", "_leave()"),
        ("--algorithm.advantage {}:exiting_advantage", "exiting_advantage()"),
        ("--actor.optimizer.name {}:exiting_optimizer", "exiting_optimizer()"),
        ("--data.rows {}:exiting_rows --data.path", "exiting_rows()"),
        ("--data.sampler {}:exiting_sampler", "exiting_sampler()"),
        ("--reward.functions {}:exiting_reward", "the reward 'exiting_reward' failed on every one"),
        ("--reward.functions leaves:reward", "reward 'leaves:reward': the module 'leaves' does not import"),
        ("--actor.loss.name leaves:loss", "'leaves:loss': the module 'leaves' does not import"),
    ],
)
def test_code_that_ends_the_process_does_not_end_a_run_as_done(task, capsys, monkeypatch, overrides, name):
    (task / "leaves.py").write_text("import sys\n\nsys.exit(0)\ndef loss(): ...\ndef reward(): ...\n")
    monkeypatch.syspath_prepend(task)
    assert _train(task, *overrides.format(__name__).split()) in (1, 2)
    said = capsys.readouterr().err
    assert name in said
    assert "Traceback" not in said
    assert not (task / "run" / "model").exists()


def test_batches_ahead_of_code_that_ends_the_process_end_the_run_too(task, capsys):
    assert _train(task, "--rollout.ahead", "1", "--data.sampler", f"{__name__}:exiting_sampler") == 1
    assert "exiting_sampler()" in capsys.readouterr().err


def test_the_parser_of_arguments_ends_commands_as_it_did(task, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["diff", "--nowhere"])
    assert ended.value.code == 2
    assert "called sys.exit" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (_leave, r"_leave\(\), .*test_ends.py:\d+, called sys.exit\(0\)"),
        (lambda: exiting_advantage(None, None), r"exiting_advantage\(\), .*called sys.exit\(None\)"),
    ],
)
def test_the_text_of_an_exit_names_the_function_of_the_user(code, said):
    with pytest.raises(RunFailed, match=said), no_exit():
        code()


def loud_loss(log_probs, old_log_probs, advantages, mask):
    raise RuntimeError(ESCAPE + "x" * 500_000)


def _harmless(said):
    """Whether a terminal shows the text as it is, and somebody may read it."""
    return len(said) < 60_000 and not any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 for c in said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "status", "shown"),
    [
        ("--reward.functions tests.rewards.functions:loud", 1, "more characters) ..."),
        ("--reward.functions tests.rewards.functions:escaping --log.loggers console --eval.before", 0, "\\x1b"),
        ("--actor.loss.name {}:loud_loss", 1, "RuntimeError: \\x1b]0;gone\\x07\\x1b[2Jxxx"),
        ("--data.source source --eval.before --log.loggers console jsonl", 0, "\\x1b]0;gone\\x07"),
        ("--data.prompt missing", 2, "\\x1b"),
    ],
)
def test_no_text_of_somebody_else_is_a_command_to_the_terminal(task, capfd, overrides, status, shown):
    row = {"prompt": "1+1=", "answer": "2", "source": ESCAPE, ESCAPE: 1}
    for name in ("train", "test"):
        (task / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    (task / "test.jsonl").write_text(json.dumps(row | {"prompt": "1+2="}) + "\n")
    assert _train(task, *overrides.format(__name__).split()) == status
    out, err = capfd.readouterr()
    assert _harmless(out + err.replace("\r", "")), (out, err)
    assert shown in out + err
    if status == 0:
        assert cli.main(["eval", str(task / "run")]) == 0
        out, err = capfd.readouterr()
        assert _harmless(out + err.replace("\r", ""))


@given(st.text(max_size=60), st.integers(0, 40))
def test_printable_text_is_short_harmless_and_else_as_it_was(text, most):
    shown = printable(text, most)
    assert _harmless(shown)
    assert "\n" not in shown
    shown.encode()
    assert len(shown) <= 10 * (most + 10) + 40
    if text.isprintable() and len(text) <= most:
        assert shown == text


def test_errors_whose_text_raises_have_one():
    class Broken(Exception):
        def __str__(self):
            raise KeyError("no")

    assert words_of(Broken()) == "Broken: (its text raises KeyError)"


@pytest.mark.slow
def test_thousands_of_named_scores_are_refused_at_once(task, capsys):
    assert _train(task, "--reward.functions", "tests.rewards.functions:hundreds") == 2
    assert "'hundreds' returned 5,001 named numbers; at most 100" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["file", "directory", "model", "link"])
def test_a_directory_of_somebody_else_is_no_output_dir(task, capsys, what):
    place = task / "there"
    place.mkdir()
    match what:
        case "file":
            (place / "thesis.tex").write_text("mine")
        case "directory":
            (place / "photos").mkdir()
        case "model":
            (place / "config.json").write_text("{}")
        case "link":
            (place / "link").symlink_to(place / "link")
    before = sorted(place.iterdir())
    for command in ("train", "rollout"):
        assert cli.main([command, str(task / "run.toml"), "--output-dir", str(place)]) == 2
        said = capsys.readouterr().err
        assert f"output_dir = {str(place)!r}: it holds {before[0].name} and no run" in said
    assert cli.main(["quickstart", "--output-dir", str(place)]) == 2
    assert f"holds {before[0].name} and no run" in capsys.readouterr().err
    assert sorted(place.iterdir()) == before


def test_root_and_links_without_an_end_are_no_output_dir(task, capsys):
    (task / "loop").symlink_to(task / "loop")
    (task / "nowhere").symlink_to(task / "away")
    for path, said in (("/", "and no run"), (task / "loop", "a link that"), (task / "nowhere", "a link that")):
        assert cli.main(["train", str(task / "run.toml"), "--output-dir", str(path)]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_run_reads_and_what_stands_beside_it_may_be_in_its_output_dir(task):
    """Settings, logs of a shell, hidden files, the model and the rows; and once it is a run's, anything."""
    for name in ("train.log", ".gitignore", "slurm-1.out"):
        (task / name).write_text("")
    (task / "test.jsonl").unlink()
    assert _train(task, "--steps", "1", "--output-dir", str(task), "--data.eval-path") == 0
    (task / "notes.txt").write_text("")
    assert _train(task, "--steps", "2", "--output-dir", str(task), "--data.eval-path") == 0


def test_names_with_dollars_and_controls_are_drawn_letter_by_letter(tmp_path):
    line = [(float(step), 0.5) for step in range(3)]
    name = r"$\frac{ and $5 " + ESCAPE
    write_png([Panel(name, "note", {name: line, "other": line})], tmp_path / "a.png", title=name)
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_rank_that_gives_way_to_another_ranks_error_ends_quietly(capsys):
    store = listening()
    store.set("error", '[1, "the data is bad"]')

    def gives_way():
        with contextlib.ExitStack() as opened:  # a frame of Python's own, as `joined` has
            opened.enter_context(Monitor(store, 0, 2, Watch({}), Limits(period=0.01)))
            raise RuntimeError("the connection is closed")

    with pytest.raises(SystemExit) as left:
        gives_way()
    with pytest.raises(SystemExit, match="1"):
        ends.status_of_exit(left.value, "train", show=False)
    assert capsys.readouterr().err == ""


def test_what_helps_where_memory_lacks_is_said_once(capsys):
    """A budget that found its size has said so itself, and quotes the device's message."""
    found = "not enough memory: you tried to allocate 8 bytes"
    assert ends.status_of(ValueError(found), "train", show=False) == 2
    assert capsys.readouterr().err.count('token_budget = "auto"') == 1
    assert ends.status_of(memory.alone("actor", 66, found), "train", show=False) == 1
    assert 'token_budget = "auto"' not in capsys.readouterr().err
