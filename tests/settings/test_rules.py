"""Every rule between settings from both sides: what may stand together has no problem, and one step further has one.

Each row gives settings without a problem, a change of them, and the settings that are named then: these and no others.
"""

from __future__ import annotations

from typing import Any

import pytest

from fppo.settings import checks, files
from fppo.settings.checks_sft import sft_problems
from fppo.settings.train import TrainSettings

BASE = {"model.path": "m", "data.path": ["a.jsonl"], "reward.functions": ["exact_match"]}
HELD = {"data.eval_path": ["b.jsonl"]}
GROUPS = {"algorithm.advantage": "grpo", "rollout.n": 2}
NO_CRITIC = {"algorithm.advantage": "reinforce_plus_plus"}
VLLM = {"rollout.engine": "vllm"}
APART = VLLM | {"rollout.vllm.host": "process"}
ENV = {"rollout.environment": "my:env", "reward.functions": []}
AGENT = {"rollout.environment": "agent", "rollout.environment.play": "my:play", "reward.functions": []}
TOOL = {"rollout.turns.respond": "my:tool"}
SAVED = {"rollout.from": "saved"}
JUDGE = {"reward.judge.path": "j"}
SCORER = {"reward.model.path": "r"}
LORA = {"model.lora.rank": 4}
KL = {"actor.kl_coef": 0.1}
TAUGHT = {
    "algorithm.advantage": "distill",
    "model.teacher_path": "t",
    "model.teacher_dtype": "bfloat16",
    "model.teacher_offload": True,
}
OWN_PROMPTS = TAUGHT | {"data.teacher_prompt": "x", "data.teacher_prompt_tokens": 9}
UNSCORED = TAUGHT | HELD | {"reward.functions": [], "eval.temperature": 1.0}
IMAGES = {"data.chat": True, "data.images": "i"}
EXACT = HELD | {"eval.exact_values": True}
GAME = EXACT | {"rollout.turns.respond": "my:game", "reward.functions": ["my:game.score"]}

Rule = tuple[dict[str, Any], dict[str, Any], list[str]]

OF_MODELS: list[Rule] = [
    (GROUPS, {"model.critic_path": "c"}, ["model.critic_path"]),
    *(
        ({"critic.reads": "hidden"}, {name: value}, [name])
        for name, value in {
            "model.critic_path": "c",
            "critic.compute_dtype": "bfloat16",
            "critic.checkpoint_layers": True,
            "critic.offload": "all",
            "critic.micro_batch_size": 2,
            "critic.token_budget": 99,
            "critic.popart": 0.5,
        }.items()
    ),
    ({"critic.reads": "confidence", "critic.ensemble": 2}, {"critic.reads": "tokens"}, ["critic.ensemble"]),
    (
        {"critic.reads": "hidden", "critic.ensemble": 2, "critic.leave_agreed": 0.1},
        {"critic.ensemble": 1},
        ["critic.leave_agreed"],
    ),
    (
        {"critic.reads": "hidden", "critic.ensemble": 2, "critic.leave_disputed": 0.1, "actor.entropy_coef": 0.1},
        {"actor.entropy_coef": 0.0},
        ["critic.leave_disputed"],
    ),
    (
        {"critic.reads": "hidden", "critic.ensemble": 2, "critic.leave_disputed": 0.1, "actor.entropy_coef": -0.1},
        {"critic.ensemble": 1},
        ["critic.leave_disputed"],
    ),
    (
        KL | {"model.ref_path": "r", "model.ref_dtype": "bfloat16", "model.ref_offload": True},
        {"actor.kl_coef": 0.0},
        ["model.ref_path", "model.ref_dtype", "model.ref_offload"],
    ),
    ({"algorithm.kl.coef": 0.1, "model.ref_path": "r"}, {"algorithm.kl.coef": 0.0}, ["model.ref_path"]),
    (OWN_PROMPTS, {"data.teacher_prompt": None}, ["data.teacher_prompt_tokens"]),
    (
        OWN_PROMPTS,
        NO_CRITIC,
        ["model.teacher_path", "model.teacher_dtype", "model.teacher_offload", "data.teacher_prompt"],
    ),
    (OWN_PROMPTS, {"rollout.environment": "my:env"}, ["data.teacher_prompt"]),
    (TAUGHT | ENV, {"model.teacher_path": None}, ["model.teacher_path"]),
    (TAUGHT | {"algorithm.advantage.score_coef": 0.5}, {"algorithm.kl.coef": 0.1}, ["algorithm.kl.coef"]),
    (UNSCORED, {"eval.temperature": 0.0}, ["eval.temperature"]),
    (UNSCORED | {"data.eval_path": [], "eval.temperature": 0.0}, HELD, ["eval.temperature"]),
    (UNSCORED, {"algorithm.advantage.score_coef": 0.5}, ["algorithm.advantage.score_coef"]),
    (UNSCORED, {"reward.overlong_buffer": 2}, ["reward.overlong_buffer"]),
    (UNSCORED, {"reward.failure_score": 0.0}, ["reward.failure_score"]),
]

