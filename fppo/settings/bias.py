"""The settings of `fppo bias`; no torch, so that its help answers at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import attrs
import tyro

from fppo._errors import did_you_mean
from fppo.fields import at_least, at_most, flag_problems, nonempty, output_file, place, setting
from fppo.settings import files
from fppo.settings.plan import run_of
from fppo.settings.train import TrainSettings

_UNREAD = ("model.path = ''", "data.path = []", "reward.functions = []")  # what a run needs, and its math does not
OF_TABLES = ("tables", "with_", "n", "markdown", "png")  # settings that lines about a run do not read
TABLES = ("estimators", "modes", "kl", "losses", "corrections", "critics", "values")

MOST_GROUPS = 1_000_000  # of one world


def _functions(values: tuple[str, ...]) -> str | None:
    wrong = next((text for text in values if not all(text.partition(":")[::2])), None)
    return None if wrong is None else f"{wrong!r} is not of the form module:function"


def _groups(values: tuple[int, ...]) -> str | None:
    return None if values and min(values) >= 2 and max(values) <= 100 else "give sizes of groups, of 2 to 100 rows"


@attrs.frozen(kw_only=True)
class BiasSettings:
    """Measures what steps optimise, exactly, in small worlds: how far their mean gradient is turned, and its noise."""

    tables: tuple[str, ...] = setting(TABLES, nonempty("give tables, as estimators,kl"))
    """Which tables, by commas or spaces."""
    with_: Annotated[tuple[str, ...], tyro.conf.arg(name="with")] = setting((), _functions, name="with")
    """Estimators and policy losses of your own among the rows, as module:function."""
    n: tuple[int, ...] = setting((2, 4, 8), _groups)
    """Rows of a group, in the table of estimators."""
    vocabulary: int = setting(2, at_least(2), at_most(100))
    """Tokens of a world; with 3, groups of 4 take minutes."""
    horizon: int = setting(3, at_least(1), at_most(100))
    """The longest response of a world, in tokens."""
    worlds: int = setting(5, at_least(1), at_most(1000))
    """Worlds that medians are taken over."""
    json: str | None = setting(None, place, output_file)
    """Write all numbers to this JSON file; -, or nothing behind it: print them in place of the tables."""
    markdown: str | None = setting(None, place, output_file)
    """Write the tables to this Markdown file."""
    png: str | None = setting(None, place, output_file)
    """Draw the tables to this PNG file."""

    @property
    def names(self) -> tuple[str, ...]:
        """The tables to compute, split at commas."""
        return tuple(dict.fromkeys(part for text in self.tables for part in text.split(",") if part))


def load(file: str | None, arguments: Sequence[str]) -> tuple[TrainSettings | None, BiasSettings]:
    """Read the settings of the run that a file and flags describe (None if neither is given), and the options of `fppo
    bias`. Raises SettingsError with every problem."""
    options, rest = tyro.cli(BiasSettings, args=arguments, prog="fppo bias [FILE.toml]", return_unknown_args=True)
    run, wrong = (None, []) if file is None and not rest else run_of(file, rest, _UNREAD)
    wrong = [*wrong, *problems(options, of_run=run is not None), *(unread(options) if run is not None else ())]
    if wrong:
        raise files.SettingsError(list(dict.fromkeys(wrong)))
    return run, options


def unread(options: BiasSettings) -> list[str]:
    """List the given options that only tables read, which have no effect on lines about a run, one line each."""
    given = attrs.asdict(options, filter=lambda field, value: field.name in OF_TABLES and value != field.default)
    text = "is of the tables, and a run gets three lines; leave it out, or the run's file and flags"
    return [f"--{name.rstrip('_')} {text}" for name in given]


def _too_many(options: BiasSettings, *, of_run: bool) -> list[str]:
    """A line if a world has too many groups of responses to sum over, else none. Groups have the largest size in `n`
    for the table of estimators, and two responses elsewhere, as for lines about a run (`of_run`)."""
    others, last = options.vocabulary - 1, options.horizon - 1
    n = max(options.n) if "estimators" in options.names and not of_run else 2
    responses = sum(others**length for length in range(last)) + others**last * options.vocabulary
    if (groups := math.comb(responses + n - 1, n)) <= MOST_GROUPS:
        return []
    sizes = f"--vocabulary {options.vocabulary} --horizon {options.horizon}{f' --n {n}' if n > 2 else ''}"
    return [f"{sizes}: {groups:.3g} groups to sum over, more than {MOST_GROUPS:,}; give smaller ones"]


def problems(options: BiasSettings, *, of_run: bool) -> list[str]:
    """List the problems of the options, one line each. `of_run`: they are for lines about a run, not for tables."""
    lines = flag_problems(options) or _too_many(options, of_run=of_run)
    unknown = [name for name in options.names if name not in TABLES]
    return lines + [f"--tables {name}: there is no such table; {did_you_mean(name, TABLES)}" for name in unknown]
