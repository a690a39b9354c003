"""The parts of a run that the viewer shows: its state as JSON, an index of its sampled rows, and their files."""

from __future__ import annotations

import hashlib
import io
import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pyarrow as pa
import pyarrow.parquet as pq

from fppo.report import charts, summary, timeline
from fppo.report.charts import Panel
from fppo.report.remains import remains
from fppo.runs import alarms, jsonl, memory, sample_files, starts
from fppo.runs.evaluations import TRUTH
from fppo.runs.loggers import METRICS
from fppo.runs.observers import TRACE
from fppo.runs.sample_files import SAMPLES
from fppo.settings.files import SETTINGS, STARTS

SHOWN_WORK = 3  # steps of the timeline
HEAD, TAIL = 300, 700  # characters of a text's beginning and end in an index
MOST_STEPS = 64  # of one index
_LONG = ("prompt", "response", "ground_truth")
_SCALARS = ("step", "row_id", "group", "episode", "id", "source", "finish", "version", "score", "length", *_LONG)


def find_runs(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The runs that paths name: a run's directory, or one that holds runs up to two levels below, as `fppo compare`
    writes it.

    Raises ValueError for a path without a run.
    """
    found: dict[Path, None] = {}
    for each in paths:
        path = Path(each)
        below = (sorted(path.glob(pattern)) for pattern in ("*", "*/*"))
        runs = [path] if is_run(path) else [run for some in below for run in some if is_run(run)]
        if not runs:
            raise ValueError(f"{path}: no record of a run; give the output_dir of one, or a directory that holds runs")
        found |= dict.fromkeys(runs)
    return list(found)


def is_run(path: Path) -> bool:
    """Whether a directory holds the record of a run."""
    return (path / METRICS).is_file() or (path / SAMPLES).is_dir() or (path / STARTS).is_dir()


def titles(runs: Sequence[Path]) -> list[str]:
    """Distinct names of runs: their paths below the directory that they have in common."""
    real = [Path(os.path.realpath(run)) for run in runs]
    above = Path(os.path.commonpath([run.parent for run in real]))
    return [str(run.relative_to(above)) for run in real]


State = dict[str, Any]


def state_of(run: Path, title: str, known: tuple[str, int] | None = None) -> State | None:
    """The state of a run, all but its rows, as JSON values; None if it is the `known` one.

    `known` has the stamp of an earlier state, and the number of lines of metrics read with it: the state then holds
    only later lines, unless the file has been replaced since. Damaged lines and files are left out and named under
    "notes".
    """
    stamp = _stamp(run)
    if known is not None and known[0] == stamp:
        return None
    damaged: list[str] = []
    sampled = sample_files.files(run / SAMPLES)
    lines = jsonl.read(run / METRICS, on_damage=damaged.append)
    others, lost = _steps_without_metrics(run, lines, sampled, damaged)
    records = summary.merged([*others, *lines])
    chosen, rest = _settings(run, damaged)
    same_file = known is not None and _file_of(known[0]) == _file_of(stamp)
    start = known[1] if known is not None and same_file and known[1] <= len(lines) else 0
    state = {
        "title": title,
        "path": str(run),
        "quoted": shlex.quote(str(run)),
        "quotedSettings": shlex.quote(str(run / SETTINGS)),
        "notes": [*lost, *(f"left out: {text}" for text in damaged), *map(str, alarms.ring(records))],
        "settings": {**chosen, **rest},
        "chosen": list(chosen),
        "lines": {"stamp": stamp, "from": start, "records": lines[start:]},
        "others": others,
        "samples": [[step, tag] for step, tag in _tags(sampled)],
        "tiles": [attrs.astuple(tile) for tile in summary.tiles(records, rest | chosen)],
        "panels": [
            {"title": each.title, "note": each.note, "least": each.least, "metrics": list(each.metrics.items())}
            for each in charts.panel_metrics(records)
        ],
        "stages": list(summary.stages(records).items()),
        "work": [
            {**bar._asdict(), "kind": bar.kind, "more": dict(bar.more)} for bar in timeline.read(run, last=SHOWN_WORK)
        ],
        "memory": _memory(run),
        "truth": [_panel(panel) for pair in summary.beside_truth(run / TRUTH) for panel in pair],
    }
    return jsonl.plain(state)


def _memory(run: Path) -> State | None:
    """The memory of the last step of which there is a record, on the rank with the largest peak."""
    found = [each for each in memory.read(run) if each.stages]
    if not found:
        return None
    last = max(found, key=lambda each: (each.step, max(stage.peak for stage in each.stages)))
    return attrs.asdict(last) | {"ranks": sum(each.step == last.step for each in found)}


def _steps_without_metrics(
    run: Path, lines: Sequence[Mapping[str, Any]], sampled: Collection[int], damaged: list[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Records of steps that other files hold and the metrics do not, and messages on steps without metrics.

    One step beyond the metrics is no loss, since the rows of a step may be written before its metrics.
    """
    present = {line.get("step") for line in lines}
    last = max((step for step in present if step is not None), default=0)
    first = starts.first(run) + 1
    path = run / METRICS
    if lines and max(sampled, default=0) <= last + 1 and not jsonl.missing(path, present, first, last):
        return [], []
    others = [x for x in remains(run, sampled, on_damage=damaged.append) if x["step"] not in present]
    return others, jsonl.missing(path, present, first, max([last, *(x["step"] for x in others)]))


def _panel(panel: Panel) -> State:
    return {"title": panel.title, "note": panel.note, "unit": panel.unit, "lines": panel.lines}


def _settings(run: Path, damaged: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings by their paths, those that differ from the defaults first; none if they are damaged."""
    try:
        return summary.settings_of(run / SETTINGS)
    except (OSError, ValueError) as error:
        damaged.append(str(error))
        return {}, {}


def _tags(sampled: dict[int, Path]) -> list[tuple[int, str]]:
    """Each step with a text that changes with its file: its size in bytes, and when it was written."""
    tags = []
    for step, path in sampled.items():
        try:
            about = path.stat()
        except FileNotFoundError:  # removed since it was listed
            continue
        tags.append((step, f"{about.st_size}-{about.st_mtime_ns}"))
    return tags


def _stamp(run: Path) -> str:
    """A text that changes with any file that a state is made of; it begins with the inode of the metrics' file."""
    number, parts = 0, list[str]()
    places = [run / METRICS, run / SETTINGS, run / SAMPLES, run / TRUTH, run / memory.MEMORY]
    places += sorted((run / TRACE).glob("rank_*.jsonl"))
    for path in places:
        try:
            about = path.stat()
        except OSError:
            continue
        number = about.st_ino if path.name == METRICS else number
        parts.append(f"{path.name} {about.st_ino} {about.st_size} {about.st_mtime_ns}")
    return f"{number}-{hashlib.blake2b('/'.join(parts).encode(), digest_size=12).hexdigest()}"


def _file_of(stamp: str) -> str:
    return stamp.partition("-")[0]


# rows


def sample_file(run: Path, step: int) -> Path | None:
    """The file of a step's rows; None without one, and for a link that leads out of the run's directory."""
    path = sample_files.files(run / SAMPLES).get(step)
    if path is None or not path.is_file() or not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(run)):
        return None
    return path


def index_of(run: Path, steps: Collection[int]) -> bytes:
    """The rows of some steps as one Parquet file, without the columns that have a list of tokens; long texts lose their
    middle.

    `number` is the place of a row in its step's file, `prompt_key` a digest of its whole prompt, and `pictures` says
    whether the file has images. Steps without a file, or with a damaged one, are left out.
    """
    tables = []
    for step in sorted(steps):
        path = sample_file(run, step)
        if path is not None and (table := _scalars(path)) is not None:
            tables.append(table)
    whole = pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({"step": pa.array([], "i4")})
    sink = io.BytesIO()
    pq.write_table(whole.combine_chunks(), sink, compression="zstd")
    return sink.getvalue()


def _scalars(path: Path) -> pa.Table | None:
    """The columns of a file with one value for each row; None for a damaged file."""
    try:
        file = pq.ParquetFile(path)
        names = [name for name in file.schema_arrow.names if name in _SCALARS or name.startswith("score.")]
        table = file.read(names)
    except (OSError, ValueError):
        return None
    if "step" not in names or "prompt" not in names:
        return None
    prompts = _encoded(table.column("prompt"))
    keys = pa.array([_digest(text) for text in prompts.dictionary.to_pylist()], pa.string())
    columns = {name: _shortened(table.column(name)) if name in _LONG else table.column(name) for name in names}
    columns = {name: x.cast(pa.string()) if pa.types.is_dictionary(x.type) else x for name, x in columns.items()}
    columns["prompt_key"] = keys.take(prompts.indices)
    columns["number"] = pa.array(range(table.num_rows), pa.int32())
    columns["pictures"] = pa.array(["images" in file.schema_arrow.names] * table.num_rows, pa.bool_())
    return pa.table(columns)


def _encoded(column: pa.ChunkedArray) -> pa.DictionaryArray:
    whole = column.combine_chunks()
    return whole if pa.types.is_dictionary(whole.type) else whole.dictionary_encode()


def _digest(text: str | None) -> str:
    return hashlib.blake2b((text or "").encode(errors="surrogatepass"), digest_size=9).hexdigest()


def _shortened(column: pa.ChunkedArray) -> pa.Array:
    """Texts in at most HEAD + TAIL characters and an ellipsis between."""
    texts = column.cast(pa.string()).to_pylist()
    most = HEAD + TAIL
    return pa.array([x if x is None or len(x) <= most else f"{x[:HEAD]} … {x[-TAIL:]}" for x in texts], pa.string())
