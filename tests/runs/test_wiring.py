"""What a run writes has the sizes, names and spacings of its settings."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

from fppo.runs import loggers, session
from fppo.settings import files
from tests import tiny_run

LOG = {
    "steps": 7,
    "log__loggers": ["wandb", "tensorboard"],
    "log__project": "p",
    "log__entity": "e",
    "log__group": "g",
    "log__table_rows": 3,
    "log__table_every": 4,
    "log__samples_gb": 0.25,
}


def assembled(tokenizer, own):
    """As much of an assembly as loggers and samples read."""
    return SimpleNamespace(inputs=SimpleNamespace(tokenizer=tokenizer, loggers=own))


def test_loggers_and_their_tables_are_those_of_the_settings(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(loggers, "open_loggers", lambda *args, **named: asked.update(named, args=args) or [])
    settings, own, tokenizer = tiny_run.settings(tmp_path, **LOG), {"a:b": print}, object()
    with contextlib.ExitStack() as opened:
        observe = session._logging(settings, assembled(tokenizer, own), 6, opened)
    assert asked == {
        "args": (("wandb", "tensorboard"), Path(settings.output_dir)),
        "steps": 7,
        "first_step": 6,
        "project": "p",
        "entity": "e",
        "group": "g",
        "settings": files.to_dict(settings),
        "own": own,
    }
    tables = inspect.getclosurevars(observe).nonlocals["tables"]
    assert tables == loggers.Tables(rows=3, every=4, tokenizer=tokenizer)


@pytest.mark.parametrize(("samples", "count"), [("all", None), (5, 5)])
def test_samples_are_as_many_and_as_large_as_settings_say(tmp_path, samples, count):
    settings, tokenizer = tiny_run.settings(tmp_path, **LOG, log__samples=samples), object()
    kept = session._sample_files(settings, assembled(tokenizer, {}), 6)
    kept.close()
    found = {name.lstrip("_"): value for name, value in vars(kept).items()}
    assert {name: found[name] for name in ("directory", "tokenizer", "count", "most")} == {
        "directory": Path(settings.output_dir) / "samples",
        "tokenizer": tokenizer,
        "count": count,
        "most": 0.25e9,
    }
