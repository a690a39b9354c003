"""Decisions of several settings, each against its definition over many combinations of them."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import settings as draws
from hypothesis import strategies as st

from fppo.settings import checks, files, resolve
from fppo.settings.learning import ActorSettings, CriticSettings, UpdateSettings
from fppo.settings.placement import (
    AXES,
    MeshSettings,
    PlacementSettings,
    Pool,
    RoleSettings,
    engines_in,
    places_of,
    pools_here,
    pools_of,
    ranks_without_gpus,
    threads_of,
)
from fppo.settings.sft import SftSettings
from fppo.settings.train import TrainSettings, sized_for_sft

EVERY: dict[str, list[Any]] = {
    "algorithm.old_log_probs": [None, "pass", "engine", "update", "auto"],
    "rollout.exact": [False, True],
    "rollout.engine": ["embedded", "vllm"],
    "rollout.ahead": [0, 2],
    "rollout.from": [None, "saved"],
    "model.compute_dtype": ["float32", "bfloat16"],
    "actor.epochs": [1, 2],
    "actor.mini_batch_size": [64, 32, None],
    "algorithm.kl.coef": [0.0, 0.1],
    "algorithm.correction": ["none", "rollout"],
    "algorithm.advantage": ["gae", "grpo", "optimal_token_baseline", "distill"],
    "critic.reads": ["tokens", "hidden"],
}
USUAL = {name: values[0] for name, values in EVERY.items()}


def make(changes: dict[str, Any]) -> TrainSettings:
    return files.replace(TrainSettings(), changes)


def reasons(given: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Why old log-probs are needed before the update, and why the engine's are not those of a pass."""
    advantage, corrected = given["algorithm.advantage"], given["algorithm.correction"] != "none"
    before = {
        f"actor.epochs = {given['actor.epochs']} and actor.mini_batch_size": given["actor.epochs"] > 1
        or given["actor.mini_batch_size"] != 64,
        "algorithm.kl.coef puts": given["algorithm.kl.coef"] > 0,
        "algorithm.correction compares them": corrected,
        f"{advantage} estimates advantages": advantage in ("distill", "optimal_token_baseline"),
    }
    besides = {
        f"rollout.engine = {given['rollout.engine']}": given["rollout.engine"] == "vllm",
        f"model.compute_dtype = {given['model.compute_dtype']}": given["model.compute_dtype"] != "float32",
        "rollout.ahead trains": given["rollout.ahead"] > 0,
        "rollout.from trains": given["rollout.ahead"] == 0 and given["rollout.from"] is not None,
        "algorithm.correction compares the two": corrected,
        f"{advantage} needs a pass": advantage == "optimal_token_baseline",
        f"critic.reads = {given['critic.reads']}": advantage == "gae" and given["critic.reads"] != "tokens",
    }
    return [text for text, there in before.items() if there], [text for text, there in besides.items() if there]


def begins(found: list[str], texts: list[str]) -> bool:
    return len(found) == len(texts) and all(map(str.startswith, found, texts))


@pytest.mark.slow
@draws(max_examples=60)
@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in EVERY.items()}))
def test_old_log_probs_come_from_the_cheapest_sound_source(given):
    settings = make(given)
    before, besides = reasons(given)
    assert begins(resolve.passes_before_update(settings), before)
    assert begins(resolve.reasons_for_pass(settings), besides)
    asked = given["algorithm.old_log_probs"]
    if given["rollout.exact"]:
        expected = "engine"
    elif asked in ("pass", "engine", "update"):
        expected = asked
    elif not before:
        expected = "update"
    else:
        expected = "auto" if asked == "auto" and not besides else "pass"
    assert resolve.old_log_probs_source(settings) == expected
    said = resolve.said_of_old_log_probs(settings)
    assert len(said) == (asked == "auto")
    if said:
        word = {"update": "update: ", "auto": "engine, held in every step"}.get(expected, "pass: ")
        assert said[0].startswith(f"algorithm.old_log_probs {word}")
        assert expected != "pass" or all(text in said[0] for text in besides)


