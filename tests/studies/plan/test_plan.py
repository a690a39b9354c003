"""`fppo plan`: models, meshes, what does not fit and what would, and mistakes."""

from __future__ import annotations

import json
import math
import re
from collections import Counter

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fppo import batch as batches
from fppo import losses, metrics, models, tree
from fppo.assembly.learning import learning_of
from fppo.commands import cli
from fppo.key import Key
from fppo.models import flops, lora
from fppo.models.adapted import Lora
from fppo.runtime.mesh import DENSE, Mesh, Sharding
from fppo.runtime.schedule import clocked, one_f_one_b
from fppo.settings import files
from fppo.settings import plan as settings_plan
from fppo.settings.model import ModelSettings
from fppo.settings.placement import MeshSettings
from fppo.settings.plan import RENAMED, PlanSettings
from fppo.settings.train import TrainSettings
from fppo.steps.actor import UpdateActor
from fppo.steps.micro_batching import fit
from fppo.steps.optimizers import adamw
from fppo.steps.outputs import Forward
from fppo.steps.packed import cut, masks_of
from fppo.steps.ranks import mini_batches
from fppo.steps.train_state import init_state
from fppo.studies.plan import passes
from fppo.studies.plan.case import GIB, PRESETS, ROLES, Role, config_of, hardware_of, with_sequences
from fppo.studies.plan.estimate import LATENCY, LINK_SHARE, ORDER, facts_of, flops_of, link, rough, seconds_of
from fppo.studies.plan.passes import Built, model_of, models_of
from fppo.studies.plan.plan import pipeline_work, plan
from fppo.studies.plan.run import case_of
from fppo.studies.plan.text import of_plan, rendered
from fppo.studies.plan.track import ACTIVATIONS, Cost, Phase, Work
from fppo_kernels.collectives import Axis
from tests import tiny_run
from tests.studies.plan.cases import at_rest, bare, case, config, mixture

NAMED = ("--model.path", "quickstart")
# as the models' cards have them
PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_the_published_sizes(name):
    assert config_of(name)[0] == name
    what = case(config=PRESETS[name]())
    one, two = (sum(x.numel() for x in model_of(what, "actor", layers).shapes.values()) for layers in (1, 2))
    assert one + (what.config.num_hidden_layers - 1) * (two - one) == PARAMETERS[name]


def test_of_experts_only_those_that_a_token_meets_count_as_work():
    what = case(config=PRESETS["qwen3-235b-a22b"]())
    model = model_of(what, "actor", 1)
    outside = 2 * 151_936 * 4096
    assert 94 * sum(flops.layer_weights(model)) + outside == pytest.approx(22.2e9, rel=0.005)  # A22B
    facts = facts_of(what, model)
    assert facts.experts == 128 * 3 * 1536 * 4096
    assert facts.dense + facts.experts + outside + 4096 == sum(x.numel() for x in model.shapes.values())


def test_owners_and_instruct_are_left_out_of_names():
    assert config_of("Qwen/Qwen2.5-7B-Instruct")[0] == "qwen2.5-7b"
    assert config_of("meta-llama/Meta-Llama-3.1-8B-Instruct")[0] == "llama-3.1-8b"


def test_a_link_is_as_fast_as_the_ranks_that_share_it():
    gpu = hardware_of("h100")

    def of(axis, **mesh):
        return link(case(hardware=gpu, mesh=mesh), axis)

    assert of("shard", shard=8) == (False, 4.5e11, 4.5e11)
    assert of("shard", shard=16) == (True, 4e11, 5e10 * 15 / 8)  # eight rings leave a node at once
    assert of("replicate", replicate=2, shard=8) == (True, 5e10, 5e10)  # one rank of an axis in each node
    assert of("replicate", replicate=4, shard=2) == (False, 4.5e11, 4.5e11)
    assert of("shard", shard=8, sequence=2)[:2] == (True, 2e11)  # four of its ranks in each node
    both = {"shard": 4, "expert": 4, "tensor": 2}
    assert of(DENSE, **both)[:2] == of("shard", shard=16, tensor=2)[:2] == (True, 2e11)
    assert of("expert", **both)[0] is False


