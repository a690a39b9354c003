"""Every setting reaches what it names, and nothing else: all that a built run holds is compared with that of another.

Each row gives settings, no two of the same value where one could stand in for another, and all that differs by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from fppo import models
from fppo.assembly.run import assemble
from fppo.key import Key
from fppo.quickstart import small_model
from fppo.rollout.turns.games import Game
from tests import tiny_run
from tests.assembly.walk import differing, walked

WITHOUT_KL = {
    "program.estimate.kl_in_reward": False,
    "program.estimate.update_kl.kind": "fixed",
    "program.estimate.update_kl.horizon": 10000,
    "kl.coef": 0.0,
}
WITHOUT_CRITIC = {
    "program.annotate.passes.values": None,
    "program.update_critic": None,
    "program.estimate.whiten": False,
}
PASSES = [f"program.annotate.passes.{name}" for name in ("policy", "reference", "values")]
UPDATES = ["program.update_actor", "program.update_critic"]
ANSWERS = ["program.rollout", "evaluate"]


def at(places: list[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values at each of the places."""
    return {f"{place}.{name}": value for place in places for name, value in values.items()}


def temperature(value: float) -> dict[str, Any]:
    """Where the temperature of responses is."""
    passes = at(PASSES[:2], {"temperature": value})
    return passes | {"program.rollout.sampling.temperature": value, "program.update_actor.terms.temperature": value}


def adapter(rank: int) -> str:
    return f"Lora(rank={rank}, alpha=6.0, targets=('q_proj', 'k_proj'), scaling='rslora', exclude=('k_proj',))"


