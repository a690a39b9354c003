"""The case that settings describe, field by field, and the sums over a whole run."""

from __future__ import annotations

import attrs
import pytest
import torch

from fppo.models.adapted import Lora
from fppo.runtime.mesh import AXES, Sharding
from fppo.settings import files
from fppo.settings.plan import PlanSettings, pools_of_run
from fppo.studies.plan import needs
from fppo.studies.plan.case import GIB, PRESETS, Case, PlannedSampling, Role, hardware_of
from fppo.studies.plan.estimate import Seconds
from fppo.studies.plan.passes import model_of
from fppo.studies.plan.plan import Plan, Stage
from fppo.studies.plan.rollout import OUTSIDE, PlannedRollout
from fppo.studies.plan.run import budgeted, case_of, engines_of, part_of
from tests import tiny_run
from tests.studies.plan.cases import case

# no two of its numbers are equal where one could stand in another's place
GIVEN = {
    "model__path": "quickstart",
    "data__max_prompt_tokens": 24,
    "rollout__max_tokens": 8,
    "rollout__batch_size": 64,
    "rollout__n": 4,
    "rollout__cache_gb": 0.5,
    "actor__mini_batch_size": 16,
    "actor__token_budget": 256,
    "actor__draw_by": "prompt",
    "actor__epochs": 3,
    "critic__mini_batch_size": 8,
    "critic__micro_batch_size": 5,
    "critic__epochs": 2,
    "critic__compute_dtype": "float16",
    "critic__checkpoint_layers": True,
    "critic__offload": "moments",
    "reward__model__path": "quickstart",
    "reward__model__dtype": "bfloat16",
    "reward__model__token_budget": 512,
    "reward__model__offload": True,
    "model__ref_dtype": "bfloat16",
    "model__ref_offload": False,
    "model__compute_dtype": "bfloat16",
    "model__checkpoint_layers": "selective",
    "model__mlp_slice_tokens": 48,
    "model__offload": "all",
    "model__offload_activations": True,
    "model__forward_token_budget": 640,
    "model__log_probs": "reference",
    "mesh__replicate": 2,
    "mesh__shard": 2,
    "mesh__stage": 2,
    "mesh__reduce_dtype": "bfloat16",
    "mesh__prefetch": False,
}


def test_every_field_of_a_case_is_what_settings_say(tmp_path):
    options = PlanSettings(gpu="h100", memory=2.0, expert_load=1.5, full=True)
    found = case_of(tiny_run.settings(tmp_path, **GIVEN), options)
    # 4 rows of a mini-batch on each of 4 data ranks, in one pass; rows of a prompt are together
    expected = Case(
        name="quickstart",
        config=found.config,
        hardware=attrs.evolve(hardware_of("h100"), memory=2.0 * GIB),
        mesh=dict.fromkeys(AXES, 1) | {"replicate": 2, "shard": 2},
        load=1.5,
        sharding=Sharding(stage=2, reduce_dtype=torch.bfloat16, prefetch=False),
        tokens=4 * 32,
        budget=256,
        length=32,
        response=0.25,
        micro_batches=1,
        together=4.0,
        forward_together=4.0,
        critic=True,
        reference=True,
        reward_model=found.reward_model,
        compute_dtype=torch.bfloat16,
        checkpoint_layers="selective",
        mlp_slice_tokens=48,
        log_probs="reference",
        offload="all",
        offload_activations=True,
        forward_tokens=640,
        roles={
            # 5 rows of two prompts
            "critic": Role(tokens=2 * 24 + 5 * 8, compute_dtype="float16", checkpoint_layers=True, offload="moments"),
            "reference": Role(offload="none", dtype=torch.bfloat16),
            "reward model": Role(tokens=512, offload="all", dtype=torch.bfloat16),
        },
        sampling=PlannedSampling(sequences=64, n=4, cache=0.5 * GIB),
        full=True,
    )
    assert found == expected
    quickstart = PRESETS["quickstart"]()
    assert found.config.to_dict() == found.reward_model.to_dict() == quickstart.to_dict()


