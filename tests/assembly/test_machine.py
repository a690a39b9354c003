"""A machine in the eyes of settings that say auto: its kernels, its compiler, and the models that a run has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from fppo.assembly import machine
from fppo.settings import files, resolve
from fppo.settings.resolve import CPU, Machine
from fppo_kernels import table as tables
from tests import tiny_run

ON_CPU, ON_GPU = torch.device("cpu"), torch.device("cuda")


def kernel(*lacks: str, why: str | None = None) -> Any:
    return SimpleNamespace(lacks=frozenset(lacks), refuse=lambda: why)


@pytest.mark.parametrize("capability", [None, (9, 0)])
def test_kernels_are_refused_for_what_any_model_needs_and_where_one_has_no_place(monkeypatch, capability):
    inside = {op: {"eager": kernel(), "triton": kernel(), "cpp": kernel()} for op in resolve.LAYERS}
    known = {
        "attention": {"plain": kernel(), "one": kernel("softcap"), "both": kernel("sinks", "softcap", "window")},
        "decode_attention": {"gone": kernel("softcap", why="is not installed"), "fast": kernel("window")},
        "log_probs": {"cpp": kernel(why="needs a compiler")},
        **inside,
    }
    monkeypatch.setattr(machine.tables, "BUILTIN", known)
    needs = {"first": {"softcap"}, "second": {"sinks"}}
    monkeypatch.setattr(machine.models, "attention_needs", lambda model: frozenset(needs[model.name]))
    monkeypatch.setattr(
        machine.models, "has_place", lambda text, op: (text, op) not in {("second", "rotary"), ("first", "glu")}
    )
    built: Any = [SimpleNamespace(name=x, skeleton=x, text_of=lambda skeleton: skeleton) for x in needs]
    refusals = {
        "attention/one": "has no softcap",
        "attention/both": "has no sinks and no softcap",
        "decode_attention/gone": "is not installed",
        "log_probs/cpp": "needs a compiler",
        **{f"{op}/{name}": "has no place in some model" for op in ("rotary", "glu") for name in ("triton", "cpp")},
    }
    found = machine.machine_of(built, capability)
    assert found.refusals == refusals
    assert (found.device, found.capability) == (("cuda", (9, 0)) if capability else ("cpu", (0, 0)))
    assert machine.machine_of([], None).refusals == {
        name: refusals[name] for name in ("decode_attention/gone", "log_probs/cpp")
    }


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The machine that settings are resolved on, with these changes and this compiler."""
    tiny_run.write_task(tmp_path)
    made = Machine(refusals={"attention/cpp": "of its own"})
    monkeypatch.setattr(
        machine, "machine_of", lambda built, capability: attrs.evolve(made, capability=capability or (0, 0))
    )
    monkeypatch.setattr(machine.resolve, "resolved", lambda settings, machine: (settings, machine))
    monkeypatch.setattr(machine.torch.cuda, "get_device_capability", lambda kind: (9, kind.index or 0))

    def found(device=ON_CPU, *, work=0.0, lacks=None, failure=None, **changes):
        monkeypatch.setattr(machine, "work_of", lambda *_: work)
        monkeypatch.setattr(machine.tables, "needs_cpp", lambda: lacks)
        monkeypatch.setattr(machine._cpp, "failure", lambda: failure)
        given = files.replace(tiny_run.settings(tmp_path), {"model.cpp": "auto", **changes})
        return machine.resolved(given, device)[1]

    return made, found


WHY = "no compiler"
WITHOUT = {f"{op}/cpp": WHY for op in tables.BUILTIN if "cpp" in tables.BUILTIN[op]}


@pytest.mark.parametrize(
    ("how", "compiles"),
    [
        ({"work": 0.99e13}, False),
        ({"work": 1e13}, True),
        ({"work": 1e14, "model.cpp": False}, False),
        ({"model.cpp": True}, True),
        ({"rollout.exact": True}, True),
        ({"rollout.exact": True, "model.cpp": False}, True),
    ],
)
def test_a_cpu_compiles_for_a_long_run_or_where_it_is_asked_to(asked, how, compiles):
    made, found = asked
    assert found(**how) == (attrs.evolve(made, compiles=True) if compiles else CPU)
    if not compiles:
        return
    for lacking in ({"lacks": WHY}, {"failure": WHY}, {"lacks": WHY, "failure": "another"}):
        without = attrs.evolve(made, compiles=True, no_compiler=WHY, refusals=made.refusals | WITHOUT)
        assert found(**how, **lacking) == without


@pytest.mark.parametrize("cpp", [True, False])
@pytest.mark.parametrize(("width", "amd"), [(256, True), (255, True), (256, False)])
def test_a_wide_policy_multiplies_by_onednn_where_that_is_fast(asked, monkeypatch, cpp, width, amd):
    made, found = asked
    text = SimpleNamespace(hidden_size=width)
    policy = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text, hidden_size=1024))
    paths = []
    monkeypatch.setattr(machine, "_built", lambda section, paths_: paths.append(dict(paths_)) or iter([policy]))
    monkeypatch.setattr(machine, "fast_on_this_processor", lambda: amd)
    expected = attrs.evolve(made, compiles=True) if cpp else CPU
    assert found(**{"model.cpp": cpp}) == attrs.evolve(expected, onednn=amd and width >= 256)
    assert list(paths[0]) == ["model.path"]


def test_a_gpu_is_asked_for_what_it_can(asked):
    made, found = asked
    assert found(ON_GPU) == attrs.evolve(made, capability=(9, 0))
    assert found(torch.device("cuda", 3), work=1e14) == attrs.evolve(made, capability=(9, 3))


def test_a_long_run_is_one_of_the_policy_that_is_there(asked, tmp_path):
    _, found = asked
    assert found(work=1e14, **{"model.path": str(tmp_path / "nowhere")}) == CPU


NONE = {"algorithm.advantage.name": "grpo", "actor.kl_coef": 0.0, "algorithm.kl.coef": 0.0}
USES = {
    "model.ref_path": {"actor.kl_coef": 0.1},
    "model.critic_path": {"algorithm.advantage.name": "gae"},
    "model.teacher_path": {"algorithm.advantage.name": "distill"},
    "reward.model.path": {"reward.model.path": "elsewhere"},
}


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
@pytest.mark.parametrize("used", [*USES, None])
def test_models_that_a_run_does_not_use_decide_nothing(asked, monkeypatch, used, device):
    _, found = asked
    paths = []

    def built(section, own):
        paths.extend(name for name, path in own.items() if path)
        return iter(())

    monkeypatch.setattr(machine, "_built", built)
    given = dict.fromkeys(("model.ref_path", "model.critic_path", "model.teacher_path"), "elsewhere")
    found(device, **{"model.cpp": True, **given, **NONE, **USES.get(used, {})})
    assert paths == ["model.path", *([used] if used else [])]
