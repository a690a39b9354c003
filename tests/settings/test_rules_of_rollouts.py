"""Rules between settings of rollouts, data and rewards from both sides, as in test_rules."""

from __future__ import annotations

import pytest

from tests.settings.rules import (
    AGENT,
    APART,
    BASE,
    ENV,
    EXACT,
    GAME,
    GROUPS,
    HELD,
    IMAGES,
    JUDGE,
    NO_CRITIC,
    SAVED,
    SCORER,
    TAUGHT,
    TOOL,
    VLLM,
    Rule,
    check_rule,
    numbered,
)

OF_ROLLOUTS: list[Rule] = [
    ({"rollout.batch_size": 12, "rollout.n": 4}, {"rollout.batch_size": 10}, ["rollout.batch_size"]),
    (GROUPS, {"rollout.n": 1}, ["rollout.n"]),
    (VLLM | {"rollout.vllm.max_rows": 9}, {"rollout.engine": "embedded"}, ["rollout.vllm.max_rows"]),
    ({"rollout.cache_gb": 1.0}, VLLM, ["rollout.cache_gb"]),
    ({"rollout.draft_tokens": 4}, VLLM, ["rollout.draft_tokens"]),
    ({"algorithm.router_replay": "rollout"}, {"rollout.draft_tokens": 4}, ["rollout.draft_tokens"]),
    ({"model.decode_attention": "eager"}, VLLM, ["model.decode_attention"]),
    (VLLM | JUDGE | {"model.decode_attention": "eager"}, {"reward.judge.path": None}, ["model.decode_attention"]),
    (VLLM | {"rollout.vllm.max_model_len": 768}, {"rollout.max_tokens": 257}, ["rollout.vllm.max_model_len"]),
    (VLLM | {"rollout.vllm.max_model_len": 768}, {"data.max_prompt_tokens": 513}, ["rollout.vllm.max_model_len"]),
    (
        VLLM | HELD | {"rollout.vllm.max_model_len": 768, "eval.max_tokens": 256},
        {"eval.max_tokens": 257},
        ["rollout.vllm.max_model_len"],
    ),
    (ENV, TOOL, ["rollout.environment.name"]),
    (ENV | NO_CRITIC, {"algorithm.advantage": "remax"}, ["rollout.environment.name"]),
    (
        ENV | {"data.path": [], "rollout.environment.episodes": 5},
        {"data.path": ["a"]},
        ["rollout.environment.episodes"],
    ),
    (
        ENV | {"data.path": [], "rollout.environment.episodes": 5},
        {"data.rows": "my:rows"},
        ["rollout.environment.episodes"],
    ),
    (TOOL | {"rollout.turns.failure": ""}, ENV | {"rollout.turns.respond": None}, ["rollout.turns.failure"]),
    *(
        (
            ENV | {"data.path": [], f"rollout.environment.{name}": value},
            BASE | {"rollout.environment": "none", f"rollout.environment.{name}": value},
            [f"rollout.environment.{name}"],
        )
        for name, value in {"episodes": 5, "eval_episodes": 6, "failure": "raise"}.items()
    ),
    (AGENT, {"mesh.shard": 2}, ["rollout.environment.name"]),
    *(
        (AGENT, {name: value}, [name])
        for name, value in {
            "rollout.turns.max_turns": 3,
            "rollout.turns.time_limit": 3.0,
            "rollout.turns.concurrency": 3,
            "rollout.turns.retries": 3,
            "rollout.environment.failure": "raise",
        }.items()
    ),
    (ENV | GROUPS | {"algorithm.group_by": "turn"}, {"algorithm.advantage": "gae"}, ["algorithm.group_by"]),
    (TOOL | GROUPS | {"algorithm.group_by": "turn"}, {"rollout.turns.respond": None}, ["algorithm.group_by"]),
    (TOOL | {"data.chat": True, "rollout.turns.thinking": "drop"}, {"data.chat": False}, ["rollout.turns.thinking"]),
    (
        TOOL | {"data.chat": True, "rollout.turns.thinking": "drop"},
        {"data.row_tools": "t"},
        ["rollout.turns.thinking"],
    ),
    (
        TOOL | {"data.chat": True, "rollout.turns.thinking": "drop"},
        {"data.images": "i"},
        ["rollout.turns.respond", "rollout.turns.thinking"],
    ),
    (
        GAME | {"data.chat": True},
        {"rollout.turns.thinking": "drop"},
        ["rollout.turns.thinking"],
    ),
    (TOOL | {"rollout.turns.turn_tokens": 256}, {"rollout.turns.turn_tokens": 257}, ["rollout.turns.turn_tokens"]),
    (ENV | {"rollout.turns.turn_tokens": 256}, {"rollout.max_tokens": 255}, ["rollout.turns.turn_tokens"]),
    (
        TOOL | {"rollout.turns.turn_tokens": 2, "rollout.turns.workers": 2},
        {"rollout.turns.respond": None},
        ["rollout.turns.turn_tokens", "rollout.turns.workers"],
    ),
    (TOOL, {"rollout.turns.respond": "tool"}, ["rollout.turns.respond"]),
    (TOOL | {"rollout.turns.max_turns": 2}, {"rollout.turns.max_turns": 1}, ["rollout.turns.max_turns"]),
    (
        {"rollout.turns.respond": "calculator", "rollout.stop": ["="]},
        {"rollout.stop": []},
        ["rollout.turns.respond"],
    ),
    (
        {"rollout.turns.respond": "calculator", "rollout.stop_token_ids": [3]},
        {"rollout.stop_token_ids": []},
        ["rollout.turns.respond"],
    ),
    (TOOL | SAVED | HELD, {"data.eval_path": []}, ["rollout.turns.respond"]),
    (
        {
            "rollout.n": 2,
            "rollout.filter.groups": True,
            "rollout.filter.by": "exact_match",
            "rollout.filter.max_draws": 3,
        },
        {"rollout.filter.groups": False},
        ["rollout.filter.by", "rollout.filter.max_draws"],
    ),
    ({"rollout.n": 2, "rollout.filter.groups": True}, {"rollout.n": 1}, ["rollout.filter.groups"]),
    ({"steps": 5, "rollout.ahead": 5}, {"rollout.ahead": 6}, ["rollout.ahead"]),
    ({"rollout.ahead": 1, "rollout.interrupt": 4}, {"rollout.ahead": 0}, ["rollout.interrupt"]),
    ({"rollout.ahead": 1, "rollout.interrupt": 4}, ENV, ["rollout.interrupt"]),
    ({"rollout.ahead": 1, "rollout.interrupt": 4}, TOOL, ["rollout.interrupt"]),
    ({"rollout.ahead": 1, "rollout.interrupt": 4}, {"algorithm.advantage": "remax"}, ["rollout.interrupt"]),
    (
        {"rollout.ahead": 1, "rollout.interrupt": 4, "algorithm.router_replay": "all"},
        {"algorithm.router_replay": "rollout"},
        ["rollout.interrupt"],
    ),
    (SAVED, {"rollout.ahead": 1}, ["rollout.ahead"]),
    (SAVED, {"rollout.save": True}, ["rollout.save"]),
    (SAVED, {"algorithm.advantage": "remax"}, ["rollout.from"]),
    (
        VLLM | {"rollout.vllm.memory_share": 0.5},
        {"rollout.vllm.cache_gb": 1.0},
        ["rollout.vllm.cache_gb"],
    ),
    (
        VLLM | {"rollout.vllm.extra.max_num_batched_tokens": 9},
        {"rollout.vllm.extra.max_num_seqs": 9},
        ["rollout.vllm.extra.max_num_seqs"],
    ),
    (VLLM, {"rollout.vllm.extra.load_format": "x"}, ["rollout.vllm.extra.load_format"]),
    (
        VLLM | {"rollout.vllm.host": "ray", "rollout.vllm.cluster": "a:1"},
        {"rollout.vllm.host": "process"},
        ["rollout.vllm.cluster"],
    ),
    (VLLM | {"rollout.vllm.host": "ray"}, {"rollout.vllm.cluster": "a"}, ["rollout.vllm.cluster"]),
    *(
        (APART | {f"rollout.vllm.{name}": 7}, {"rollout.vllm.host": "local"}, [f"rollout.vllm.{name}"])
        for name in ("restarts", "patience", "start_patience")
    ),
    *(
        (APART | {f"rollout.vllm.{name}": value}, {"rollout.vllm.host": "local"}, [f"rollout.vllm.{name}"])
        for name, value in {"tensor_parallel": 2, "devices": [1], "transport": "nccl"}.items()
    ),
    (APART | {"rollout.vllm.devices": [1]}, {"rollout.vllm.host": "ray"}, ["rollout.vllm.devices"]),
]

