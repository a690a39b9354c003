"""These tests need the real vLLM, which has an environment of its own; elsewhere they say so and skip."""

import importlib.util
import os

import pytest

from fppo.rollout.vllm.engine import VllmEngine, VllmOptions
from tests.vllm.families import make

MISSING = importlib.util.find_spec("vllm") is None


def pytest_collection_modifyitems(items):
    if MISSING:
        for item in items:
            if "/tests/vllm/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed in this environment"))


def start(name="qwen2", *, options=None, **changes):
    """An engine for a tiny model, and the model."""
    model, _ = make(name)
    settings = {"cache_gb": 0.05, "max_rows": 16, **(options or {})}
    return VllmEngine(model, pad_token_id=0, options=VllmOptions(**settings), **changes), model


def process_of(engine):
    """The number of the process that vLLM is in."""
    return engine._host._group.call(os.getpid)


def damage(host, wrong, monkeypatch):
    """From now on this tensor is another one when it reaches the host."""
    take_in = host.take_in
    monkeypatch.setattr(host, "take_in", lambda x: take_in({k: v + 1e-6 if k == wrong else v for k, v in x.items()}))


@pytest.fixture
def qwen2():
    engine, model = start()
    with engine:
        yield engine, model
