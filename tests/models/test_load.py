"""What is tried of a model when it is loaded, on which axes, and which of several heads is read."""

from __future__ import annotations

import importlib
import json
from fnmatch import fnmatch

import attrs
import pytest
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaConfig

from fppo import models, tree
from fppo.models.load import VALUE_HEADS, find_directory, read_value_head
from fppo.runtime import fsdp
from fppo.runtime.mesh import Sharding
from fppo.runtime.simulate import simulate
from fppo.runtime.weights import weight_files
from tests.models.families import COMMON, make

AXES = [{"shard": 2}, {"tensor": 2}, {"expert": 2}, {"pipeline": 2}, {"expert": 2, "tensor": 2}, {"expert": 4}]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_a_whole_model_is_tried_on_each_axis_that_cuts_it(axes, tmp_path, monkeypatch):
    model, params = make("qwen3_moe", dtype=torch.float32)
    models.save(model, params, tmp_path)
    loading, asked = importlib.import_module("fppo.models.load"), []

    def told(name):
        monkeypatch.setattr(
            loading, name, lambda model, *ranks, **more: asked.append((name, model.layout, ranks, more.get("tensor")))
        )

    for name in ("check_model", "check_placed", "check_dispatched", "check_staged"):
        told(name)
    simulate(axes, lambda mesh: models.load(tmp_path, mesh=mesh))
    each = {"check_model": (), "check_placed": ("tensor",), "check_dispatched": ("expert",), "check_staged": ()}
    needed = {"check_model", *(name for name, axis in each.items() if axes.keys() & set(axis))}
    needed |= {"check_staged"} if "pipeline" in axes else set()
    expected = {
        (name, None, tuple(axes[axis] for axis in each[name]), axes.get("tensor", 1) if "disp" in name else None)
        for name in needed
    }
    assert set(asked) == expected


@pytest.mark.parametrize(
    ("key_heads", "ranks", "cut"), [(2, 2, 2), (2, 4, 4), (2, 8, 4), (8, 8, 2), (4, 8, 4), (4, 4, 2), (1, 2, 4)]
)
def test_a_cut_is_tried_with_key_heads_on_several_ranks_where_the_model_has_them_so(key_heads, ranks, cut, monkeypatch):
    """The small instance has four heads and two key heads, or four of each."""
    place, tried = importlib.import_module("fppo.models.place"), []
    narrowed = place.narrowed
    monkeypatch.setattr(place, "narrowed", lambda model, ranks: tried.append(ranks) or narrowed(model, ranks))
    sizes = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": key_heads}
    models.check_placed(models.build(LlamaConfig(**COMMON | sizes)), ranks)
    assert tried == [cut]


@pytest.mark.parametrize("first", range(len(VALUE_HEADS)))
def test_of_several_value_heads_the_first_that_is_known_is_read_with_its_own_bias(first, tmp_path):
    kept = {name: number for number, name in enumerate(VALUE_HEADS) if number >= first}
    tensors = {f"{name}.weight": torch.full((2, 3), float(number)) for name, number in kept.items()}
    tensors |= {f"{name}.bias": torch.full((2,), 10.0 + number) for name, number in kept.items() if number % 2}
    save_file(tensors | {"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    found = read_value_head(tmp_path, torch.float64)
    assert {name: (x.dtype, x.tolist()) for name, x in found.items()} == {
        "score.weight": (torch.float64, [[float(first)] * 3] * 2),
        "score.bias": (torch.float64, [10.0 + first if first % 2 else 0.0] * 2),
    }


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("stored", [True, False])
def test_a_rank_has_its_rows_of_a_value_head_that_is_read_or_new(stored, tmp_path):
    model, params = make(
        "llama", head="value" if stored else "lm", dtype=torch.float32, **{"outputs": 5} if stored else {}
    )
    models.save(model, params, tmp_path)
    _, whole = models.load(tmp_path, "value", outputs=5)

    def run(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding())
        _, own = models.load(tmp_path, "value", outputs=5, mesh=mesh)
        return tree.digest(own), tree.digest(fsdp.shard(whole, mesh))

    assert all(found == expected for found, expected in simulate({"shard": 2}, run))
    assert whole["score.weight"].shape == (5, 16)


class Tokenizer:
    def save_pretrained(self, directory):
        (directory / "words.txt").write_text("a")


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_is_saved_with_its_tokenizer_and_how_it_generates(whole, tmp_path):
    model, params = make("llama", dtype=torch.float32)
    beside = {"tokenizer": Tokenizer(), "generation_config": GenerationConfig(max_new_tokens=3, eos_token_id=[2, 5])}
    if whole:
        models.save(model, params, tmp_path, **beside)
    else:
        models.save_config(model, tmp_path, **beside)
    assert (tmp_path / "words.txt").read_text() == "a"
    found = GenerationConfig.from_pretrained(tmp_path)
    assert (found.max_new_tokens, found.eos_token_id) == (3, [2, 5])
    assert bool(list(tmp_path.glob("*.safetensors"))) == whole


@pytest.mark.parametrize("name", ["/model.safetensors", "../m.safetensors", "a/../../m.safetensors", 3])
def test_weights_outside_of_the_directory_are_refused(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": name}))
    with pytest.raises(ValueError, match=r"config\.json names .* as transformers_weights, which is not a file in"):
        weight_files(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": "a/../m.safetensors"}))
    assert weight_files(tmp_path) == [tmp_path / "a/../m.safetensors"]


def test_what_comes_from_the_hub_is_a_model_once(monkeypatch, tmp_path):
    """No weights in the makers' own layouts come, and no pickles."""
    (tmp_path / "model.safetensors").touch()
    asked = {}

    def came(name, **how):
        asked.update(how, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", came)
    assert find_directory("some/model") == tmp_path
    assert asked["name"] == "some/model"

    def comes(file):
        allowed, ignored = (any(fnmatch(file, x) for x in asked[f"{what}_patterns"]) for what in ("allow", "ignore"))
        return allowed and not ignored

    for file in ("config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "chat_template.jinja", "own.py"):
        assert comes(file), file
    for file in ("original/consolidated.00.safetensors", "consolidated.safetensors", "pytorch_model.bin", "README.md"):
        assert not comes(file), file
