"""Programs in C++ that a wheel brings: which process takes them, and why another does not."""

from __future__ import annotations

import json
import subprocess
from types import MappingProxyType

import pytest
import torch

from fppo.quickstart import addition
from fppo.runs import bits
from fppo_kernels import _cpp, prebuilt, table
from fppo_kernels.table import lacks_cpp_compiler

ZEN = ["abm", "avx", "avx2", "bmi1", "bmi2", "cx16", "f16c", "fma", "lahf_lm", "movbe", "popcnt", "sse4_1", "sse4_2"]
ZEN += ["ssse3", "xsave", "sse2"]
XEON = [*ZEN, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"]


@pytest.mark.parametrize(
    ("flags", "capability", "level"),
    [
        (XEON, "AVX512", "x86-64-v4"),
        (XEON, "AVX2", "x86-64-v3"),  # as ATEN_CPU_CAPABILITY=avx2 asks
        (XEON, "DEFAULT", None),
        (ZEN, "AVX2", "x86-64-v3"),
        (ZEN, "AVX512", "x86-64-v3"),  # whatever the variable says
        ([x for x in ZEN if x != "fma"], "AVX2", None),
        ([x for x in XEON if x != "avx512vl"], "AVX512", "x86-64-v3"),
        ([], "AVX2", None),
        (ZEN, "SVE256", None),
    ],
)
def test_a_process_takes_the_best_level_that_processor_and_torch_have(flags, capability, level):
    assert prebuilt.level_of(flags, capability) == level


@pytest.fixture
def folder(tmp_path):
    """What a wheel brings for torch 2.13.0 and 2.14.1, the libraries empty files."""
    (tmp_path / "build.json").write_text(json.dumps({"torch": ["2.13.0", "2.14.1"], "compiler": "g++ 12"}))
    for level in prebuilt.LEVELS:
        (tmp_path / level).mkdir()
        for path in prebuilt.paths():
            (tmp_path / level / prebuilt.file_name(path)).touch()
    return tmp_path


def test_programs_that_do_not_fit_are_refused_in_a_line(folder, tmp_path_factory):
    v3 = prebuilt.LEVELS[1]
    assert prebuilt.loaded(tmp_path_factory.mktemp("empty"), "2.14.1", v3) == prebuilt.NONE
    said = "those built in are for torch 2.13.0, 2.14.1, and this is 2.14.0+cpu"
    assert prebuilt.loaded(folder, "2.14.0+cpu", v3) == said
    assert "x86-64-v4 and x86-64-v3, and this process may use neither" in prebuilt.loaded(folder, "2.14.1", None)
    assert "do not load: " in prebuilt.loaded(folder, "2.13.0+cu130", v3)  # no library is in the files
    (folder / v3 / prebuilt.file_name("glu/_numbers.cpp")).unlink()
    assert prebuilt.loaded(folder, "2.14.1", v3) == "those built in are not of the present glu/_numbers.cpp"


def test_a_library_is_of_the_text_of_one_program(tmp_path, monkeypatch):
    names = {prebuilt.file_name(path) for path in prebuilt.paths()}
    assert len(names) == len(prebuilt.paths()) > 5
    for path in ("_numbers.h", "_vectors.h", *prebuilt.paths()):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text((prebuilt.FOLDER / path).read_text("utf-8"))
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    assert {prebuilt.file_name(path) for path in prebuilt.paths()} == names
    with (tmp_path / "_vectors.h").open("a") as file:
        file.write("// changed\n")
    assert not names & {prebuilt.file_name(path) for path in prebuilt.paths()}


@pytest.mark.skipif(lacks_cpp_compiler() is not None, reason="needs a C++ compiler")
def test_programs_that_fit_are_loaded(folder):
    v3 = prebuilt.LEVELS[1]
    for path in prebuilt.paths():
        library = folder / v3 / prebuilt.file_name(path)
        if path == "attention/_sequences.cpp":
            command = ["g++", "-shared", "-x", "c++", "-", "-o", str(library)]
            subprocess.run(command, input='extern "C" int number() { return 7; }', text=True, check=True)
            first = library
        else:
            library.unlink()
            library.symlink_to(first)
    build = prebuilt.loaded(folder, "2.14.1+cpu", v3)
    assert isinstance(build, prebuilt.Build)
    assert str(build) == "built in for x86-64-v3 by g++ 12"
    assert set(build.libraries) == {*prebuilt.paths()}
    assert build.libraries["glu/_numbers.cpp"].number() == 7


@pytest.fixture
def built(monkeypatch):
    """A process with programs that are built in, and no compiler."""
    libraries = MappingProxyType({path: object() for path in prebuilt.paths()})
    build = prebuilt.Build("x86-64-v3", "g++ 12", libraries)
    monkeypatch.setattr(prebuilt, "here", lambda: build)
    monkeypatch.setattr(table.shutil, "which", lambda name: None)
    return build


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels in C++ are for machines without a GPU")
def test_built_in_programs_need_no_compiler(built):
    assert table.lacks_cpp_compiler() is not None
    assert table.needs_cpp() is None
    assert table.needs_compiler() is not None  # of torch.compile
    assert table.available("glu")["cpp"] is None
    load = _cpp._library.__wrapped__
    assert all(load(path) is built.libraries[path] for path in prebuilt.paths())
    assert bits.ground()["kernels in C++"] == "built in for x86-64-v3 by g++ 12"
    assert addition.warm_up_kernels().log_probs is table.get("log_probs", "cpp")


def test_without_them_nothing_is_said_and_a_warm_up_compiles_nothing(monkeypatch):
    monkeypatch.setattr(prebuilt, "here", lambda: prebuilt.NONE)
    assert "kernels in C++" not in bits.ground()
    assert addition.warm_up_kernels() == table.Kernels.named()
