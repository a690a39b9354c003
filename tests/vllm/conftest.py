"""These tests need the real vLLM, which has an environment of its own; elsewhere they say so and skip."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator

import attrs
import pytest

from fppo.rollout.vllm import engine as engines
from fppo.rollout.vllm.engine import VllmEngine, VllmOptions
from fppo.rollout.vllm.host import Host
from fppo.rollout.vllm.local import LocalHost
from fppo.rollout.vllm.remote import RemoteHost, start_host
from tests.vllm.families import make

MISSING = importlib.util.find_spec("vllm") is None


def pytest_collection_modifyitems(items):
    if MISSING:
        for item in items:
            if "/tests/vllm/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed in this environment"))
    else:
        items.sort(key=lambda item: "lent" not in item.fixturenames)


def start(name="qwen2", *, model=None, options=None, **changes):
    """An engine for a tiny model, and the model."""
    model = model or make(name)[0]
    return VllmEngine(model, pad_token_id=0, options=options_of(options), **changes), model


def options_of(options=None):
    return VllmOptions(**{"cache_gb": 0.05, "max_rows": 16, **(options or {})})


_IDLE: dict[str, list[Host]] = {}  # vLLM that no test uses now, by what it was started with


def _end_idle(kind: type = object) -> None:
    for hosts in _IDLE.values():
        for host in [x for x in hosts if isinstance(x, kind)]:
            hosts.remove(host)
            host.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """vLLM stays in this process for tests that borrow it: others may start one here, or processes of a group."""
    if "lent" not in item.fixturenames:
        _end_idle(LocalHost)


@contextlib.contextmanager
def _lend(name="qwen2", *, options=None, **changes):
    own = options_of(options)
    key = repr((name, attrs.evolve(own, restarts=0, patience=1.0)))

    def taken(model, options, dtype):
        if not (hosts := _IDLE.setdefault(key, [])):
            if own.host == "local":  # there can be one in a process
                _end_idle(LocalHost)
            return start_host(model, options, dtype)
        host = hosts.pop()
        if isinstance(host, RemoteHost):
            host._options = options  # with its patience
        return host

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "start_host", taken)
        engine, model = start(name, options=options, **changes)
    with engine:
        yield engine, model
        if not engine._broken and engine._host is not None:
            _IDLE[key].append(engine._host)
            engine._host = None


@pytest.fixture(scope="session")
def lent() -> Iterator:
    """An engine as of `start`, for the length of a context, whose vLLM is one that an earlier test has given back
    whole, if there is any. Whatever a rollout depends on, its engine sends anew. Not for tests of starts and ends."""
    yield _lend
    _end_idle()


def process_of(engine):
    """The number of the process that vLLM is in."""
    return engine._host._group.call(os.getpid)


def damage(host, wrong, monkeypatch):
    """From now on this tensor is another one when it reaches the host."""
    take_in = host.take_in
    monkeypatch.setattr(host, "take_in", lambda x: take_in({k: v + 1e-6 if k == wrong else v for k, v in x.items()}))


@pytest.fixture
def qwen2(lent):
    with lent() as (engine, model):
        yield engine, model
