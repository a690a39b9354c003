"""Checkpoints: whole, atomic, checked."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from fppo import tree
from fppo.key import Key
from fppo.runtime import _checkpoint_files as files
from fppo.runtime import checkpoint


def _state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "params": {"w": torch.randn(5, 3, generator=generator), "h": torch.randn(2, generator=generator).bfloat16()},
        "count": torch.tensor(3.0),
        "key": Key(2**64 - 1),
        "step": 7,
        "coef": 0.1 + 0.2,
    }


def test_round_trip_is_bit_for_bit(tmp_path):
    checkpoint.begin_save(_state(), tmp_path, 7).wait()
    assert checkpoint.steps(tmp_path) == [7]
    assert tree.digest(checkpoint.load(_state(1), tmp_path, 7)) == tree.digest(_state())


def test_nothing_is_lost_where_no_thread_can_be_started(tmp_path):
    """As where there is no memory for its stack, or a limit on processes."""
    before = threading.stack_size(2**47 - 4096)  # no address space has room for it
    try:
        pending = checkpoint.begin_save(_state(), tmp_path, 7)
    finally:
        threading.stack_size(before)
    pending.wait()
    assert tree.digest(checkpoint.load(_state(1), tmp_path, 7)) == tree.digest(_state())


def test_a_template_may_give_its_memory_to_what_is_loaded(tmp_path):
    checkpoint.begin_save(_state(), tmp_path, 7).wait()
    other = _state(1) | {"params": {"w": torch.zeros(4, 3), "h": torch.zeros(2).bfloat16()}}
    with pytest.raises(checkpoint.CheckpointError, match="1 leaves differ"):
        checkpoint.load(other, tmp_path, 7, donate=True)
    assert not other["params"]["w"].any()  # kept: nothing came in its place
    template = _state(1)
    places = [x.data_ptr() for x in tree.tensors(template)]
    loaded = checkpoint.load(template, tmp_path, 7, donate=True)
    assert tree.digest(loaded) == tree.digest(_state())
    assert [x.data_ptr() for x in tree.tensors(loaded)] == places
    with pytest.raises(RuntimeError):
        template["params"]["w"].sum()


@pytest.fixture
def pinned(monkeypatch):
    """The sizes of all memory that was asked for as pinned, which no machine without a GPU has."""
    sizes, empty = [], torch.empty

    def recorded(*shape, pin_memory=False, **keywords):
        x = empty(*shape, **keywords)
        if pin_memory:
            sizes.append(x.nbytes)
        return x

    monkeypatch.setattr(torch, "empty", recorded)
    return sizes


def test_what_is_pinned_is_loaded_as_pinned(tmp_path, pinned, monkeypatch):
    state = _state()
    checkpoint.begin_save(state, tmp_path, 7).wait()
    template = _state(1)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: x is template["params"]["w"])
    assert tree.digest(checkpoint.load(template, tmp_path, 7)) == tree.digest(state)
    assert pinned == [state["params"]["w"].nbytes]


def test_a_state_on_a_gpu_is_copied_through_a_bounded_piece_of_pinned_memory(tmp_path, pinned, monkeypatch):
    """A state on the CPU that says it is on a GPU."""
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) * 3
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    tensors = {
        f"{kind} {i}": each.to(kind) for kind in kinds for i, each in enumerate((x, x.T, x[:, ::2], x[0, 0], x[:0]))
    }
    monkeypatch.setattr(files, "STAGE_BYTES", 16)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    copies = files.on_host(tensors, copy=True)
    monkeypatch.undo()
    assert pinned == [16]
    assert tree.digest(copies) == tree.digest(tensors)
    for name, copy in copies.items():
        assert copy.is_contiguous()
        assert copy.data_ptr() != tensors[name].data_ptr() or not copy.numel()


def test_only_the_newest_are_kept(tmp_path):
    for step in range(5):
        checkpoint.begin_save(_state(step), tmp_path, step, keep=2).wait()
    assert checkpoint.steps(tmp_path) == [3, 4]
    assert {p.name for p in tmp_path.iterdir()} == {"step_00000003", "step_00000004"}


def test_the_same_state_is_saved_once_and_another_does_not_replace_it(tmp_path):
    checkpoint.begin_save(_state(), tmp_path, 1).wait()
    checkpoint.begin_save(_state(), tmp_path, 1).wait()
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.begin_save(_state(1), tmp_path, 1).wait()
    assert tree.digest(checkpoint.load(_state(2), tmp_path, 1)) == tree.digest(_state())


def test_a_step_that_is_saved_again_is_whole_or_an_error(tmp_path):
    checkpoint.begin_save(_state(), tmp_path, 7).wait()
    data = checkpoint.path_of(tmp_path, 7) / "shard_00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    with pytest.raises(checkpoint.CheckpointError, match="there is one, and it is not whole"):
        checkpoint.begin_save(_state(), tmp_path, 7).wait()


@pytest.mark.parametrize("number", [5, 8])
def test_formats_of_other_versions_are_named(tmp_path, number):
    manifest = checkpoint.begin_save(_state(), tmp_path, 7).wait() / "state.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": number}))
    with pytest.raises(checkpoint.CheckpointError, match=f"has format {number}; this version reads 6 and 7"):
        checkpoint.load(_state(), tmp_path, 7)


def test_leaves_that_no_checkpoint_can_give_back_are_refused(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="a leaf of type set does not fit a checkpoint"):
        checkpoint.begin_save(_state() | {"more": {1}}, tmp_path, 7)
    assert checkpoint.steps(tmp_path) == []


def test_a_checkpoint_of_another_dtype_is_refused(tmp_path):
    """Copied into it, the numbers would be rounded without a word."""
    checkpoint.begin_save({"w": torch.ones(2, dtype=torch.float64)}, tmp_path, 1).wait()
    with pytest.raises(checkpoint.CheckpointError, match=r"\['w'\] is torch.float64 \(2,\), expected torch.float32"):
        checkpoint.load({"w": torch.zeros(2)}, tmp_path, 1)


def test_another_models_checkpoint_names_the_leaves(tmp_path):
    checkpoint.begin_save(_state(), tmp_path, 1).wait()
    other = _state()
    other["params"]["w"] = torch.zeros(4, 3)
    other["params"]["new"] = torch.zeros(1)
    with pytest.raises(checkpoint.CheckpointError, match=r"2 leaves differ.*\['w'\].*new.*missing|new.*\['w'\]"):
        checkpoint.load(other, tmp_path, 1)


@pytest.mark.parametrize("damage", ["truncate", "flip", "json", "missing", "plain", "rows", "gone"])
def test_damage_is_found_and_the_way_out_named(tmp_path, damage):
    checkpoint.begin_save(_state(), tmp_path, 1).wait()
    path = checkpoint.begin_save(_state(1), tmp_path, 2).wait()
    tensors, about, manifest = (
        path / f"{name}" for name in ("shard_00000.safetensors", "shard_00000.json", "state.json")
    )
    data = bytearray(tensors.read_bytes())
    match damage:
        case "truncate":
            tensors.write_bytes(data[: len(data) // 2])
        case "flip":
            data[-1] ^= 1
            tensors.write_bytes(data)
        case "json":
            manifest.write_text("{")
        case "missing":
            tensors.unlink()
        case "plain":
            manifest.write_text(manifest.read_text().replace("0.30000000000000004", "0.30000000000000008"))
        case "rows":
            about.write_text(about.read_text().replace('"rows": [0, 5]', '"rows": [0, 4]'))
        case "gone":
            about.unlink()
    with pytest.raises(checkpoint.CheckpointError, match=r"damaged: .*shard_00000|damaged: state\.json") as caught:
        checkpoint.load(_state(), tmp_path, 2)
    assert "Remove it to resume from step 1" in str(caught.value)


NODE = {"type": "builtins.tuple", "context": "null", "children_spec": []}


@pytest.mark.parametrize(
    "node",
    [
        {"type": "builtins.dict", "context": '{"__enum__": true, "fqn": "evil:E", "name": "x"}', "children_spec": []},
        {"type": "collections.defaultdict", "context": '{"default_factory_module": "evil"}', "children_spec": []},
        {"type": "torch.Size", "context": "null", "children_spec": []},
    ],
)
def test_a_structure_from_a_file_names_no_module(tmp_path, monkeypatch, node):
    """Only tuples, dicts and the project's own records are built: torch would import what the others name."""
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    structure = json.dumps([1, NODE | {"children_spec": [node]}])
    with pytest.raises(files.DamagedError, match="structure"):
        checkpoint._standins("ahead", {"structure": structure, "leaves": {}}, None)
    assert checkpoint._standins("ahead", {"structure": json.dumps([1, NODE]), "leaves": {}}, None) == ()


