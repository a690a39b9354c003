"""The settings of `fppo compare`; no torch, so that its help answers at once."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from fppo.fields import at_least, nonempty, output_file, place, setting
from fppo.settings import files
from fppo.settings.train import TrainSettings
from fppo.settings.values import is_list, read, value_of_words

FORM = "write section.setting=VALUE,VALUE, as critic.loss=mse,hl_gauss, and a list as reward.weights=[1, 0.5],[1, 0]"
_PATH = r"[a-z_0-9]+(?:\.[a-z_0-9]+)*"
_MORE = re.compile(rf"\+(?={_PATH}=)")
_COMMA = re.compile(",")
_PLAIN, _LONGEST = re.compile(r"[\w.+=, -]+", re.ASCII), 100  # of names that directories keep nearly unchanged


def _form(values: tuple[str, ...]) -> str | None:
    wrong = next((text for text in values if not _is_of_form(text)), None)
    return None if wrong is None else f"{wrong!r} is not of that form: {FORM}"


def _is_of_form(text: str) -> bool:
    path, equals, values = text.partition("=")
    parts = _split(values, _COMMA)
    return bool(re.fullmatch(_PATH, path) and equals and parts and all(part.strip() for part in parts))


def _split(text: str, separator: re.Pattern[str]) -> list[str] | None:
    """Split a text at separators outside of lists, tables and quotes; None if a list, table or quote is not closed."""
    parts, start, place, depth, quote = [], 0, 0, 0, ""
    while place < len(text):
        char = text[place]
        if quote:
            place += char == "\\" and quote == '"'  # an escaped character ends no text
            quote = "" if char == quote else quote
        elif char in "\"'" and text[:place].rstrip()[-1:] in ("", *",[{=+"):  # else an apostrophe
            quote = char
        elif depth == 0 and (match := separator.match(text, place)):
            parts.append(text[start:place])
            start = match.end()
            place = start - 1
        else:
            depth += (char in "[{") - (char in "]}")
        place += 1
    return None if quote or depth else [*parts, text[start:]]


@attrs.frozen(kw_only=True)
class CompareSettings:
    """Trains variants of a run, each with several seeds, and shows them side by side; started again, it goes on."""

    vary: tuple[str, ...] = setting((), nonempty(FORM), _form)
    """Settings with their values, as critic.loss=mse,hl_gauss+critic.loss.bins=21; several of them are crossed."""
    seeds: int = setting(5, at_least(1))
    """Seeds of each variant, from that of the file on."""
    metrics: tuple[str, ...] = setting(())
    """The metrics to compare; none: the held-out reward, and critic/true/r2 where it is logged."""
    out: str | None = setting(None, place)
    """The directory for all runs, the table and the picture; None: output_dir of the file, and -compare."""
    json: str | None = setting(None, place, output_file)
    """Write the comparison to this JSON file, too; -, or nothing behind it: print it in place of all else."""


@attrs.frozen
class Variant:
    """The settings of one variant that differ from the file's, by path, and its name."""

    name: str
    changes: dict[str, Any]

    @property
    def directory(self) -> str:
        """The variant's name as a directory name without special characters; with a digest if the variant's name is
        long or unusual."""
        plain = re.sub(r"[^\w.+-]+", "_", self.name.replace(", ", "_").replace("=", "-"), flags=re.ASCII).replace(
            "-_", "-"
        )
        if _PLAIN.fullmatch(self.name) and len(self.name) <= _LONGEST:
            return plain
        return f"{plain[:_LONGEST].rstrip('_.')}_{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"


def variants(vary: Sequence[str]) -> list[Variant]:
    """Combine the values of all settings in `vary` ("setting=value,value"); the last setting varies fastest."""
    axes = [list(_values(text)) for text in vary]
    return [
        Variant(", ".join(name for name, _ in chosen), {k: v for _, changes in chosen for k, v in changes.items()})
        for chosen in itertools.product(*axes)
    ]


def _values(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parse "setting=value,value": for each value, yield a name and the settings that it changes, by path. A value may
    change further settings besides."""
    kinds = files.paths()
    path, _, values = text.partition("=")
    for value in _split(values, _COMMA) or []:
        first, *more = _split(value, _MORE) or [value]
        parts = [(path, first), *(part.partition("=")[::2] for part in more)]
        yield f"{path}={value}", {name: _read(word, kinds.get(name, Any)) for name, word in parts}


def _read(word: str, kind: Any) -> Any:
    """Parse a value as a flag of this type would; blanks separate the words of a list."""
    return value_of_words(word.split() if is_list(kind) and read(word) == word else [word], kind)


def changed(settings: TrainSettings, variant: Variant, seed: int, directory: str) -> TrainSettings:
    """The settings of one run of a variant, which writes to `directory` and to a place of its own at checkpoint.remote.
    `seed` is added to the settings' own seed. Raises SettingsError for invalid paths and values."""
    own = ("seed", "output_dir")
    wrong = [f"{path}: fppo compare sets it; give --seeds and --out" for path in variant.changes if path in own]
    try:
        found = files.replace(settings, variant.changes | {"output_dir": directory, "seed": settings.seed + seed})
        if (remote := found.checkpoint.remote) is not None:
            own_place = "/".join((remote.rstrip("/"), *Path(directory).parts[-2:]))
            found = files.replace(found, {"checkpoint.remote": own_place})
    except files.SettingsError as error:
        raise files.SettingsError([*wrong, *error.problems], source=f"--vary {variant.name}") from error
    if wrong:
        raise files.SettingsError(wrong, source=f"--vary {variant.name}")
    return found
