"""The page of metrics has a line for every metric that a run writes, and for every column of the console."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from fppo.assembly.run import assemble
from fppo.assembly.supervised import assemble_supervised
from fppo.pipeline.supervised import imitate_steps
from fppo.pipeline.train import Evaluation, StepRecord, train
from fppo.runs import loggers
from fppo.settings import files, logged
from tests import tiny_run

from .pages import ROOT

PAGE = ROOT / "docs" / "metrics.md"
WORDS = {"SPREAD": ("mean", "max", "min"), "ROLE": ("actor", "critic", "supervised"), "NAME": (), "SOURCE": ()}
WORDS |= dict.fromkeys(("AXIS", "LAYER", "AGE", "N"), ())


def rows(heading: str) -> Iterator[tuple[str, str]]:
    """The first two cells of the rows of the page's tables that begin with this heading."""
    inside = False
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        inside = line.startswith(f"| {heading} |") or (inside and line.startswith("|"))
        if inside and cells[0] != heading and not line.startswith("|-"):
            yield cells[0], cells[1]


def listed() -> list[str]:
    """The names in the first column of the tables of metrics."""
    return [name for cell, _ in rows("metric") for name in re.findall(r"`([^`]+)`", cell)]


def pattern_of(name: str) -> str:
    """The names that a name on the page stands for, by its words in capitals."""
    parts = re.split(f"({'|'.join(sorted(WORDS, key=len, reverse=True))})", name)
    return "".join(f"({'|'.join(WORDS[x])})" if WORDS.get(x) else ".+" if x in WORDS else re.escape(x) for x in parts)


def missing(names: set[str]) -> list[str]:
    """The names that have no line on the page."""
    known = re.compile("|".join(f"({pattern_of(name)})" for name in listed()))
    return sorted(name for name in names if not known.fullmatch(name))


def written() -> set[str]:
    """The names of metrics in the sources, as they are written there: {} stands for what a run knows."""
    families = {name.partition("/")[0] for name in listed()} - {"ROLE"} | {*logged.FAMILIES, "actor", "critic"}
    name = re.compile(rf"""["'`]((?:{"|".join(sorted(families))})/[\w/@{{}}.]*)["'`]""")
    sources = [path.read_text() for path in (ROOT / "fppo").rglob("*.py")]
    return {found for text in sources for found in name.findall(text) if "..." not in found}


def test_every_metric_that_the_sources_name_has_a_line():
    examples = [name for each in listed() for name in _examples(each)]
    for found in written():  # a whole name, or what names begin with
        wanted = re.sub(r"\\\{.*?\\\}", ".+", re.escape(found)) + (".*" if found.endswith(("/", "_")) else "(/.+)?")
        assert any(re.fullmatch(wanted, name) for name in examples) or not missing({found}), found


def _examples(name: str) -> Iterator[str]:
    """Some names that a name on the page stands for."""
    word = next((word for word in sorted(WORDS, key=len, reverse=True) if word in name), None)
    for each in [name] if word is None else WORDS[word] or ("1",):
        made = name if word is None else name.replace(word, each, 1)
        yield from [made] if word is None else _examples(made)


def test_every_metric_that_settings_foretell_has_a_line():
    assert missing(set(logged.NAMES)) == []


def test_every_column_of_the_console_has_a_line():
    lines = {name: cell for names, cell in rows("column") for name in re.findall(r"`([^`]+)`", names)}
    columns = {label: names for label, names, _ in (*loggers.LINES, *loggers.FAILURES)}
    assert lines.keys() - {"left"} == columns.keys()
    for label, names in columns.items():
        said = re.findall(r"`([^`]+)`", lines[label])
        assert all(any(re.fullmatch(pattern_of(x), name) for x in said) for name in names)


RUNS = {
    "ppo": {"eval__n": 2, "eval__temperature": 1.0},
    "grpo": {"algorithm__advantage__name": "grpo", "rollout__n": 4, "actor__kl_coef": 0.1, **tiny_run.NO_KL},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_metric_that_a_run_writes_has_a_line(name, tmp_path):
    tiny_run.write_task(tmp_path, rows=8)
    names: set[str] = set()

    def watch(record: StepRecord) -> None:
        names.update(record.metrics)

    with assemble(tiny_run.settings(tmp_path, **RUNS[name])) as assembly:
        assert assembly.evaluate is not None
        evaluation, stages = Evaluation(assembly.evaluate), {"program": assembly.program, "draw": assembly.draw}
        train(assembly.run, **stages, steps=2, observers=[watch], evaluation=evaluation)
    assert len(names) > 60
    assert missing(names) == []


def test_every_metric_that_a_supervised_run_writes_has_a_line(tmp_path):
    tiny_run.write_task(tmp_path)
    (tmp_path / "train.jsonl").write_text("\n".join([json.dumps({"prompt": "1+1=", "response": "2"})] * 4))
    settings = files.replace(tiny_run.settings(tmp_path), {"sft.batch_size": 4, "data.eval_path": ()})
    _, assembly = assemble_supervised(settings)
    _, _, report = next(imitate_steps(assembly.run, imitation=assembly.imitation))
    assert "supervised/grad_norm" in report
    assert missing(set(report)) == []
