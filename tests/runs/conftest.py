"""What tests of whole runs share."""

import pytest

from tests import tiny_run


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The files of a small task, of which each file of tests has its own."""
    directory = tmp_path_factory.mktemp("task")
    tiny_run.write_task(directory)
    return directory
