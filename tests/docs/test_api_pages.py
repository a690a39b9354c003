"""The API reference has every public name, and the pages build without a warning."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import zlib
from pathlib import Path
from types import ModuleType

import pytest

from .pages import ROOT


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_pages", ROOT / "docs" / "api_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


API = _generator()


@pytest.mark.slow
def test_every_public_module_has_its_place():
    shown = [name for text in API.pages().values() for name in re.findall(r"^::: (\S+)", text, re.MULTILINE)]
    assert set(API.modules()) <= set(shown)
    assert len(shown) == len(set(shown))


@pytest.mark.slow
def test_every_exported_name_is_on_its_room_s_page():
    pages = API.pages()
    for module, path in API.modules().items():
        for name in set(API.exported(path)) - API.foreign(path):
            assert name in API.defined(path) or f"[`{name}`]" in pages[API.room_of(module)], f"{module}.{name}"


@pytest.mark.parametrize("module", [name for name, path in API.modules().items() if "__all__" in path.read_text()])
def test_the_names_read_from_the_source_are_those_of_the_module(module: str):
    """`__all__` is a plain list, so that the pages can be written without importing anything."""
    assert API.exported(API.modules()[module]) == list(importlib.import_module(module).__all__)


def _inventory(path: Path) -> set[str]:
    """The names in a Sphinx inventory."""
    *_, packed = path.read_bytes().split(b"\n", 4)
    return {line.split(" ", 1)[0] for line in zlib.decompress(packed).decode().splitlines()}


def test_llms_txt_has_a_line_for_each_page():
    """Hold its names and links against the navigation, and let no page be without a sentence."""
    config = pytest.importorskip("yaml").safe_load((ROOT / "mkdocs.yml").read_text())
    text = API.llms(config["site_name"], "A summary", config["nav"], lambda page: (ROOT / "docs" / page).read_text())
    lines = re.findall(r"^- \[(.+)\]\((\S+)\.html\): (\w|`)(.+)$", text, re.MULTILINE)
    names = re.findall(r"^ +- (.+): ([\w/-]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted((name, page) for name, page, *_ in lines) == sorted(names)
    assert text.startswith("# fppo\n\n> A summary\n\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Pages", "Tutorials", "Guides", "Results"]
    assert "](http" not in text


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("# A\n\nOne [link](to.md)\nand `code.x`, a: b. Two.\n", "One link and `code.x`, a: b."),
        ("# A\n\n```bash\nfppo train.\n```\n\n| a |\n\n![A picture.](x.png)\n\nIt has two ways:\n", "It has two ways"),
        ("# fppo.losses\n\n::: fppo.losses\n", "Losses as pure functions"),
    ],
)
def test_the_first_sentence_is_that_of_the_prose(page, sentence):
    assert API.first_sentence(page).startswith(sentence)


def test_the_pages_build_and_every_public_name_can_be_linked(tmp_path: Path):
    pytest.importorskip("mkdocstrings", reason="the docs extra is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = re.compile(r'<(script|img|link rel="stylesheet")[^>]*(src|href)="(https?:)?//')
    for page in tmp_path.rglob("*.html"):
        assert not loaded.search(page.read_text()), f"{page.name} loads something from elsewhere"
    index = re.findall(r"^- \[.+\]\((\S+)\): \S", (tmp_path / "llms.txt").read_text(), re.MULTILINE)
    assert sorted(index) == sorted(str(x.relative_to(tmp_path)) for x in tmp_path.rglob("*.html") if x.stem != "404")
    linked = _inventory(tmp_path / "objects.inv")
    for module, path in API.modules().items():
        names = {*API.defined(path), *API.exported(path)} - {"__all__"} - API.foreign(path)
        assert not {name for name in names if f"{module}.{name}" not in linked} - _overloads(path), module


def _overloads(path: Path) -> set[str]:
    """Names that are defined several times, as overloads are."""
    names = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {name for name in names if names.count(name) > 1}
