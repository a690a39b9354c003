"""Optimizers' state in files: the bits of memory, through updates and checkpoints, and nothing left behind."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path

import pytest
import torch

from fppo import losses, tree
from fppo.key import Key
from fppo.runtime import checkpoint
from fppo.runtime._checkpoint_files import on_host
from fppo.runtime.mapped import empty_beside, to_files, write_zeros
from fppo.runtime.offload import Lane, Offloaded, copied, offloaded_adamw
from fppo.steps import host_step, optimizers
from fppo.steps.actor import UpdateActor
from fppo.steps.adamw_8bit import adamw_8bit
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.muon import muon
from fppo.steps.optimizers import kept_on_host
from fppo.steps.train_state import init_state
from fppo_kernels.adamw import adamw_
from tests import tiny

LANE = Lane(torch.device("cpu"))
MAKE = {
    "adamw": optimizers.adamw,
    "sgd": partial(optimizers.sgd, momentum=0.9),
    "lion": optimizers.lion,
    "muon": muon,
    "adamw_8bit": partial(adamw_8bit, block_size=4),
}


def rate(step):
    return 1e-2


def files_of(values) -> list[str | None]:
    return [x.untyped_storage().filename for x in tree.tensors(values) if x.dim()]


def in_directory(values, directory: Path) -> bool:
    return {Path(name).parent for name in files_of(values)} == {directory}


def stage_of(name: str, offload: str):
    """An update whose state waits on the host as `offload` says, and its optimizer."""
    model, params = tiny.model_and_params("lm")
    forward, make = Forward(model), MAKE[name]
    if offload == "optimizer_step":
        optimizer = host_step.on_host(
            lambda wrap: make(rate, kernel=wrap(adamw_)) if name == "adamw" else make(rate), LANE
        )
    elif name == "adamw":
        optimizer = make(rate, kernel=offloaded_adamw(adamw_, LANE))
    else:
        optimizer = kept_on_host(make(rate), LANE)
    loop = Loop(mini_batch_size=2, micro_batching=MicroBatching(size=2))
    stage = UpdateActor(forward=forward, optimizer=optimizer, loop=loop, loss_fn=losses.ppo_clip)
    if offload == "all":
        stage = Offloaded(stage, LANE)
    if offload == "optimizer_step":
        stage = host_step.HostStep(stage, LANE, forward)
    return stage, init_state(tree.copy(params), optimizer)


@pytest.mark.parametrize(
    ("name", "offload"),
    [
        *(("adamw", offload) for offload in ("moments", "all", "optimizer_step")),
        *(("sgd", "moments"), ("lion", "optimizer_step"), ("muon", "all")),
        *(("adamw_8bit", offload) for offload in ("moments", "all", "optimizer_step")),
    ],
)
def test_moments_in_files_have_the_bits_of_moments_in_memory_and_stay_there(tmp_path, name, offload):
    (stage, state), batch = stage_of(name, offload), tiny.experience(3, 4, prompt=3, response=4)
    there = tree.replace(copied(state), opt=to_files(copied(state.opt), tmp_path, setting="x"))
    for step in range(2):
        state, _ = stage(state, batch, key=Key(step), donate=True)
        there, _ = stage(there, batch, key=Key(step), donate=True)
    assert tree.digest(there) == tree.digest(state)
    assert in_directory(there.opt, tmp_path)
    assert not any(files_of(there.params))
    assert not [*tmp_path.iterdir()]


def test_copies_of_what_is_in_files_are_in_files_and_a_checkpoint_is_the_same(tmp_path):
    values = {"a": torch.randn(3, 5).t(), "b": torch.randn(0, 4), "c": torch.tensor(2.0), "d": torch.arange(7)}
    there = to_files(copied(values), tmp_path, setting="x")
    assert in_directory(there, tmp_path)
    assert not any(files_of(values))
    assert there["a"].stride() == values["a"].stride()
    for copy in (copied(there), on_host({"d": there["d"]}, copy=True)):
        assert in_directory(copy, tmp_path)
        copy["d"].zero_()
    assert tree.digest(there) == tree.digest(values)
    assert empty_beside(values["a"]) is None
    for name, own in (("memory", values), ("files", there)):
        checkpoint.begin_save(own, tmp_path / name, 1).wait()
    blank = to_files(tree.map(torch.zeros_like, values), tmp_path, setting="x")
    loaded = checkpoint.load(blank, tmp_path / "memory", 1, donate=True)
    assert in_directory(loaded, tmp_path)
    assert tree.digest(loaded) == tree.digest(checkpoint.load(values, tmp_path / "files", 1)) == tree.digest(values)


def test_where_the_system_reserves_no_room_zeros_are_written(tmp_path):
    """As on macOS, which has no posix_fallocate."""
    values = {"a": torch.randn(3, 5).t(), "b": torch.randn(0, 4), "c": torch.tensor(2.0), "d": torch.arange(300_000)}
    there = to_files(values, tmp_path, setting="x", reserve=None)
    assert in_directory(there, tmp_path)
    assert tree.digest(there) == tree.digest(values)
    with (tmp_path / "zeros").open("w+b", buffering=0) as file:
        write_zeros(file.fileno(), 0, 3 << 20)
        assert file.read() == bytes(0)
        file.seek(0)
        assert file.read() == bytes(3 << 20)
    with open("/dev/full", "wb", buffering=0) as disk, pytest.raises(OSError, match="No space left"):
        write_zeros(disk.fileno(), 0, 8)


def test_a_disk_without_room_and_a_directory_that_is_missing_are_named_with_the_setting(tmp_path):
    values = {"a": torch.zeros(4)}
    with pytest.raises(ValueError, match=r"model\.moments_directory = '.*nowhere': No such file"):
        to_files(values, tmp_path / "nowhere", setting="model.moments_directory")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ValueError, match=r"model\.moments_directory = .*: No space left .* GiB that are free"):
        to_files(values, tmp_path, setting="model.moments_directory", reserve=full)
    assert not [*tmp_path.iterdir()]
