"""Models saved from shards: the files of one process, with no rank ever holding the model."""

import contextlib
import importlib
import threading
import weakref

import attrs
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fppo import models, tree
from fppo.models.save import _made_of
from fppo.runtime import fsdp
from fppo.runtime.exports import CONTENTS
from fppo.runtime.mesh import Mesh, Sharding
from fppo.runtime.simulate import simulate
from fppo.runtime.streamed import written
from tests.models.families import CONFIGS, make, plain

pytestmark = pytest.mark.usefixtures("unprobed")
FILE = 4000


def save(mesh, model, params, directory, **settings):
    mesh, model = attrs.evolve(mesh, sharding=Sharding()), models.place(model, mesh)
    models.save(model, models.own_params(model, params, mesh), directory, mesh=mesh, **settings)


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("name", CONFIGS)
def test_files_are_those_that_transformers_writes(name, tmp_path):
    model, params = make(name, dtype=torch.bfloat16)
    models.save(model, params, tmp_path / "ours", max_shard_bytes=FILE)
    plain(model, params).save_pretrained(tmp_path / "theirs", max_shard_size=FILE)
    ours, theirs = contents(tmp_path / "ours"), contents(tmp_path / "theirs")
    assert len(ours) > 4
    if name in ("qwen3_moe", "olmoe"):  # transformers' files are too large there: it counts what experts share once
        stored = [{k: x for f in d.glob("*.safetensors") for k, x in load_file(f).items()} for d in tmp_path.iterdir()]
        assert tree.digest(dict(sorted(stored[0].items()))) == tree.digest(dict(sorted(stored[1].items())))
        return
    assert ours.keys() == theirs.keys() | {CONTENTS}
    assert [file for file in theirs if ours[file] != theirs[file] and file != "config.json"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head", "axes"),
    [
        ("llama", "lm", {"shard": 2}),
        ("qwen2", "lm", {"replicate": 2, "shard": 3}),
        ("qwen3_moe", "lm", {"shard": 4}),
        ("qwen3_moe", "lm", {"shard": 3, "expert": 2}),
        ("gpt2", "value", {"shard": 2, "sequence": 2}),
        ("cohere", "value", {"shard": 2}),
    ],
)
@pytest.mark.parametrize("size", [FILE, 1 << 30])
def test_files_from_shards_are_those_of_one_process(name, head, axes, size, tmp_path):
    model, params = make(name, head=head, dtype=torch.bfloat16)
    models.save(model, params, tmp_path / "one", max_shard_bytes=size)
    simulate(axes, lambda mesh: save(mesh, model, params, tmp_path / "many", max_shard_bytes=size))
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["many", "one"]
    wide_head = {name: x.float() if name.startswith("score.") else x for name, x in params.items()}
    assert tree.digest(models.load(tmp_path / "many", head, dtype=torch.bfloat16)[1]) == tree.digest(wide_head)


def test_transformers_loads_what_shards_saved(tmp_path):
    model, params = make("qwen3_moe", dtype=torch.float32)
    simulate({"shard": 3}, lambda mesh: save(mesh, model, params, tmp_path, max_shard_bytes=FILE))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    tokens = torch.tensor([[5, 7, 3, 9]])
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, plain(model, params)(tokens).logits, rtol=0, atol=0)