@pytest.mark.parametrize("name", EVERY)
def test_each_reason_alone_is_enough(name):
    """Beside settings whose log-probs could come from the update, or from the engine."""
    for value in EVERY[name][1:]:
        given = USUAL | {name: value}
        before, besides = reasons(given)
        assert begins(resolve.passes_before_update(make(given)), before)
        assert begins(resolve.reasons_for_pass(make(given)), besides)


SHARING = {
    "model.remove_padding": [(True, None), (False, "runs padded rows as they are")],
    "mesh.context": [(1, None), (2, "deals the packed row in blocks")],
    "algorithm.router_replay": [("none", None), ("all", "replays what routers chose for each row")],
}


@pytest.mark.parametrize("chosen", itertools.product(*SHARING.values()), ids=str)
def test_rows_share_prompts_unless_a_setting_hinders_them(chosen):
    values = {name: value for name, (value, _) in zip(SHARING, chosen, strict=True)}
    expected = [(name, value, why) for name, (value, why) in zip(SHARING, chosen, strict=True) if why]
    assert resolve.sharing_hindrances(make(values)) == expected


GRAPHS: dict[str, tuple[Any, Any, bool]] = {  # a value that hinders, as it is said; whether recording is impossible
    "device": ("cpu", "cpu", True),
    "rollout.ahead": (1, 1, True),
    "model.remove_padding": (False, False, True),
    "model.share_prompts": (True, True, True),
    "model.checkpoint_layers": ("selective", "selective", True),
    "model.mlp_slice_tokens": (64, 64, True),
    "model.compile_layers": (True, True, True),
    "model.offload_activations": (True, True, True),
    "model.attention": ("sdpa", "sdpa", True),
    "model.offload": ("moments", None, False),
    "rollout.engine": ("vllm", None, False),
    "reward.judge.engine": ("vllm", None, False),
}
FAST = {"device": "cuda", "model.attention": "varlen"}


@pytest.mark.parametrize("names", [(), *itertools.combinations(GRAPHS, 1), *itertools.combinations(GRAPHS, 2)], ids=str)
def test_passes_are_recorded_where_nothing_hinders_it(names):
    settings = make(FAST | {name: GRAPHS[name][0] for name in names})
    found = [(path, value) for path, value, _ in resolve.hindrances(settings)]
    assert sorted(found) == sorted((name, GRAPHS[name][1]) for name in names if GRAPHS[name][2])
    assert resolve.records(settings) == (not names)


@pytest.mark.parametrize("attention", ["varlen", "flash", "my:attention", "auto"])
def test_attention_that_reads_lengths_on_the_device_may_be_recorded(attention):
    settings = make({"device": "cuda", "model.attention": attention})
    assert resolve.hindrances(settings) == []
    assert resolve.records(settings) == (attention in ("varlen", "flash"))


@pytest.mark.parametrize(
    ("advantage", "warmup", "pretrain", "expected"),
    [("gae", 0, 0, 10), ("gae", 3, 0, 7), ("gae", 0, 4, 6), ("gae", 0, 12, 1), ("grpo", 3, 4, 10)],
)
def test_the_policy_is_updated_in_the_steps_after_the_critics_own(advantage, warmup, pretrain, expected):
    own = {"critic.warmup_steps": warmup, "critic.pretrain": pretrain}
    assert make({"steps": 10, "algorithm.advantage": advantage, **own}).actor_steps == expected