OF_DATA: list[Rule] = [
    (ENV | {"data.path": []}, BASE | {"data.path": [], "rollout.environment": "none"}, ["data.path"]),
    ({"data.path": [], "data.rows": "my:rows"}, {"data.rows": None}, ["data.path"]),
    ({"data.path": [], "data.rows": "my:rows"}, {"data.path": ["a.jsonl"]}, ["data.path"]),
    ({"data.eval_rows": "my:rows"}, HELD, ["data.eval_path"]),
    ({"data.path": ["org/set"], "data.stream": 5}, {"data.path": ["a.jsonl"]}, ["data.stream"]),
    (HELD | {"data.path": ["org/set"], "data.stream": 5}, {"data.path": ["a.csv"]}, ["data.stream"]),
    ({"data.eval_path": ["org/set"], "data.stream": 5}, HELD, ["data.stream"]),
    ({"data.sampler": "my:order"}, {"data.shuffle": False}, ["data.shuffle"]),
    ({"data.curriculum": "learnability"}, {"data.sampler": "my:order"}, ["data.sampler"]),
    ({"data.curriculum": "learnability"}, {"data.shuffle": False}, ["data.shuffle"]),
    ({"data.curriculum": "learnability"}, SAVED, ["rollout.from"]),
    (
        {
            "data.chat": True,
            "data.chat_template": "t",
            "data.chat_arguments": {"a": 1},
            "data.tools": "x",
            "data.row_tools": "y",
        },
        {"data.chat": False},
        ["data.chat_template", "data.chat_arguments", "data.tools", "data.row_tools"],
    ),
    (IMAGES, {"data.chat": False}, ["data.images"]),
    (IMAGES | {"data.over_long": "drop"}, {"data.over_long": "truncate"}, ["data.over_long"]),
    (IMAGES, {"data.row_tools": "t"}, ["data.row_tools"]),
    (IMAGES, TOOL, ["rollout.turns.respond"]),
    (IMAGES, {"critic.privileged": 2}, ["critic.privileged"]),
    (IMAGES, SCORER, ["reward.model.path"]),
    (IMAGES, JUDGE, ["reward.judge.path"]),
    (IMAGES, TAUGHT, ["model.teacher_path"]),
    (IMAGES, ENV, ["rollout.environment.name"]),
    ({"data.chat": True, "data.videos": "v", "data.video_fps": 2.0}, {"data.videos": None}, ["data.video_fps"]),
    ({"data.chat": True, "data.videos": "v", "data.video_frames": 2}, {"data.videos": None}, ["data.video_frames"]),
    ({"data.chat": True, "data.videos": "v", "data.video_fps": 2.0}, {"data.video_frames": 2}, ["data.video_frames"]),
    ({"data.prompt": "Q: {q}"}, {"data.prompt": "Q: {}"}, ["data.prompt"]),
    ({"data.prompt": "Q: {{}}"}, {"data.prompt": "Q: {"}, ["data.prompt"]),
    (HELD, {"data.eval_path": ["a.jsonl", "b.jsonl"]}, ["data.eval_path"]),
    ({"data.path": ["org/set"], "data.eval_path": ["org/set"]}, {"data.eval_split": "train"}, ["data.eval_path"]),
    (
        HELD | {"data.ground_truth": "", "reward.functions": ["my:f"]},
        {"reward.functions": ["math_verify"]},
        ["data.ground_truth"],
    ),
    (
        JUDGE | {"data.ground_truth": "", "reward.functions": [], "reward.judge.template": "{response}"},
        {"reward.judge.template": "{response}{ground_truth}"},
        ["data.ground_truth"],
    ),
    (HELD | {"eval.every": 5}, {"data.eval_path": []}, ["eval.every"]),
    (
        ENV | {"rollout.environment.eval_episodes": 3, "eval.every": 5},
        {"rollout.environment.eval_episodes": 0},
        ["eval.every"],
    ),
    ({"eval.before": False}, {"eval.max_tokens": 9}, ["eval.max_tokens"]),
    (HELD | {"eval.max_prompts": 3}, {"data.eval_path": []}, ["eval.max_prompts"]),
    (
        HELD | {"eval.temperature": 0.5, "eval.top_k": 3, "eval.top_p": 0.5, "eval.min_p": 0.1},
        {"eval.temperature": 0.0},
        ["eval.top_k", "eval.top_p", "eval.min_p"],
    ),
    (HELD | {"eval.n": 4, "eval.temperature": 0.5}, {"eval.temperature": 0.0}, ["eval.temperature"]),
    *(
        (EXACT, changes, ["eval.exact_values"])
        for changes in (
            {"rollout.top_k": 5},
            {"rollout.top_p": 0.5},
            {"rollout.min_p": 0.1},
            {"rollout.stop": ["x"]},
            {"reward.weights": [2.0]},
            {"reward.functions": ["my:f"]},
            {"reward.functions": ["exact_match", "my:f"]},
            {"reward.overlong_buffer": 2},
            SCORER,
            JUDGE,
            NO_CRITIC,
            {"rollout.environment": "my:env"},
        )
    ),
    (EXACT, {"data.eval_path": []}, ["eval.exact_values", "eval.exact_values"]),
    (GAME | {"rollout.stop": ["x"]}, {"reward.functions": ["exact_match"]}, ["eval.exact_values"]),
    (
        GAME | {"algorithm.advantage": "turn_gae", "algorithm.advantage.gamma": 1.0},
        {"algorithm.advantage.gamma": 0.5},
        ["eval.exact_values"],
    ),
    (
        GAME | {"algorithm.advantage.gamma": 0.5},
        {"algorithm.advantage": "turn_gae", "algorithm.advantage.gamma": 0.5},
        ["eval.exact_values"],
    ),
]