def test_only_what_is_sent_meanwhile_can_hide():
    gpu = case(hardware=hardware_of("h100"), mesh={"shard": 8}, micro_batches=3)

    def phase(name, wait):
        cost = Cost()
        cost.add(Work("matmul bfloat16", 0.7 * gpu.hardware.flops, 0))
        cost.sent["shard", "all_gather", wait] = round(0.5 * LINK_SHARE * 4.5e11)
        cost.calls["shard", "all_gather", wait] = 1
        return Phase(name, (), cost)

    each = LATENCY[False] + 0.5
    hidden = seconds_of([phase("forward 1", False), phase("forward 2", False)], gpu)
    waited = seconds_of([phase("forward 1", True), phase("forward 2", True)], gpu)
    assert hidden == pytest.approx((3.0, 3 * each, 0.0, 0.0, 0.0))
    assert waited == pytest.approx((3.0, 3 * each, 3 * each, 0.0, 0.0))


@pytest.mark.slow
def test_a_pipeline_is_planned_from_the_end_that_holds_more():
    """What it says of time is what the clock of the schedule says."""
    virtual = 2
    what = bare(layers=4, mesh={"pipeline": 2}, virtual_stages=virtual, micro_batches=4)
    found = plan(what)
    embedding = 4 * what.config.vocab_size * what.config.hidden_size  # tied: on both
    clock = clocked(one_f_one_b(2, 4, virtual))
    assert what.bubble == pytest.approx(clock.bubble / (1 - clock.bubble))
    assert [attrs.evolve(what, pipeline_rank=rank).in_flight for rank in (0, 1)] == list(clock.kept)
    update = found.stages[-1]
    assert update.name == "update actor"
    work = pipeline_work(what, "actor", Built())
    assert found.imbalance == max(work) / (sum(work) / 2)
    hidden = 4 * what.tokens * what.config.hidden_size  # of a micro-batch, forward; an end sends it once for each stage
    messages = 4 * (2 * virtual - 1)
    assert update.wire["pipeline"].sent == pytest.approx(messages * hidden, rel=0.01, abs=4 * embedding)
    assert update.seconds.idle > 0


@pytest.mark.slow
def test_the_meshes_that_fit_are_told_by_their_time_and_the_others_why_they_are_not(capsys):
    given = [*of_rows(8, 64), "--actor.token-budget", "64", "--gpu", "h100", "--search", "4"]
    assert run(*given, "--json", "-") == 0
    read = json.loads(capsys.readouterr().out)
    every = [mesh["mesh"] for what in ("best", "failed", "slower", "too_large") for mesh in read[what]]
    assert {axis for mesh in every for axis, size in mesh.items() if size > 1} == {*ORDER} - {"expert"}
    seconds = [mesh["seconds"] for mesh in read["best"]]
    assert seconds == sorted(seconds)
    assert all(
        math.prod(size for axis, size in m["mesh"].items() if axis != "virtual_stages") == 4 for m in read["best"]
    )
    assert read["meshes"] == sum(len(read[what]) for what in ("best", "failed", "slower", "too_large")) + sum(
        read["impossible"].values()
    )
    assert run(*given, "--memory", "0.001") == 1
    out = capsys.readouterr().out
    assert "too large for 0.0 GiB by the formula; the smallest takes" in out
    assert run(*given, "--mesh.tensor", "2") == 2
    assert "--search 4: it looks for the mesh of so many GPUs; leave out --mesh.tensor" in capsys.readouterr().err


def run(*arguments):
    return cli.main(["plan", *arguments])


def of_rows(half, count):
    """Flags of a run of the quickstart's policy alone, on so many rows of prompts and responses of one length."""
    rows = {"data.max-prompt-tokens": half, "rollout.max-tokens": half, "rollout.batch-size": count}
    words = [word for name, value in rows.items() for word in (f"--{name}", str(value))]
    return [*NAMED, *words, "--algorithm.advantage", "reinforce_plus_plus", "--no-sampling"]