ENV = {"rollout.environment": "my:env"}
PROPERTIES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"reward.functions": ["exact_match"]}, {"has_reward": True}),
    ({"reward.model.path": "m"}, {"has_reward": True}),
    ({"reward.judge.path": "j"}, {"has_reward": True}),
    (ENV, {"has_reward": True, "in_turns": True}),
    (ENV | {"rollout.environment.eval_episodes": 3}, {"has_reward": True, "in_turns": True, "has_held_out": True}),
    ({"rollout.environment.eval_episodes": 3}, {}),
    ({"rollout.turns.respond": "my:tool"}, {"in_turns": True}),
    ({"data.eval_path": ["b"]}, {"has_held_out": True}),
    ({"data.eval_rows": "my:rows"}, {"has_held_out": True}),
    ({"rollout.engine": "vllm"}, {"decodes": False}),
    ({"rollout.engine": "vllm", "reward.judge.path": "j"}, {"decodes": True, "has_reward": True}),
    (
        {"rollout.engine": "vllm", "reward.judge.path": "j", "reward.judge.engine": "vllm"},
        {"decodes": False, "has_reward": True},
    ),
    ({"reward.judge.path": "j", "reward.judge.engine": "vllm"}, {"has_reward": True}),
    ({"algorithm.advantage": "grpo"}, {"uses_critic_model": False}),
    ({"critic.reads": "hidden"}, {"uses_critic_model": False}),
    ({"algorithm.advantage": "distill"}, {"uses_critic_model": False, "uses_teacher": True}),
    ({"actor.kl_coef": 0.1}, {"uses_reference": True}),
    ({"algorithm.kl.coef": 0.1}, {"uses_reference": True}),
]


@pytest.mark.parametrize(("changes", "differing"), PROPERTIES, ids=str)
def test_what_a_run_has_follows_from_its_settings(changes, differing):
    usual = {"has_reward": False, "in_turns": False, "has_held_out": False, "decodes": True}
    usual |= {"uses_critic_model": True, "uses_teacher": False, "uses_reference": False}
    settings, expected = make(changes), usual | differing
    assert {name: getattr(settings, name) for name in expected} == expected
    critic, teacher = expected["uses_critic_model"], expected["uses_teacher"]
    reward = settings.reward
    judged = {"reward": reward.model.path is not None, "judge": reward.judge.path is not None}
    roles = {"actor": True, "critic": critic, "teacher": teacher, **judged}
    assert settings.model_roles == {role for role, is_used in roles.items() if is_used}


def test_a_supervised_run_is_sized_as_one_pass_over_rows_of_its_own():
    given = make({"sft.max_tokens": 99, "sft.batch_size": 7, "rollout.exact": True, "actor.epochs": 3, "seed": 5})
    found = sized_for_sft(given)
    expected = {"data.max_prompt_tokens": 98, "rollout.batch_size": 7, "rollout.max_tokens": 1}
    expected |= {"rollout.exact": False, "actor.epochs": 1, "actor.mini_batch_size": 7}
    assert found == files.replace(given, expected)


@pytest.mark.parametrize("section", [ActorSettings, CriticSettings])
@given(batch=st.integers(1, 40), mini=st.none() | st.integers(1, 40), epochs=st.integers(1, 3))
def test_a_batch_becomes_as_many_updates_as_it_has_mini_batches_in_each_epoch(section, batch, mini, epochs):
    of = section(mini_batch_size=mini, epochs=epochs)
    size = mini or batch // max(parts for parts in (1, 2, 3, 4) if batch % parts == 0)
    assert of.mini_batch(batch, 1) == size
    assert of.updates(batch, 1) == epochs * len(range(0, batch, size))


@pytest.mark.parametrize(
    ("batch", "n", "by_row", "by_prompt"),
    [(64, 8, 16, 16), (64, 16, 16, 16), (64, 32, 16, 32), (24, 4, 6, 8), (8, 8, 2, 8), (6, 1, 2, 2), (7, 1, 7, 7)],
)
def test_mini_batches_are_a_quarter_or_as_few_parts_fewer_as_come_out_even(batch, n, by_row, by_prompt):
    for draw_by, size in (("row", by_row), ("prompt", by_prompt)):
        assert UpdateSettings(draw_by=draw_by).mini_batch(batch, n) == size
        changes = {"rollout.batch_size": batch, "rollout.n": n, "algorithm.advantage": "rloo" if n > 1 else "gae"}
        assert not any("mini_batch" in str(x) for x in checks.problems(make(changes | {"actor.draw_by": draw_by})))


