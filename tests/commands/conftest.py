"""A run on disk for the tests of commands."""

from __future__ import annotations

import pytest

from fppo.settings import files
from tests import tiny_run


@pytest.fixture
def task(tmp_path):
    """A directory with the tiny run's files and its settings, run.toml."""
    tiny_run.write_task(tmp_path)
    files.save(tiny_run.settings(tmp_path), tmp_path / "run.toml")
    return tmp_path
