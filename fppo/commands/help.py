"""Help on settings, from their classes: the sections, or the settings of one."""

from __future__ import annotations

import ast
import functools
import inspect
import shutil
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import attrs

from fppo._errors import UsageError, did_you_mean
from fppo.fields import fields_of, name_of
from fppo.settings.component import Functions, Keyword, signature_of, table_of
from fppo.settings.train import TrainSettings

_NAMES = 14  # columns for names before their text
_WORDS = {bool: "", int: "INT", float: "FLOAT", str: "TEXT", dict: "JSON"}


class _Setting(NamedTuple):
    path: str
    kind: Any
    default: Any
    text: str


def help_sections(words: Sequence[str]) -> list[str] | None:
    """The sections named after --help; None without the flag."""
    place = next((i for i, word in enumerate(words) if word in ("-h", "--help")), None)
    if place is None:
        return None
    return [word.strip("-").replace("-", "_") for word in words[place + 1 :] if not word.startswith("-")]


def show(usage: str, cls: type | None, more: str = "") -> None:
    """Print the help of a command whose arguments are the fields of a class, and `more` below it."""
    parts = [f"usage: {usage}"]
    if cls is not None:
        places = positional(cls)
        settings = list(_settings(cls, default=_defaults(cls)))
        parts += ["", inspect.getdoc(cls) or "", ""]
        for setting in settings:
            parts += _named(places[setting.path], setting) if setting.path in places else _written(setting)
        parts += [line for inner, _ in _sections(cls) for line in _lines(_kind(cls, inner), f"{inner}.")]
    print("\n".join([*parts, *(["", more] if more else [])]))


def positional(cls: type) -> dict[str, str]:
    """The names under which help shows a command's positional arguments, by field of the class."""
    kinds = get_type_hints(cls, include_extras=True)
    return {name: _metavar(kind) for name, kind in kinds.items() if "Positional" in str(kind)}


def _metavar(kind: Any) -> str:
    return next(x.metavar for x in kind.__metadata__ if getattr(x, "metavar", None))


def _named(name: str, setting: _Setting) -> list[str]:
    """Help lines on a positional argument."""
    return [f"  {name}", f"      {setting.text}"]


def _kind(cls: type, name: str) -> type:
    return attrs.fields_dict(attrs.resolve_types(cls, include_extras=False))[name].type  # pyright: ignore[reportReturnType]


def _defaults(cls: type) -> Any:
    """An object with the default of every field of a class; None for fields without a default."""
    return types.SimpleNamespace(
        **{
            field.name: (field.default.factory() if isinstance(field.default, attrs.Factory) else field.default)  # type: ignore[arg-type]
            if field.default is not attrs.NOTHING
            else None
            for field in attrs.fields(cls)
        }
    )


def listed(names: Iterable[tuple[str, str]]) -> list[str]:
    """Names with a text each, wrapped to the terminal's width."""
    width = max(shutil.get_terminal_size((120, 24)).columns, 2 * _NAMES)
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent=" " * _NAMES, break_on_hyphens=False, break_long_words=False
    )
    return [wrapper.fill(f"  {name:<{_NAMES - 2}}{text}") for name, text in names]


def overview(usage: str, first: str) -> str:
    """The top-level settings, and the list of sections."""
    sections = listed(_sections(TrainSettings))
    hint = f"fppo {usage.split()[1]} --help SECTION shows a section's settings, for example --help rollout"
    return "\n".join([f"usage: {usage}", "", first, "", *_lines(TrainSettings), "", "sections:", *sections, "", hint])


def section_help(usage: str, names: Sequence[str], first: str = "") -> str:
    """Help on the settings of sections. Raises ValueError for an unknown section."""
    parts = [f"usage: {usage}", *(["", first] if first else [])]
    for name in names:
        section = _section(name)
        parts += ["", f"{name}: {inspect.getdoc(section.__class__)}", "", *_lines(type(section), f"{name}.", section)]
        for inner, _ in _sections(type(section)):
            path = f"{name}.{inner}"
            parts += ["", f"{path}: {inspect.getdoc(type(_section(path)))}", ""]
            parts += _lines(type(_section(path)), f"{path}.", _section(path))
    return "\n".join(parts)