@pytest.mark.slow
def test_a_table_and_a_file(tmp_path, capsys):
    file = tmp_path / "out" / "plan.json"
    given = [*of_rows(8, 256), "--algorithm.advantage", "gae", "--actor.token-budget", "512", "--mesh.shard", "2"]
    assert run(*given, "--json", str(file)) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 100 for line in out.splitlines())
    for words in (
        "rollout is planned (--no-sampling)",
        "actor's optimizer",
        "It fits",
        "activations",
        "shard (inside nodes",
        "MFU",
        "estimate",
    ):
        assert words in " ".join(out.split())
    read = json.loads(file.read_text())
    assert read["fits"]
    assert read["case"]["mesh"] == dict.fromkeys(ORDER, 1) | {"shard": 2}
    assert [stage["name"] for stage in read["stages"]] == ["log-probs", "values", "update critic", "update actor"]
    assert read["needs"] == max(stage["total"] for stage in read["stages"])
    for stage in read["stages"]:
        assert sum(stage["memory"].values()) == pytest.approx(stage["total"])


@pytest.mark.slow
def test_a_runs_settings_are_planned_as_each_role_has_them(tmp_path, capsys):
    settings = tiny_run.settings(
        tmp_path,
        model__path="quickstart",
        rollout__batch_size=64,
        rollout__max_tokens=16,
        data__max_prompt_tokens=16,
        reward__model__path="quickstart",
        reward__model__dtype="bfloat16",
        reward__model__micro_batch_size=2,
        actor__mini_batch_size=32,
        actor__micro_batch_size=4,
        critic__token_budget=256,
        critic__checkpoint_layers="selective",
        critic__compute_dtype="bfloat16",
        critic__offload="all",
        critic__optimizer__name="adamw_8bit",
        model__ref_dtype="bfloat16",
        model__ref_offload=False,
        model__offload="moments",
        model__forward_token_budget=512,
        mesh__shard=2,
    )
    files.save(settings, tmp_path / "run.toml")
    assert run(str(tmp_path / "run.toml"), "--gpu", "cpu", "--json", "-") == 0
    read = json.loads(capsys.readouterr().out)
    numbers = [read["case"][name] for name in ("tokens", "length", "micro_batches", "mini_batch")]
    assert numbers == [128, 32, 4, 32]
    weights = {role: 4 * count / 2 for role, count in read["parameters"].items()}  # of a rank of two
    assert weights["reward model"] == pytest.approx(weights["critic"])
    rest = {name: size for name, size in read["rest"].items() if name != "rows of the batch"}
    expected = {
        "reward model's parameters": weights["reward model"] / 2,
        "actor's parameters": weights["actor"],
        "actor's optimizer": 0,
        "critic's parameters": 0,
        "critic's optimizer": 0,
        "reference's parameters": weights["actor"] / 2,
    }
    assert {name: rest[name] for name in expected} == pytest.approx(expected, rel=0.01)
    case = cases_of(settings)
    passes_of = {stage: (at.rows, at.micro_batches) for stage in ROLES for at in [case.at(stage)]}
    assert passes_of == {
        "reward model": (2, 8),
        **dict.fromkeys(("teacher", "log-probs", "reference", "values"), (16, 1)),
        "update critic": (8, 2),
        "update actor": (4, 4),
    }
    critic, reference = case.at("update critic"), case.at("reference")
    assert (critic.compute_dtype, critic.checkpoint_layers, critic.offload) == (torch.bfloat16, "selective", "all")
    assert (reference.compute_dtype, reference.dtype, reference.offload) == (None, torch.bfloat16, "none")
    assert case.at("log-probs").offload == "moments"
    assert [case.at(name).optimizer.name for name in ("update actor", "update critic")] == ["adamw", "adamw_8bit"]