OF_ALGORITHMS: list[Rule] = [
    ({"algorithm.gae": "loop"}, {"algorithm.advantage": "td", "algorithm.advantage.steps": 2}, ["algorithm.gae"]),
    ({"algorithm.gae": "loop"}, {"algorithm.advantage.lam_alpha": 0.1}, ["algorithm.gae"]),
    (
        {"algorithm.gae": "loop", "algorithm.advantage.lam_alpha": 0.1, "algorithm.advantage.critic_lam": 1.0},
        {"algorithm.advantage.critic_lam": "none"},
        ["algorithm.gae"],
    ),
    *(
        (
            {"algorithm.advantage": "vtrace", "algorithm.correction": "rollout", "algorithm.correction.level": "token"},
            changes,
            ["algorithm.correction.name"],
        )
        for changes in (
            {"algorithm.correction.level": "sequence"},
            {"algorithm.correction.batch_normalize": True},
        )
    ),
    *(
        ({"algorithm.old_log_probs": "update"}, changes, ["algorithm.old_log_probs"])
        for changes in (
            {"actor.epochs": 2},
            {"actor.mini_batch_size": 32},
            {"algorithm.kl.coef": 0.1},
            {"algorithm.correction": "rollout"},
        )
    ),
    ({"algorithm.old_log_probs": "engine"}, {"algorithm.correction": "rollout"}, ["algorithm.old_log_probs"]),
    (
        {"algorithm.kl.coef": 0.1, "algorithm.kl.controller": "adaptive", "algorithm.kl.target": 0.2},
        {"algorithm.kl.coef": 0.0},
        ["algorithm.kl.controller"],
    ),
    (
        {
            "algorithm.kl.coef": 0.1,
            "algorithm.kl.controller": "adaptive",
            "algorithm.kl.target": 0.2,
            "algorithm.kl.horizon": 7,
        },
        {"algorithm.kl.controller": "fixed"},
        ["algorithm.kl.target", "algorithm.kl.horizon"],
    ),
    ({"algorithm.kl.coef": 0.1, "algorithm.kl.kind": "k1+"}, {"algorithm.kl.coef": 0.0}, ["algorithm.kl.kind"]),
    ({"algorithm.kl.coef": 0.1, "algorithm.kl.kind": "k1"}, {"algorithm.kl.kind": "abs"}, ["algorithm.kl.kind"]),
    ({"algorithm.advantage": "gdpo", "rollout.n": 2}, {"algorithm.kl.coef": 0.1}, ["algorithm.kl.coef"]),
    (KL | {"actor.kl_kind": "k2"}, {"actor.kl_coef": 0.0}, ["actor.kl_kind"]),
    (KL | {"actor.kl_kind": "k1+"}, {"actor.kl_kind": "k1"}, ["actor.kl_kind"]),
    (
        {"algorithm.router_replay": "all", "actor.experts.balance_coef": 0.1},
        {"algorithm.router_replay": "none"},
        ["actor.experts.balance_coef"],
    ),
    *(
        ({f"actor.experts.{name}": 0.1}, {"model.compile_layers": True}, [f"actor.experts.{name}"])
        for name in ("bias_rate", "z_coef")
    ),
    ({"algorithm.router_replay": "all"}, {"model.compile_layers": True}, ["algorithm.router_replay"]),
    ({"algorithm.router_replay": "rollout"}, VLLM, ["algorithm.router_replay"]),
    (
        VLLM | {"algorithm.router_replay": "old_log_probs"},
        {"algorithm.router_replay": "rollout"},
        ["algorithm.router_replay"],
    ),
    (VLLM | SAVED | {"algorithm.router_replay": "rollout"}, {"rollout.from": None}, ["algorithm.router_replay"]),
]

