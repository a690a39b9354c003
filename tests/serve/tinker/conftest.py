"""Tests of the server are left out where its packages are missing, as they are without the extra `test`."""

import importlib.util
import os

NEEDED = ("fastapi", "uvicorn", "httpx2", "tinker")
WITHOUT = (
    "test_graphs.py",
    "test_losses.py",
    "test_runs.py",
    "test_provenance.py",
    "test_futures.py",
    "test_journal.py",
)
os.environ["TINKER_TELEMETRY"] = "0"  # its client would send what it does


def pytest_ignore_collect(collection_path, config):
    """Whether a file is left out."""
    lacking = not all(map(importlib.util.find_spec, NEEDED))
    return True if lacking and collection_path.suffix == ".py" and collection_path.name not in WITHOUT else None
