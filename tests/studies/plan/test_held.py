"""Bytes of batches, columns and caches that a plan counts, against their sums by hand."""

from __future__ import annotations

from collections import Counter

import attrs
import pytest
import torch

from fppo.models import flops
from fppo.settings.plan import PlanSettings
from fppo.studies.plan import host
from fppo.studies.plan.case import GIB, PlannedSampling, Role, hardware_of, overhead
from fppo.studies.plan.columns import column_calls
from fppo.studies.plan.host import state_of
from fppo.studies.plan.passes import Built, model_of, rows_of
from fppo.studies.plan.plan import plan
from fppo.studies.plan.rollout import KEYS, MOVING, OUTSIDE, rollout_of
from fppo.studies.plan.run import case_of
from fppo.studies.plan.track import BATCH, Cost, Phase
from tests import tiny_run
from tests.studies.plan.cases import at_rest, case

ROW = 64 * (8 + 1) + 32 * (1 + 2 * 4) + 3 * 8 + 4  # tokens and masks, log-probs of the engine, numbers of the row


def test_every_rank_holds_the_rows_of_a_whole_mini_batch():
    what = case(mesh={"shard": 2}, micro_batches=3)  # 4 rows in each of three passes on two ranks
    numbers = 32 * 4 * (1 + 3 + 2)  # old log-probs; token rewards, advantages, returns; the reference's, values
    assert at_rest(what)[BATCH] == (ROW + numbers) * 4 * 3 * 2
    alone = attrs.evolve(what, critic=False, reference=False)
    assert at_rest(alone)[BATCH] == (ROW + numbers - 2 * 32 * 4) * 24


@pytest.mark.parametrize("together", [1.0, 2.0, 1.5])
def test_rows_of_a_prompt_are_alike_up_to_their_responses(together):
    rows = rows_of(case(together=together, response=0.25), 6)
    prompts = rows.tokens[:, :48]
    counted = len(prompts.unique(dim=0))
    assert counted == (1 if together == 1 else round(6 / together))
    assert rows.response_mask.shape == (6, 16)


def calls(tmp_path, roles, **changes):
    placed = {f"placement__roles__{role}": pool for role, pool in roles.items()}
    pools = {pool: {"ranks": 1} for pool in roles.values()}
    own = {"rollout__batch_size": 8, "rollout__max_tokens": 3, "data__max_prompt_tokens": 5}
    settings = tiny_run.settings(tmp_path, model__path="quickstart", placement__pools=pools, **own, **placed, **changes)
    found = column_calls(settings, case_of(settings, PlanSettings(gpu="cpu")))
    return {(pool, call.call): call for pool, each in found.items() for call in each}


NUMBERS = 8 * 3 * 4  # of a column of one number for each token of a response
ROLES = {"actor": "a", "critic": "c"}


def test_a_critic_of_hidden_states_gets_what_it_reads_and_gives_a_value_for_each_member(tmp_path):
    own = {"critic__reads": "hidden", "critic__ensemble": 3, "critic__leave_disputed": 0.2, "critic__privileged": 2}
    found = calls(tmp_path, ROLES, **own, actor__entropy_coef=0.01)
    values, update = found["c", "values"], found["c", "update_critic"]
    width = found["a", "old_log_prob"].back["hidden"] // NUMBERS
    assert width > 8
    assert set(values.there) == {"hidden", "response_mask", "truth_signs"}
    assert values.there["hidden"] == NUMBERS * width
    assert values.back == {"values": 3 * NUMBERS}
    assert {"hidden", "truth_signs", "disagreement", "entropy_mask"} <= set(update.there)
    actor = found["a", "update_actor"]
    assert set(update.there) - set(actor.there) == {"hidden", "truth_signs"}
    assert actor.there["disagreement"] == NUMBERS
    assert actor.back == update.back == {}


def test_a_critic_of_confidence_gets_log_probs_and_entropy(tmp_path):
    found = calls(tmp_path, ROLES, critic__reads="confidence")
    assert found["c", "values"].there == {"log_probs": NUMBERS, "entropy": NUMBERS, "response_mask": 8 * 3}
    assert set(found["a", "old_log_prob"].back) == {"log_probs", "entropy"}
    assert found["c", "values"].back == {"values": NUMBERS}


def test_a_critic_of_tokens_gets_the_scored_rows(tmp_path):
    found = calls(tmp_path, ROLES)
    assert found["c", "values"].there == found["a", "old_log_prob"].there
    assert found["a", "old_log_prob"].back == {"log_probs": NUMBERS}
    assert found["c", "values"].there["tokens"] == 8 * 8 * 8
    prompts = found["a", "generate"].there
    assert prompts == {"tokens": 8 * 5 * 8, "attention_mask": 8 * 5, "row_ids": 8 * 8}


def test_greedy_baselines_are_a_second_rollout_of_one_row_for_each_prompt(tmp_path):
    none = tiny_run.NO_KL
    roles = {"actor": "a", "reward": "j"}
    placed = {f"placement__roles__{role}": pool for role, pool in roles.items()}
    settings = tiny_run.settings(
        tmp_path,
        model__path="quickstart",
        reward__model__path="quickstart",
        placement__pools={pool: {"ranks": 1} for pool in roles.values()},
        algorithm__advantage="remax",
        rollout__n=4,
        **placed,
        **none,
    )
    found = column_calls(settings, case_of(settings, PlanSettings(gpu="cpu")))
    generated = [call for call in found["a"] if call.call == "generate"]
    scored = [call for call in found["j"] if call.call == "reward_model"]
    assert generated[0].there == generated[1].there  # the same prompts
    assert [call.back["tokens"] for call in generated] == [8 * 515 * 8, 2 * 515 * 8]
    assert [call.back["scores"] for call in scored] == [4 * 8, 4 * 2]


