"""A run on disk for the tests of commands."""

from __future__ import annotations

import sys

import pytest

from fppo.settings import files
from tests import tiny_run


@pytest.fixture
def task(tmp_path):
    """A directory with the tiny run's files and its settings, run.toml."""
    tiny_run.write_task(tmp_path)
    files.save(tiny_run.settings(tmp_path), tmp_path / "run.toml")
    return tmp_path


@pytest.fixture
def started(tmp_path, monkeypatch):
    """What the first of several ranks is started with, a line each; the ranks are stand-ins, which end at once."""
    noted, python = tmp_path / "started", tmp_path / "python"

    def ends_with(status):
        begun = f'[ "$RANK" = 0 ] && echo "$WORLD_SIZE $*" >> "{noted}"'
        python.write_text(f"#!/bin/sh\n{begun}\nexit {status}\n")
        python.chmod(0o755)
        noted.write_text("")
        return lambda: noted.read_text().splitlines()

    monkeypatch.setattr(sys, "executable", str(python))
    return ends_with
