"""What a model is asked to be, it is: options of loading, of heads and critics, and the parts that a rank asks for."""

from __future__ import annotations

import itertools

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import models, tree
from fppo.key import Key
from fppo.models import heads, lora, rows
from fppo.models.adapted import Lora
from fppo.models.experts import expert_count, expert_names
from fppo.models.heads import Head, logits_of
from fppo.models.init import init_value_head
from fppo.models.place import tensor_axis, tensor_parts
from fppo.runtime.mesh import Mesh
from fppo.runtime.simulate import simulate
from fppo_kernels.padding import make_lengths
from tests import tiny
from tests.models.families import CONFIGS, EXPERTS


@pytest.mark.usefixtures("unprobed")
def test_a_model_is_loaded_with_what_is_asked_for(tmp_path):
    model, params = tiny.model_and_params("lm", dtype=torch.float32)
    models.save(model, params, tmp_path)
    how = {"compute_dtype": torch.bfloat16, "checkpoint_layers": True, "config": {"rms_norm_eps": 0.5}}
    loaded, half = models.load(tmp_path, dtype=torch.bfloat16, **how)
    assert (loaded.compute_dtype, loaded.checkpoint_layers, loaded.head) == (torch.bfloat16, True, "lm")
    assert (loaded.config.rms_norm_eps, loaded.skeleton.config.rms_norm_eps, model.config.rms_norm_eps) == (
        *(0.5, 0.5),
        tiny.config().rms_norm_eps,
    )
    assert tree.digest(half) == tree.digest({name: x.bfloat16() for name, x in params.items()})
    with pytest.raises(ValueError, match=r"has no \['rms_eps'\]; it has \[.*'rms_norm_eps'"):
        models.load(tmp_path, config={"rms_eps": 0.5, "rms_norm_eps": 0.1})


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("outputs", [4, range(1, 3), range(4)])
def test_some_outputs_of_a_value_head_are_read_or_drawn_in_float32(tmp_path, outputs):
    model = models.build(tiny.config(), "value", outputs=4)
    params = models.init_params(model, Key(2))
    params["score.bias"] = torch.arange(4.0)
    models.save(model, params, tmp_path / "value")
    taken = slice(0, 4) if outputs == 4 else slice(outputs.start, outputs.stop)
    loaded, found = models.load(tmp_path / "value", "value", dtype=torch.bfloat16, outputs=outputs)
    expected = {name: x[taken] if name.startswith("score.") else x.bfloat16() for name, x in params.items()}
    assert tree.digest(found) == tree.digest(expected)
    assert loaded.outputs == len(found["score.bias"])
    models.save(*tiny.model_and_params("lm", dtype=torch.float32), tmp_path / "lm")
    for key in (None, Key(7)):
        loaded, found = models.load(tmp_path / "lm", "value", dtype=torch.bfloat16, outputs=outputs, key=key)
        drawn = init_value_head(loaded, Key(7))
        zeros = {name: torch.zeros_like(x) for name, x in drawn.items()}
        own = {name: x for name, x in found.items() if name.startswith("score.")}
        assert tree.digest(own) == tree.digest(zeros if key is None else drawn)


@pytest.mark.parametrize(("spread", "dtype"), [(0.5, torch.float32), (0.01, torch.float64), (0.0, torch.bfloat16)])
def test_a_value_head_is_drawn_as_wide_as_the_config_says(spread, dtype):
    model = models.build(tiny.config(initializer_range=spread), "value", outputs=3)
    noise = torch.randn(3, 16, generator=Key(4).fold("score").generator(), dtype=torch.float64)
    expected = {"score.weight": ((spread or 0.02) * noise).to(dtype), "score.bias": torch.zeros(3, dtype=dtype)}
    assert tree.digest(init_value_head(model, Key(4), dtype)) == tree.digest(expected)
    whole = models.init_params(model, Key(4), dtype)
    assert {name: x for name, x in whole.items() if name in expected}.keys() == expected.keys()
    assert tree.digest({name: whole[name] for name in expected}) == tree.digest(expected)
    assert {x.dtype for x in whole.values()} == {dtype}


