"""These tests need the real vLLM, which has an environment of its own; elsewhere they say so and skip."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator

import attrs
import pytest
import torch

from fppo.rollout.sync import SyncError
from fppo.rollout.vllm import engine as engines
from fppo.rollout.vllm import remote
from fppo.rollout.vllm.engine import VllmEngine, VllmOptions
from fppo.rollout.vllm.host import Host
from fppo.rollout.vllm.local import LocalHost
from fppo.rollout.vllm.remote import RemoteHost, start_host
from fppo.rollout.vllm.vision import weight_names
from fppo.runtime.mesh import LOCAL
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


def _key(model, options, dtype):
    return repr(
        (model.whole_config.to_json_string(use_diff=False), attrs.evolve(options, restarts=0, patience=1.0), dtype)
    )


def _end_idle(kind: type = object) -> None:
    for hosts in _IDLE.values():
        for host in [x for x in hosts if isinstance(x, kind)]:
            hosts.remove(host)
            host.close()


def _take(model, options, dtype):
    """A vLLM that an earlier test gave back, or a new one."""
    if hosts := _IDLE.get(_key(model, options, dtype)):
        host = hosts.pop()
        if isinstance(host, RemoteHost):
            host._options = options  # with its patience
        return host
    if options.host == "local":  # there can be one in a process
        _end_idle(LocalHost)
    return start_host(model, options, dtype)


def _give(engine):
    """Closes an engine, whose vLLM another test may have if it is whole: with zeros for weights, so that an engine that
    sends it none is found out."""
    if engine._host is not None and not engine._broken:
        with contextlib.suppress(SyncError):  # where the engine was given wrong names
            if engine._source.frozen is None:
                engine._rename, engine._mesh = weight_names(engine._source), LOCAL
                engine._send, engine._probe = "all", "never"
                engine.sync({name: torch.zeros(shape) for name, shape in engine._model.shapes.items()}, version=-1)
            _IDLE.setdefault(_key(engine._source, engine._options, engine._dtype), []).append(engine._host)
            engine._host = None
    _close(engine)


_close = VllmEngine.close


@contextlib.contextmanager
def forks():
    """vLLM's processes that start in this context are forks of one that has imported it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "_environment", lambda gpus: None)
        yield


@contextlib.contextmanager
def lending():
    """Engines that start in this context take a vLLM from earlier tests, and those that are closed in it leave theirs
    to later ones. Whatever a rollout depends on, an engine sends anew."""
    with pytest.MonkeyPatch.context() as patch, forks():
        patch.setattr(engines, "start_host", _take)
        patch.setattr(VllmEngine, "close", _give)
        yield


@contextlib.contextmanager
def _lend(name="qwen2", *, replaced_by=forks, **changes):
    with lending():
        engine, model = start(name, **changes)
    try:
        with replaced_by():
            yield engine, model
    except BaseException:
        engine.close()
        raise
    with lending():
        engine.close()


@pytest.fixture(scope="session")
def lent() -> Iterator:
    """`start` as a context, by `lending`. Not for tests of how vLLM starts and ends."""
    yield _lend
    _end_idle()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """vLLM stays in this process for tests that borrow it: others may start one here, or processes of a group."""
    if "lent" not in item.fixturenames:
        _end_idle(LocalHost)


@pytest.fixture(autouse=True, scope="module")
def frugal():
    """vLLM is imported in this process, which then inspects the classes of models, in place of a process for each, and
    in the fork server. Threads that wait do not spin: where others want the processor, that took 20 times the work."""
    if MISSING:
        yield
        return
    registry = importlib.import_module("vllm.model_executor.models.registry")
    importlib.import_module("fppo.rollout.vllm.worker")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
        patch.setenv("OMP_WAIT_POLICY", "passive")
        yield


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
