"""Quantised bases on meshes: on every layout the codes, the update, the weights and the samples of one process."""

import math
from functools import cache, partial

import attrs
import pytest
import torch
from transformers import GPT2Config, GptOssConfig, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from fppo import losses, metrics, models, tree
from fppo.key import Key
from fppo.models import bases, lora
from fppo.models.adapted import Lora
from fppo.models.codes import is_coded
from fppo.models.place import place_beside
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.runtime import fsdp
from fppo.runtime.mesh import LOCAL, Mesh, Sharding
from fppo.runtime.simulate import simulate
from fppo.runtime.watch import watched
from fppo.steps.actor import UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.train_state import init_state
from fppo_kernels.collectives import Axis
from fppo_kernels.table import Kernels
from tests import tiny
from tests.models import families
from tests.rollout.test_embedded import make_prompts
from tests.steps.test_adapters import noisy

pytest.importorskip("bitsandbytes", reason="pip install 'fppo[quantised]'")

SPEC = Lora(rank=3, alpha=6.0)
TWO = MicroBatching(size=2)
OPTIMIZER = adamw(lambda step: 0.01, eps=1.0, max_grad_norm=0.5)
WIDE = families.COMMON | {"hidden_size": 128, "intermediate_size": 256}
MOE = {"num_experts_per_tok": 2}
CONFIGS = {  # of widths that two ranks cut between blocks
    "llama": LlamaConfig(**WIDE, attention_bias=True, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**WIDE, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=31, n_embd=128, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2),
    "qwen3_moe": Qwen3MoeConfig(**WIDE, **MOE, head_dim=32, num_experts=4, moe_intermediate_size=128),
    "gpt_oss": GptOssConfig(
        **WIDE, **MOE, head_dim=32, num_local_experts=4, sliding_window=3, rope_parameters=families.ROPE
    ),
    "narrow": families.CONFIGS["llama"],  # where blocks run over the ends of rows
    "narrow experts": families.CONFIGS["qwen3_moe"],
}
# axes, stage of the sharding (None: whole parameters), layers recomputed; head, family, codes
LAYOUTS = [
    ({"shard": 3}, 3, False, "lm", "llama", "nf4"),
    ({"tensor": 2}, None, False, "lm", "llama", "nf4"),
    ({"expert": 2}, 3, False, "lm", "narrow experts", "nf4"),
    ({"shard": 2}, 2, False, "value", "narrow", "nf4"),
    ({"shard": 3}, 1, True, "value", "llama", "int8"),
    ({"shard": 3}, 3, False, "lm", "gpt2", "nf4"),  # layers stored [in, out]
    ({"tensor": 4}, None, False, "lm", "llama", "int8"),  # two key heads
    ({"pipeline": 2, "shard": 2}, 3, True, "lm", "qwen2", "nf4"),
    ({"tensor": 2, "shard": 2}, 3, False, "lm", "gpt_oss", "int8"),  # experts stored [in, out]
    ({"expert": 2, "tensor": 2}, None, False, "lm", "qwen3_moe", "nf4"),
    ({"tensor": 2, "shard": 2}, 3, True, "lm", "qwen3_moe", "int8"),
    ({"tensor": 2, "pipeline": 2, "shard": 2}, 3, False, "value", "llama", "int8"),
]


@cache
def plain(head, name, dtype, passes):
    """A model in floats, which ranks share."""
    return families.make(name, config=CONFIGS[name], head=head, dtype=dtype, compute_dtype=passes)


def in_codes(model, params, kind, dtype, mesh=LOCAL):
    return lora.adapt(*models.quantise(model, params, kind, mesh=mesh), SPEC, key=Key(3), dtype=dtype, mesh=mesh)


@cache
def whole_adapter(head, name, kind, dtype, passes):
    """The parameters of an adapter in one process."""
    return in_codes(*plain(head, name, dtype, passes), kind, dtype)[1]


