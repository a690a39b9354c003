"""Messages of errors: hints on unknown names, untrusted text, exits in user code."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import signal
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
DEEPEST = 100  # levels of nested tables and lists in files
_TOO_DEEP = f"its tables and lists are nested more than {DEEPEST} deep"
MOST = 4000  # characters of untrusted text in a message
# control characters, marks of the direction of writing, and surrogates
_HARMFUL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LIBRARY = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))


class UsageError(ValueError):
    """An error in a command's arguments, with a message that is complete without a traceback."""


class RunFailed(ValueError):
    """A failure that makes it pointless to go on with a run: the command's exit status is 1."""


def printable(text: str, most: int = MOST, *, lines: bool = False) -> str:
    """Make untrusted text safe for a terminal: control characters become escapes, newlines and tabs too unless `lines`
    is set, and text of more than `most` characters loses its middle."""
    if len(text) > most:
        half = most // 2
        left = f" ... ({len(text) - 2 * half:,} more characters) ... "
        text = f"{text[:half]}{left}{text[-half:]}" if half else left.strip()
    text = _HARMFUL.sub(lambda match: ascii(match[0])[1:-1], text)
    return text if lines else text.replace("\n", "\\n").replace("\t", "\\t")


def shown(value: Any, most: int = 200) -> str:
    """The repr of a value that comes from data, for a message: one line with its first `most` characters, also if the
    repr raises."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"a {type(value).__name__} whose repr raises {type(error).__name__}"
    return printable(text if len(text) <= most else f"{text[:most]}...", most + 3)


def listed(names: Iterable[Any], most: int = 1000) -> str:
    """The sorted list of names that come from data, as text for a message, cut to about `most` characters."""
    return shown(sorted(map(str, names)), most)


def words_of(error: BaseException, most: int = MOST) -> str:
    """The type and text of an error from other people's code, on one line, even if its `__str__` raises."""
    try:
        text = str(error)
    except Exception as other:
        text = f"(its text raises {type(other).__name__})"
    return printable(f"{type(error).__name__}: {text}", most)


def json_of(text: str | bytes, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON. `pairs` makes an object of its list of (key, value); None: a dict.

    Raises ValueError for invalid JSON, and for values nested more than `DEEPEST` deep.
    """
    try:
        value = json.loads(text, object_pairs_hook=pairs)
        opened = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
        return value if opened <= DEEPEST else check_depth(value)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def check_depth(value: T) -> T:
    """Return a value of parsed data. Raises ValueError if its mappings and lists are nested over `DEEPEST` deep."""
    inside: list[Any] = [value]
    for _ in range(DEEPEST + 1):
        inside = list({id(x): x for each in inside for x in _held(each)}.values())
        if not inside:
            return value
    raise ValueError(_TOO_DEEP)


def _held(value: Any) -> Iterable[Any]:
    """The mappings and lists directly inside a mapping or a list; none for any other value."""
    held = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return (x for x in held if isinstance(x, Mapping | list | tuple))


def is_interrupt(error: BaseException) -> bool:
    """True if an error is ctrl-C: raised by a signal handler, Python's or ours, and not by the user's own code."""
    if not isinstance(error, KeyboardInterrupt):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    ours = not frames or Path(frames[-1].filename).is_relative_to(Path(__file__).parent)
    return ours or signal.getsignal(signal.SIGINT) is signal.default_int_handler


@contextlib.contextmanager
def no_exit() -> Iterator[None]:
    """A context in which `sys.exit` raises RunFailed, since an exit would look like the regular end of a run."""
    try:
        yield
    except SystemExit as error:
        raise RunFailed(of_exit(error)) from error


def of_exit(error: SystemExit) -> str:
    """The error message about a call of `sys.exit` in the user's code: the calling function, the code, the remedy."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_of_python(frame.filename)]
    place = "a function"
    if frames:
        last = frames[-1]
        name = "the module's own code" if last.name == "<module>" else f"{last.name}()"
        place = f"{name}, {last.filename}:{last.lineno},"
    code = printable(repr(error.code), 200)
    return f"{place} called sys.exit({code}), which ends nothing here: raise an error where a run cannot go on"


def is_of_python(filename: str) -> bool:
    """Whether a file belongs to the standard library, or is not a file ("<...>")."""
    parts = Path(filename).parts
    if "site-packages" in parts or "dist-packages" in parts:
        return False
    return filename.startswith("<") or any(filename.startswith(f"{place}/") for place in _LIBRARY)


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar of `names`; None if no similarity to `name` reaches `cutoff`, from 0 to 1."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The hint "did you mean NEAREST? there are A, B"; without the question if no name is near."""
    choices = list(names)
    near = nearest(name, choices, cutoff)
    return f"{f'did you mean {near}? ' if near else ''}there are {', '.join(choices)}"
