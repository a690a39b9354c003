"""A model holds no state: parameters go in, results come out, and the seams do what their caller says."""

import copy

import attrs
import pytest
import torch
from torch.nn import functional as F
from transformers import BertConfig, Llama4TextConfig

from fppo import models, tree
from fppo.grad import value_and_grad
from fppo.key import Key
from fppo.models.model import _has_shared
from fppo.models.run import call_layer, checkpointed_layers
from fppo.models.seams import LayerSeam, attention_seam, find_layers
from fppo_kernels.padding import make_lengths
from fppo_kernels.table import Kernels
from tests import tiny
from tests.models.families import CONFIGS, make, plain

KERNELS = Kernels.named()
TOKENS = torch.tensor([5, 7, 3, 9, 4, 8, 6])
POSITIONS = torch.tensor([0, 1, 2, 0, 1, 2, 3])
ATTEND = models.packed_attention(KERNELS.attention, make_lengths([3, 4]))


def run(model, params, **kwargs):
    return models.hidden_states(model, params, TOKENS, POSITIONS, attend=ATTEND, **kwargs)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_transformers_and_depend_on_the_key_alone(name):
    model = models.build(CONFIGS[name])
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    params = models.init_params(model, Key(1))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert tree.digest(models.init_params(model, Key(1))) == tree.digest(params)
    assert tree.digest(models.init_params(model, Key(2))) != tree.digest(params)
    assert dict(plain(model, params).named_parameters()).keys() == params.keys()
    assert {n: x.shape for n, x in params.items()} == dict(model.shapes)
    assert all(x.dtype == torch.float32 for x in params.values())
    assert all(x.is_meta for x in [*model.skeleton.parameters(), *model.skeleton.buffers()])
    norms = [x for n, x in params.items() if "norm" in n and n.endswith("weight")]
    assert all((x == (0 if "gemma" in name else 1)).all() for x in norms)


def test_passes_leave_nothing_behind():
    model, params = make("qwen2", dtype=torch.float32)
    first = run(model, params)
    other = run(model, {name: x + 1 for name, x in params.items()})
    assert not torch.equal(first, other)
    assert torch.equal(run(model, params), first)
    assert all(x.is_meta for x in [*model.skeleton.parameters(), *model.skeleton.buffers()])


def test_a_missing_parameter_is_named():
    model, params = make("qwen2")
    del params["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"parameters \['model\.layers\.1\.mlp\.up_proj\.weight'\]"):
        run(model, params)


def test_apply_layer_brings_the_layers_parameters():
    model, params = make("gemma2")
    start = model.prefix + "layers."
    inside = {n.removeprefix(model.prefix): x for n, x in params.items() if n.startswith(start)}
    outside = {n: x for n, x in params.items() if not n.startswith(start)}
    seen = []
    plain_apply = checkpointed_layers(model, inside)

    def apply_layer(index, layer, args, kwargs):
        seen.append((index, type(layer).__name__))
        return plain_apply(index, layer, args, kwargs)

    torch.testing.assert_close(run(model, outside, apply_layer=apply_layer), run(model, params), rtol=0, atol=0)
    assert seen == [(0, "Gemma2DecoderLayer"), (1, "Gemma2DecoderLayer")]


@pytest.mark.parametrize("checkpoint_layers", [False, True])
def test_compute_dtype_is_inside_the_gradient(checkpoint_layers):
    model, params = make("qwen2", dtype=torch.float32)
    half = attrs.evolve(model, compute_dtype=torch.bfloat16, checkpoint_layers=checkpoint_layers)
    assert run(half, params).dtype == torch.bfloat16
    assert models.output_head(half, params).weight.dtype == torch.bfloat16

    def loss(p, m):
        head = models.output_head(m, p)
        return KERNELS.log_probs(run(m, p), head.weight, TOKENS).log_probs.mean()

    (low, low_grads), (exact, grads) = (value_and_grad(loss)(params, m) for m in (half, model))
    assert all(g.dtype == torch.float32 for g in low_grads.values())
    assert abs(low - exact) < 0.1 * abs(exact)
    flat, low_flat = (torch.cat([g.flatten() for g in gs.values()]) for gs in (grads, low_grads))
    assert F.cosine_similarity(flat, low_flat, dim=0) > 0.98


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_with_a_cache_in_one_bind_equals_the_whole_pass(name):
    """What a rollout engine does: one token per row and call, keys and values kept by its own `attend`."""
    model, params = make(name)
    tokens = torch.randint(3, 31, (2, 6), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(6).expand(2, 6)
    whole = models.padded_attention(torch.ones(2, 6, dtype=torch.bool))
    expected = models.hidden_states(model, params, tokens, positions, attend=whole)
    cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(query, key, value, layer):
        index, scale, window, softcap, sinks = layer
        if index in cache:
            key, value = torch.cat([cache[index][0], key], 1), torch.cat([cache[index][1], value], 1)
        cache[index] = key, value
        seen = slice(None) if window is None else slice(-window, None)
        groups = query.shape[2] // key.shape[2]
        k, v = (x[:, seen].repeat_interleave(groups, 2) for x in (key, value))
        scores = torch.einsum("bshd,bkhd->bhsk", query, k) * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[None, :, None, None].expand(2, -1, 1, 1)], -1)
        return torch.einsum("bhsk,bkhd->bshd", scores.softmax(-1)[..., : k.shape[1]], v)

    def decode(skeleton):
        steps = [models.forward(skeleton, tokens[:, i, None], positions[:, i, None], attend=attend) for i in range(6)]
        return torch.cat(steps, 1)

    torch.testing.assert_close(models.bind(model, params, decode), expected, rtol=1e-10, atol=1e-12)


