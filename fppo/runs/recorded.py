"""The record of a run, to look into with pandas or arrow, also while it trains."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pyarrow as pa

from fppo.runs import jsonl, sample_files, starts
from fppo.runs.loggers import METRICS
from fppo.runs.sample_files import SAMPLES
from fppo.settings.places import MODEL

if TYPE_CHECKING:
    import pandas as pd


@attrs.frozen
class RecordedRun:
    """The record of a run in its directory. Nothing is cached: each call reads what has been written by then."""

    directory: Path

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the last start, by their paths."""
        return dict(starts.last(self.directory))

    @property
    def sampled(self) -> tuple[int, ...]:
        """The steps whose rows are kept."""
        return tuple(sample_files.files(self.directory / SAMPLES))

    @property
    def model(self) -> Path:
        """The directory of the trained policy, for `AutoModelForCausalLM.from_pretrained`. Raises ValueError until the
        last step has written it."""
        if not (path := self.directory / MODEL).is_dir():
            raise ValueError(f"{path}: no model; a run writes it after its last step, fppo export of any checkpoint")
        return path

    def metrics(self) -> pd.DataFrame:
        """All metrics, with the step as index. A metric that a step lacks is nan."""
        import pandas as pd

        lines = jsonl.read(self.directory / METRICS)
        return pd.DataFrame(lines).groupby("step").first() if lines else pd.DataFrame()

    def samples(self, step: int | Iterable[int] | None = None, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """The sampled rows of one step, of several, or of all kept steps (None), as a data frame; `columns` and errors
        are those of `arrow`."""
        return self.arrow(step, columns).to_pandas()

    def arrow(self, step: int | Iterable[int] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """The sampled rows of one step, of several, or of all kept steps (None), in order, with these `columns` (None:
        all).

        A column that a step lacks is null there. Raises ValueError for a step that is not kept, a column that no step
        has, and a damaged file.
        """
        found = sample_files.files(self.directory / SAMPLES)
        steps = list(found) if step is None else [step] if isinstance(step, int) else list(step)
        if lost := [each for each in steps if each not in found]:
            kept = f"{len(found)} steps are, {min(found)} to {max(found)}" if found else "none is"
            raise ValueError(f"{self.directory / SAMPLES}: the rows of step {lost[0]} are not kept; {kept}")
        tables = [sample_files.read(found[each], columns) for each in steps]
        if columns is not None and tables:
            present = {name for table in tables for name in table.column_names}
            if unknown := [name for name in columns if name not in present]:
                every = sample_files.read(found[steps[-1]]).column_names
                raise ValueError(f"unknown column {unknown[0]!r}; step {steps[-1]} has {', '.join(every)}")
        return pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})


def open_run(directory: str | os.PathLike[str]) -> RecordedRun:
    """Open the record of a run: `fppo.open("runs/quickstart").samples(step=60)`.

    Raises ValueError for a directory that is no run's.
    """
    path = Path(directory)
    if not (path / METRICS).exists() and not (path / SAMPLES).is_dir():
        raise ValueError(f"{path}: no record of a run; give the output_dir of one")
    return RecordedRun(path)
