"""CONTRIBUTING shows the house as it stands."""

import pytest

from tests import house

from .pages import ROOT, blocks


@pytest.mark.slow
def test_the_drawing_of_the_house_is_current():
    texts = [block.text for block in blocks(ROOT / "CONTRIBUTING.md") if block.language == "text"]
    assert house.drawing() + "\n" in texts, "put the output of `python -m tests.house` in its place"
