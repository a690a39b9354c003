"""The notebooks run from top to bottom, show progress and pictures, and are kept without outputs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_run

NOTEBOOKS = Path(__file__).parent.parent / "experiments" / "notebooks"
ORDER = ("quickstart", "own_loss", "look")  # the last reads the run of the first


def read(name: str) -> dict[str, Any]:
    return json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())


def test_notebooks_are_small_and_without_outputs():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(ORDER)
    for name in ORDER:
        code = [cell for cell in read(name)["cells"] if cell["cell_type"] == "code"]
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code), name
        assert sum(len(cell["source"]) for cell in code) < 80, name


SMALL = {"rollout.batch_size": 64, "actor.mini_batch_size": 32, "critic.mini_batch_size": 32, "eval.max_prompts": 32}


def shortened(source: str) -> str:
    """A cell of a few steps of few rows."""
    source = re.sub(r"^warm_up, steps = .*$", "warm_up, steps = 8, 2", source, flags=re.MULTILINE)
    return source.replace('{"steps": steps,', f'{{"steps": steps, **{SMALL!r},')


@pytest.mark.slow
def test_notebooks_run_and_show_what_they_are_for(tmp_path, monkeypatch):
    """One after another in one kernel, which knows no name of the one before: it has imported the library once."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOKS.parents[1]), os.environ.get("PYTHONPATH", "")]))
    books = {name: nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4) for name in ORDER}
    whole = nbformat.v4.new_notebook(metadata=books[ORDER[0]].metadata)
    for book in books.values():
        for cell in book.cells:
            cell.source = shortened(cell.source)
        whole.cells += [nbformat.v4.new_code_cell("%reset -f"), *book.cells]
    assert sum(repr(SMALL) in cell.source for cell in whole.cells) == 2  # each run of them is of few rows
    nbclient.NotebookClient(whole, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for name, book in books.items():
        outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
        assert any("image/png" in output.get("data", {}) for output in outputs), name
        said = "".join(output.get("text", "") for output in outputs)
        if name != "look":
            assert any("<progress" in output.get("data", {}).get("text/html", "") for output in outputs), name
            assert re.search(r"step 2/2 .*reward", said), name
        if name == "own_loss":
            assert "spo keeps the laws" in said
            assert "averaged" in said
        if name == "look":
            assert any("<span" in output.get("data", {}).get("text/html", "") for output in outputs)


CELL = """
import fppo

def score(sample):
    return float("1" in sample.response)

rows = [{"prompt": f"{a}+1="} for a in range(9)]
settings = {"rollout": {"batch_size": 8, "max_tokens": 3}, "seed": 1}
run = fppo.train(model="start", prompts=rows, reward=score, steps=2, settings=settings, output_dir="run")
print(run.settings["reward.functions"], len(run.metrics()))
"""


@pytest.mark.slow
def test_a_function_of_a_notebook_is_a_reward_and_the_curves_are_shown(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    tiny_run.write_task(tmp_path)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    (cell,) = book.cells
    said = "".join(output.get("text", "") for output in cell.outputs)
    assert "step 2/2" in said
    assert "['fppo.train:score'] 2" in said
    shown = [output["data"] for output in cell.outputs if "data" in output]
    assert any("value='2'" in data.get("text/html", "") for data in shown)  # the bar, at its end
    assert any("image/png" in data for data in shown)
