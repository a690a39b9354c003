"""The README is short, the links of all pages lead somewhere, and the kernel that they show is short."""

import re

from tests.docs.pages import PAGES, ROOT, blocks

README = ROOT / "README.md"


def test_the_readme_has_at_most_900_words():
    assert len(README.read_text(encoding="utf-8").split()) <= 900


def test_a_kernel_has_under_15_lines():
    (kernel,) = [block for block in blocks(ROOT / "docs/tutorials/kernel.md") if block.file == "mine.py"]
    assert kernel.text.count("\n") <= 15


def test_links_to_files_lead_to_files():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
