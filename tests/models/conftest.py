"""What tests of models share."""

import importlib

import pytest


@pytest.fixture
def unprobed(monkeypatch):
    """What is loaded is not tried on small random instances: test_probe.py and others do that."""
    loading = importlib.import_module("fppo.models.load")
    for name in ("check_model", "check_placed", "check_dispatched", "check_staged"):
        monkeypatch.setattr(loading, name, lambda *_, **__: None)