@pytest.mark.slow
def test_half_of_what_is_free_on_a_gpu_is_for_the_engines_cache():
    """A pass has as many rows as it holds, with prompts and their responses together."""
    gpu = hardware_of("h100", {"memory": GIB})
    sampling = PlannedSampling(sequences=1 << 16, n=4, max_rows=1 << 16)
    what = case(hardware=gpu, critic=False, reference=False, compute_dtype=torch.bfloat16, sampling=sampling, length=64)
    rest = at_rest(what)
    planned = rollout_of(what, rest, Built())
    weights = sum(x for name, x in planned.memory.items() if name not in (KEYS, MOVING, OUTSIDE))
    row = 64 * 3 * 2 * 2 * 32 * 2  # of three layers, keys and values of two heads, in 16 bits
    fitting = int((gpu.memory - weights - overhead(gpu, 0, 0)) / 2 // row)
    assert planned.together == fitting // 4 * 4
    assert planned.memory[KEYS] == planned.together * row
    rows = planned.engines * planned.rows
    assert rows == 1 << 16
    moving = planned.memory[MOVING]
    assert planned.memory[OUTSIDE] == overhead(gpu, 0, moving + planned.memory[KEYS])
    again = rollout_of(attrs.evolve(what, sampling=attrs.evolve(sampling, max_rows=64)), rest, Built())
    assert again.together == 64
    assert planned.decode < again.decode


@pytest.mark.slow
def test_the_work_of_a_stage_is_that_of_its_models_arithmetic():
    """A reward model's head is applied to one token of a row; every rank has its share."""
    what = case(layers=1, micro_batches=2, mesh={"shard": 2}, full=True)
    what = attrs.evolve(what, reward_model=what.config)
    found = {stage.name: stage.model_flops for stage in plan(what).stages}
    rows, length, response = 2 * 4, 64, 32  # of each rank
    policy, critic, reward = (model_of(what, name) for name in ("actor", "critic", "reward model"))
    one = {
        "reward model": flops.forward_flops(reward, [length], head_tokens=1),
        "log-probs": flops.forward_flops(policy, [length], head_tokens=response),
        "reference": flops.forward_flops(policy, [length], head_tokens=response),
        "values": flops.forward_flops(critic, [length], head_tokens=response),
        "update critic": flops.train_flops(critic, [length], head_tokens=response),
        "update actor": flops.train_flops(policy, [length], head_tokens=response),
    }
    assert found == pytest.approx({name: rows * each for name, each in one.items()})


def test_weights_go_to_vllm_through_a_bucket_of_which_cut_ones_fill_a_third():
    """Parts, the whole, and what is cast are there at once."""
    whole = PlannedSampling(engine="vllm", shared=True, bucket=3_300_000)
    what, built = case(layers=1, sampling=whole), Built()
    third = attrs.evolve(what, sampling=attrs.evolve(whole, bucket=1_100_000))
    cut = attrs.evolve(what, mesh={"shard": 2})
    assert host.bucket_bytes(cut, built) == host.bucket_bytes(third, built) < host.bucket_bytes(what, built)
    half = attrs.evolve(what, sampling=attrs.evolve(whole, bucket=1_650_000, dtype=torch.float16))  # vLLM's own
    assert 2 * host.bucket_bytes(half, built) == host.bucket_bytes(what, built)
    alone = attrs.evolve(what, sampling=attrs.evolve(whole, shared=False))
    assert host.bucket_bytes(alone, built) == 0


def test_activations_put_away_are_those_of_the_passes_in_flight():
    stages = {name: [Phase("forward 1", (), Cost(other=Counter(away=size)))] for name, size in (("a", 5), ("b", 8))}
    assert host.away_bytes(case(), stages) == 8
    ends = [
        host.away_bytes(case(layers=4, mesh={"pipeline": 2}, pipeline_rank=rank, micro_batches=4), stages)
        for rank in (0, 1)
    ]
    assert ends == [2 * 8, 8]
    chunks = case(layers=4, mesh={"pipeline": 2}, virtual_stages=2, micro_batches=4)
    assert host.away_bytes(chunks, stages) == chunks.in_flight * 8 / 2


LEVELS = ("none", "moments", "all", "optimizer_step")
AWAY = ("all", "optimizer_step")  # with parameters


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("of_critic", [None, *LEVELS])
@pytest.mark.parametrize("of_reference", [None, "none", "all"])
def test_each_role_says_what_of_its_state_is_on_the_host(level, of_critic, of_reference):
    roles = {"critic": Role(offload=of_critic), "reference": Role(offload=of_reference)}
    found = state_of(attrs.evolve(case(layers=1, offload=level), roles=roles), Built())
    critic, reference = of_critic or level, of_reference or level
    assert {name: away for name, (away, _) in found.items()} == {
        "actor's parameters": level in AWAY,
        "actor's optimizer": level != "none",
        "critic's parameters": critic in AWAY,
        "critic's optimizer": critic != "none",
        "reference's parameters": reference in AWAY,
    }
    actor, moments = (found[f"actor's {x}"][1] for x in ("parameters", "optimizer"))
    assert sum(moments) == 2 * sum(actor) == 2 * sum(found["reference's parameters"][1])