def test_a_seam_shows_the_layers_attributes_and_names():
    layer = torch.nn.Module()
    layer.attention_type, layer.weight = "sliding_attention", torch.nn.Parameter(torch.ones(2))
    layer.inner = torch.nn.Linear(2, 3)
    seam = LayerSeam(4, layer)
    assert seam.attention_type == "sliding_attention"
    assert dict(seam.named_parameters()).keys() == {"weight", "inner.weight", "inner.bias"}
    layer.forward = lambda x, **kwargs: (x, kwargs)
    assert seam(1, scale=2) == (1, {"scale": 2})
    seen = seam(1, scale=2, apply_layer=lambda *arguments: arguments)
    assert seen == (4, layer, (1,), {"scale": 2})


def test_models_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="unknown head 'reward'"):
        models.build(CONFIGS["llama"], "reward")
    chunked = Llama4TextConfig(vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    with pytest.raises(ValueError, match="chunked_attention"):
        models.build(chunked)


def test_attention_that_is_not_causal_is_refused():
    model = models.build(BertConfig(vocab_size=31, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ValueError, match="fppo cannot run"):
        run(model, models.init_params(model, Key(0)))


def test_tensors_with_several_names_are_looked_for_only_where_there_are_some(monkeypatch):
    model, params = make("llama")
    plain, shared = run(model, params), attrs.evolve(model, shares=True)
    assert torch.equal(run(shared, params), plain)
    monkeypatch.setattr(torch.nn.utils.stateless, "_untie_named_tensors_map", None)
    assert torch.equal(run(model, params), plain)
    recomputed = attrs.evolve(model, checkpoint_layers=True)
    assert torch.equal(run(recomputed, params), plain)
    for each in (shared, attrs.evolve(shared, checkpoint_layers=True)):
        with pytest.raises(TypeError):
            run(each, params)
    path = f"{model.layers[0]}."
    layer, own = model.skeleton.get_submodule(path[:-1]), {n: x for n, x in params.items() if path in n}
    own = {name.removeprefix(model.prefix + path): x for name, x in own.items()}
    with pytest.raises(TypeError, match="NoneType"):
        call_layer(shared, 0, layer, own, (), {})
    skeleton = copy.deepcopy(model.skeleton)
    assert not _has_shared(skeleton)
    skeleton.get_submodule(f"{model.layers[0]}.mlp.up_proj").weight = skeleton.get_input_embeddings().weight
    assert _has_shared(skeleton)


def test_a_critic_has_weights_of_its_own():
    """An update that overwrites the policy's memory leaves it alone."""
    model, params = tiny.model_and_params("lm")
    _, own = models.as_critic(model, params, Key(0))
    shared = [name for name, x in own.items() if name in params and x.data_ptr() == params[name].data_ptr()]
    assert len(own.keys() & params.keys()) > 5
    assert shared == []


def test_a_critic_runs_as_its_policy_does():
    model, params = tiny.model_and_params("lm")
    how = {"compute_dtype": torch.bfloat16, "checkpoint_layers": True, "compile_layers": True}
    critic, _ = models.as_critic(attrs.evolve(model, **how), params, Key(0), outputs=3)
    assert {name: getattr(critic, name) for name in how} == how
    assert (critic.head, critic.outputs, critic.layers) == ("value", 3, model.layers)


def test_a_parameter_is_of_the_layer_in_its_name():
    """With more than ten layers."""
    model = models.build(tiny.config(num_hidden_layers=12))
    numbers = [model.layer_of(f"model.layers.{i}.mlp.up_proj.weight") for i in range(12)]
    assert numbers == list(range(12))
    assert [model.layer_of(name) for name in model.shapes if ".layers." not in name] == [None, None]


def test_a_model_has_one_list_of_layers_whose_attention_gets_its_function():
    base = torch.nn.Module()
    base.config = tiny.config(num_hidden_layers=2)
    base.inner = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(2))})
    assert find_layers(base) == ("inner.layers.0", "inner.layers.1")
    for others in ({"others": torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(2))}, {"inner": None}):
        changed = copy.deepcopy(base)
        for name, module in others.items():
            setattr(changed, name, module)
        with pytest.raises(ValueError, match="expected one list of 2 decoder layers in Module, found"):
            find_layers(changed)
    heads = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="Linear does not pass keyword arguments on to its attention"):
        attention_seam(torch.nn.Linear(1, 1), heads, heads, heads, None)


@pytest.mark.parametrize(
    ("name", "needs"),
    [("qwen2", set()), ("mistral", {"window"}), ("gemma2", {"window", "softcap"}), ("gpt_oss", {"window", "sinks"})],
)
def test_a_model_needs_what_its_attention_does_beside_softmax(name, needs):
    assert models.attention_needs(make(name)[0]) == needs
