"""Placed models in files: each rank reads its part, and all together write the whole."""

import sys

import attrs
import pytest
import safetensors.torch
import torch
from transformers import GptOssConfig, LlamaConfig

from fppo import models, tree
from fppo.key import Key
from fppo.models.narrow import find_cuts
from fppo.models.place import place_beside, prepare
from fppo.runtime.layout import Cut
from fppo.runtime.mesh import Mesh, Sharding
from fppo.runtime.simulate import simulate
from fppo_kernels.collectives import Axis
from tests import tiny
from tests.models.families import CONFIGS, make

AXES = [{"replicate": 2, "tensor": 2}, {"tensor": 4}, {"shard": 3, "tensor": 2}, {"pipeline": 2, "shard": 2}]


def sharded(mesh):
    return attrs.evolve(mesh, sharding=Sharding() if mesh["shard"].size > 1 else None)


@pytest.mark.slow
@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("name", ["phi3", "olmo2", "qwen3_moe"])
def test_what_ranks_read_is_their_part_and_what_they_write_the_whole(name, axes, tmp_path):
    model, params = make(name, dtype=torch.float32)
    if name == "phi3" and axes.get("tensor") == 4:
        pytest.skip("two key heads merged into one projection")
    models.save(model, params, tmp_path / "whole")

    def run(mesh):
        mesh = sharded(mesh)
        placed, own = models.load(tmp_path / "whole", mesh=mesh)
        assert tree.digest(own) == tree.digest(models.own_params(placed, params, mesh))
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in own.values())
        assert tree.digest(models.whole_params(placed, own, mesh)) == tree.digest(params)
        models.save(placed, own, tmp_path / "again", mesh=mesh)

    simulate(axes, run)
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"pipeline": 2, "tensor": 2}], ids=str)
def test_what_transformers_alone_can_read_is_cut_too(tmp_path, monkeypatch, axes):
    model, params = tiny.model_and_params("lm", dtype=torch.float32)
    models.save(model, params, tmp_path / "whole")
    monkeypatch.setattr(sys.modules["fppo.models.load"], "read_parts", lambda *args, **settings: None)

    def run(mesh):
        placed, own = models.load(tmp_path / "whole", mesh=mesh)
        assert tree.digest(own) == tree.digest(models.own_params(placed, params, mesh))

    simulate(axes, run)


def test_every_stage_says_what_a_checkpoint_lacks(tmp_path):
    model, params = tiny.model_and_params("lm", dtype=torch.float32)
    models.save(model, params, tmp_path)
    file = tmp_path / "model.safetensors"
    last = max(name for name in params if "layers.1." in name)
    safetensors.torch.save_file({n: x for n, x in params.items() if n != last}, file, metadata={"format": "pt"})

    def run(mesh):
        with pytest.raises(ValueError, match=f"missing .*{last}"):
            models.load(tmp_path, mesh=mesh)

    simulate({"pipeline": 2}, run)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_critic_is_read_and_written(tmp_path, axis):
    model, params = tiny.model_and_params("value", dtype=torch.float32)
    models.save(model, params, tmp_path / "whole")

    def run(mesh):
        placed, own = models.load(tmp_path / "whole", "value", mesh=mesh, key=Key(1))
        models.save(placed, own, tmp_path / "again", mesh=mesh)
        models.save_config(placed, tmp_path / f"config{mesh[axis].rank}")

    simulate({axis: 2}, run)
    _, again = models.load(tmp_path / "again", "value")
    assert tree.digest(again) == tree.digest(params)
    assert (tmp_path / "config1" / "config.json").read_bytes() == (tmp_path / "whole" / "config.json").read_bytes()


def test_a_model_that_cannot_be_cut_is_refused_when_it_is_loaded(tmp_path):
    model, params = make("gpt_neox", dtype=torch.float32)
    models.save(model, params, tmp_path)
    with pytest.raises(ValueError, match="cannot run model type 'gpt_neox' on a tensor axis of 2 ranks"):
        simulate({"tensor": 2}, lambda mesh: models.load(tmp_path, mesh=mesh))


