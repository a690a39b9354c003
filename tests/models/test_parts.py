"""A rank reads its part of a checkpoint, and holds no more than that and one tensor."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PreTrainedModel

from fppo import models, tree
from fppo.key import Key
from fppo.runtime import fsdp
from fppo.runtime.mesh import LOCAL, Mesh, Sharding
from fppo_kernels.collectives import Axis
from tests.models.families import CONFIGS, make

pytestmark = pytest.mark.usefixtures("unprobed")
loading = importlib.import_module("fppo.models.load")

PEAK = """
import json, sys, pathlib
from fppo import models
from fppo.runtime.mesh import Mesh, Sharding
from fppo_kernels.collectives import Axis

def memory(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10

small, large = sys.argv[1:]
models.load(small)
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
_, params = models.load(large, mesh=Mesh({"shard": Axis(4, 1, None)}, Sharding()))
part = sum(x.nbytes for x in params.values())
print(json.dumps([memory("VmHWM") - before, part]))
"""


def mesh_of(ranks, rank):
    return Mesh({"shard": Axis(ranks, rank, None)}, Sharding())


@pytest.fixture
def never_whole(monkeypatch):
    """transformers would read all of a model; a rank does not ask it to."""
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)


@pytest.mark.slow
@pytest.mark.usefixtures("never_whole")
@pytest.mark.parametrize(
    ("name", "head"), [*((name, "lm") for name in CONFIGS), *((name, "value") for name in ("qwen2", "gpt2", "opt"))]
)
def test_the_parts_of_all_ranks_are_the_whole(name, head, tmp_path):
    model, params = make(name, head=head, dtype=torch.bfloat16)
    models.save(model, params, tmp_path, max_shard_bytes=4000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    _, whole = models.load(tmp_path, head)
    assert tree.digest(whole) == tree.digest({n: x.float() for n, x in params.items()})
    for rank in (0, 2, 4):  # more ranks than heads: some have no rows of some tensors
        mesh = mesh_of(5, rank)
        part = models.load(tmp_path, head, mesh=mesh)[1]
        assert tree.digest(part) == tree.digest(fsdp.shard(whole, mesh))
        assert all(x.is_contiguous() and x.storage_offset() == 0 for x in part.values())


def test_a_critic_from_a_policy_is_cut_too(tmp_path):
    model, params = make("qwen2", dtype=torch.float32)
    models.save(model, params, tmp_path)
    whole = models.load(tmp_path, "value", key=Key(1))[1]
    for rank in range(3):
        part = models.load(tmp_path, "value", key=Key(1), mesh=mesh_of(3, rank))[1]
        assert tree.digest(part) == tree.digest(fsdp.shard(whole, mesh_of(3, rank)))
        for x in part.values():  # in the file's dtype too it has memory of its own, as torch aligns it
            assert x.untyped_storage().nbytes() == x.nbytes
            assert x.data_ptr() % 64 == 0


@pytest.mark.parametrize("mesh", [LOCAL, mesh_of(3, 1)], ids=["whole", "cut"])
def test_what_transformers_alone_can_read_is_read_whole_and_cut(mesh, tmp_path, monkeypatch):
    model, params = make("llama", dtype=torch.float32)
    models.save(model, params, tmp_path)
    expected = models.load(tmp_path)[1]
    monkeypatch.setattr(loading, "read_parts", lambda *_, **__: None)
    got = models.load(tmp_path, mesh=mesh)[1]
    assert tree.digest(got) == tree.digest(fsdp.shard(expected, mesh))


@pytest.mark.usefixtures("never_whole")
def test_a_checkpoint_of_the_base_model_without_its_prefix(tmp_path):
    model, params = make("gpt2", dtype=torch.float32)
    models.save(model, params, tmp_path)
    stored = {name.removeprefix("transformer."): x for name, x in load_file(tmp_path / "model.safetensors").items()}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert tree.digest(models.load(tmp_path)[1]) == tree.digest(params)


@pytest.mark.slow
def test_at_load_a_rank_holds_no_more_than_its_part_and_one_tensor(tmp_path):
    shared = {"num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 4000}
    for name, width in (("small", 32), ("large", 512)):
        model = models.build(LlamaConfig(**shared, hidden_size=width, intermediate_size=4 * width))
        models.save(model, models.init_params(model, Key(0), torch.bfloat16), tmp_path / name)
    largest = max(x.numel() for x in model.shapes.values()) * 4
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "large")],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    peak, part = json.loads(done.stdout)
    assert part > 4 * largest / 2
    assert peak < part + largest + (4 << 20)


@pytest.mark.usefixtures("never_whole")
@pytest.mark.parametrize("head", ["lm", "value"])
def test_what_a_model_leaves_aside_is_no_reason_to_read_it_whole(head, tmp_path):
    """Buffers of older versions, and heads of values."""
    model, params = make("llama", dtype=torch.float32)
    models.save(model, params, tmp_path)
    file = tmp_path / "model.safetensors"
    others = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2), "score.weight": torch.ones(1, 16)}
    save_file(load_file(file) | others, file, metadata={"format": "pt"})
    found = models.load(tmp_path, head)[1]
    inside = {name: x for name, x in params.items() if head == "lm" or name.startswith(model.prefix)}
    assert tree.digest({name: found[name] for name in inside}) == tree.digest(inside)
    assert found.keys() - inside.keys() == (set() if head == "lm" else {"score.weight", "score.bias"})


def test_what_a_language_model_does_not_know_is_named_and_a_critic_leaves_it_aside(tmp_path):
    model, params = make("llama", dtype=torch.float32)
    models.save(model, params, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"other.weight": torch.ones(2)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"does not hold a whole 'llama' model: unknown \['other.weight'\]"):
        models.load(tmp_path)
    inside = {name: x for name, x in models.load(tmp_path, "value")[1].items() if name in params}
    assert tree.digest(inside) == tree.digest({name: params[name] for name in inside})
