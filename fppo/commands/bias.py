"""The work of `fppo bias`, after its arguments are read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from fppo._errors import UsageError
from fppo.commands import output
from fppo.settings.bias import BiasSettings
from fppo.settings.train import TrainSettings
from fppo.studies.bias import text
from fppo.studies.bias.of_run import run_bias
from fppo.studies.bias.run import lines_of
from fppo.studies.bias.study import WorldSizes, is_loss, study
from fppo.workers.imports import imported, search


def run(of: TrainSettings | None, options: BiasSettings) -> int:
    """Print and write the tables of bias that the options name or, if the settings `of` a run are given, lines on what
    this run optimises; returns 0."""
    with output.shown(options.json) as show:
        _run(of, options, show)
    return 0


def _run(of: TrainSettings | None, options: BiasSettings, show: output.Show) -> None:
    transformers_logging.set_verbosity_error()
    sizes = WorldSizes(
        vocabulary=options.vocabulary, horizon=options.horizon, worlds=options.worlds, groups=tuple(options.n)
    )
    width = min(shutil.get_terminal_size((120, 24)).columns, 140)
    if of is not None:
        search(of.module_dirs)
        found = lines_of(run_bias(of, sizes))
        numbers: Any = {"run": found.numbers}
        shown = "\n".join(found.lines)
    else:
        own = {place.rpartition(":")[2]: imported(place, "--with") for place in options.with_}
        _check_own(own)
        tables = list(study(options.names, sizes, own))
        numbers, shown = {"tables": [text.plain(table) for table in tables]}, text.terminal(tables, width)
        if options.markdown is not None:
            output.write(options.markdown, text.markdown(tables))
        if options.png is not None:
            from fppo.studies.bias import chart  # here: it loads matplotlib

            chart.save(tables, Path(options.png))
    show(shown, numbers)


def _check_own(own: dict[str, Any]) -> None:
    """Raises UsageError for functions that are neither an estimator nor a policy loss."""
    for name, fn in own.items():
        try:
            is_loss(fn)
        except ValueError as error:
            raise UsageError(f"--with {name}: neither a policy loss nor an estimator: {error}") from error
