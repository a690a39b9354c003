"""CONTRIBUTING shows the house as it stands."""

from tests import house

from .pages import ROOT, blocks


def test_the_drawing_of_the_house_is_current():
    (drawing,) = [block for block in blocks(ROOT / "CONTRIBUTING.md") if block.language == "text"]
    assert drawing.text == house.drawing() + "\n", "put the output of `python -m tests.house` in its place"