def adapted(head="lm", mesh=LOCAL, *, name, kind, again=False, dtype=torch.float64, passes=None):
    """An adapted model on a base in codes with parameters, none of which is 0: on a mesh that cuts, this rank's."""
    model, params = plain(head, name, dtype, passes)
    placed = models.place(attrs.evolve(model, checkpoint_layers=again), mesh)
    on_rank, own = in_codes(placed, models.own_params(placed, params, mesh), kind, dtype, mesh)
    whole = whole_adapter(head, name, kind, dtype, passes)
    assert tree.digest(own) == tree.digest(models.own_params(on_rank, whole, mesh))
    return on_rank, models.own_params(on_rank, noisy(whole), mesh)


def outcome(head, mesh, **settings):
    model, params = adapted(head, mesh, **settings)
    fn = partial(UpdateActor, loss_fn=losses.ppo_clip) if head == "lm" else UpdateCritic
    batch = tiny.experience(7, 7)
    state, report = fn(
        forward=Forward(model, mesh=mesh),
        loop=Loop(mini_batch_size=4, micro_batching=TWO, epochs=1),
        optimizer=OPTIMIZER,
    )(init_state(params, OPTIMIZER), tree.replace(batch, tokens=batch.tokens % 8))
    whole = {what: models.whole_params(model, x, mesh) for what, x in (("params", state.params), ("mu", state.opt.mu))}
    return dict(tree.leaves_with_paths(whole)), metrics.report(report), model


def bytes_of(model):
    return sum(x.nbytes for x in lora.frozen_of(model).params.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=() if n < 3 else pytest.mark.slow) for n in range(len(LAYOUTS))]
)
def test_every_layout_makes_the_update_of_one_process(number):
    axes, stage, again, head, name, kind = LAYOUTS[number]
    expected, numbers, alone = outcome(head, LOCAL, name=name, kind=kind)

    def run(mesh):
        mesh = attrs.evolve(mesh, sharding=None if stage is None else Sharding(stage=stage))
        return outcome(head, mesh, again=again, name=name, kind=kind)

    held = []
    for got, report, model in simulate(axes, run):
        assert got.keys() == expected.keys()
        for path, x in expected.items():
            torch.testing.assert_close(got[path], x, rtol=1e-10, atol=1e-12)
        prefix = "actor" if head == "lm" else "critic"
        assert report[f"{prefix}/grad_norm"] == pytest.approx(numbers[f"{prefix}/grad_norm"], rel=1e-10)
        assert lora.frozen_of(model).digest == lora.frozen_of(alone).digest
        assert bases.base_kind(model) == kind
        held.append(bytes_of(model))
    assert max(held) < 1.4 * bytes_of(alone) / math.prod(size for axis, size in axes.items() if axis != "expert")