ON_HOST = {
    f"optimizer.{name}": value
    for place in ("", "update.")
    for name, value in {
        f"{place}kernel()": "offloaded_adamw.<locals>.adamw",
        f"{place}kernel.bucket_bytes": 2**27,
        f"{place}kernel.kernel()": "adamw_",
    }.items()
}
GAME = Game(node=lambda state: pytest.fail("nobody plays"), draws=3)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rollout": (
        {
            "rollout__temperature": 0.75,
            "rollout__top_k": 3,
            "rollout__top_p": 0.875,
            "rollout__min_p": 0.125,
            "rollout__max_tokens": 5,
            "rollout__n": 2,
            "rollout__stop": ["5"],
            "rollout__filter__groups": True,
            "rollout__filter__by": "exact_match",
            "rollout__filter__max_draws": 6,
            "rollout__filter__truncated": True,
            "rollout__cache_gb": 0.25,
            "rollout__gap": "stop",
        },
        temperature(0.75)
        | at(ANSWERS, {"sampling.top_k": 3, "sampling.top_p": 0.875, "sampling.max_tokens": 5, "cache_bytes": 2**28})
        | at(ANSWERS, {"sampling.min_p": 0.125})
        | at(ANSWERS, {"sampling.stop_token_ids.1": 8, "sampling.stop_texts.texts.0": b"5"})
        | {
            "program.rollout.sampling.n": 2,
            "program.annotate.then": "stop",
            "program.estimate.max_tokens": 5,
            "program.estimate.drop.0()": "equal_groups",
            "program.estimate.drop.0.by": "exact_match",
            "program.estimate.drop.1()": "truncated",
            "program.sample.pad_token_id": 0,
            "program.sample.max_draws": 6,
            "program.sample.by": "exact_match",
            "draw.size": 4,
        },
    ),
    "algorithm": (
        {
            "algorithm__kl__coef": 0.03,
            "algorithm__kl__kind": "k1+",
            "algorithm__kl__target": 0.3,
            "algorithm__kl__horizon": 70,
            "algorithm__whiten": False,
            "algorithm__advantage__gamma": 0.9375,
            "algorithm__advantage__lam": 0.5,
            "algorithm__correction": "rollout",
        },
        {
            "kl.coef": 0.03,
            "program.estimate.kl_kind": "k1+",
            "program.estimate.update_kl.target": 0.3,
            "program.estimate.update_kl.horizon": 70,
            "program.estimate.whiten": False,
            "program.estimate.advantage_fn.fn.gamma": 0.9375,
            "program.estimate.advantage_fn.fn.lam": 0.5,
            "program.estimate.correct()": "rollout_correction",
        },
    ),
    "actor": (
        {
            "actor__loss__clip_low": 0.125,
            "actor__entropy_coef": 0.01,
            "actor__top_entropy_share": 0.75,
            "actor__kl_coef": 0.2,
            "actor__kl_kind": "k2",
            "actor__positive_nll_coef": 0.3,
            "actor__experts__bias_rate": 0.0625,
            "actor__experts__z_coef": 0.4,
            "actor__epochs": 3,
            "actor__mini_batch_size": 8,
            "actor__draw_by": "prompt",
            "actor__micro_batch_size": 5,
            "actor__weight_mode": "seq-mean-token-sum-norm",
            "actor__horizon": 9,
            "actor__optimizer__lr": 0.5,
            "actor__optimizer__schedule": "cosine",
            "actor__optimizer__warmup_steps": 4,
            "actor__optimizer__min_lr_ratio": 0.25,
            "actor__optimizer__weight_decay": 0.375,
            "model__forward_token_budget": 77,
            "rollout__n": 2,
            "steps": 7,
        },
        at(PASSES, {"micro_batching.token_budget": 77})
        | at(
            ["program.update_actor"],
            {
                "loss_fn.clip_low": 0.125,
                "terms.entropy_coef": 0.01,
                "terms.top_entropy_share": 0.75,
                "terms.kl_coef": 0.2,
                "terms.kl_kind": "k2",
                "terms.nll_coef": 0.3,
                "terms.router_z_coef": 0.4,
                "loop.balance_rate": 0.0625,
                "loop.epochs": 3,
                "loop.mini_batch_size": 8,
                "loop.by_prompt": True,
                "loop.micro_batching.size": 5,
                "loop.micro_batching.token_budget": None,
                "loop.weight_mode": "seq-mean-token-sum-norm",
                "loop.horizon": 9,
                "loop.timeline.warmup": 4,
                "loop.timeline.total": 7 * 3,
                "optimizer.update.schedule.peak": 0.5,
                "optimizer.update.schedule.kind": "cosine",
                "optimizer.update.schedule.warmup_steps": 4,
                "optimizer.update.schedule.min_ratio": 0.25,
                "optimizer.update.schedule.total": 7 * 3,
                "optimizer.update.weight_decay": 0.375,
                "epochs": 3,
            },
        )
        | {
            "program.update_critic.optimizer.update.schedule.total": 7 * 2,
            "program.rollout.sampling.n": 2,
            "program.steps": 7,
            "draw.size": 4,
        },
    ),
    "critic": (
        {
            "critic__loss__clip": 0.125,
            "critic__epochs": 3,
            "critic__mini_batch_size": 2,
            "critic__token_budget": 55,
            "critic__weight_mode": "seq-mean-token-sum-norm",
            "critic__horizon": 9,
            "critic__popart": 0.3,
            "critic__pretrain": 2,
            "critic__pretrain_patience": 5,
            "critic__pretrain_rise": 0.125,
            "critic__freeze": True,
            "critic__optimizer__lr": 0.5,
            "critic__optimizer__schedule": "linear",
            "critic__optimizer__warmup_steps": 4,
            "critic__optimizer__min_lr_ratio": 0.25,
            "critic__privileged": 2,
            "algorithm__advantage__gamma": 0.9375,
            "steps": 5,
        },
        at(
            ["program.update_critic"],
            {
                "loss_fn.clip": 0.125,
                "loop.epochs": 3,
                "loop.mini_batch_size": 2,
                "loop.micro_batching.token_budget": 55,
                "loop.weight_mode": "seq-mean-token-sum-norm",
                "loop.horizon": 9,
                "loop.timeline.warmup": 4,
                "loop.timeline.total": 5 * 4 * 3,  # it learns in every step
                "optimizer.update.schedule.peak": 0.5,
                "optimizer.update.schedule.kind": "linear",
                "optimizer.update.schedule.warmup_steps": 4,
                "optimizer.update.schedule.min_ratio": 0.25,
                "optimizer.update.schedule.total": 5 * 4 * 3,
                "epochs": 3,
                "rate": 0.3,
            },
        )
        | at(
            ["program.annotate.passes.values", "program.update_critic"],
            {"view()": "with_truth", "view.encode()": "view_of.<locals>.encode", "view.encode.vocabulary": 15}
            | {"view.limit": 2},
        )
        | {
            "program.update_actor.loop.timeline.total": 3 * 2 * 2,  # the actor in those after the critic's own
            "program.update_actor.optimizer.update.schedule.total": 3 * 2 * 2,
            "program.estimate.advantage_fn.fn.gamma": 0.9375,
            "program.pretrain.limit": 2,
            "program.pretrain.patience": 5,
            "program.pretrain.rise": 0.125,
            "program.pretrain.returns_of()": "plain_returns",
            "program.pretrain.returns_of.gamma": 0.9375,
            "program.pretrain.returns_of.turns": False,
            "program.freeze_critic": True,
            "program.steps": 5,
        },
    ),
    "paths": (
        {"model__critic_path": "teacher", "model__ref_path": "teacher"},
        at([*PASSES[1:], UPDATES[1]], {"forward.model.layers": 2, "forward.model.width": 32}),
    ),
    "dtypes": (
        {
            "model__compute_dtype": "bfloat16",
            "model__checkpoint_layers": True,
            "model__mlp_slice_tokens": 64,
            "critic__compute_dtype": "float32",
            "critic__checkpoint_layers": False,
            "critic__loss": "two_hot",
            "critic__loss__low": -2.0,
            "critic__loss__high": 3.0,
        },
        at(
            [*PASSES[:2], UPDATES[0], "program.annotate.passes.balance"],
            {"forward.model.compute_dtype": torch.bfloat16, "forward.model.checkpoint_layers": True},
        )
        | at(ANSWERS, {"model.compute_dtype": torch.bfloat16, "model.checkpoint_layers": True})
        | at([*PASSES, *UPDATES, "program.annotate.passes.balance"], {"forward.model.mlp_slice_tokens": 64})
        | at(ANSWERS, {"model.mlp_slice_tokens": 64})
        | at(
            [PASSES[2], UPDATES[1]],
            {"forward.read()": "placed_values", "forward.read.low": -2.0, "forward.read.high": 3.0},
        )
        | at([UPDATES[1]], {"loss_fn()": "two_hot", "loss_fn.low": -2.0, "loss_fn.high": 3.0})
        | {"program.annotate.limit": 0.05},
    ),
    "the host": (
        {
            "model__offload": "all",
            "model__ref_offload": False,
            "critic__offload": "moments",
            "model__offload_activations": True,
        },
        {"program.annotate.passes.policy.fetch.offload": "all"}
        | {"program.annotate.passes.values.fetch.offload": "moments"}
        | at(UPDATES, {**ON_HOST, "minimum_bytes": 2**20, "window_bytes": 2**28}),
    ),
    "the host for others": (
        {"model__offload": "moments", "model__ref_offload": True, "critic__offload": "all"},
        {"program.annotate.passes.policy.fetch.offload": "moments"}
        | at(PASSES[1:], {"fetch.offload": "all"})
        | at(UPDATES, ON_HOST),
    ),
    "adapters": (
        {
            "model__lora__rank": 2,
            "model__lora__alpha": 6.0,
            "model__lora__scaling": "rslora",
            "model__lora__targets": ["q_proj", "k_proj"],
            "model__lora__exclude": ["k_proj"],
            "model__lora__critic_rank": 3,
        },
        at([*PASSES[:2], UPDATES[0], "program.annotate.passes.balance"], {"forward.model.adapter": adapter(2)})
        | at([PASSES[2], UPDATES[1]], {"forward.model.adapter": adapter(3)})
        | at(ANSWERS, {"model.adapter": adapter(2)}),
    ),
    "one update": (
        {"actor__epochs": 1, "actor__mini_batch_size": 8, **tiny_run.NO_KL},
        WITHOUT_KL
        | {
            "program.annotate.old_log_probs": "update",
            "program.update_actor.old_log_probs": "update",
            "program.update_actor.limit": 1e-4,
            "program.update_actor.then": "warn",
            "program.update_actor.epochs": 1,
            "program.update_actor.loop.epochs": 1,
            "program.update_actor.loop.mini_batch_size": 8,
            "program.update_actor.loop.timeline.total": 4,
            "program.update_actor.optimizer.update.schedule.total": 4,
        },
    ),
    "a reward model": (
        {
            "reward__model__path": "scorer",
            "reward__model__weight": 0.5,
            "reward__model__micro_batch_size": 3,
            "model__share_prompts": False,
        },
        at(
            ["program", "evaluate"],
            {
                "reward.terms.1.name": "reward_model",
                "reward.terms.1.weight": 0.5,
                "reward.terms.1.fn.micro_batching.size": 3,
                "reward.terms.1.fn.micro_batching.token_budget": None,
                "reward.terms.1.fn.forward.model.head": "value",
                "reward.terms.1.fn.forward.share_prompts": False,
            },
        )
        | at([*PASSES, *UPDATES, "program.annotate.passes.balance"], {"forward.share_prompts": False}),
    ),
    "a judge": (
        {
            "reward__judge__path": "start",
            "reward__judge__weight": 0.25,
            "reward__judge__chat": False,
            "reward__judge__template": "{prompt}?{response}=",
            "reward__judge__max_tokens": 7,
            "reward__judge__max_prompt_tokens": 11,
            "reward__judge__temperature": 0.5,
            "reward__judge__max_rows": 3,
            "seed": 3,
        },
        at(
            ["program", "evaluate"],
            {
                "reward.terms.1.name": "judge",
                "reward.terms.1.weight": 0.25,
                "reward.terms.1.fn.template": "{prompt}?{response}=",
                "reward.terms.1.fn.chat": False,
                "reward.terms.1.fn.sampling.max_tokens": 7,
                "reward.terms.1.fn.sampling.temperature": 0.5,
                "reward.terms.1.fn.sampling.greedy": False,
                "reward.terms.1.fn.sampling.stop_token_ids.0": 1,
                "reward.terms.1.fn.max_prompt_tokens": 11,
                "reward.terms.1.fn.max_rows": 3,
                "reward.terms.1.fn.vocabulary": 15,
                "reward.terms.1.fn.key": Key(3).fold("judge").seed,
            },
        )
        | {"key": Key(3).seed, "draw.key": Key(3).fold("data").seed},
    ),
    "a game": (
        {"rollout__turns__respond": "tests.assembly.test_arrival:GAME", "rollout__turns__turn_tokens": 1},
        at(ANSWERS, {"draws": 3, "turn_tokens": 1, "encode.vocabulary": 15, "prompt.2": 15})
        | {"program.rollout.measure.0()": "turn_metrics"},
    ),
    "evaluation": (
        {
            "eval__n": 2,
            "eval__temperature": 0.5,
            "eval__top_k": 4,
            "eval__top_p": 0.4,
            "eval__min_p": 0.2,
            "eval__max_tokens": 9,
            "eval__stop": ["9"],
            "eval__max_prompts": 7,
        },
        {
            "evaluate.batches.0": 7,
            "evaluate.batches.1": 4,
            "evaluate.sampling.n": 2,
            "evaluate.sampling.temperature": 0.5,
            "evaluate.sampling.greedy": False,
            "evaluate.sampling.top_k": 4,
            "evaluate.sampling.top_p": 0.4,
            "evaluate.sampling.min_p": 0.2,
            "evaluate.sampling.max_tokens": 9,
            "evaluate.sampling.stop_token_ids.1": 12,
            "evaluate.sampling.stop_texts.texts.0": b"9",
        },
    ),
    "rewards": (
        {
            "reward__time_limit": 7.0,
            "reward__batch_time_limit": 9.0,
            "reward__workers": 3,
            "reward__failure_score": -3.0,
            "reward__weights": [0.5],
            "reward__overlong_buffer": 2,
            "reward__overlong_penalty": 0.75,
            "rollout__max_tokens": 5,
        },
        at(
            ["program", "evaluate"],
            {
                "reward.time_limit": 7.0,
                "reward.batch_limit": 9.0,
                "reward.workers": 3,
                "reward.terms.0.weight": 0.5,
                "reward.terms.1.name": "length_penalty",
                "reward.terms.1.weight": 0.75,
                "reward.terms.1.fn.buffer": 2,
                "reward.terms.1.fn.max_tokens": 5,
                "reward.terms.1.fn.factor": 1.0,
                "failure_score": -3.0,
            },
        )
        | at(ANSWERS, {"sampling.max_tokens": 5})
        | {"program.estimate.max_tokens": 5},
    ),
    "model": (
        {"model__remove_padding": False, "model__share_prompts": False, "seed": 3, "data__shuffle": False},
        at([*PASSES, *UPDATES, "program.annotate.passes.balance"], {"forward.remove_padding": False})
        | at([*PASSES, *UPDATES, "program.annotate.passes.balance"], {"forward.share_prompts": False})
        | {"draw.shuffle": False, "key": Key(3).seed, "draw.key": Key(3).fold("data").seed},
    ),
    "interrupts": (
        {"rollout__interrupt": 2, "rollout__ahead": 1},
        at(ANSWERS, {"every": 2}) | {"program.interrupts": True},
    ),
    "a critic of hidden states": (
        {
            "critic__reads": "hidden",
            "critic__ensemble": 2,
            "critic__leave_agreed": 0.375,
            "critic__leave_disputed": 0.25,
            "critic__privileged": 3,
            "actor__entropy_coef": 0.01,
        },
        {
            "program.annotate.passes.values": None,
            "program.annotate.passes.hidden()": "hidden_values",
            "program.annotate.passes.hidden.read()": "first_output",
            "program.annotate.passes.truth_signs()": "truth_signs",
            "program.annotate.passes.truth_signs.encode.add_special_tokens": False,
            "program.annotate.passes.truth_signs.limit": 3,
            "program.estimate.share": 0.375,  # the innermost: of tokens in which members agree
            "program.estimate.share'": 0.25,
            "program.update_actor.terms.entropy_coef": 0.01,
        },
    ),
    "gmpo": (
        {"actor__loss__name": "gmpo", "algorithm__correction": "rollout"},
        {
            "program.estimate.correct.correct()": "rollout_correction",
            "program.estimate.correct()": "_by_row.<locals>.by_row",
            "program.update_actor.loss_fn()": "gmpo",
        },
    ),
    "greedy baselines": (
        {"algorithm__advantage": "remax", "rollout__n": 2, "rollout__temperature": 0.75, **tiny_run.NO_KL},
        temperature(0.75)
        | WITHOUT_KL
        | WITHOUT_CRITIC
        | {"program.rollout.sampling.n": 2, "program.estimate.advantage_fn.fn()": "remax", "draw.size": 4}
        | {
            "program.sampling.temperature": 0.75,
            "program.sampling.greedy": True,
            "program.sampling.n": 1,
            "program.sampling.max_tokens": 3,
        },
    ),
    "the optimal baseline": (
        {
            "algorithm__advantage": "optimal_token_baseline",
            "algorithm__old_log_probs": "engine",
            "rollout__n": 4,
            **tiny_run.NO_KL,
        },
        WITHOUT_KL
        | WITHOUT_CRITIC
        | {
            "program.annotate.old_log_probs": "engine",
            "program.annotate.sum_squared": True,
            "program.estimate.advantage_fn.fn()": "optimal_token_baseline",
            "program.rollout.sampling.n": 4,
            "draw.size": 2,
        },
    ),
    "tools": (
        {
            "rollout__turns__respond": "tests.rollout.functions:adder",
            "rollout__turns__max_turns": 5,
            "rollout__turns__turn_tokens": 2,
            "rollout__turns__failure": "no",
            "rollout__turns__time_limit": 7.0,
            "rollout__turns__workers": 2,
            "rollout__turns__concurrency": 9,
            "rollout__turns__retries": 3,
        },
        at(
            ANSWERS,
            {
                "tools.function.name": "adder",
                "tools.function.inline": False,
                "tools.result.failure": "no",
                "tools.time_limit": 7.0,
                "tools.workers": 2,
                "tools.concurrency": 9,
                "tools.retries": 3,
                "max_turns": 5,
                "turn_tokens": 2,
                "encode.vocabulary": 15,
                "prompt.2": 15,
            },
        )
        | {"program.rollout.measure.0()": "turn_metrics"},
    ),
    "an environment": (
        {
            "rollout__environment": "tests.rollout.environments:Count",
            "rollout__environment__failure": "raise",
            "rollout__turns__max_turns": 5,
            "rollout__turns__time_limit": 7.0,
            "rollout__turns__workers": 2,
            "rollout__turns__concurrency": 9,
            "rollout__turns__retries": 3,
            "data__max_prompt_tokens": 99,
            "reward__functions": [],
        },
        at(
            ANSWERS,
            {
                "tools.function.name": "tests.rollout.environments:Count",
                "tools.time_limit": 7.0,
                "tools.workers": 2,
                "tools.concurrency": 9,
                "tools.retries": 3,
                "max_turns": 5,
                "failure": "raise",
                "encode.vocabulary": 15,
                "prompt.2": 15,
                "prompt_tokens": 99,
            },
        )
        | at(["program", "evaluate"], {"reward.terms.0.name": "environment"})
        | at(["program", "evaluate"], {"reward.terms.0.fn()": "environment_reward"})
        | {"program.rollout.measure.0()": "turn_metrics"},
    ),
    "an agent": (
        {
            "rollout__environment": "agent",
            "rollout__environment__play": "tests.serve.players:counting",
            "rollout__environment__concurrency": 7,
            "rollout__environment__time_limit": 9.0,
            "rollout__environment__rows": "all",
            "rollout__turns__workers": 3,
            "rollout__turns__turn_tokens": 2,
            "data__max_prompt_tokens": 11,
            "reward__functions": [],
        },
        at(
            ANSWERS,
            {
                "agent.calls.name": "counting",
                "agent.time_limit": 9.0,
                "agent.workers": 3,
                "agent.concurrency": 7,
                "bounds.row_tokens": 11 + 3,
                "bounds.answer_tokens": 2,
                "all": True,
                "anew": False,
                "texts.vocabulary": 15,
            },
        )
        | at(["program", "evaluate"], {"reward.terms.0.name": "environment"})
        | at(["program", "evaluate"], {"reward.terms.0.fn()": "environment_reward"})
        | {"program.rollout.measure.0()": "turn_metrics"},
    ),
    "a teacher": (
        {
            "model__teacher_path": "teacher",
            "model__teacher_offload": True,
            "algorithm__advantage": "distill",
            "actor__epochs": 1,
            "actor__token_budget": 44,
            "rollout__temperature": 0.75,
            **tiny_run.NO_KL,
        },
        temperature(0.75)
        | WITHOUT_KL
        | WITHOUT_CRITIC
        | at(PASSES[:2], {"micro_batching.token_budget": 44})
        | at(["program", "evaluate"], {"teacher.policy.micro_batching.token_budget": 44, "alone": False})
        | at(["program", "evaluate"], {"teacher.policy.fetch.offload": "all"})
        | {
            "program.temperature": 0.75,
            "evaluate.temperature": 1.0,
            "program.estimate.advantage_fn.fn()": "reverse_kl",
            "program.update_actor.loop.epochs": 1,
            "program.update_actor.loop.micro_batching.token_budget": 44,
            "program.update_actor.loop.timeline.total": 8,
            "program.update_actor.optimizer.update.schedule.total": 8,
            "program.update_actor.epochs": 1,
        },
    ),
    "a curriculum": (
        {"data__curriculum": "learnability", "data__curriculum__decay": 0.75},
        at(["program.sample.learn", "draw"], {"curriculum.update.decay": 0.75, "curriculum.choose.prior": 1.0})
        | {"cursor.course.step": 0},
    ),
}
# with functions of fixed values, whose other values are those of their own defaults
OPEN = (
    "greedy baselines",
    "tools",
    "an environment",
    "an agent",
    "a game",
    "a teacher",
    "a curriculum",
    "a reward model",
    "a judge",
)
PATHS = ("model__teacher_path", "model__critic_path", "model__ref_path", "reward__model__path", "reward__judge__path")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    tiny_run.write_task(directory)
    teacher = small_model(15, width=32, layers=2)
    models.save(teacher, models.init_params(teacher, Key(1)), directory / "teacher")
    scorer = models.build(small_model(15, width=16, layers=1).config, "value")
    models.save(scorer, models.init_params(scorer, Key(2)), directory / "scorer")
    return directory


def held(task, **changes):
    """All plain values of a run of these settings."""
    changes |= {name: str(task / changes[name]) for name in PATHS if name in changes}
    with assemble(tiny_run.settings(task, **changes)) as made:
        run = {"kl": made.run.kl, "key": made.run.key, "cursor": made.run.cursor}
        return walked({"program": made.program, "draw": made.draw, "evaluate": made.evaluate, **run})


@pytest.fixture(scope="module")
def base(task):
    return held(task)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_settings_reach_what_they_name_and_nothing_else(task, base, name):
    changes, expected = CASES[name]
    found = differing(base, held(task, **changes))
    shown = {path: found[path] for path in found if name not in OPEN or path in expected or path in base}
    assert shown == expected
