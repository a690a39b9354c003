"""The README is short, its links lead somewhere, and its kernel is."""

import re

from tests.docs.pages import PAGES, ROOT, blocks

README = ROOT / "README.md"


def test_the_readme_has_at_most_1500_words():
    assert len(README.read_text(encoding="utf-8").split()) <= 1500


def test_the_kernel_of_the_readme_has_under_15_lines():
    (kernel,) = [block for block in blocks(README) if block.file == "mine.py"]
    assert kernel.text.count("\n") <= 15


def test_links_to_files_lead_to_files():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
