"""Every Python block of the README and the pages runs, in the order of its page, in one namespace."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fppo.quickstart import character_tokenizer, prepare
from tests.runs.test_samples import write_record

from .pages import PAGES, REASONS, ROOT, blocks, code_of

SLOW = ("loss.md", "kernel.md")  # what they run of the laws takes seconds
WITH_PYTHON = [
    pytest.param(page, marks=pytest.mark.slow) if page.name in SLOW else page
    for page in PAGES
    if any(block.language == "python" for block in blocks(page))
]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if 'fppo.open("runs/quickstart")' in page.read_text():
        write_record(tmp_path / "runs/quickstart", 60, character_tokenizer())
    if 'model="models/sums"' in page.read_text():  # in place of a model from the hub
        prepare(tmp_path / "models", seed=0, steps=2)
        (tmp_path / "models/warm").rename(tmp_path / "models/sums")
    before = set(sys.modules)
    namespace: dict = {"__name__": "page"}
    for block in blocks(page):
        if block.language != "python" or block.skip is not None:
            continue
        if block.package is not None:
            pytest.importorskip(block.package)
        code = compile(code_of(block), block.name, "exec")
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        exec(code, namespace)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_block_is_skipped_for_a_reason_that_this_machine_cannot_help(page: Path):
    for block in blocks(page):
        assert block.skip is None or block.skip.startswith(REASONS), f"{block.name}: {block.skip}"
        assert block.language in ("python", "bash", "toml", "text"), f"{block.name}: {block.language!r}"