OF_ADAPTERS: list[Rule] = [
    (
        LORA
        | {
            "model.lora.alpha": 8.0,
            "model.lora.scaling": "rslora",
            "model.lora.targets": ["q_proj"],
            "model.lora.base": "nf4",
            "model.lora.critic_rank": 2,
        },
        {"model.lora.rank": 0},
        [f"model.lora.{name}" for name in ("alpha", "scaling", "targets", "base", "critic_rank")],
    ),
    *(
        ({"model.lora.path": "p"}, {f"model.lora.{name}": value}, [f"model.lora.{name}"])
        for name, value in {"rank": 4, "alpha": 8.0, "scaling": "rslora", "targets": ["q_proj"]}.items()
    ),
    (
        {"model.lora.path": "p", "model.lora.reference": "base"},
        LORA | {"model.lora.path": None},
        ["model.lora.reference"],
    ),
    (
        KL | {"model.lora.path": "p", "model.lora.reference": "base"},
        {"model.ref_path": "r"},
        ["model.lora.reference"],
    ),
    (LORA | {"model.lora.critic_rank": 2}, GROUPS, ["model.lora.critic_rank"]),
    (LORA | {"model.lora.critic_rank": 2}, {"critic.reads": "hidden"}, ["model.lora.critic_rank"]),
    (LORA | VLLM | {"model.lora.send": "alone"}, {"rollout.engine": "embedded"}, ["model.lora.send"]),
    (LORA | VLLM | {"rollout.vllm.send": "changed"}, {"model.lora.send": "alone"}, ["rollout.vllm.send"]),
    (LORA, {"model.compile_layers": True}, ["model.compile_layers"]),
    (LORA | {"model.offload": "moments"}, {"model.offload": "all"}, ["model.offload"]),
    (LORA | {"critic.offload": "moments"}, {"critic.offload": "all"}, ["critic.offload"]),
    (LORA | {"critic.offload": "all", "model.lora.critic_rank": 0}, {"model.lora.critic_rank": 1}, ["critic.offload"]),
    (
        LORA | KL | {"model.ref_path": "r", "model.ref_dtype": "bfloat16", "model.ref_offload": True},
        {"model.ref_path": None},
        ["model.ref_dtype", "model.ref_offload"],
    ),
    (LORA | {"actor.experts.z_coef": 0.1}, {"actor.experts.bias_rate": 0.1}, ["actor.experts.bias_rate"]),
]

