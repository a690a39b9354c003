"""Whether a run goes on with the prompts that it began with."""

from __future__ import annotations

import sys
from pathlib import Path

from fppo.assembly.run import DrawnPrompts
from fppo.runtime import checkpoint

_TRAINED = "prompts, "  # what the notes of the prompts to train on begin with


def check(own: DrawnPrompts, path: Path, *, speaks: bool) -> None:
    """Raises ValueError if the prompts of a run are others than those of the checkpoint at `path`, unless they may
    change. `speaks`: says on stderr what has changed, and may, as held-out prompts may. What a checkpoint has no notes
    of is not compared."""
    before, now = checkpoint.notes_of(path), own.notes()
    changed = [name for name in now if name in before and before[name] != now[name]]
    trained = [name for name in changed if name.startswith(_TRAINED)]
    if trained and not own.may_change:
        raise ValueError(
            f"data: {_listed(trained)} differ from those that {path} was made with, and the run would go on in the "
            "middle of others: a file of data.path, the tokenizer or the chat template is another (a template that "
            "writes the date is so every day); give the same, or data.may_change = true to go on with these"
        )
    if changed and speaks:
        print(f"going on with other data than {path.name} was made with: {_listed(changed)}", file=sys.stderr)


def _listed(names: list[str]) -> str:
    return " and ".join(f"the {name.replace(', ', ' ')}" for name in names)