def test_a_teacher_has_a_place_and_a_dtype_of_its_own(tmp_path):
    taught = {f"model__{name}": "quickstart" for name in ("path", "teacher_path")}
    taught |= {"model__teacher_offload": True, "model__teacher_dtype": "bfloat16", "model__ref_offload": False}
    taught |= tiny_run.NO_KL | {"algorithm__advantage": "distill", "actor__kl_coef": 0.1}
    settings = tiny_run.settings(tmp_path, **taught)
    roles = case_of(settings, PlanSettings(gpu="h100")).roles
    assert roles["teacher"] == Role(offload="all", dtype=torch.bfloat16)
    assert roles["reference"] == Role(offload="none", dtype=torch.float32)


def test_a_case_without_what_settings_leave_out(tmp_path):
    bare = tiny_run.NO_KL | {"algorithm__advantage": "reinforce_plus_plus", "model__path": "quickstart"}
    bare |= {"model__share_prompts": False, "rollout__n": 4, "rollout__batch_size": 64, "rollout__max_tokens": 8}
    settings = tiny_run.settings(tmp_path, **bare, actor__micro_batch_size=3, data__max_prompt_tokens=24)
    found = budgeted(settings, PlanSettings(gpu="cpu", sampling=False))
    assert (found.critic, found.reference, found.reward_model, found.teacher, found.sampling) == (
        *(False, False),
        *(None, None, None),
    )
    assert (found.together, found.forward_together, found.roles, found.compute_dtype) == (1.0, 1.0, {}, None)
    assert found.tokens == found.budget == 3 * 32
    assert (found.lora, found.critic_lora, found.lora_base) == (None, None, None)


@pytest.mark.parametrize(
    ("changes", "gpu", "packs"),
    [
        ({"model__linear": "onednn"}, "cpu", True),
        ({"model__linear": "cpp"}, "cpu", True),
        ({"model__linear": "onednn"}, "h100", False),
        ({"model__linear": "torch"}, "cpu", False),
        ({"rollout__exact": True}, "cpu", False),
    ],
)
def test_weights_are_packed_for_onednn_on_a_cpu_but_for_exact_rollouts(tmp_path, changes, gpu, packs):
    settings = tiny_run.settings(tmp_path, model__path="quickstart", **changes)
    assert budgeted(settings, PlanSettings(gpu=gpu)).packs is packs


def test_axes_and_adapters_of_a_case_are_the_settings_own(tmp_path):
    changes = {
        "model__path": "quickstart",
        "model__lora__rank": 4,
        "model__lora__targets": ["q_proj"],
        "model__lora__base": "int8",
        "mesh__context": 2,
        "mesh__ring": True,
        "mesh__pipeline": 2,
        "mesh__virtual_stages": 2,
        "model__graphs": False,
    }
    settings = tiny_run.settings(tmp_path, **changes)
    found = case_of(settings, PlanSettings(gpu="cpu", gpus=16))
    assert (found.size("context"), found.size("pipeline"), found.size("shard")) == (2, 2, 4)
    assert (found.ring, found.virtual_stages, found.lora_base) == (True, 2, "int8")
    assert found.lora == found.critic_lora == Lora(4, 1.0, ("q_proj",))
    none = tiny_run.settings(tmp_path, **changes, model__lora__critic_rank=0)
    assert case_of(none, PlanSettings(gpu="cpu")).critic_lora is None