def test_ranks_with_whole_parameters_write_them_once(tmp_path):
    model, params = make("llama", dtype=torch.float32)
    simulate({"replicate": 2, "shard": 2}, lambda mesh: models.save(model, params, tmp_path / "m", mesh=mesh))
    assert tree.digest(models.load(tmp_path / "m")[1]) == tree.digest(params)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_no_rank_holds_more_than_one_parameter(tmp_path, monkeypatch):
    model, params = make("llama", dtype=torch.float32)
    alive, most = {}, {}
    real = fsdp.gather

    def gather(*args, **kwargs):
        found = real(*args, **kwargs)
        rank = threading.current_thread().name
        for x in found.values():
            alive[rank] = alive.get(rank, 0) + x.nbytes
            most[rank] = max(most.get(rank, 0), alive[rank])
            weakref.finalize(x, lambda size=x.nbytes: alive.__setitem__(rank, alive[rank] - size))
        return found

    monkeypatch.setattr(fsdp, "gather", gather)
    simulate({"shard": 2}, lambda mesh: save(mesh, model, params, tmp_path))
    assert most == dict.fromkeys(("rank 0", "rank 1"), max(x.nbytes for x in params.values()))
    assert not any(alive.values())


@pytest.mark.parametrize("stage", ["file", "tensor", "tokenizer"])
def test_a_failure_of_the_first_rank_is_one_of_all_and_leaves_the_old_one(tmp_path, monkeypatch, stage):
    model, params = make("llama", dtype=torch.float32)
    models.save(model, params, tmp_path / "m")
    files = []

    @contextlib.contextmanager
    def full(path, like, **kwargs):
        files.append(path)
        with written(path, like, **kwargs) as write:
            yield no_space if len(files) == 2 else write

    def no_space(name, x):
        raise OSError(28, "No space left on device") if stage == "file" else ValueError("not the tensor")

    class Tokenizer:
        def save_pretrained(self, directory):
            raise OSError(28, "No space left on device")

    def run(mesh):
        try:
            changed = {name: x + 1 for name, x in params.items()}
            tokenizer = Tokenizer() if stage == "tokenizer" else None
            save(mesh, model, changed, tmp_path / "m", max_shard_bytes=FILE, tokenizer=tokenizer)
        except (OSError, RuntimeError, ValueError) as error:
            return type(error), str(error)

    with monkeypatch.context() as patch:
        if stage != "tokenizer":
            patch.setattr(importlib.import_module("fppo.models.save"), "written", full)
        first, *others = simulate({"shard": 2, "replicate": 2}, run)
    kind, text = (
        (ValueError, "not the tensor") if stage == "tensor" else (OSError, "[Errno 28] No space left on device")
    )
    assert first == (kind, text)
    for other, said in others:
        assert other is RuntimeError
        assert f"could not be saved on the first rank: {kind.__name__}: {text}" in said
    assert tree.digest(models.load(tmp_path / "m")[1]) == tree.digest(params)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_shards_of_another_mesh_are_refused(tmp_path):
    model, params = make("llama", dtype=torch.float32)
    with pytest.raises(ValueError, match="cannot save: parameters that are"):
        models.save(model, fsdp.shard(params, attrs.evolve(Mesh.local())) | {"new": torch.ones(1)}, tmp_path)

    def run(mesh):
        models.save(model, params, tmp_path, mesh=attrs.evolve(mesh, sharding=Sharding()))

    with pytest.raises(ValueError, match="of another shape"):
        simulate({"shard": 2}, run)


def test_a_stored_tensor_may_take_several_parameters():
    """Where a family stores fused what it holds apart, a layer's are gathered together."""
    params = {f"layers.{i}.{n}.weight": torch.empty(2, 2, device="meta") for i in (0, 1) for n in "qk"}
    params["norm.weight"] = torch.empty(2, device="meta")

    def fused(given):
        found = {"norm.weight": given["norm.weight"]} if "norm.weight" in given else {}
        for i in {name.split(".")[1] for name in given} - {"weight"}:
            found[f"layers.{i}.qk.weight"] = torch.cat([given[f"layers.{i}.{n}.weight"] for n in "qk"])
        return found

    made_of = _made_of(fused, params, fused(params))
    assert made_of == {
        "layers.0.qk.weight": ("layers.0.q.weight", "layers.0.k.weight"),
        "layers.1.qk.weight": ("layers.1.q.weight", "layers.1.k.weight"),
        "norm.weight": ("norm.weight",),
    }
