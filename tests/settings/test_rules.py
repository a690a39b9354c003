"""Rules between settings of models, algorithms and updates from both sides: one step further, and there is a problem.

Each row gives settings without a problem, a change of them, and the settings that are named then: these and no others.
"""

from __future__ import annotations

import pytest

from tests.settings.rules import (
    ENV,
    GROUPS,
    HELD,
    KL,
    LORA,
    NO_CRITIC,
    OWN_PROMPTS,
    SAVED,
    TAUGHT,
    UNSCORED,
    VLLM,
    Rule,
    check_rule,
    numbered,
)

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
        {"model.offload": "moments", "model.moments_directory": "m"},
        {"model.offload": "none"},
        ["model.moments_directory"],
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
        ({"algorithm.old_log_probs": "update", "actor.mini_batch_size": 64}, changes, ["algorithm.old_log_probs"])
        for changes in (
            {"actor.epochs": 2},
            {"actor.mini_batch_size": 32},
            {"algorithm.kl.coef": 0.1},
            {"algorithm.correction": "rollout"},
        )
    ),
    ({"algorithm.old_log_probs": "engine"}, {"algorithm.correction": "rollout"}, ["algorithm.old_log_probs"]),
    (
        {"actor.entropy_control.target": 0.5, "actor.entropy_control.rate": 0.5, "actor.entropy_control.unit": "start"},
        {"actor.entropy_control.target": None},
        ["actor.entropy_control.unit", "actor.entropy_control.rate"],
    ),
    (
        {"actor.entropy_control.target": 0.5, "actor.entropy_control.high": 0.2, "actor.entropy_coef": 0.15},
        {"actor.entropy_control.high": 0.1},
        ["actor.entropy_coef"],
    ),
    (
        {f"actor.entropy_control.{name}": x for name, x in {"target": 0.5, "low": -0.1, "high": 0.1}.items()},
        {"actor.entropy_control.low": 0.2},
        ["actor.entropy_control.low"],
    ),
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
    *(
        ({"algorithm.kl.coef": 0.1, "algorithm.kl.kind": "k1"}, {"algorithm.kl.kind": kind}, ["algorithm.kl.kind"])
        for kind in ("abs", "abs+", "k2", "k2+", "k3", "k3+")
    ),
    *(
        ({"algorithm.advantage": name, "rollout.n": 2}, {"algorithm.kl.coef": 0.1}, ["algorithm.kl.coef"])
        for name in ("gdpo", "grpo_process")
    ),
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
            "model.lora.exclude": ["o_proj"],
            "model.lora.base": "nf4",
            "model.lora.critic_rank": 2,
        },
        {"model.lora.rank": 0},
        [f"model.lora.{name}" for name in ("alpha", "scaling", "targets", "exclude", "base", "critic_rank")],
    ),
    *(
        ({"model.lora.path": "p"}, {f"model.lora.{name}": value}, [f"model.lora.{name}"])
        for name, value in {
            "rank": 4,
            "alpha": 8.0,
            "scaling": "rslora",
            "targets": ["q_proj"],
            "exclude": ["o_proj"],
        }.items()
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
    (LORA | {"model.lora.critic_path": "c"}, {"model.lora.rank": 0}, ["model.lora.critic_path"]),
    (LORA | {"model.lora.critic_path": "c"}, GROUPS, ["model.lora.critic_path"]),
    (LORA | {"model.lora.critic_path": "c"}, {"model.lora.critic_rank": 2}, ["model.lora.critic_rank"]),
    (LORA | {"model.lora.critic_rank": 2}, {"critic.reads": "hidden"}, ["model.lora.critic_rank"]),
    (LORA | VLLM | {"model.lora.send": "alone"}, {"rollout.engine": "embedded"}, ["model.lora.send"]),
    (LORA | VLLM | {"rollout.vllm.send": "changed"}, {"model.lora.send": "alone"}, ["rollout.vllm.send"]),
    (LORA, {"model.compile_layers": True}, ["model.compile_layers"]),
    ({"model.mlp_slice_tokens": 64}, {"model.compile_layers": True}, ["model.mlp_slice_tokens"]),
    (LORA | {"model.offload": "moments"}, {"model.offload": "all"}, ["model.offload"]),
    (LORA | {"model.offload": "moments"}, {"model.offload": "optimizer_step"}, ["model.offload"]),
    (LORA | {"critic.offload": "moments"}, {"critic.offload": "all"}, ["critic.offload"]),
    ({"model.offload": "optimizer_step"}, {"actor.optimizer.name": "muon"}, ["actor.optimizer.name"]),
    ({"model.offload": "optimizer_step"}, {"critic.optimizer.name": "muon"}, ["critic.optimizer.name"]),
    (
        {"model.offload": "optimizer_step"} | {"critic.offload": "all", "critic.optimizer.name": "muon"},
        {"critic.offload": None},
        ["critic.optimizer.name"],
    ),
    ({"model.offload": "optimizer_step"}, {"actor.experts.bias_rate": 0.1}, ["actor.experts.bias_rate"]),
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
            {f"{role}.optimizer.warmup_steps": 2, f"{role}.optimizer.warmup_ratio": 0.0},
            {f"{role}.optimizer.warmup_ratio": 0.1},
            [f"{role}.optimizer.warmup_ratio"],
        ),
        (
            {f"{role}.optimizer.schedule": "cosine", f"{role}.optimizer.num_cycles": 2},
            {f"{role}.optimizer.schedule": "linear"},
            [f"{role}.optimizer.num_cycles"],
        ),
        (
            {
                "steps": 5,
                f"{role}.epochs": 2,
                f"{role}.mini_batch_size": 32,
                f"{role}.optimizer.schedule": "cosine",
                f"{role}.optimizer.warmup_ratio": 0.25,
                f"{role}.optimizer.num_cycles": 15,
            },
            {f"{role}.optimizer.num_cycles": 16},
            [f"{role}.optimizer.num_cycles"],
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
        {"steps": 5, "critic.warmup_steps": 2, "actor.epochs": 2, "actor.optimizer.warmup_steps": 23},
        {"actor.optimizer.warmup_steps": 24},
        ["actor.optimizer.warmup_steps"],
    ),
    (
        {"steps": 5, "critic.pretrain": 3, "actor.optimizer.warmup_steps": 7},
        {"actor.optimizer.warmup_steps": 8},
        ["actor.optimizer.warmup_steps"],
    ),
    (
        {"steps": 5, "critic.pretrain": 3, "critic.optimizer.warmup_steps": 19},
        {"critic.optimizer.warmup_steps": 20},
        ["critic.optimizer.warmup_steps"],
    ),
]

RULES = OF_MODELS + OF_ALGORITHMS + OF_ADAPTERS + OF_CRITICS + OF_UPDATES


@pytest.mark.slow
@pytest.mark.parametrize(("agreeing", "step", "named"), RULES, ids=numbered(RULES))
def test_settings_agree_until_one_step_further(agreeing, step, named):
    check_rule(agreeing, step, named)
