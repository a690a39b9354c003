"""A machine in the eyes of settings that say auto: its kernels, its compiler, and the models that a run has."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import pytest
import torch

from fppo import models
from fppo.assembly import machine
from fppo.settings import files
from fppo.settings.resolve import CPU, Machine
from fppo_kernels import prebuilt
from fppo_kernels import table as tables
from tests import tiny_run
from tests.models.families import CONFIGS

ON_CPU, ON_GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("capability", [None, (9, 0)])
@pytest.mark.parametrize("names", [(), ("llama",), ("gpt_oss",), ("gemma2", "llama"), ("gemma2", "gpt_oss"), ("gpt2",)])
def test_kernels_are_refused_for_what_any_model_needs_and_where_one_has_no_place(capability, names):
    built = [models.build(CONFIGS[name]) for name in names]
    needs = set().union(*(models.attention_needs(model) for model in built))
    found = machine.machine_of(built, capability)
    assert (found.device, found.capability) == (("cuda", (9, 0)) if capability else ("cpu", (0, 0)))
    for op in ("attention", "decode_attention"):
        for name, kernel in tables.BUILTIN[op].items():
            lacking, said = sorted(kernel.lacks & needs), found.refusals.get(f"{op}/{name}")
            assert said == (kernel.refuse() or (f"has no {' and no '.join(lacking)}" if lacking else None))
    no_place = {name for name, text in found.refusals.items() if text == "has no place in some model"}
    assert {"rms_norm/cpp", "rms_norm/triton"} <= no_place or "gpt2" not in names
    assert {"layer_norm/cpp", "layer_norm/triton"} <= no_place or not {*names} - {"gpt2"}
    assert "rms_norm/cpp" not in no_place or "gpt2" in names


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

    def found(device=ON_CPU, *, work=0.0, lacks=None, failure=None, build=prebuilt.NONE, **changes):
        monkeypatch.setattr(machine.prebuilt, "here", lambda: build)
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


def test_kernels_that_are_built_in_are_taken_at_once_and_those_that_do_not_fit_are_named(asked):
    made, found = asked
    build = prebuilt.Build("x86-64-v3", "g++", {})
    assert found(build=build) == attrs.evolve(made, compiles=True)
    assert found(build=build, **{"model.cpp": False}) == CPU
    other = "those built in are for torch 2.13.0, and this is 2.14.1"
    assert found(build=other) == attrs.evolve(CPU, unfit_build=other)
    assert found(build=other, work=1e13) == attrs.evolve(made, compiles=True, unfit_build=other)


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