def chosen_help(paths: Sequence[str]) -> list[str]:
    """Help lines on single settings, given by their paths."""
    lines = []
    for path in paths:
        section = _section(path.rpartition(".")[0])
        settings = _settings(type(section), f"{path.rpartition('.')[0]}.", section)
        lines += [line for setting in settings if setting.path == path for line in _written(setting)]
    return lines


def _section(path: str) -> Any:
    value: Any = TrainSettings()
    for name in path.split("."):
        names = [inner for inner, _ in _sections(type(value))]
        if name not in names:
            raise UsageError(f"--help {path}: unknown section {name!r}; {did_you_mean(name, names)}")
        value = getattr(value, name)
    return value


def _sections(cls: type) -> Iterator[tuple[str, str]]:
    for field in attrs.fields(attrs.resolve_types(cls)):
        if attrs.has(field.type):
            yield field.name, texts_of(cls).get(field.name, "")


def _settings(cls: type, prefix: str = "", default: Any = None) -> Iterator[_Setting]:
    default = cls() if default is None else default
    attrs.resolve_types(cls, include_extras=False)
    for field in fields_of(cls):
        if not attrs.has(field.type or str):
            text = texts_of(cls).get(field.name, "")
            yield _Setting(f"{prefix}{name_of(field)}", field.type, getattr(default, field.name), text)


@functools.cache
def texts_of(cls: type) -> Mapping[str, str]:
    """The help lines of fields: the string below each field in the class's source."""
    texts: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if attrs.has(base)]):
        module = ast.parse(inspect.getsource(sys.modules[base.__module__]))
        body = next(node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == base.__name__)
        for field, below in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                texts[ast.unparse(field.target)] = ast.literal_eval(below.value)
    return texts


def _lines(cls: type, prefix: str = "", default: Any = None) -> list[str]:
    lines = [line for setting in _settings(cls, prefix, default) for line in _written(setting)]
    return lines if (table := table_of(cls)) is None else [*lines, *_keywords(table, prefix)]


def _keywords(table: Functions, prefix: str) -> list[str]:
    """Help lines on a part's keywords: for each function in its table, the keywords with their defaults."""
    lines = [f"  --{prefix.replace('_', '-')}KEYWORD VALUE", "      Any keyword of the function that is named:"]
    for name in table:
        signature = signature_of(name, table)
        keywords = {} if signature is None else signature.keywords
        words = [f"{key} {_default(keyword)}".strip() for key, keyword in keywords.items()]
        lines.append(f"      {name}: {', '.join(words) or 'none'}")
    return lines


def _default(keyword: Keyword) -> str:
    if keyword.default is attrs.NOTHING:
        return "(give one)"
    return "none" if keyword.default is None else _plain(keyword.default)


def _written(setting: _Setting) -> list[str]:
    flag = f"--{setting.path.replace('_', '-')}"
    if setting.kind is bool:
        section, _, name = flag.rpartition(".")
        flag += f", {section}.no-{name}" if section else f", --no-{name.removeprefix('--')}"
    width = min(shutil.get_terminal_size().columns, 100)
    text = setting.text if setting.default in (None, (), {}, "") else f"{setting.text} [{_plain(setting.default)}]"
    text = textwrap.shorten(text, 10_000)
    return [
        f"  {flag} {_word(setting.kind)}".rstrip(),
        textwrap.fill(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6),
    ]


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _word(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return next((x.metavar for x in arguments[1:] if getattr(x, "metavar", None)), _word(arguments[0]))
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin is tuple:
        return f"{_word(arguments[0])} ..."
    if origin in (Union, types.UnionType):
        return "|".join(_word(a) or "True|False" for a in arguments if a is not types.NoneType)
    return _WORDS[origin or kind]
