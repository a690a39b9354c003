"""Checks that a resumed run has the prompts that it began with."""

from __future__ import annotations

import sys
from pathlib import Path

from fppo.assembly.run import DrawnPrompts
from fppo.runtime import checkpoint

_TRAINED = "prompts, "  # prefix of the notes of training prompts


def check(own: DrawnPrompts, path: Path, *, speaks: bool) -> None:
    """Raise ValueError if the training prompts of a run differ from those of the checkpoint at `path`, unless they may
    change. `speaks`: print permitted changes, such as of held-out prompts, on stderr. Prompts without notes in the
    checkpoint are not compared."""
    before, now = checkpoint.notes_of(path), own.notes()
    changed = [name for name in now if name in before and before[name] != now[name]]
    trained = [name for name in changed if name.startswith(_TRAINED)]
    if trained and not own.may_change:
        raise ValueError(
            f"data: {_listed(trained)} differ from those that {path} was made with, and the run would go on in the "
            "middle of them: a file of data.path, the tokenizer or the chat template has changed (a template that "
            "writes the date does so daily); give the same, or data.may_change = true to go on with these"
        )
    if changed and speaks:
        print(f"going on with other data than {path.name} was made with: {_listed(changed)}", file=sys.stderr)


def _listed(names: list[str]) -> str:
    return " and ".join(f"the {name.replace(', ', ' ')}" for name in names)