OF_REWARDS: list[Rule] = [
    *(
        (SCORER | {f"reward.model.{name}": value}, {"reward.model.path": None}, [f"reward.model.{name}"])
        for name, value in {
            "weight": 2.0,
            "label": "x",
            "tokenizer": "t",
            "chat": True,
            "dtype": "bfloat16",
            "max_tokens": 9,
            "micro_batch_size": 2,
            "token_budget": 9,
            "offload": True,
        }.items()
    ),
    (
        SCORER | {"reward.model.max_tokens": 9, "reward.model.over_long": "truncate"},
        {"reward.model.max_tokens": None},
        ["reward.model.over_long"],
    ),
    (
        SCORER | {"reward.model.micro_batch_size": 2},
        {"reward.model.token_budget": 9},
        ["reward.model.micro_batch_size"],
    ),
    (ENV, BASE | {"rollout.environment": "none", "reward.functions": []}, ["reward.functions"]),
    (SCORER | {"reward.functions": []}, {"reward.model.path": None}, ["reward.functions"]),
    (JUDGE | {"reward.functions": []}, {"reward.judge.path": None}, ["reward.functions"]),
    ({"reward.functions": ["my.module:fn.part"]}, {"reward.functions": ["my module:fn"]}, ["reward.functions"]),
    ({"reward.weights": [2.0]}, {"reward.weights": [2.0, 1.0]}, ["reward.weights"]),
    ({"reward.weights": [2.0]}, {"reward.weights": [0.0]}, ["reward.weights"]),
    (SCORER | {"reward.weights": [0.0]}, {"reward.model.weight": 0.0}, ["reward.weights"]),
    (JUDGE | {"reward.weights": [0.0]}, {"reward.judge.weight": 0.0}, ["reward.weights"]),
    (SCORER | {"reward.functions": []}, {"reward.model.weight": 0.0}, ["reward.model.weight"]),
    (JUDGE | {"reward.functions": []}, {"reward.judge.weight": 0.0}, ["reward.judge.weight"]),
    (
        {"reward.functions": ["regular_expression"], "reward.arguments": {"regular_expression": {"pattern": "x"}}},
        {"reward.arguments": {}},
        ["reward.arguments.regular_expression.pattern"],
    ),
    ({}, {"reward.arguments": {"exact_match": 1}}, ["reward.arguments.exact_match"]),
    ({}, {"reward.arguments": {"other": {}}}, ["reward.arguments.other"]),
    (
        {"reward.overlong_buffer": 255, "reward.overlong_penalty": 0.5},
        {"reward.overlong_buffer": 0},
        ["reward.overlong_penalty"],
    ),
    ({"reward.overlong_buffer": 255}, {"reward.overlong_buffer": 256}, ["reward.overlong_buffer"]),
    *(
        (JUDGE | {f"reward.judge.{name}": value}, {"reward.judge.path": None}, [f"reward.judge.{name}"])
        for name, value in {
            "weight": 2.0,
            "chat": False,
            "temperature": 0.5,
            "max_tokens": 9,
            "max_prompt_tokens": 9,
            "max_rows": 9,
            "offload": True,
        }.items()
    ),
    (
        JUDGE | {"reward.judge.engine": "vllm", "reward.judge.vllm.cache_gb": 2.0},
        {"reward.judge.engine": "embedded"},
        ["reward.judge.vllm.cache_gb"],
    ),
    *(
        (JUDGE | {f"reward.judge.{name}": value}, {"reward.judge.engine": "vllm"}, [f"reward.judge.{name}"])
        for name, value in {"max_rows": 9, "offload": True}.items()
    ),
    (
        JUDGE | {"reward.judge.engine": "vllm", "reward.judge.vllm.max_model_len": 4352},
        {"reward.judge.max_tokens": 257},
        ["reward.judge.vllm.max_model_len"],
    ),
    (
        JUDGE | {"reward.judge.engine": "vllm", "reward.judge.vllm.host": "process"},
        {"reward.judge.vllm.transport": "nccl"},
        ["reward.judge.vllm.transport"],
    ),
    (
        JUDGE | APART | {"reward.judge.engine": "vllm"},
        {"rollout.vllm.host": "local"},
        ["reward.judge.vllm.host"],
    ),
    (
        JUDGE
        | APART
        | {"reward.judge.engine": "vllm", "reward.judge.vllm.memory_share": 0.5, "rollout.vllm.memory_share": 0.5},
        {"rollout.vllm.memory_share": 0.625},
        ["reward.judge.vllm.memory_share"],
    ),
]

RULES = OF_ROLLOUTS + OF_DATA + OF_REWARDS


@pytest.mark.slow
@pytest.mark.parametrize(("agreeing", "step", "named"), RULES, ids=numbered(RULES))
def test_settings_agree_until_one_step_further(agreeing, step, named):
    check_rule(agreeing, step, named)