@pytest.mark.slow
def test_adapters_are_planned_over_one_base(tmp_path):
    """What a run with adapters holds: factors and their moments, one base in the dtype of the passes."""
    settings = tiny_run.settings(
        tmp_path, model__path="quickstart", model__lora__rank=4, model__lora__critic_rank=2, rollout__max_tokens=4
    )
    asked = cases_of(settings)
    assert (asked.lora, asked.critic_lora) == (Lora(4, 1.0), Lora(2, 1.0))
    small = case(layers=1, micro_batches=1, compute_dtype=torch.bfloat16)
    with_adapters = attrs.evolve(small, lora=asked.lora, critic_lora=asked.critic_lora)
    planned = plan(with_adapters)
    model, critic = (model_of(with_adapters, name) for name in ("actor", "critic"))
    base, numbers = model.frozen.shapes, sum(x.numel() for x in model.shapes.values())
    heads = critic.shapes["score.weight"].numel() + 1
    factors = sum(x.numel() for x in critic.shapes.values()) - heads
    assert numbers == 2 * factors
    assert planned.rest["base's weights"] == 2 * sum(x.numel() for x in base.values())
    assert planned.rest["actor's parameters"] == planned.rest["actor's optimizer"] / 2 == 4 * numbers
    assert planned.rest["critic's optimizer"] == 8 * (factors + heads)
    assert "reference's parameters" not in planned.rest
    assert planned.peak.total < plan(small).peak.total / 2
    linear = [x for name, x in base.items() if ".layers." in name and len(x) == 2]
    others = 2 * (sum(x.numel() for x in base.values()) - sum(x.numel() for x in linear))
    coded = {"int8": sum(x.numel() + 4 * x[0] for x in linear), "nf4": sum(36 * -(-x.numel() // 64) for x in linear)}
    for kind, size in coded.items():
        quantised = attrs.evolve(with_adapters, lora_base=kind)
        assert at_rest(quantised)["base's weights"] == size + others
    with_codes = plan(quantised)
    assert with_codes.peak.memory["base's weights"] == size + others < planned.peak.memory["base's weights"]
    assert f"in {kind} and bfloat16" in rendered(of_plan(with_codes, None))
    halves = at_rest(attrs.evolve(quantised, mesh={"shard": 2}))
    assert halves["base's weights"] == pytest.approx((size + others) / 2, rel=0.01)
    for axes, rank in (({"tensor": 2, "pipeline": 2}, 0), ({"tensor": 2, "shard": 2}, 0)):
        at = attrs.evolve(with_adapters, config=config(num_hidden_layers=2), mesh=axes)
        rest = at_rest(at)
        placed = models.place(
            model_of(at, "actor").plain, Mesh({name: Axis(2, rank) for name in axes if name != "shard"})
        )
        own = lora.without_base(placed, asked.lora)
        shards = axes.get("shard", 1)
        assert rest["actor's parameters"] == 4 * sum(-(-x[0] // shards) * x[1:].numel() for x in own.shapes.values())
        base = own.frozen.shapes.values()
        assert rest["base's weights"] == 2 * sum(-(-x[0] // shards) * x[1:].numel() for x in base)
    assert plan(attrs.evolve(at, mesh={"pipeline": 2, "tensor": 2})).fits


def test_the_passes_of_a_mini_batch_are_as_equal_as_those_of_a_run():
    at = with_sequences(case(tokens=320, length=32), 16)
    assert (at.rows, at.micro_batches) == (8, 2)
    assert [len(group) for group in fit([32] * 16, 320)] == [8, 8]
    wide = attrs.evolve(at, forward_tokens=32 * 12, roles={"critic": Role(tokens=32 * 7)})
    assert [(x.rows, x.micro_batches) for x in map(wide.at, ("values", "update critic"))] == [(8, 2), (6, 3)]


def full_rows(length, prompt, n, count):
    """Rows of full length in any order, of which n have one prompt."""
    g = torch.Generator().manual_seed(0)
    groups = torch.randperm(count, generator=g) // n
    prompts = torch.randint(2, 12, (count // n, prompt), generator=g)
    prompts[:, 0] = torch.arange(count // n)  # no two of them begin alike
    responses = torch.randint(2, 12, (count, length - prompt), generator=g)
    responses[:, 0] = torch.arange(count) % 12
    batch = passes.rows_of(case(length=length, response=1 - prompt / length), count)
    return tree.replace(batch, tokens=torch.cat([prompts[groups], responses], 1), groups=groups)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mini", "budget"),
    [
        pytest.param({"mini_batch_size": 32}, 176, marks=pytest.mark.slow),
        ({"mini_batch_size": 16, "draw_by": "prompt"}, 88),
    ],
    ids=str,
)
def test_shared_prompts_are_planned_as_a_run_computes_them(tmp_path, mini, budget):
    """Tokens, passes and FLOPs of an update, by the metrics of a run whose rows are as long as they may be."""
    sizes = {"rollout__batch_size": 32, "rollout__n": 8, "rollout__max_tokens": 8, "data__max_prompt_tokens": 24}
    sizes |= {f"actor__{name}": x for name, x in mini.items()} | {"actor__epochs": 1, "actor__token_budget": budget}
    settings = tiny_run.settings(tmp_path, model__path="quickstart", **sizes)
    planned = case_of(settings, PlanSettings(gpu="cpu"))
    apart = attrs.evolve(planned, together=1.0, forward_together=1.0)  # the same passes
    how = {"batch_size": 32, "n": 8, "steps": 1, "offload": "none", "offload_activations": False}
    how |= {"moments_directory": None}
    at, loop = planned.at("update actor"), learning_of("actor", settings.actor, **how).loop
    assert (at.distinct(at.rows), at.rows * at.micro_batches) == (budget, loop.mini_batch_size)
    model, batch = model_of(planned, "actor"), full_rows(32, 24, 8, 32)
    forward, optimizer = Forward(model), adamw(lambda step: 0.0)
    update = UpdateActor(forward=forward, loop=loop, optimizer=optimizer, loss_fn=losses.ppo_clip)
    state = init_state(models.init_params(model, Key(0)), optimizer)
    report = metrics.report(update(state, batch, key=Key(1))[1])
    assert report["perf/shared_tokens/actor"] == pytest.approx(1 - at.computed)
    first = loop.mini_batches(batch, Key(1).fold("epoch", 0))[0]
    assert len(cut(masks_of(batches.rows(batch, first), forward), loop.micro_batching)) == at.micro_batches
    gpu = hardware_of("h100")  # where launches are told apart from what is computed
    stages = [{x.name: x for x in plan(attrs.evolve(each, hardware=gpu)).stages} for each in (planned, apart)]
    one, other = (stage["update actor"] for stage in stages)
    assert report["perf/shared_flops/actor"] == pytest.approx(1 - one.model_flops / other.model_flops)
    for name in stages[0]:
        busy = [stage[name].seconds.compute - stage[name].seconds.launching for stage in stages]
        assert busy[0] < 0.6 * busy[1]
    assert one.memory[ACTIVATIONS] < 0.8 * other.memory[ACTIVATIONS]


@pytest.mark.parametrize(("rows", "n", "mini"), [(32, 8, 8), (24, 2, 6), (24, 4, 24)])
def test_rows_of_a_prompt_in_a_mini_batch_of_rows_are_those_of_many_draws(tmp_path, rows, n, mini):
    changes = {"rollout__batch_size": rows, "rollout__n": n, "actor__mini_batch_size": mini, "rollout__max_tokens": 1}
    settings = tiny_run.settings(tmp_path, model__path="quickstart", data__max_prompt_tokens=31, **changes)
    drawn = [mini_batches(torch.arange(rows), mini, key=Key(seed))[0] // n for seed in range(400)]
    prompts = sum(len(numbers.unique()) for numbers in drawn) / len(drawn)
    planned = case_of(settings, PlanSettings(gpu="cpu"))
    assert planned.together == pytest.approx(mini / prompts, rel=0.02)
    assert planned.forward_together == n


def cases_of(settings):
    return case_of(settings, PlanSettings())


@pytest.mark.slow
def test_what_does_not_fit_is_said_with_its_remedies(tmp_path, capsys):
    config(num_hidden_layers=1).save_pretrained(tmp_path)
    given = [*of_rows(128, 64), "--gpu", "h100", "--model.path", str(tmp_path), "--actor.token-budget", "4096"]
    given += ["--model.log-probs", "chunked", "--memory", "0.75"]
    assert run(*given) == 1
    out = capsys.readouterr().out
    assert "It does not fit" in out
    assert "--actor.token-budget 2048" in out
    assert run(*given, "--no-tries", "--json", "-") == 1
    assert json.loads(capsys.readouterr().out)["remedies"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model.path", "qwen2.5-7"], "did you mean qwen2.5-7b"),
        ([*NAMED, "--gpu", "h20"], "did you mean h200"),
        ([*NAMED, "--reward.model.path", "qwen2.5-7"], "--reward.model.path 'qwen2.5-7': there is no such"),
        (
            ["--model.path", "llama-3.1-8b", "--mesh.sequence", "8", "--reward.model.path", "qwen2.5-7b"],
            "--mesh.sequence 8: the reward model has 28 attention heads",
        ),
        ([*NAMED, "--gpu", "custom"], "--memory"),
        ([*NAMED, "--mesh.sequence", "3"], "these sizes do: 1, 2, 4"),
        ([*NAMED, "--gpus", "8", "--mesh.shard", "3"], "the mesh has 3 ranks"),
        ([*NAMED, "--gpus", "9", "--mesh.replicate", "2"], "the mesh has 8 ranks"),
        ([*NAMED, "--rollout.batch-size", "0"], "rollout.batch_size = 0: must be 1 or more"),
        ([*NAMED, "--rollout.n", "3"], "rollout.batch_size = 64: must be a multiple of rollout.n = 3"),
        ([*NAMED, "--actor.tokens", "4"], "did you mean actor.token_budget?"),
        ([*NAMED, "--model.lora.rank", "4", "--search", "2"], "--search 2: it does not know adapters"),
        (
            [*NAMED, "--mesh.pipeline", "2", "--mesh.virtual-stages", "2", "--search", "4", "--gpus", "4"],
            "--search 4: it looks for the mesh of so many GPUs; leave out --mesh.pipeline --mesh.virtual-stages --gpus",
        ),
        ([*NAMED, "--model.lora.base", "nf4"], "model.lora.base = 'nf4': nothing reads it"),
        (
            [*NAMED, "--model.lora.rank", "4", "--model.lora.base", "nf4", "--mesh.tensor", "4"],
            "--model.lora.base nf4: a tensor axis of 4 ranks does not go with nf4: ",
        ),
        ([*NAMED, "--mesh.expert", "2"], "quickstart is 'qwen2', which has no experts to cut"),
        (
            ["--model.path", "qwen3-30b-a3b", "--mesh.expert", "3"],
            "has 128 experts, which it does not divide; these sizes do",
        ),
        ([*NAMED, "--expert-load", "0.5"], "--expert-load 0.5: must be 1 or more"),
        (
            ["--model.path", "qwen3-30b-a3b", "--mesh.expert", "2", "--expert-load", "2.5"],
            "--expert-load 2.5: where one of the 2 ranks of --mesh.expert has all tokens, that is 2 times the mean",
        ),
        ([], "model.path = '': is not set"),
        (["--model", "quickstart", "--lora-base", "nf4"], "--model quickstart: it is --model.path now"),
        ([*NAMED, "--lora-base", "nf4"], "--lora-base nf4: it is --model.lora.base now"),
        ([*NAMED, "--rollout.max-rows", "4"], "--rollout.max-rows 4: it is --rollout.vllm.max-rows now"),
    ],
)
def test_mistakes_are_said(arguments, words, capsys):
    assert run(*arguments) == 2
    assert words in capsys.readouterr().err


def test_shards_are_what_the_other_axes_leave():
    others = {"pipeline": 1, "expert": 1, "context": 1, "tensor": 1}
    sizes = settings_plan.sizes_of(MeshSettings(replicate=2, sequence=4), 64)
    assert sizes == {"replicate": 2, "shard": 8, "sequence": 4, **others}


def test_every_old_flag_has_a_new_one():
    known = {f"--{path}" for path in files.paths()} | {"--algorithm.advantage"}
    named = {
        name: re.findall(r"--[a-z_.]+", text.replace("-", "_").replace("__", "--")) for name, text in RENAMED.items()
    }
    assert all(flags and known >= {*flags} for flags in named.values())
    assert not set(RENAMED) & (known | set(files.paths(PlanSettings)))


def test_a_custom_gpu_is_its_numbers():
    numbers = {"memory": GIB, "flops": 1e14, "bandwidth": 1e12, "node_bandwidth": 1e11, "network_bandwidth": 1e10}
    found = hardware_of("custom", numbers)
    assert (found.memory, found.flops, found.network_bandwidth) == (GIB, 1e14, 1e10)
    assert hardware_of("h100", {"memory": 2 * GIB}).memory == 2 * GIB
    assert Sharding().stage == 3


@pytest.mark.parametrize(
    ("gpu", "dtype", "expected"),
    [
        ("h100", "auto", (torch.bfloat16, "triton")),
        ("h100", "float16", (torch.float16, "chunked")),
        ("cpu", "auto", (None, "chunked")),
    ],
)
def test_a_plan_is_of_what_would_run_there(gpu, dtype, expected):
    planned = case_of(TrainSettings(model=ModelSettings(path="quickstart", compute_dtype=dtype)), PlanSettings(gpu=gpu))
    assert (planned.compute_dtype, planned.log_probs) == expected


def test_a_plan_has_the_config_of_the_run(tmp_path):
    config(num_hidden_layers=2).save_pretrained(tmp_path)
    for path in ("quickstart", str(tmp_path)):
        model = ModelSettings(path=path, config={"num_hidden_layers": 1})
        assert len(model_of(case_of(TrainSettings(model=model), PlanSettings()), "actor").layers) == 1


@pytest.mark.parametrize("virtual", [1, 2])
def test_the_formula_of_the_search_waits_as_a_pipeline_does(virtual):
    def seconds(micro_batches):
        moved = case(layers=4, mesh={"pipeline": 2}, virtual_stages=virtual, micro_batches=micro_batches)
        return rough(moved, {name: facts_of(moved, model_of(moved, name)) for name in models_of(moved)}).seconds

    assert seconds(4) / seconds(2) == pytest.approx((4 * virtual + 1) / (2 * virtual + 1))  # v m + p - 1


@pytest.mark.slow
@examples(max_examples=3)
@given(
    kind=st.sampled_from([config(num_hidden_layers=1), mixture(chosen=3, num_hidden_layers=1)]),
    how=st.sampled_from([False, True, "selective"]),
    log_probs=st.sampled_from(["reference", "chunked"]),
    half=st.integers(3, 40),  # a prompt, and a response
    rows=st.integers(1, 3),
)
@example(kind=config(num_hidden_layers=1), how="selective", log_probs="chunked", half=32, rows=2)
def test_the_formula_of_the_search_has_the_flops_of_an_update(kind, how, log_probs, half, rows):
    """Those of all that torch runs, again or not: it stops before the product that ends a dense layer."""
    sizes = {"length": 2 * half, "tokens": 2 * half * rows, "micro_batches": 1, "critic": False, "reference": False}
    one = case(config=kind, checkpoint_layers=how, log_probs=log_probs, **sizes)
    cost = sum((phase.cost.flops for phase in passes.run_stage(one, "update actor")), Counter())
    traced = [sum(x for kind, x in cost.items() if kind.startswith(word)) for word in ("attention", "matmul")]
    assert flops_of(one, "update actor", facts_of(one, model_of(one, "actor"))) == pytest.approx(traced, rel=1e-9)


@pytest.mark.slow
def test_the_plan_of_a_run_with_pools_is_one_of_each(tmp_path, capsys):
    tiny_run.write_task(tmp_path)
    placed = {
        "placement__pools": {"p": {"ranks": 2}, "v": {"ranks": 1}, "e": {"ranks": 3}},
        "placement__roles__actor": "p",
        "placement__roles__critic": "v",
        "placement__roles__rollout": "e",
    }
    files.save(tiny_run.settings(tmp_path, **placed), tmp_path / "placed.toml")
    files.save(tiny_run.settings(tmp_path), tmp_path / "alone.toml")
    flags = ["--gpu", "cpu", "--json", "-"]
    assert run(str(tmp_path / "placed.toml"), *flags) == 0
    pools = json.loads(capsys.readouterr().out)
    assert run(str(tmp_path / "alone.toml"), *flags) == 0
    alone = json.loads(capsys.readouterr().out)
    columns = {name: {call["call"]: call for call in pool["columns"]} for name, pool in pools.items()}
    assert {name: list(calls) for name, calls in columns.items()} == {
        "e": ["generate"],
        "p": ["old_log_prob", "ref", "balance", "update_actor"],
        "v": ["values", "update_critic"],
    }
    there, back = columns["v"]["update_critic"]["there"], columns["v"]["values"]["back"]
    assert (there["tokens"], there["advantages"], back) == (8 * 515 * 8, 8 * 3 * 4, {"values": 8 * 3 * 4})
    assert {"ref_log_probs", "old_log_probs", "returns"} <= set(there) - set(columns["v"]["values"]["there"])
    engines = pools.pop("e")
    assert engines["rollout"]["sent"] == 4 * alone["parameters"]["actor"]
    assert engines["sent"] == 3 * engines["rollout"]["sent"]
    assert pools["p"]["rollout"] is pools["v"]["rollout"] is None
    assert alone["rollout"]["engines"] == 1
    assert pools["v"]["host"]["rest"]["columns of the batch"] == sum(there.values())
    assert {name: list(pool["parameters"]) for name, pool in pools.items()} == {
        "p": ["actor", "reference"],
        "v": ["critic"],
    }
    assert pools["p"]["case"]["mesh"]["shard"] == 2
    whole = {stage["name"]: stage for stage in alone["stages"]}
    assert [stage["name"] for stage in pools["v"]["stages"]] == ["values", "update critic"]
    elsewhere = sum(size for kind, size in alone["rest"].items() if kind.startswith(("actor's", "reference's")))
    assert elsewhere > 0
    for stage in pools["v"]["stages"]:
        assert stage["total"] == pytest.approx(whole[stage["name"]]["total"] - elsewhere, rel=1e-3)
        assert stage["seconds"]["total"] == pytest.approx(whole[stage["name"]]["seconds"]["total"], rel=0.02)
    needed = {name: max(stage["total"] for stage in pool["stages"]) for name, pool in pools.items()}
    memory = (needed["p"] + needed["v"]) / 2 / GIB
    assert run(str(tmp_path / "placed.toml"), "--gpu", "cpu", "--memory", str(memory)) == 1
    shown = capsys.readouterr().out
    of_p, of_v = shown[shown.index("pool p: actor, reference") :].split("pool v: critic")
    assert needed["p"] < needed["v"]
    assert ("It fits" in of_p, "What would make it fit" in of_p) == (True, False)
    assert re.search(
        r"It does not fit: update critic .*What would make it fit.* --critic.token-budget \d+ ", of_v, re.DOTALL
    )
    assert "pool e: rollout\n\nrollout by the embedded engine: each of 3 engines has 3 rows" in shown
    table = of_v[of_v.index("columns of a step's batch to this pool, MiB") :].splitlines()
    assert table[1].split() == ["values", "update_critic"]
    assert next(line for line in table if "tokens" in line).split() == ["tokens", *2 * ["0.0314"]]  # 8 x 515 x 8 bytes