@pytest.mark.parametrize(
    ("vllm", "expected"),
    [
        ({}, {}),
        ({"host": "process"}, {"shared": True}),
        ({"memory_share": 0.25, "max_rows": 33}, {"share": 0.25, "max_rows": 33}),
        ({"cache_gb": 2.0, "dtype": "float16"}, {"cache": 2.0 * GIB, "dtype": torch.float16}),
        ({"tensor_parallel": 2, "host": "process"}, {"tensor": 2, "apart": True, "shared": True}),
        ({"tensor_parallel": 2, "host": "ray"}, {"tensor": 2, "apart": True, "shared": True}),
        ({"transport": "nccl", "host": "ray"}, {"apart": True}),
        ({"devices": [1], "host": "process"}, {"apart": True, "shared": True}),
        ({"sleep": True, "bucket_mb": 3}, {"sleeps": True, "bucket": 3 * 2**20}),
    ],
    ids=str,
)
def test_the_sampling_of_a_case_is_that_of_the_section_of_vllm(tmp_path, vllm, expected):
    section = {f"rollout__vllm__{name}": value for name, value in vllm.items()}
    own = {"rollout__engine": "vllm", "rollout__batch_size": 24, "rollout__n": 3, "rollout__max_tokens": 8}
    settings = tiny_run.settings(tmp_path, model__path="quickstart", **own, actor__mini_batch_size=12, **section)
    rows = settings.rollout.vllm.max_rows
    defaults = {"engine": "vllm", "sequences": 24, "n": 3, "max_rows": rows}
    assert case_of(settings, PlanSettings(gpu="cpu")).sampling == PlannedSampling(**defaults | expected)


def test_the_parts_of_pools_are_their_models_alone():
    of = {"critic": Role(tokens=1), "reference": Role(dtype=torch.bfloat16)}
    whole = case(roles=of, reward_model=case().config, teacher=case().config)
    critic = part_of(whole, ["critic"])
    assert (critic.only, critic.critic, critic.reference) == (("critic",), True, False)
    assert (critic.reward_model, critic.teacher, critic.roles) == (None, None, {"critic": Role(tokens=1)})
    others = part_of(whole, ["reference", "reward model", "teacher"])
    assert (others.critic, others.reference, others.roles) == (False, True, {"reference": of["reference"]})
    assert others.reward_model is whole.reward_model
    assert others.teacher is whole.teacher


@pytest.mark.parametrize(("asked", "rows"), [(7, 7), (1, 2)])
def test_engines_of_a_pool_have_its_ranks_and_the_rows_of_the_settings(tmp_path, asked, rows):
    """At least those of one prompt."""
    placed = {"placement__pools": {"e": {"ranks": 3}}, "placement__roles__rollout": "e"}
    own = {"rollout__n": 2, "rollout__max_tokens": 8, "placement__engines__rows": asked}
    settings = tiny_run.settings(tmp_path, model__path="quickstart", **placed, **own)
    found = engines_of(settings, PlanSettings(gpu="cpu"), "e", 12.0)
    assert (found.only, found.columns, found.world) == ((), 12.0, 1)
    assert (found.sampling.pool, found.sampling.max_rows, found.sampling.shared) == (3, rows, True)


