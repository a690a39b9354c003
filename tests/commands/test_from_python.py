"""`fppo.train`: its numbers, record, errors, and what becomes of functions that only one program has."""

from __future__ import annotations

import json

import pytest

import fppo
from fppo.commands import cli
from fppo.settings import files
from tests import tiny_run
from tests.house import ROOT

ROWS = [{"prompt": f"{a}+{b}=", "ground_truth": str(a + b), "kind": "sum"} for a in range(4) for b in range(5)]
SMALL = {
    "rollout": {"batch_size": 8, "max_tokens": 3, "n": 4},
    "actor.optimizer.lr": 1e-3,
    "actor.mini_batch_size": 4,
    "algorithm.advantage.scale": "none",
    "digest.every": 1,
}
REWARD = """
def score(sample):
    return len(set(sample.response)) / 7 + (sample.extras["kind"] == "sum") + (sample.response == sample.ground_truth)
"""


def made(task, **changes):
    """Keywords of a call on the tiny run's model."""
    return {
        "model": task / "start",
        "prompts": ROWS,
        "reward": "exact_match",
        "steps": 2,
        "output_dir": task / "run",
        "settings": SMALL,
        **changes,
    }


def problems_of(**call):
    with pytest.raises(files.SettingsError) as caught:
        fppo.train(**call)
    return caught.value.problems


def lines_of(run, name, leave=()):
    lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [{key: x for key, x in line.items() if not key.startswith(leave)} for line in lines]


@pytest.mark.slow
def test_a_closure_trains_as_the_command_does_bit_for_bit(task, capsys):
    kind = "sum"  # which a function of a module cannot see

    def score(sample):
        right = sample.response == sample.ground_truth
        return len(set(sample.response)) / 7 + (sample.extras["kind"] == kind) + right

    run = fppo.train(**made(task, reward=score))
    said = capsys.readouterr().out
    assert "step 2/2" in said
    assert f"report: {task / 'run' / 'report.html'}" in said
    assert [*run.metrics().index] == [1, 2]
    assert len(run.samples(2)) == 8
    assert (run.model / "model.safetensors").exists()

    (task / "my_rewards.py").write_text(REWARD)
    changes = {"output_dir": str(task / "other"), "reward.functions": ["my_rewards:score"]}
    changes["module_dirs"] = [str(task)]
    files.save(files.replace(files.load(task / "run" / "settings.toml"), changes), task / "other.toml")
    assert cli.main(["train", str(task / "other.toml")]) == 0
    for name in ("metrics.jsonl", "digests.jsonl"):
        assert lines_of(task / "run", name, tiny_run.UNLIKE) == lines_of(task / "other", name, tiny_run.UNLIKE)

    capsys.readouterr()
    assert cli.main(["train", str(task / "run" / "settings.toml"), "--steps", "3"]) == 2
    assert "'fppo.train:score' is a function of the program that called fppo.train" in capsys.readouterr().err
    again = fppo.train(**made(task, reward=score, steps=3))
    said = capsys.readouterr().err
    assert "going on from step 2" in said
    assert "other code" not in said
    assert [*again.metrics().index] == [1, 2, 3]

    changed = lambda sample: 0.5 * score(sample)  # noqa: E731
    changed.__name__ = "score"
    fppo.train(**made(task, reward=changed, steps=4))
    assert "with other code: the code of fppo.train:score has changed: 1 lines added" in capsys.readouterr().err


def length(sample):
    return float(len(sample.response))


