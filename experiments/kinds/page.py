"""The tables of what types of models do."""

from collections.abc import Mapping, Sequence

from kinds.verdicts import ADAPTED, AS_PUBLISHED, CUT, IMAGES, TEXT, UNKNOWN, VIDEOS, WHOLE, Verdict

COLUMNS = (WHOLE, AS_PUBLISHED, CUT, ADAPTED, IMAGES, VIDEOS)
_WORDS = {None: "yes", TEXT: "-", UNKNOWN: "-"}


def page(verdicts: Mapping[str, Verdict]) -> str:
    """How many types run; what runs and how; why not what of it does not, and why not the others."""
    runs = {kind: verdict for kind, verdict in verdicts.items() if verdict[WHOLE] is None}
    sees, moves = (sum(verdict[name] is None for verdict in runs.values()) for name in (IMAGES, VIDEOS))
    does = [(f"`{kind}`", *(_WORDS.get(x[name], "no") for name in COLUMNS)) for kind, x in runs.items()]
    lacks: dict[tuple[str, str], list[str]] = {}
    for name in COLUMNS:
        for kind, verdict in runs.items():
            why = verdict[name]
            if why is not None and why not in _WORDS:
                lacks.setdefault((name, why), []).append(f"`{kind}`")
    refused = [(f"`{kind}`", str(x[WHOLE])) for kind, x in verdicts.items() if x[WHOLE] is not None]
    parts = [
        f"{len(runs)} of {len(verdicts)} types run, {sees} of them with images and {moves} with videos.",
        _table("What runs", ("type", *COLUMNS), does),
        _table("What of it does not", ("types", "what", "why"), [(", ".join(x), *of) for of, x in lacks.items()]),
        _table("Refused", ("type", "why"), refused),
    ]
    return "\n\n".join(part for part in parts if part)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A section with a table; nothing without rows."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([f"## {title}\n", lines[0], f"|{'---|' * len(head)}", *lines[1:]]) if rows else ""
