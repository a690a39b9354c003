"""CONTRIBUTING shows the house as it stands."""

from tests import house

from .pages import ROOT, blocks


def test_the_drawing_of_the_house_is_current():
    texts = [block.text for block in blocks(ROOT / "CONTRIBUTING.md") if block.language == "text"]
    assert house.drawing() + "\n" in texts, "put the output of `python -m tests.house` in its place"