def test_a_critic_is_run_as_the_policy_is():
    model, params = tiny.model_and_params("lm", dtype=torch.bfloat16)
    run_as = {"compute_dtype": torch.bfloat16, "checkpoint_layers": "selective", "compile_layers": True}
    critic, own = models.as_critic(attrs.evolve(model, **run_as), params, Key(1), outputs=2)
    assert {name: getattr(critic, name) for name in run_as} == run_as
    assert (critic.head, critic.outputs, list(own)) == ("value", 2, list(critic.shapes))
    assert all(torch.equal(own[name], x) for name, x in params.items() if name in own)
    assert tree.digest({name: own[name] for name in ("score.weight", "score.bias")}) == tree.digest(
        init_value_head(critic, Key(1), torch.bfloat16)
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_known_by_its_names_and_its_width(tied):
    model = models.build(tiny.config(tie_word_embeddings=tied))
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert heads.embedding_name(model) == "model.embed_tokens.weight"
    assert heads.vocabulary_head(model) == (name, name.replace("weight", "bias"))
    assert heads.hidden_width(model) == 16
    for axis in ("tensor", "pipeline"):  # where a rank has some rows, or no table at all
        assert simulate({axis: 2}, lambda mesh: heads.hidden_width(models.place(model, mesh))) == [16, 16]


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("biased", [False, True])
def test_logits_are_the_head_s_formula_in_its_dtype(softcap, biased):
    g, seen = torch.Generator().manual_seed(0), []
    weight, hidden = (torch.randn(size, generator=g, dtype=torch.float64) for size in ((5, 3), (2, 4, 3)))
    bias = torch.randn(5, generator=g, dtype=torch.float64) if biased else None

    def linear(x, weight, bias):
        seen.append((x.dtype, weight.shape))
        return x @ weight.T + (0 if bias is None else bias)

    found = logits_of(Head(weight, bias, softcap, 0.3), hidden.float(), linear)
    products = (torch.einsum("bsh,vh->bsv", hidden.float().double(), weight) + (0 if bias is None else bias)) * 0.3
    torch.testing.assert_close(found, products if softcap is None else softcap * (products / softcap).tanh())
    torch.testing.assert_close(logits_of(Head(weight, bias, softcap, 0.3), hidden.float()), found)
    assert seen == [(torch.float64, (5, 3))]
    value = models.output_head(*tiny.model_and_params("value"))
    assert (value.softcap, value.scale, value.weight.shape) == (None, 1.0, (1, 16))


def test_experts_are_counted_by_the_config():
    for name in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama"):
        config = (CONFIGS | EXPERTS)[name]
        model = models.build(config)
        assert expert_count(config) == (model.routers[0].experts if model.routers else 0)
        assert {model.shapes[each][0] for each in expert_names(model)} == {expert_count(config)} - {0}


def test_an_adapted_model_is_decoded_merged_where_passes_are_wide_or_as_is_asked():
    model, params = tiny.model_and_params("lm")
    adapted, adapter = lora.adapt(model, params, Lora(2, 4.0, ("q_proj",)), key=Key(0))
    adapter = {name: x + 0.5 for name, x in adapter.items()}
    dtypes = {None: True, torch.float32: True, torch.float64: True, torch.bfloat16: False, torch.float16: False}
    for dtype, merges in dtypes.items():
        own = attrs.evolve(adapted, compute_dtype=dtype)
        assert lora.decodes_merged(own) == merges
        for wanted in (None, True, False):
            decoded, found = lora.decoded(own, adapter, merges=wanted)
            whole = merges if wanted is None else wanted
            assert (decoded.frozen is None, decoded.compute_dtype) == (whole, dtype)
            expected = lora.merged(own, adapter) if whole else own.joined(adapter)
            assert tree.digest(found) == tree.digest(expected)
    plain, found = lora.decoded(model, params)
    assert (plain, found) == (model, params)
    assert lora.kept(model) == frozenset()
    assert lora.kept(adapted) == {name for name in params if not name.endswith("q_proj.weight")}


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.sampled_from([0.0, 0.5, 1.0]))
def test_rows_of_similar_length_run_together_and_come_back_to_their_places(sizes, like):
    groups = rows.grouped(make_lengths(sizes), like=like)
    assert sorted(row for group in groups for row in group.rows) == list(range(len(sizes)))
    starts = [sum(sizes[:row]) for row in range(len(sizes))]
    hidden = torch.randn(1, sum(sizes), 3, generator=torch.Generator().manual_seed(0))
    longest = [max(sizes[row] for row in group.rows) for group in groups]
    assert longest == sorted(longest, reverse=True)
    for group, most in zip(groups, longest, strict=True):
        assert group.shape == (len(group.rows), most)
        assert min(sizes[row] for row in group.rows) >= like * most
    for most, following in itertools.pairwise(longest):
        assert following < like * most  # else it ran together with it
    seen = []

    def run(number, padded):
        seen.append(number)
        for place, row in enumerate(groups[number].rows):
            size = sizes[row]
            assert torch.equal(padded[place, :size], hidden[0, starts[row] : starts[row] + size])
            assert not padded[place, size:].any()
        return padded * 2, padded.sum(-1)

    doubled, sums = rows.by_groups(groups, hidden, run)
    assert torch.equal(doubled, hidden * 2)
    torch.testing.assert_close(sums, hidden.sum(-1))
    assert torch.equal(rows.by_groups(groups, hidden, lambda number, padded: padded + 1), hidden + 1)
    assert seen == list(range(len(groups)))


def test_some_whole_parameters_are_gathered_in_the_dtypes_that_are_asked_for():
    model, params = tiny.model_and_params("lm", dtype=torch.float32)
    names = ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"]
    dtypes = {name: torch.bfloat16 if "embed" in name else torch.float32 for name in params}

    def run(mesh):
        placed = models.place(model, mesh)
        own = models.own_params(placed, params, mesh)
        whole = models.whole_params(placed, own, mesh, dtypes=dtypes)
        assert tree.digest(whole) == tree.digest({name: x.to(dtypes[name]) for name, x in params.items()})
        some = models.whole_params(placed, own, mesh, names=names)
        assert tree.digest(some) == tree.digest({name: x for name, x in params.items() if name in names})
        # all layers, cut over the tensor axis alone
        alone = models.place(model, Mesh({"tensor": mesh["tensor"]}))
        joined, parts = tensor_parts(placed, own, mesh)
        assert tree.digest(parts) == tree.digest(models.own_params(alone, params, mesh))
        assert (joined.shapes, joined.spans, tensor_axis(placed, mesh)) == (alone.shapes, (), mesh["tensor"])

    simulate({"pipeline": 2, "tensor": 2}, run)

    def of_one(mesh):
        placed = models.place(model, mesh)
        joined, whole = tensor_parts(placed, models.own_params(placed, params, mesh), mesh)
        assert (joined, tensor_axis(placed, mesh).size) == (model, 1)
        assert tree.digest(whole) == tree.digest(params)

    simulate({"pipeline": 2}, of_one)