@pytest.mark.parametrize("section", [ActorSettings, CriticSettings, SftSettings])
@pytest.mark.parametrize(
    ("rows", "tokens", "expected"),
    [(None, None, (None, 16384)), (3, None, (3, None)), (3, 0, (3, None)), (0, 9, (None, 9)), (None, 9, (None, 9))],
)
def test_a_pass_has_so_many_rows_or_so_many_tokens(section, rows, tokens, expected):
    assert section(micro_batch_size=rows, token_budget=tokens).passes == expected


def test_every_axis_of_a_mesh_counts():
    sizes = dict(zip(AXES, (2, 3, 5, 7, 11, 13, 17), strict=True))
    mesh = MeshSettings(**sizes)
    assert mesh.sizes(5) == sizes
    assert list(mesh.sizes(5)) == list(AXES)
    assert mesh.others == 2 * 3 * 7 * 11 * 13 * 17
    assert mesh.least_ranks == 5 * mesh.others
    assert attrs.evolve(mesh, shard=None).least_ranks == mesh.others
    pool = Pool(ranks=24, tensor=2, pipeline=3, virtual_stages=2, ring=True)
    whole = dict.fromkeys(AXES, 1) | {"tensor": 2, "pipeline": 3, "shard": 4}
    assert pool.axes == whole
    assert pool.mesh == whole | {"virtual_stages": 2, "ring": True}
    assert pool.problem is None
    assert attrs.evolve(pool, shard=2).axes == whole | {"shard": 2}
    assert "do not multiply to its 24 ranks" in str(attrs.evolve(pool, shard=2).problem)
    assert Pool(ranks=1, tensor=2).axes["shard"] == 1


POOLS = {"a": {"ranks": 2, "gpus": 1}, "b": {"ranks": 1}, "e": {"ranks": 3, "threads": 2}}


@pytest.mark.parametrize(
    ("roles", "places", "engines", "without"),
    [
        ({}, {}, None, True),
        ({"actor": "a"}, {"actor": "a", "reference": "a"}, None, True),
        ({"actor": "a", "rollout": "a"}, {"actor": "a", "reference": "a"}, None, True),
        (
            {"actor": "a", "reference": "b", "rollout": "e"},
            {"actor": "a", "reference": "b", "rollout": "e"},
            "e",
            True,  # b has none
        ),
        ({"critic": "b", "reference": "here"}, {"critic": "b"}, None, True),
        ({"teacher": "a", "reward": "b", "rollout": "e"}, {"rollout": "e", "teacher": "a", "reward": "b"}, "e", True),
    ],
    ids=str,
)
def test_roles_are_where_the_placement_has_them(roles, places, engines, without):
    placement = PlacementSettings(pools=POOLS, roles=RoleSettings(**roles))
    assert places_of(placement) == places
    assert engines_in(placement) == engines
    assert ranks_without_gpus(placement) is without
    alone = attrs.evolve(placement, pools={name: POOLS[name] for name in "ae"})
    assert ranks_without_gpus(alone) is (engines != "e")  # engines may have none
    assert [pool.ranks for pool in pools_of(placement).values()] == [2, 1, 3]


def test_ranks_of_one_machine_share_what_others_leave_and_those_elsewhere_have_all():
    placement = PlacementSettings(pools=POOLS, roles=RoleSettings(actor="a"))
    assert threads_of(placement, 15) == {"a": 3, "b": 3, "e": 2}  # 15 - 3 * 2 over 3 ranks
    assert threads_of(placement, 4) == {"a": 1, "b": 1, "e": 2}
    there = attrs.evolve(placement, cluster="host:1")
    assert threads_of(there, 15) == {"a": 15, "b": 15, "e": 2}
    assert [pool.ranks for pool in pools_here(placement)] == [2, 1, 3]
    assert [pool.ranks for pool in pools_here(attrs.evolve(placement, cluster="local"))] == [2, 1, 3]
    assert pools_here(there) == []
    broken = attrs.evolve(placement, pools=POOLS | {"x": {"ranks": 0}, "y": 3})
    assert [pool.ranks for pool in pools_here(broken)] == [2, 1, 3]
