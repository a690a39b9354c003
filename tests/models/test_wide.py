"""Parameters that a family keeps in float32 stay so wherever others are cast to 16 bits, as transformers keeps them."""

import attrs
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fppo import models, tree
from fppo.key import Key
from fppo.models import bases
from fppo.models.model import float32_names, named_state
from fppo.models.several import Adapter, fitted
from fppo.rollout.sync import reshard
from fppo.runtime import fsdp
from fppo.runtime.mesh import Sharding
from fppo.runtime.simulate import simulate
from fppo.steps.sharded import whole, wire_dtypes
from fppo_kernels.attention.sdpa import sdpa
from fppo_kernels.padding import make_lengths
from tests.models.families import COMMON, CONFIGS, EXPERTS, make
from tests.models.hybrids import HYBRIDS

HALVES = (torch.bfloat16, torch.float16)
GATE = "model.layers.1.mlp.gate.weight"
MORE = {
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8, "moe_layer_start_index": 0},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": [2, 2], "head_dim": 4, "num_shared_expert": [1, 1]},
    "afmoe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_dense_layers": 1},
    "solar_open": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 4},
}
OTHERS = {name: AutoConfig.for_model(name, **COMMON | changes) for name, changes in MORE.items()}
FAMILIES = {**CONFIGS, **EXPERTS, **HYBRIDS, **OTHERS}
# some that keep nothing else wide, some that list names, some whose modules create float32, some for float16 alone
NAMES = ("qwen3", "gpt2", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "mamba", *OTHERS)


def family(name, **changes):
    return make(name, config=FAMILIES[name], dtype=torch.float32, **changes)


def of_transformers(model, params, path, dtype):
    """The dtypes of what transformers loads in `dtype`, and its module."""
    models.save(model, params, path)
    module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    module.set_experts_implementation("eager")
    return {name: x.dtype for name, x in named_state(module).items() if name not in model.buffers}, module


def kinds(model, params):
    return {name: x.dtype for name, x in params.items() if name not in model.buffers}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", NAMES)
def test_passes_and_copies_have_the_dtypes_of_transformers(name, dtype, tmp_path):
    model, params = family(name, compute_dtype=dtype)
    expected, _ = of_transformers(model, params, tmp_path / "m", dtype)
    bound = models.bind(model, params, lambda module: kinds(model, named_state(module)))
    inside = {n: kind for n, kind in expected.items() if n.startswith(model.prefix)}
    assert {f"{model.prefix}{n}": kind for n, kind in bound.items() if f"{model.prefix}{n}" in inside} == inside
    assert models.output_head(model, params).weight.dtype == dtype
    assert kinds(model, models.in_compute_dtype(model, params)) == expected
    wired = wire_dtypes(model, params)
    assert {n: kind for n, kind in wired.items() if n not in model.buffers} == expected
    _, loaded = models.load(tmp_path / "m", dtype=dtype)
    assert kinds(model, loaded) == kinds(model, models.init_params(model, Key(0), dtype)) == expected
    sent = {}
    for bucket in reshard(params, model.shapes, bucket_bytes=999, dtype=dtype, exact=float32_names(model, dtype)):
        sent |= bucket.tensors
    assert kinds(model, sent) == expected
    wide = {n for n, kind in expected.items() if kind == torch.float32}
    assert all(torch.equal(x[n], params[n]) for n in wide for x in (loaded, sent))
    assert all(kind == torch.float32 for n, kind in kinds(model, params).items() if n in wide)


@pytest.mark.parametrize(("name", "some"), [("qwen3", 0), ("glm4_moe", 1), ("ernie4_5_moe", 2), ("hunyuan_v1_moe", 2)])
def test_routers_of_bfloat16_passes_are_in_float32(name, some):
    model, params = family(name, compute_dtype=torch.bfloat16)
    gates = {n for n in params if n.endswith(("gate.weight", "wg.weight"))}
    narrow = models.in_compute_dtype(model, params)
    assert {n for n, x in narrow.items() if x.dtype == torch.float32 and n not in model.buffers} == gates
    assert len(gates) == some


@pytest.mark.parametrize("name", ["glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe", "gpt_oss"])
@pytest.mark.parametrize("again", [False, True])
def test_a_bfloat16_pass_gives_the_logits_of_transformers_bfloat16_model(name, again, tmp_path):
    model, params = family(name, compute_dtype=torch.bfloat16, checkpoint_layers=again)
    tokens = torch.arange(3, 23)
    _, module = of_transformers(model, params, tmp_path / "m", torch.bfloat16)
    attend = models.packed_attention(sdpa, make_lengths([20]))
    with torch.no_grad():
        theirs = module(tokens[None]).logits[0]
        hidden = models.hidden_states(model, params, tokens, torch.arange(20), attend=attend)
        ours = models.heads.logits_of(models.output_head(model, params), hidden)
    apart = (ours - theirs).abs().amax(-1)
    assert apart.median() < 0.02 * theirs.abs().max()
    assert (apart > 0.1 * theirs.abs().max()).float().mean() <= 0.1  # rounding of attention may move a token


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["shard", "pipeline"])
def test_parts_are_loaded_and_gathered_in_the_dtypes_of_whole_ones(axis, tmp_path):
    model, params = family("glm4_moe", compute_dtype=torch.bfloat16)
    models.save(model, params, tmp_path)
    _, half = models.load(tmp_path, dtype=torch.bfloat16)

    def run(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding())
        placed, own = models.load(tmp_path, mesh=mesh, dtype=torch.bfloat16, compute_dtype=torch.bfloat16)
        wide = fsdp.shard(params, mesh) if axis == "shard" else own
        return models.whole_params(placed, own, mesh), whole(wide, placed, mesh).params if axis == "shard" else {}

    for read, gathered in simulate({axis: 2}, run):
        assert tree.digest(read) == tree.digest(half)
        assert not gathered or tree.digest(gathered) == tree.digest(models.in_compute_dtype(model, params))


def test_adapters_follow_the_weights_that_they_adapt_and_codes_replace_no_wide_ones():
    model, params = family("qwen3", compute_dtype=torch.bfloat16)
    name = "model.layers.0.self_attn.q_proj.weight"
    model = attrs.evolve(model, float32_params={torch.bfloat16: frozenset({name})})
    adapted, adapter = models.adapt(model, params, models.Lora(2, 4.0, ("q_proj",)), key=Key(0))
    narrow = models.in_compute_dtype(adapted, adapted.joined(adapter))
    wide = {n for n, x in narrow.items() if x.dtype == torch.float32}
    assert wide == {name, f"{name}.lora_A", f"{name}.lora_B"}
    beside = fitted(model, Adapter.of(adapted, adapter), "a", torch.device("cpu"), torch.float32)
    assert {n for n, x in beside.factors.items() if x.a.dtype == torch.float32} == {name}
    assert name not in bases.quantised_weights(model)
    assert name.replace("q_proj", "k_proj") in bases.quantised_weights(model)


def test_a_model_in_float32_or_wider_keeps_nothing_apart():
    for dtype in (None, torch.float32, torch.float64):
        model, params = make("glm4_moe", compute_dtype=dtype)
        narrow = models.in_compute_dtype(model, params)
        assert {x.dtype for n, x in narrow.items() if n not in model.buffers} == {dtype or torch.float64}