def test_a_full_disk_is_an_error_that_leaves_the_last_one(tmp_path, monkeypatch):
    checkpoint.begin_save(_state(), tmp_path, 1).wait()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(checkpoint.CheckpointError, match=r"No space left.*last complete one is of step 1"):
        checkpoint.begin_save(_state(1), tmp_path, 2).wait()
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    assert tree.digest(checkpoint.load(_state(2), tmp_path, 1)) == tree.digest(_state())


WRITER = """
import sys, pathlib, torch
from fppo.runtime import checkpoint
for step in range(10_000):
    state = {"x": torch.full((50_000,), float(step)), "step": step}
    checkpoint.begin_save(state, pathlib.Path(sys.argv[1]), step, keep=2).wait()
    print(step, flush=True)
"""


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    generator = torch.Generator().manual_seed(0)
    template = {"x": torch.zeros(50_000), "step": 0}
    for trial in range(3):
        directory = tmp_path / str(trial)
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.05 + 0.1 * torch.rand((), generator=generator).item())
        os.kill(writer.pid, signal.SIGKILL)
        printed = [int(line) for line in writer.communicate()[0].split()]
        step = checkpoint.steps(directory)[-1]
        assert step >= max(printed, default=0)
        loaded = checkpoint.load(template, directory, step)
        assert loaded["step"] == step
        assert bool((loaded["x"] == step).all())
        assert json.loads((checkpoint.path_of(directory, step) / "state.json").read_text())["step"] == step