@pytest.mark.slow
def test_functions_of_a_module_and_rows_are_what_the_command_finds_again(task, capsys):
    tables = {"rollout": {"batch_size": 8, "max_tokens": 3}, "algorithm": {"advantage": {"scale": "none"}}}
    run = fppo.train(
        **made(task, settings=tables, eval_prompts=ROWS[:4], reward=[length, "exact_match", score_of(2.0)], steps=1)
    )
    functions = [f"{__name__}:length", "exact_match", "fppo.train:score"]
    expected = {"data.path": [str(task / "run" / "prompts.jsonl")], "data.ground_truth": "ground_truth", "rollout.n": 8}
    expected |= {"data.eval_path": [str(task / "run" / "eval_prompts.jsonl")], "reward.functions": functions}
    expected |= {"algorithm.advantage.name": "grpo", "algorithm.advantage.scale": "none", "data.chat": False}
    assert {path: run.settings[path] for path in expected} == expected
    assert str(ROOT) in run.settings["module_dirs"]
    assert lines_of(task / "run", "prompts.jsonl") == ROWS
    assert "exact_match 0.000  score 2.000" in capsys.readouterr().out


def score_of(score_of_all):
    def score(sample):
        return score_of_all

    return score


def test_all_that_is_wrong_is_named_at_once(task):
    wrong = {"actor.optimiser.lr": 1e-5, "rollout": {"batch_sise": 8}, "steps": 3, "seed": "one", "reward.workers": 0}
    found = problems_of(**made(task, settings=wrong, reward="exact_mach", output_dir=task / "train.jsonl" / "run"))
    for text in (
        "[actor.optimiser]: there is no such setting; did you mean actor.optimizer?",
        "rollout.batch_sise = 8: there is no such setting; did you mean rollout.batch_size?",
        "steps = 3: it is given twice; give it once",
        "seed = 'one': must be a whole number",
        "reward.workers = 0: must be 1 or more",
    ):
        assert any(text in each for each in found), (text, found)
    found = problems_of(**made(task, reward="exact_mach", model=task / "nowhere", settings={"rollout.batch_size": 12}))
    for text in (
        "model.path = '{task}/nowhere': there is no such file or directory",
        "rollout.batch_size = 12: must be a multiple of rollout.n = 8",
        "reward.functions = 'exact_mach': there is no such reward; did you mean exact_match?",
    ):
        assert any(text.format(task=task) in each for each in found), (text, found)


def test_a_run_without_a_reward_or_prompts_is_refused(task):
    found = problems_of(**made(task, reward=None, prompts=None))
    assert any("reward.functions = []: nothing scores the responses" in each for each in found), found
    assert any(each.startswith("data.path = []") for each in found), found
    assert any("must be a list, each text" in each for each in problems_of(**made(task, reward=3)))


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([*ROWS, "1+2="], "prompts[20]: it is no dict with fields"),
        ([{"prompt": "1+2=", "image": b"GIF"}], "prompts[0]: Object of type bytes is not JSON serializable"),
        ([{"prompt": "1+2="}, {"question": "1+3="}], "prompts.jsonl:2: "),
        ([{"prompt": "1+2=", "ground_truth": "3"}, {"prompt": "1+3="}], "prompts.jsonl:2: "),
        ([{"prompt": [{"role": "user", "content": "1+2="}]}], "its tokenizer has no chat template"),
        ([], "the data set is empty"),
    ],
)
def test_a_faulty_row_is_named(task, rows, text):
    found = problems_of(**made(task, prompts=rows, reward=length))
    assert any(text in each for each in found), found


def test_the_rows_of_another_run_are_left_alone(task):
    run = task / "run"
    (run / "starts").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("")
    (run / "prompts.jsonl").write_text("others\n")
    (text,) = problems_of(**made(task))
    assert "it holds a run with other rows in prompts.jsonl; give another directory, or data.may_change = true" in text
    assert (run / "prompts.jsonl").read_text() == "others\n"
    assert "others" not in problems_of(**made(task, settings={**SMALL, "data.may_change": True, "steps": 1}))[0]
    assert (run / "prompts.jsonl").read_text() == "others\n"


def test_one_of_several_ranks_is_sent_to_the_command(task, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"one of several ranks; start several by fppo train FILE.toml --nproc N"):
        fppo.train(**made(task))
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    (text,) = problems_of(**made(task, settings={**SMALL, "mesh.shard": 2}))
    assert text.startswith("mesh: its axes")