OF_CRITICS: list[Rule] = [
    ({"critic.popart": 0.1, "critic.loss": "huber"}, {"critic.loss": "hl_gauss"}, ["critic.popart"]),
    (
        {"critic.pretrain": 5, "critic.pretrain_patience": 2, "critic.pretrain_rise": 0.1},
        {"critic.pretrain": 0},
        ["critic.pretrain_patience", "critic.pretrain_rise"],
    ),
    ({"critic.pretrain": 5}, {"critic.warmup_steps": 3}, ["critic.warmup_steps"]),
    ({"critic.pretrain": 5, "steps": 6}, {"steps": 5}, ["critic.pretrain"]),
    ({"critic.freeze": True, "critic.pretrain": 5}, {"critic.pretrain": 0}, ["critic.freeze"]),
    ({"critic.freeze": True, "critic.warmup_steps": 5}, {"critic.warmup_steps": 0}, ["critic.freeze"]),
    ({"critic.freeze": True, "model.critic_path": "c"}, {"model.critic_path": None}, ["critic.freeze"]),
    ({"critic.warmup_steps": 4, "steps": 5}, {"steps": 4}, ["critic.warmup_steps"]),
    (GROUPS | {"critic.mini_batch_size": 48}, {"algorithm.advantage": "gae"}, ["critic.mini_batch_size"]),
]

OF_UPDATES: list[Rule] = [
    rule
    for role in ("actor", "critic")
    for rule in (
        ({f"{role}.mini_batch_size": 32}, {f"{role}.mini_batch_size": 48}, [f"{role}.mini_batch_size"]),
        (
            {"rollout.n": 8, f"{role}.draw_by": "prompt", f"{role}.mini_batch_size": 16},
            {f"{role}.mini_batch_size": 4},
            [f"{role}.mini_batch_size"],
        ),
        (
            {"rollout.n": 8, f"{role}.draw_by": "row", f"{role}.mini_batch_size": 4},
            {f"{role}.draw_by": "prompt"},
            [f"{role}.mini_batch_size"],
        ),
        (
            {f"{role}.micro_batch_size": 8, f"{role}.token_budget": 0},
            {f"{role}.token_budget": 100},
            [f"{role}.micro_batch_size"],
        ),
        (
            {f"{role}.micro_batch_size": 0, f"{role}.token_budget": 100},
            {f"{role}.token_budget": 0},
            [f"{role}.token_budget"],
        ),
        (
            {f"{role}.mini_batch_size": 8, f"{role}.micro_batch_size": 8},
            {f"{role}.micro_batch_size": 9},
            [f"{role}.micro_batch_size"],
        ),
        (
            {f"{role}.weight_mode": "seq-mean-token-sum-norm", f"{role}.horizon": 9},
            {f"{role}.horizon": None},
            [f"{role}.horizon"],
        ),
        (
            {f"{role}.weight_mode": "seq-mean-token-sum-norm", f"{role}.horizon": 9},
            {f"{role}.weight_mode": "token-mean"},
            [f"{role}.horizon"],
        ),
        (
            {"steps": 5, f"{role}.epochs": 2, f"{role}.mini_batch_size": 32, f"{role}.optimizer.warmup_steps": 19},
            {f"{role}.optimizer.warmup_steps": 20},
            [f"{role}.optimizer.warmup_steps"],
        ),
        (
            {f"{role}.optimizer.schedule": "wsd", f"{role}.optimizer.min_lr_ratio": 0.1},
            {f"{role}.optimizer.schedule": "constant"},
            [f"{role}.optimizer.min_lr_ratio"],
        ),
        (
            {f"{role}.optimizer.schedule": "exponential", f"{role}.optimizer.min_lr_ratio": 0.1},
            {f"{role}.optimizer.min_lr_ratio": 0.0},
            [f"{role}.optimizer.min_lr_ratio"],
        ),
    )
] + [
    # the actor's updates come after the critic's own steps
    (
        {"steps": 5, "critic.warmup_steps": 2, "actor.epochs": 2, "actor.optimizer.warmup_steps": 5},
        {"actor.optimizer.warmup_steps": 6},
        ["actor.optimizer.warmup_steps"],
    ),
    (
        {"steps": 5, "critic.pretrain": 3, "actor.optimizer.warmup_steps": 1},
        {"actor.optimizer.warmup_steps": 2},
        ["actor.optimizer.warmup_steps"],
    ),
    (
        {"steps": 5, "critic.pretrain": 3, "critic.optimizer.warmup_steps": 4},
        {"critic.optimizer.warmup_steps": 5},
        ["critic.optimizer.warmup_steps"],
    ),
]

