"""Settings of reward models and judges that cannot work are named, all at once, before any work."""

from __future__ import annotations

import json

import pytest

from fppo.settings import checks, files, places
from fppo.settings.train import TrainSettings

BASE = {"model.path": "m", "data.path": ["a.jsonl"], "reward.functions": ["exact_match"]}
MODEL, JUDGE = {"reward.model.path": "r"}, {"reward.judge.path": "j"}
VLLM = JUDGE | {"reward.judge.engine": "vllm"}
BOTH = VLLM | {"rollout.engine": "vllm"}


def make(changes):
    return files.replace(TrainSettings(), BASE | changes)


CONFLICTS = [
    ({"reward.model.label": "good"}, "reward.model.label"),
    ({"reward.model.weight": 2.0}, "reward.model.weight"),
    (MODEL | {"reward.model.micro_batch_size": 2, "reward.model.token_budget": 9}, "reward.model.micro_batch_size"),
    (MODEL | {"reward.model.micro_batch_size": 0}, "reward.model.micro_batch_size"),
    (MODEL | {"reward.model.weight": float("nan")}, "reward.model.weight"),
    ({"reward.judge.template": "{response}?"}, "reward.judge.template"),
    ({"reward.judge.max_rows": 3}, "reward.judge.max_rows"),
    (JUDGE | {"reward.judge.template": "{prompt}"}, "reward.judge.template"),
    (JUDGE | {"reward.judge.template": ""}, "reward.judge.template"),
    (JUDGE | {"reward.judge.template": "{response} {answer}"}, "reward.judge.template"),
    (JUDGE | {"reward.judge.template": "{response"}, "reward.judge.template"),
    (JUDGE | {"reward.judge.template": "{response.__class__}"}, "reward.judge.template"),
    (JUDGE | {"reward.judge.pattern": r"\d+"}, "reward.judge.pattern"),
    (JUDGE | {"reward.judge.pattern": r"(\d+)/(\d+)"}, "reward.judge.pattern"),
    (JUDGE | {"reward.judge.pattern": "("}, "reward.judge.pattern"),
    (JUDGE | {"reward.judge.pattern": ""}, "reward.judge.pattern"),
    (JUDGE | {"reward.judge.temperature": -1.0}, "reward.judge.temperature"),
    (JUDGE | {"reward.judge.vllm.cache_gb": 2.0}, "reward.judge.vllm.cache_gb"),
    (VLLM | {"reward.judge.max_rows": 3}, "reward.judge.max_rows"),
    (VLLM | {"reward.judge.vllm.max_model_len": 4000}, "reward.judge.vllm.max_model_len"),
    (VLLM | {"reward.judge.vllm.cache_gb": 2.0, "reward.judge.vllm.memory_share": 0.3}, "reward.judge.vllm.cache_gb"),
    (
        VLLM | {"reward.judge.vllm.host": "process", "reward.judge.vllm.transport": "ipc"},
        "reward.judge.vllm.transport",
    ),
    (BOTH, "reward.judge.vllm.host"),
    (
        BOTH | {"reward.judge.vllm.memory_share": 0.6, "rollout.vllm.memory_share": 0.5},
        "reward.judge.vllm.memory_share",
    ),
]


@pytest.mark.parametrize(("changes", "place"), CONFLICTS, ids=[c[1] + str(i) for i, c in enumerate(CONFLICTS)])
def test_each_conflict_is_named_by_its_setting(changes, place):
    assert place in [p.path for p in checks.problems(make(changes))]


@pytest.mark.parametrize(
    "changes",
    [
        MODEL | {"reward.functions": []},
        MODEL | {"reward.model.label": "1", "reward.model.chat": False, "reward.model.token_budget": 100},
        JUDGE | {"reward.functions": [], "reward.judge.weight": -1.0},
        MODEL | JUDGE | {"reward.judge.template": "{{{response}}}", "reward.judge.pattern": r"(?:a|b)(\d)"},
        VLLM | {"reward.judge.vllm.max_model_len": 4352, "reward.judge.vllm.memory_share": 0.4},
        BOTH | {"reward.judge.vllm.host": "process"},
    ],
)
def test_settings_that_agree_pass(changes):
    assert checks.problems(make(changes)) == []


def test_a_judge_on_several_ranks_needs_a_process_of_its_own():
    said = checks.mesh_problems(make(VLLM), 2)
    assert [p.path for p in said] == ["reward.judge.vllm.host"]
    assert checks.mesh_problems(make(VLLM | {"reward.judge.vllm.host": "process"}), 2) == []
    assert checks.mesh_problems(make(VLLM), 1) == []


def test_of_large_files_the_first_rows_are_looked_at_beforehand(tmp_path):
    """Reading them takes time: what is wrong with the others is told once the run reads them."""
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "1", "answer": "2"}\n' * 1000 + "no row\n")
    (problem,) = places.row_problems(make({"data.path": [str(file)]}))
    assert "a.jsonl:1001: not JSON" in str(problem)
    with file.open("r+b") as opened:
        opened.truncate((32 << 20) + 1)
    assert places.row_problems(make({"data.path": [str(file)]})) == []
    (problem,) = places.row_problems(make({"data.path": [str(file)], "data.prompt": "question"}))
    assert str(problem).startswith("data.prompt = 'question': no row has that field; did you mean 'prompt'?")


def test_ids_that_a_tokenizer_lacks_are_named_though_it_has_larger_ones(tmp_path):
    written = {"model": {"vocab": {"a": 0, "b": 2}}, "added_tokens": [{"id": 7, "content": "<end>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    given = {"model.path": str(tmp_path), "rollout.stop_token_ids": [0, 1, 2, 7, 8]}
    (problem,) = places.token_problems(make(given))
    assert str(problem) == "rollout.stop_token_ids = [1, 8]: the tokenizer has no such ids; they go up to 7"
    (tmp_path / "tokenizer.json").write_text(json.dumps(written | {"model": {"vocab": [["a", 0.0], ["b", -1.0]]}}))
    (problem,) = places.token_problems(make(given))
    assert problem.value == [2, 8]


def test_of_many_names_the_first_three_are_shown_and_the_others_counted():
    assert [places.some("abcde"[:count]) for count in (1, 3, 4, 5)] == [
        "a",
        "a, b, c",
        "a, b, c and 1 more",
        "a, b, c and 2 more",
    ]


def test_nothing_that_scores_is_an_error_and_the_old_name_too():
    assert "reward.judge.path" in checks.problems(make({"reward.functions": []}))[0].text
    with pytest.raises(files.SettingsError, match=r"model\.reward_path = 'r': there is no such setting"):
        make({"model.reward_path": "r"})


def test_what_reads_a_ground_truth_is_named_where_there_is_none(tmp_path):
    own = {"data.ground_truth": "", "reward.functions": ["mine:reward"]}
    assert checks.problems(make(own)) == []
    for changes, reader in (
        ({"reward.functions": ["mine:reward", "exact_match"]}, "reward exact_match would"),
        (JUDGE, "reward.judge.template would"),
        ({"critic.privileged": 8}, "critic.privileged would"),
    ):
        (problem,) = [x for x in checks.problems(make(own | changes)) if x.path == "data.ground_truth"]
        assert str(problem) == f"data.ground_truth = '': {reader} read it; give a field of the rows"
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1="}\n')
    rows = own | {"data.path": [str(tmp_path / "a.jsonl")]}
    assert places.row_problems(make(rows)) == []
    (problem,) = places.row_problems(make(rows | {"data.ground_truth": "answer"}))
    assert str(problem) == "data.ground_truth = 'answer': no row has that field; there are 'prompt'"