def planned_of(what: Case, seconds: dict[str, float], rollout: float) -> Plan:
    """A plan whose stages take so long."""
    memory = {"x": 5.0, OUTSIDE: 0.0}
    stages = tuple(Stage(name, "", memory, {}, Seconds(x, 0.0, 0.0), 0.0) for name, x in seconds.items())
    numbers = dict.fromkeys((x.name for x in attrs.fields(PlannedRollout)), 0)
    sampled = PlannedRollout(**numbers | {"memory": {OUTSIDE: 0.0}, "prefill": rollout})
    return Plan(what, {}, {}, stages, rollout=sampled)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "log_probs"), [("pass", 1), ("engine", 0)], ids=["of a pass before the update", "of the engine"]
)
def test_a_run_takes_its_steps_and_a_step_its_mini_batches_and_epochs(tmp_path, monkeypatch, old, log_probs):
    settings = tiny_run.settings(
        tmp_path, **GIVEN, algorithm__old_log_probs=old, steps=11, checkpoint__keep=4, log__samples_gb=0.25
    )
    what = case_of(settings, PlanSettings(gpu="cpu"))
    each = {"reward model": 32.0, "log-probs": 1.0, "reference": 2.0, "values": 4.0}
    planned = planned_of(what, each | {"update critic": 8.0, "update actor": 16.0}, 5.0)
    monkeypatch.setattr(needs, "plan", lambda case: planned)
    found = needs.needs_of(settings, PlanSettings(gpu="cpu"))
    step = 4 * (32 + log_probs + 2 + 4 + 2 * 8 + 3 * 16) + 5  # of 64 rows in mini-batches of 16
    assert (found.step, found.run) == (step, 11 * step)
    assert (found.gpu, found.ranks, found.memory, found.host) == ("cpu", 4, 5.0, 0.0)
    assert found.available == what.hardware.memory
    assert found.disk == 5 * found.checkpoint + found.model + 0.25e9
    none = needs.needs_of(attrs.evolve(settings, log=attrs.evolve(settings.log, samples=0)), PlanSettings(gpu="cpu"))
    assert none.disk == 5 * found.checkpoint + found.model


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(5, 5), (2, 20, 5)])
def test_prompts_of_a_known_length_are_planned_as_long_as_they_are(tmp_path, lengths):
    """The longest counts for memory, their mean for time."""
    own = {"model__path": "quickstart", "data__max_prompt_tokens": 512, "actor__token_budget": 640}

    def planned(prompt, **known):
        settings = tiny_run.settings(tmp_path, **own | {"data__max_prompt_tokens": prompt})
        return needs.needs_of(settings, PlanSettings(gpu="cpu"), **known)

    found, longest, mean = planned(512, lengths=lengths), planned(max(lengths)), planned(sum(lengths) // len(lengths))
    assert found.memory == longest.memory < planned(512).memory
    assert (found.prompt, found.response) == (sum(lengths) // len(lengths), 3)
    assert 0.4 * mean.step < found.step <= longest.step
    assert found.pace is None


@pytest.mark.slow
def test_log_probs_of_the_update_itself_take_no_pass_before_it_and_a_checkpoint_has_the_state_of_all_ranks(tmp_path):
    own = tiny_run.NO_KL | {"actor__epochs": 1, "actor__mini_batch_size": 64, "model__ref_dtype": "bfloat16"}
    own |= {"model__path": "quickstart", "rollout__batch_size": 64, "mesh__shard": 2, "actor__kl_coef": 0.1}
    found = {}
    for old in ("pass", "update"):
        settings = tiny_run.settings(tmp_path, **own, algorithm__old_log_probs=old)
        found[old] = needs.needs_of(settings, PlanSettings(gpu="cpu"))
    assert found["update"].step < found["pass"].step
    what = case_of(settings, PlanSettings(gpu="cpu"))
    actor, critic = (sum(x.numel() for x in model_of(what, name).shapes.values()) for name in ("actor", "critic"))
    saved = 12 * (actor + critic) + 2 * actor  # a number, two moments; the reference
    assert (found["pass"].checkpoint, found["pass"].model) == (saved, 4 * actor)


def test_each_pool_of_a_run_has_its_own_mesh_and_models(tmp_path):
    pools = {"a": {"ranks": 4, "tensor": 2, "ring": False}, "c": {"ranks": 3}, "e": {"ranks": 2}, "r": {"ranks": 1}}
    roles = {"actor": "a", "critic": "c", "reference": "c", "rollout": "e", "reward": "r"}
    placed = {f"placement__roles__{role}": pool for role, pool in roles.items()} | {"placement__pools": pools}
    settings = tiny_run.settings(tmp_path, reward__model__path="m", mesh__stage=2, **placed)
    sizes = {"a": {"shard": 2, "tensor": 2}, "c": {"shard": 3}, "e": {"shard": 2}, "r": {"shard": 1}}
    own = {"a": ["actor"], "c": ["critic", "reference"], "e": ["rollout"], "r": ["reward model"]}
    assert pools_of_run(settings) == {
        name: (attrs.evolve(settings.mesh, **sizes[name]), models) for name, models in own.items()
    }
    alone = files.replace(settings, {"placement.roles.reward": "here"})
    assert pools_of_run(alone)["here"] == (alone.mesh, ["reward model"])
    assert list(pools_of_run(files.replace(settings, {"reward.model.path": None}))) == ["a", "c", "e"]
    assert pools_of_run(tiny_run.settings(tmp_path, reward__model__path="m")) == {}
    reads_hidden = files.replace(settings, {"critic.reads": "hidden"})  # no model
    assert [models for _, models in pools_of_run(reads_hidden).values() if "critic" in models] == []