OF_ROLLOUTS: list[Rule] = [
    ({"rollout.batch_size": 12, "rollout.n": 4}, {"rollout.batch_size": 10}, ["rollout.batch_size"]),
    (GROUPS, {"rollout.n": 1}, ["rollout.n"]),
    (VLLM | {"rollout.vllm.max_rows": 9}, {"rollout.engine": "embedded"}, ["rollout.vllm.max_rows"]),
    ({"rollout.cache_gb": 1.0}, VLLM, ["rollout.cache_gb"]),
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
        HELD | {"eval.temperature": 0.5, "eval.top_k": 3, "eval.top_p": 0.5},
        {"eval.temperature": 0.0},
        ["eval.top_k", "eval.top_p"],
    ),
    (HELD | {"eval.n": 4, "eval.temperature": 0.5}, {"eval.temperature": 0.0}, ["eval.temperature"]),
    *(
        (EXACT, changes, ["eval.exact_values"])
        for changes in (
            {"rollout.top_k": 5},
            {"rollout.top_p": 0.5},
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
            "micro_batch_size": 2,
            "token_budget": 9,
            "offload": True,
        }.items()
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

TWO = {"a": {"ranks": 2}, "c": {"ranks": 1}}
POOLED = {"placement.pools": TWO, "placement.roles.actor": "a", "placement.roles.critic": "c"}
ENGINES = POOLED | {"placement.pools": TWO | {"e": {"ranks": 2}}, "placement.roles.rollout": "e"}
ALONE = {"placement.roles.critic": "here"}


def pooled(**pools: dict[str, Any]) -> dict[str, Any]:
    """Pools in place of the two, or beside them."""
    return {"placement.pools": TWO | pools}


ON_GPUS = pooled(a={"ranks": 2, "gpus": 1}, c={"ranks": 1, "gpus": 1})
OF_PLACES: list[Rule] = [
    (POOLED, {"placement.roles.critic": "d"}, ["placement.roles.critic", "placement.pools.c"]),
    (POOLED, {"placement.roles.actor": "here"}, ["placement.pools.a"]),
    (POOLED, pooled(d={"ranks": 1}), ["placement.pools.d"]),
    (POOLED, pooled(here={"ranks": 1}), ["placement.pools.here"] * 2),
    (POOLED, pooled(c={"ranks": 0}), ["placement.pools.c.ranks"]),
    (POOLED, pooled(c={"threads": 1}), ["placement.pools.c.ranks"]),
    (POOLED, GROUPS, ["placement.roles.critic"]),
    (POOLED | KL | {"placement.roles.reference": "c"}, {"actor.kl_coef": 0.0}, ["placement.roles.reference"]),
    (POOLED | KL, {"placement.roles.reference": "here"}, ["placement.roles.reference"]),
    (
        POOLED | ALONE | TAUGHT | {"placement.roles.teacher": "c"},
        NO_CRITIC | {"model.teacher_path": None, "model.teacher_dtype": "float32", "model.teacher_offload": None},
        ["placement.roles.teacher"],
    ),
    (
        POOLED | ALONE | SCORER | {"placement.roles.reward": "c"},
        {"reward.model.path": None},
        ["placement.roles.reward"],
    ),
    (POOLED | {"placement.cluster": "host:1"}, {"placement.cluster": "host"}, ["placement.cluster"]),
    *(
        (
            POOLED | {f"placement.{name}": value},
            {"placement.pools": {}, **ALONE, "placement.roles.actor": "here"},
            [f"placement.{name}"],
        )
        for name, value in {"cluster": "local", "patience": 7.0, "restarts": 7}.items()
    ),
    (POOLED, {"mesh.shard": 2}, ["mesh"]),
    (POOLED, APART, ["rollout.engine"]),
    (
        ENGINES | {"placement.engines.rows": 8},
        {"placement.roles.rollout": None, "placement.pools": TWO},
        ["placement.engines.rows"],
    ),
    (ENGINES, {"placement.roles.rollout": "c"}, ["placement.roles.rollout", "placement.pools.e"]),
    (ENGINES, {"placement.roles.rollout": "here", "placement.pools": TWO}, ["placement.roles.rollout"]),
    *(
        (ENGINES, pooled(e={"ranks": 2, axis: 2}), [f"placement.pools.e.{axis}"])
        for axis in ("shard", "replicate", "tensor")
    ),
    (ENGINES, pooled(e={"ranks": 2, "ring": True}), ["placement.pools.e.ring"]),
    (ENGINES, pooled(e={"ranks": 2, "virtual_stages": 2}), ["placement.pools.e.virtual_stages"]),
    (ENGINES | HELD | SAVED, {"data.eval_path": []}, ["placement.roles.rollout"]),
    (ENGINES | VLLM, {"rollout.vllm.sleep": True}, ["rollout.vllm.sleep"]),
    (ENGINES | APART, {"rollout.vllm.devices": [1]}, ["rollout.vllm.devices"]),
    (ENGINES | APART, {"rollout.vllm.host": "ray"}, ["rollout.vllm.host"]),
    (
        ENGINES | APART | pooled(e={"ranks": 2, "gpus": 2}) | {"rollout.vllm.tensor_parallel": 2},
        pooled(e={"ranks": 2, "gpus": 1}),
        ["placement.pools.e.gpus"],
    ),
    (POOLED | ON_GPUS, pooled(a={"ranks": 2, "gpus": 1}), ["placement.pools.c.gpus"]),
    (POOLED | ON_GPUS, {"device": "cpu"}, ["placement.pools.a.gpus", "placement.pools.c.gpus"]),
    (POOLED | ON_GPUS | {"device": "cuda"}, pooled(), ["placement.pools.a.gpus", "placement.pools.c.gpus"]),
    (POOLED | ON_GPUS, pooled(a={"ranks": 2, "gpus": 2}, c={"ranks": 1, "gpus": 1}), ["placement.pools.a.gpus"]),
    (POOLED | ON_GPUS, pooled(a={"ranks": 2, "gpus": 0.5}, c={"ranks": 1, "gpus": 0.5}), ["placement.pools.a.gpus"]),
    (
        ENGINES | {"placement.pools": ON_GPUS["placement.pools"] | {"e": {"ranks": 2}}},
        {"placement.pools": ON_GPUS["placement.pools"] | {"e": {"ranks": 2, "tensor": 2}}},
        ["placement.pools.e.tensor"],
    ),
    (
        POOLED | pooled(a={"ranks": 4, "tensor": 2}),
        pooled(a={"ranks": 3, "tensor": 2}),
        ["placement.pools.a"],
    ),
    (
        POOLED | pooled(a={"ranks": 8}) | {"actor.mini_batch_size": 8},
        {"actor.mini_batch_size": 4},
        ["placement.pools.a"],
    ),
    (
        POOLED | pooled(c={"ranks": 8}) | {"critic.mini_batch_size": 8},
        {"critic.mini_batch_size": 4},
        ["placement.pools.c"],
    ),
    (
        POOLED | KL | pooled(r={"ranks": 8}) | {"placement.roles.reference": "r", "actor.mini_batch_size": 4},
        {"placement.roles.reference": None, "placement.pools": {"a": {"ranks": 8}, "c": {"ranks": 1}}},
        ["placement.pools.a"],
    ),
    (
        POOLED | pooled(a={"ranks": 2, "tensor": 2}),
        {"actor.optimizer": "muon"},
        ["placement.pools.a"],
    ),
    (
        POOLED | pooled(c={"ranks": 2, "tensor": 2}) | {"actor.optimizer": "muon"},
        {"critic.optimizer": "muon"},
        ["placement.pools.c"],
    ),
]

RULES = [
    *(OF_MODELS + OF_ALGORITHMS + OF_ADAPTERS + OF_CRITICS + OF_UPDATES + OF_ROLLOUTS + OF_DATA + OF_REWARDS),
    *OF_PLACES,
]


def make(changes: dict[str, Any]) -> TrainSettings:
    return files.replace(TrainSettings(), BASE | changes)


def numbered(rules: list[Any]) -> list[str]:
    return [f"{rule[-1][0]}-{number}" for number, rule in enumerate(rules)]


WRONG: dict[str, list[str]] = {}  # what is wrong with settings of which several rows are one step away


@pytest.mark.parametrize(("agreeing", "step", "named"), RULES, ids=numbered(RULES))
def test_settings_agree_until_one_step_further(agreeing, step, named):
    if (text := repr(agreeing)) not in WRONG:
        WRONG[text] = [*map(str, checks.problems(make(agreeing)))]
    assert WRONG[text] == []
    found = checks.problems(make(agreeing | step))
    assert sorted(problem.path for problem in found) == sorted(named), [*map(str, found)]


# world, settings that so many ranks run, a change, and what is named
MESHES: list[tuple[int, dict[str, Any], dict[str, Any], list[str]]] = [
    (2, {"mesh.sequence": 2}, {"model.remove_padding": False}, ["mesh.sequence"]),
    (2, {"mesh.pipeline": 2, "mesh.virtual_stages": 2}, {"mesh.pipeline": 1}, ["mesh.virtual_stages"]),
    (2, {"mesh.pipeline": 2}, {"model.compile_layers": True}, ["mesh.pipeline"]),
    (2, {"mesh.context": 2, "mesh.ring": True}, {"mesh.context": 1}, ["mesh.ring"]),
    (2, {"mesh.context": 2}, {"model.remove_padding": False}, ["mesh.context"]),
    (4, {"mesh.context": 2}, {"mesh.sequence": 2}, ["mesh.context"]),
    (2, {"mesh.expert": 2}, {"model.compile_layers": True}, ["mesh.expert"]),
    (2, {"mesh.expert": 2}, {"actor.optimizer": "muon"}, ["actor.optimizer.name"]),
    (2, {"mesh.tensor": 2}, {"critic.optimizer": "muon"}, ["critic.optimizer.name"]),
    (2, GROUPS | {"mesh.tensor": 2, "critic.optimizer": "muon"}, {"actor.optimizer": "muon"}, ["actor.optimizer.name"]),
    (2, {"mesh.shard": 2, "actor.optimizer": "muon"}, {"mesh.shard": 1, "mesh.tensor": 2}, ["actor.optimizer.name"]),
    (2, {"mesh.tensor": 2}, {"model.remove_padding": False}, ["mesh.tensor"]),
    *(
        (2, {"mesh.tensor": 2, "model.log_probs": "chunked"}, {"model.log_probs": x}, ["model.log_probs"])
        for x in ("compiled", "liger")
    ),
    (2, APART, {"rollout.vllm.host": "local"}, ["rollout.vllm.host"]),
    (8, {"actor.mini_batch_size": 8}, {"actor.mini_batch_size": 4}, ["actor.mini_batch_size"]),
    (8, {"critic.mini_batch_size": 8}, {"critic.mini_batch_size": 4}, ["critic.mini_batch_size"]),
    (8, GROUPS | {"critic.mini_batch_size": 4}, {"algorithm.advantage": "gae"}, ["critic.mini_batch_size"]),
    (8, {"rollout.batch_size": 8}, {"rollout.batch_size": 4}, ["actor.mini_batch_size", "critic.mini_batch_size"]),
    *(
        (8, {f"mesh.{axis}": 2, "actor.mini_batch_size": 4}, {f"mesh.{axis}": 1}, ["actor.mini_batch_size"])
        for axis in ("pipeline", "sequence", "context", "tensor")
    ),
    *(
        (8, {f"mesh.{axis}": 2, "actor.mini_batch_size": 8}, {"actor.mini_batch_size": 4}, ["actor.mini_batch_size"])
        for axis in ("replicate", "shard", "expert")
    ),
    (6, {"mesh.replicate": 3}, {"mesh.replicate": 4}, ["mesh"]),
    (6, {"mesh.replicate": 3, "mesh.shard": 2}, {"mesh.shard": 1}, ["mesh"]),
    (6, {"mesh.replicate": 3, "mesh.shard": 2}, {"mesh.shard": 4}, ["mesh"]),
]


@pytest.mark.parametrize(("world", "agreeing", "step", "named"), MESHES, ids=numbered(MESHES))
def test_a_mesh_of_ranks_agrees_until_one_step_further(world, agreeing, step, named):
    def found(changes):
        changes = {"mesh.shard": None, **changes}
        return [x.path for x in checks.mesh_problems(make(changes), world)]

    if "mesh.shard" in agreeing and agreeing["mesh.shard"] == 2 and world == 8:
        agreeing = agreeing | {"mesh.replicate": 4}
    assert found(agreeing) == []
    assert found(agreeing | step) == named


SFT = {"reward.functions": []}
OF_SFT: list[Rule] = [
    ({"sft.messages": "m", "data.chat": True, "sft.turns": "last"}, {"sft.messages": None}, ["sft.turns"]),
    ({"sft.response": "r"}, {"sft.messages": "m", "data.chat": True}, ["sft.response"]),
    ({"sft.messages": "m", "data.chat": True}, {"data.chat": False}, ["sft.messages"]),
    ({"data.chat": True}, {"data.images": "i"}, ["data.images"]),
    ({"data.chat": True}, {"data.videos": "i"}, ["data.videos"]),
    ({"data.path": [], "data.rows": "my:rows"}, {"data.rows": None}, ["data.path"]),
    ({"sft.micro_batch_size": 2, "sft.token_budget": 0}, {"sft.token_budget": 9}, ["sft.micro_batch_size"]),
    ({"sft.micro_batch_size": 2, "sft.token_budget": 0}, {"sft.micro_batch_size": 0}, ["sft.token_budget"]),
    ({"sft.weight_mode": "seq-mean-token-sum-norm", "sft.horizon": 9}, {"sft.horizon": None}, ["sft.horizon"]),
    (
        {"sft.weight_mode": "seq-mean-token-sum-norm", "sft.horizon": 9},
        {"sft.weight_mode": "token-sum"},
        ["sft.horizon"],
    ),
    (
        {"sft.optimizer.schedule": "exponential", "sft.optimizer.min_lr_ratio": 0.1},
        {"sft.optimizer.min_lr_ratio": 0.0},
        ["sft.optimizer.min_lr_ratio"],
    ),
    ({"steps": 5, "sft.optimizer.warmup_steps": 4}, {"steps": 4}, ["sft.optimizer.warmup_steps"]),
    (
        {"steps": 5, "sft.optimizer.warmup_steps": 9, "sft.epochs": 1},
        {"sft.epochs": None},
        ["sft.optimizer.warmup_steps"],
    ),
    ({}, {"placement.pools": {"a": {"ranks": 1}}, "placement.roles.actor": "a"}, ["placement"]),
]


@pytest.mark.parametrize(("agreeing", "step", "named"), OF_SFT, ids=numbered(OF_SFT))
def test_settings_of_a_supervised_run_agree_until_one_step_further(agreeing, step, named):
    assert [x.path for x in sft_problems(make(SFT | agreeing))] == []
    assert [x.path for x in sft_problems(make(SFT | agreeing | step))] == named
