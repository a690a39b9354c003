"""Rules between settings of places, meshes and supervised runs from both sides, as `test_rules` has those of others."""

from __future__ import annotations

from typing import Any

import pytest

from fppo.settings import checks
from fppo.settings.checks_sft import sft_problems
from tests.settings.rules import (
    APART,
    GROUPS,
    HELD,
    KL,
    NO_CRITIC,
    SAVED,
    SCORER,
    TAUGHT,
    VLLM,
    Rule,
    check_rule,
    make,
    numbered,
)

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


@pytest.mark.parametrize(("agreeing", "step", "named"), OF_PLACES, ids=numbered(OF_PLACES))
def test_places_agree_until_one_step_further(agreeing, step, named):
    check_rule(agreeing, step, named)


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
    (8, {"rollout.batch_size": 32}, {"rollout.batch_size": 16}, ["actor.mini_batch_size", "critic.mini_batch_size"]),
    *(
        (8, {f"mesh.{axis}": 2, "actor.mini_batch_size": 4}, {f"mesh.{axis}": 1}, ["actor.mini_batch_size"])
        for axis in ("pipeline", "sequence", "context", "tensor")
    ),
    *(
        (8, {"actor.mini_batch_size": 8, **axes}, {"actor.mini_batch_size": 4}, ["actor.mini_batch_size"])
        for axes in ({"mesh.replicate": 2}, {"mesh.replicate": 4, "mesh.shard": 2}, {"mesh.expert": 2})
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

    assert found(agreeing) == []
    assert found(agreeing | step) == named


SFT = {"reward.functions": []}
OF_SFT: list[Rule] = [
    ({"sft.messages": "m", "data.chat": True, "sft.turns": "last"}, {"sft.messages": None}, ["sft.turns"]),
    ({"model.offload": "optimizer_step"}, {"sft.optimizer.name": "muon"}, ["sft.optimizer.name"]),
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
    (
        {"sft.optimizer.warmup_steps": 2, "sft.optimizer.warmup_ratio": 0.0},
        {"sft.optimizer.warmup_ratio": 0.1},
        ["sft.optimizer.warmup_ratio"],
    ),
    (
        {"sft.optimizer.schedule": "cosine", "sft.optimizer.num_cycles": 2},
        {"sft.optimizer.schedule": "wsd"},
        ["sft.optimizer.num_cycles"],
    ),
    (
        {"steps": 5, "sft.optimizer.schedule": "cosine", "sft.optimizer.num_cycles": 5},
        {"steps": 4},
        ["sft.optimizer.num_cycles"],
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