def test_a_pass_gathers_codes_and_no_wide_weights():
    """In 16 bits, whose rounding is for weights and not for their scales."""
    make = partial(adapted, name="llama", kind="nf4", dtype=torch.float32, passes=torch.bfloat16)
    alone, _ = make()
    batch = tiny.experience(3, 2)

    def run(mesh):
        mesh, watch = watched(attrs.evolve(mesh, sharding=Sharding()))
        model, _ = make(mesh=mesh)
        before = watch.traffic()["shard"]
        got = compute_log_probs({}, batch, forward=Forward(lora.base_of(model), mesh=mesh), micro_batching=TWO)
        return got, watch.traffic()["shard"].since(before).bytes

    (got, sent), (_, other) = simulate({"shard": 2}, run)
    base = lora.frozen_of(alone).params
    whole = sum(x.nbytes / (1 if is_coded(n) else 2) for n, x in base.items())
    assert sent + other == pytest.approx(whole, rel=0.05)  # each sends its half; shards of odd rows are padded
    expected = compute_log_probs({}, batch, forward=Forward(lora.base_of(alone)), micro_batching=TWO)
    assert torch.equal(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes", "kind"),
    [
        ("gpt2", {"shard": 3}, "nf4"),
        ("llama", {"tensor": 2, "pipeline": 2, "shard": 2}, "int8"),
        pytest.param("narrow experts", {"expert": 2, "shard": 2}, "nf4", marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"tensor": 2, "shard": 3}, "nf4", marks=pytest.mark.slow),
    ],
)
def test_each_rank_merges_its_part_and_the_base_alone(name, axes, kind):
    model, adapter = adapted(name=name, kind=kind)
    whole, dense = lora.merged(model, adapter), lora.base_weights(model)

    def on_ranks(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding() if mesh["shard"].size > 1 else None)
        own, shards = adapted(mesh=mesh, name=name, kind=kind)
        parts = lora.merged(own, shards, mesh=mesh)
        shapes = fsdp.shard_shapes(own.plain.shapes, mesh, own.plain.cuts)
        assert {n: tuple(x.shape) for n, x in parts.items()} == shapes
        return [models.whole_params(own.plain, x, mesh) for x in (parts, lora.base_weights(own, mesh=mesh))]

    for got in simulate(axes, on_ranks):
        for one, other in zip(got, (whole, dense), strict=True):
            assert one.keys() == other.keys()
            for each, x in other.items():
                torch.testing.assert_close(one[each], x, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes", "kind"),
    [
        ("qwen2", {"tensor": 2, "pipeline": 2}, "nf4"),
        pytest.param("gpt2", {"shard": 3}, "int8", marks=pytest.mark.slow),
        pytest.param("narrow experts", {"expert": 2}, "int8", marks=pytest.mark.slow),
    ],
)
def test_the_embedded_engine_samples_on_ranks_what_one_process_samples(name, axes, kind):
    ask = Ask(make_prompts((3, 1, 4)), Sampling(max_tokens=6, n=2), Key(5))

    def rollout(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding() if mesh["shard"].size > 1 else None)
        model, adapter = adapted(mesh=mesh, name=name, kind=kind, dtype=torch.float32)
        return EmbeddedEngine(model=model, kernels=Kernels.named(), pad_token_id=0, mesh=mesh).generate(adapter, ask)

    expected = rollout(LOCAL)
    for got in simulate(axes, rollout):
        assert torch.equal(got.tokens, expected.tokens)
        assert (got.rollout_log_probs - expected.rollout_log_probs).abs().max() < 1e-4


def test_a_critic_stands_on_the_codes_of_the_policy():
    critic = models.build(CONFIGS["llama"], "value")

    def on_ranks(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding())
        policy, _ = adapted(mesh=mesh, name="llama", kind="nf4")
        beside = bases.in_codes(place_beside(critic, policy, mesh), "nf4", torch.float64)
        base = lora.frozen_of(policy).params
        head = models.own_params(
            beside, {n: torch.zeros(beside.whole_shapes[n]) for n in beside.shapes if "score" in n}, mesh
        )
        own, _ = lora.adapt(
            beside, {n: base[n] for n in beside.shapes if n in base} | head, SPEC, key=Key(1), mesh=mesh
        )
        assert lora.same_base(policy, own)
        assert own.forms == policy.forms

    simulate({"pipeline": 2, "shard": 2}, on_ranks)


def test_axes_that_would_cut_what_has_one_scale_are_refused_with_the_numbers():
    on_two, on_four = (Mesh({"tensor": Axis(n, 0)}) for n in (2, 4))
    for name, mesh, words in (
        (
            "llama",
            on_four,
            r"o_proj.weight is cut within blocks of 64 weights .* in 4 parts of 128 .*one of \[1, 2\] ranks",
        ),
        ("narrow", on_two, r"q_proj.weight has rows of 16 weights, not a multiple of the 64 .*give int8"),
    ):
        placed = models.place(models.build(CONFIGS[name]), mesh)
        with pytest.raises(ValueError, match=r"model\.lora\.base = 'nf4': a tensor axis of . ranks .*" + words):
            bases.in_codes(placed, "nf4", torch.float32)
        assert bases.in_codes(placed, "int8", torch.float32).plain.shapes == placed.shapes
