"""The work of `fppo audit`, after its arguments are read."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fppo._errors import UsageError, did_you_mean
from fppo.commands import output
from fppo.commands.options import AuditOptions
from fppo.studies.audit import dump, report
from fppo.studies.audit.peers import PEERS, adapters_of
from fppo.studies.audit.report import Audited
from fppo.workers.imports import imported

FORM = "give a trainer (trl, verl, openrlhf, areno, areal, skyrl, agilerl, or module:adapters), or --dump FILE"


def audit(options: AuditOptions) -> int:
    """Print the verdicts on a trainer, or where a batch differs, and write JSON; returns 1 for a fault or a
    difference."""
    if (options.trainer is None) == (options.dump is None):
        raise UsageError(f"{FORM}, not both" if options.dump else FORM)
    with output.shown(options.json) as show:
        if options.dump is not None:
            return _dump(options, options.dump, show)
        return _laws(options, options.trainer or "", show)


def _laws(options: AuditOptions, trainer: str, show: output.Show) -> int:
    functions, versions = _own(trainer) if ":" in trainer else _peer(trainer)
    found = report.audit(trainer, functions, versions, _progress)
    _progress("")
    width = shutil.get_terminal_size((120, 24)).columns
    show(report.table(found, width=width, batches=options.batches), report.record(found))
    return 1 if found.faults else 0


def _progress(name: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{name}", end="", file=sys.stderr, flush=True)


def _peer(name: str) -> tuple[Sequence[Audited], Sequence[str]]:
    if name not in PEERS:
        raise UsageError(f"trainer {name!r}: {did_you_mean(name, PEERS)}; your own are named as module:adapters")
    return adapters_of(name)


def _own(place: str) -> tuple[Sequence[Audited], Sequence[str]]:
    """Import a user's `Audited` functions from `place` (module:name), a tuple or list of them or a function that
    returns one. Returns them, and an empty tuple of package versions."""
    found = imported(place, "trainer", also=(tuple, list))
    found = found if isinstance(found, (tuple, list)) else found()
    if not isinstance(found, (tuple, list)) or not all(isinstance(x, Audited) for x in found):
        raise UsageError(f"trainer {place!r}: expected a tuple of Audited, or a function that returns one")
    return found, ()


def _dump(options: AuditOptions, path: str, show: output.Show) -> int:
    if options.preset not in dump.PRESETS:
        raise UsageError(f"--preset {options.preset!r}: {did_you_mean(options.preset, dump.PRESETS)}")
    mapped = _pairs("--map", options.map)
    if unknown := next((name for name in mapped if name not in dump.COLUMNS), None):
        raise UsageError(f"--map {unknown}: {did_you_mean(unknown, dump.COLUMNS)}")
    if options.group_size is not None and options.group_size < 1:
        raise UsageError(f"--group-size must be 1 or more, got {options.group_size}")
    recipe = dump.Recipe(
        estimator=options.estimator,
        estimator_settings=_values("--estimator-settings", options.estimator_settings),
        whiten=options.whiten,
        loss=options.loss,
        loss_settings=_values("--loss-settings", options.loss_settings),
        mode=options.mode,
        horizon=options.horizon,
        tolerance=options.tolerance,
    )
    stages = dump.compare(dump.load(path, dump.PRESETS[options.preset], mapped, options.group_size), recipe)
    show(dump.text(stages), dump.record(stages))
    return 1 if any(stage.outcome == "differs" for stage in stages) else 0


def _pairs(flag: str, words: Sequence[str]) -> dict[str, str]:
    """Parse words such as a=1,b=2 into a mapping of names to values. Raises UsageError, naming the flag, for others."""
    pairs = [part.partition("=") for word in words for part in word.split(",")]
    if wrong := next((pair for pair in pairs if not pair[0] or not pair[2]), None):
        raise UsageError(f"{flag} {''.join(wrong)!r}: write name=value")
    return {name: value for name, _, value in pairs}


def _values(flag: str, words: Sequence[str]) -> Mapping[str, Any]:
    """Parse words such as a=1,b=none into keywords: numbers, true, false, None for none (but the text "none" for the
    keyword `scale`), and else texts."""
    fixed = {"true": True, "false": False}

    def value(name: str, text: str) -> Any:
        if text.lower() in fixed:
            return fixed[text.lower()]
        if text.lower() == "none":
            return "none" if name == "scale" else None
        try:
            return float(text)
        except ValueError:
            return text

    return {name: value(name, text) for name, text in _pairs(flag, words).items()}