@pytest.mark.parametrize(
    ("experts", "sizes", "virtual"),
    [
        (False, {"tensor": 2, "pipeline": 2}, 1),
        (False, {"pipeline": 2}, 2),
        (True, {"expert": 2, "tensor": 2}, 1),
        (True, {"expert": 2, "pipeline": 2}, 2),
    ],
    ids=str,
)
def test_a_layout_is_known_before_a_model_is_placed(experts, sizes, virtual):
    """Also with other stages than those of equal work, and for a model that differs in how it runs."""
    layers = {"num_hidden_layers": 4}
    config = type(CONFIGS["qwen3_moe"])(**CONFIGS["qwen3_moe"].to_dict() | layers) if experts else tiny.config(**layers)
    model = models.build(config)
    other = attrs.evolve(model, compute_dtype=torch.bfloat16, checkpoint_layers=True)
    own_cuts = [range(1), range(1, 2), range(2, 3), range(3, 4)] if virtual == 2 else [range(1), range(1, 4)]
    for rank in range(2):
        mesh = Mesh({name: Axis(size, rank) for name, size in sizes.items()}, virtual_stages=virtual)
        prepared = prepare(model, mesh)
        for cuts in (None, own_cuts) if "pipeline" in sizes else (None,):
            placed, like = (x.on(mesh, cuts) for x in (prepared, prepared.like(other)))
            assert prepared.layout(mesh, cuts) == placed.layout == like.layout
            if cuts is not None:
                assert [span.layers for span in placed.spans] == cuts[rank::2]
            assert (like.compute_dtype, like.checkpoint_layers, like.unplaced) == (torch.bfloat16, True, other)
            assert (placed.compute_dtype, placed.unplaced) == (None, model)


@pytest.mark.parametrize("virtual", [1, 2])
def test_a_model_of_anothers_tensors_has_the_others_stages(virtual):
    """A critic without the vocabulary's head, whose own stages would have other layers."""
    config = tiny.config(num_hidden_layers=8, vocab_size=400)
    model, critic = models.build(config), models.build(config, "value")
    for rank in range(2):
        mesh = Mesh({"pipeline": Axis(2, rank)}, virtual_stages=virtual)
        placed, own = models.place(model, mesh), models.place(critic, mesh)
        beside = place_beside(critic, placed, mesh)
        assert [x.layers for x in beside.spans] == [x.layers for x in placed.spans] != [x.layers for x in own.spans]
        assert place_beside(critic, model, mesh).spans == own.spans


def test_merged_projections_are_cut_by_heads_of_any_width():
    """Six wide, where the hidden size would make them four."""
    config = LlamaConfig(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=6)
    whole = {"a.qkv_proj.weight": (48, 16), "a.qkv_proj.bias": (48,), "b.gate_up_proj.weight": (20, 16), "c": (8, 16)}
    fewer = {"a.qkv_proj.weight": (24, 16), "a.qkv_proj.bias": (24,), "b.gate_up_proj.weight": (10, 16), "c": (8, 8)}
    cuts = find_cuts(*({name: torch.Size(x) for name, x in each.items()} for each in (whole, fewer)), config)
    heads = Cut(0, 2, (24, 12, 12))
    expected = {"b.gate_up_proj.weight": Cut(0, 2, (10, 10)), "c": Cut(1, 2, (16,))}
    assert cuts == {"a.qkv_proj.weight": heads, "a.qkv_proj.bias": heads, **expected}


@pytest.mark.parametrize(
    ("name", "fewer", "message"),
    [
        ("x", (4,), "x is no parameter of the narrower model, or has other dimensions"),
        ("y", (4, 6), "x is no parameter of the narrower model"),
        ("x", (2, 3), r"x of \[4, 6\] is \[2, 3\] in the narrower model, which is no equal part"),
        ("x", (4, 4), r"x of \[4, 6\] is \[4, 4\] in the narrower model, which is no equal part"),
    ],
)
def test_parameters_that_are_cut_otherwise_than_in_equal_parts_are_refused(name, fewer, message):
    with pytest.raises(ValueError, match=message):
        find_cuts({"x": torch.Size((4, 6))}, {name: torch.Size(fewer)}, LlamaConfig())


def test_experts_that_alternate_gate_and_up_are_cut_as_one_run():
    whole, fewer = ({"mlp.experts.gate_up_proj": torch.Size((4, 8, n))} for n in (12, 6))
    assert find_cuts(whole, fewer, GptOssConfig())["mlp.experts.gate_up_proj"] == Cut(2, 2, (12,))
    assert find_cuts(whole, fewer, LlamaConfig())["mlp.experts.gate_up_proj"] == Cut(2, 2, (6, 6))
