"""Runs on prompts with images whose batches wait for their step, or whose roles are in pools."""

import contextlib

import pytest

from fppo.assembly import pools
from fppo.commands import cli
from tests.assembly.test_images import arguments, write_task
from tests.runs.test_placed import Here, lines


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    write_task(directory, "idefics3")
    return directory


def train(task, directory, *more, file=()):
    command, *flags = arguments(task, f"--output-dir={directory}", "--checkpoint.every=1", *more)
    assert cli.main([command, *map(str, file), *flags]) == 0
    return lines(directory)


@pytest.mark.slow
def test_batches_with_images_wait_on_disk(task, tmp_path):
    whole = train(task, tmp_path / "whole", "--rollout.ahead=1", "--steps=3")
    train(task, tmp_path / "parts", "--rollout.ahead=1")
    assert train(task, tmp_path / "parts", "--rollout.ahead=1", "--steps=3")[1] == whole[1]


@pytest.mark.slow
def test_roles_in_pools_see_what_one_process_sees(task, tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "cluster", lambda name: contextlib.nullcontext(Here()))
    whole = train(task, tmp_path / "whole")
    places = {"actor": "a", "critic": "c", "rollout": "e"}
    roles = [f"--placement.roles.{role}={pool}" for role, pool in places.items()]
    (file := tmp_path / "pools.toml").write_text("".join(f"[placement.pools.{pool}]\nranks = 1\n" for pool in "ace"))
    apart = train(task, tmp_path / "apart", *roles, "--placement.engines.rows=16", file=[file])
    assert apart == whole
