"""Parts of a run that are functions: named in a table or as module:function, with keywords for settings.

A section with a field made by `named` is such a part. What it holds beside its own fields are keywords of the function:
their names, types and defaults are read from the function's source, so nothing is imported and torch is not loaded.
`bound` imports the functions and binds the keywords.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Literal, Protocol, Union, get_args

import attrs

from fppo._errors import did_you_mean
from fppo.fields import (
    Check,
    Problem,
    Problems,
    WrongSetting,
    fields_of,
    name_of,
    nonempty,
    number_problem,
    table_of,
)
from fppo.settings.values import RENAMED, converter, described
from fppo.workers.imports import imported

Functions = Mapping[str, tuple[str, ...]]  # by name, the functions of a part as module:function
_KINDS = {"float": float, "Scalar": float, "int": int, "bool": bool, "str": str, "Callable": Callable}
_TENSORS = ("Tensor", "Tokens", "Rows")  # types that scripts may give in place of a number


class Component(Protocol):
    """A section that names a function."""

    @property
    def name(self) -> str: ...
    @property
    def keywords(self) -> Mapping[str, Any]: ...


@attrs.frozen
class Keyword:
    """A keyword of a function, as its source has it."""

    kind: Any  # a type as settings have it; Any where the source does not say
    default: Any  # a literal, the text of an expression, or NOTHING where it must be given


@attrs.frozen
class Signature:
    """The parameters of a function, as its source has them."""

    required: tuple[str, ...]  # the positional ones without a default
    keywords: Mapping[str, Keyword]  # that settings can give
    functions: frozenset[str]  # keywords that are functions or tensors, which settings cannot give


def named(default: str, table: Functions, kind: str) -> Any:
    """Make the field for a part's function: a name in the table, or module:function. Messages call the part `kind`."""
    checks: tuple[Check, ...] = (nonempty(f"give the name of {kind}, as {default}"),)
    return attrs.field(default=default, metadata={"checks": checks, "table": table, "kind": kind})


def given() -> Any:
    """Make the field for a part's keywords, those that settings give to its function."""
    return attrs.field(factory=dict, metadata={"keywords": True})


def parts(section: Any, prefix: str = "") -> Iterator[tuple[str, Component, Functions]]:
    """Yield every part in the settings: its path, its section, and the table of functions for its kind."""
    for field in attrs.fields(type(section)):
        value, path = getattr(section, field.name), f"{prefix}{name_of(field)}"
        if attrs.has(type(value)):
            if (table := table_of(type(value))) is not None:
                yield path, value, table
            yield from parts(value, f"{path}.")


def part_problems(settings: Any) -> Problems:
    """Yield the problems of all parts: unknown function names, and keywords that are unknown, missing or of a wrong
    type."""
    for path, part, table in parts(settings):
        if part.name and ":" not in part.name and part.name not in table:
            kind = attrs.fields_dict(type(part))["name"].metadata["kind"].split(" ", 1)[1]
            text = f"there is no such {kind}; {did_you_mean(part.name, table)} and module:function"
            yield Problem(f"{path}.name", part.name, text)
            continue
        own = [name_of(field) for field in fields_of(type(part)) if field.name != "name"]
        yield from keyword_problems(path, part.name, part.keywords, table, own)


def _wrong(value: Any, keyword: Keyword) -> str | None:
    try:
        return number_problem(called_with(value, keyword))
    except Exception:  # cattrs raises a type of its own for each kind of mistake
        none = ', or "none"' if _is_optional(keyword.kind) else ""
        return f"must be {described(keyword.kind)}{none}"


def _no_keyword(function: str, name: str, names: Sequence[str]) -> str:
    return f"{function} has no such keyword; {did_you_mean(name, names) if names else 'it takes none'}"


def called_with(value: Any, keyword: Keyword | None) -> Any:
    """Convert `value`, as a file of settings has it, to the argument that a function is called with. `keyword`
    describes the parameter: the value is converted to its type, and "none" to None if it may be None. Without a known
    type (None, or a keyword of type Any) only a list changes, to a tuple."""
    if keyword is None or keyword.kind is Any:
        return tuple(value) if isinstance(value, list) else value
    if value == "none" and _is_optional(keyword.kind):
        return None
    return converter().structure(value, keyword.kind)


def _is_optional(kind: Any) -> bool:
    return types.NoneType in get_args(kind)


def keyword_problems(
    path: str, function: str, keywords: Mapping[str, Any], table: Functions, own: Sequence[str] = ()
) -> Problems:
    """Yield a problem for each keyword that is unknown, missing or of a wrong type, as far as the function's source
    says. `own` are the section's settings that are not keywords, for hints."""
    signature = signature_of(function, table)
    if signature is None:
        return
    for name, keyword in signature.keywords.items():
        if keyword.default is attrs.NOTHING and name not in keywords:
            yield Problem(f"{path}.{name}", None, f"{function} needs it: give {described(keyword.kind)}")
    for name, value in keywords.items():
        if (keyword := signature.keywords.get(name)) is not None:
            text = _wrong(value, keyword)
        elif (renamed := RENAMED.get(f"{path}.{name}")) is not None:
            text = f"it is called {renamed} now"
        else:
            text = _no_keyword(function, name, [*own, *signature.keywords])
        if text is not None:
            yield Problem(f"{path}.{name}", value, text)


def value_of(part: Component, table: Functions, name: str, otherwise: Any = None) -> Any:
    """The value of a part's keyword `name`: the given one, else the function's default; `otherwise` if the function has
    no such keyword."""
    signature = signature_of(part.name, table)
    if signature is None:
        return part.keywords.get(name, otherwise)
    if (keyword := signature.keywords.get(name)) is None:
        return otherwise
    return called_with(part.keywords[name], keyword) if name in part.keywords else keyword.default


def requires(part: Component, table: Functions, name: str) -> bool:
    """Whether the part's function has a parameter of that name without a default, as far as its source says."""
    signature = signature_of(part.name, table)
    return signature is not None and name in signature.required


def signature_of(name: str, table: Functions) -> Signature | None:
    """Join the parameters of all functions that the table has under a name (or of one module:function).

    None if the source does not tell: if one of them is no plain function of a module, or takes arbitrary keywords.
    """
    found: list[Signature] = []
    for function in table.get(name, (name,)):
        module, _, attribute = function.partition(":")
        path = source_of(module)
        signature = None if path is None else _signature_in(path, path.stat().st_mtime_ns, attribute)
        if signature is None:
            return None
        found.append(signature)
    return Signature(
        tuple(dict.fromkeys(name for each in found for name in each.required)),
        {name: keyword for each in found for name, keyword in each.keywords.items()},
        frozenset(name for each in found for name in each.functions),
    )


def source_of(module: str) -> Path | None:
    """The file of a module's source; None if it has none, or is not found."""
    try:
        spec = spec_of(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None and spec.origin.endswith(".py") else None


def spec_of(module: str) -> ModuleSpec | None:
    """The spec of a module, found without importing the packages around it."""
    first, *rest = module.split(".")
    spec, name = importlib.util.find_spec(first), first
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec


@functools.lru_cache(maxsize=256)
def _signature_in(path: Path, changed: int, name: str) -> Signature | None:
    """The signature of a plain function or class in a file; `changed` is the file's time of modification, for the
    cache."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError, OSError, RecursionError):
        return None
    of_name = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name]
    if len(of_name) != 1 or of_name[0].decorator_list:
        return None
    made = _made_by(of_name[0])
    if made is None or made.args.kwarg is not None:
        return None
    arguments = made.args
    plain = [*arguments.posonlyargs, *arguments.args][isinstance(of_name[0], ast.ClassDef) :]
    first = len(plain) - len(arguments.defaults)
    pairs = [*zip(plain[first:], arguments.defaults), *zip(arguments.kwonlyargs, arguments.kw_defaults)]
    keywords = {x.arg: _keyword(x.annotation, default) for x, default in pairs}
    # a tensor that must be given to a function is no setting
    of_tensors = isinstance(of_name[0], ast.FunctionDef)
    tensors = [name for name, x in keywords.items() if of_tensors and x.kind is Any and x.default is attrs.NOTHING]
    functions = [name for name, x in keywords.items() if x.kind is Callable]
    return Signature(
        (*(x.arg for x in plain[:first]), *tensors),
        {name: x for name, x in keywords.items() if name not in (*tensors, *functions)},
        frozenset(functions),
    )


def _made_by(node: ast.FunctionDef | ast.ClassDef) -> ast.FunctionDef | None:
    """The definition that holds the parameters of a function or class: the function itself, or the class's `__init__`;
    None for a class without one of its own."""
    if isinstance(node, ast.FunctionDef):
        return node
    return next((x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"), None)


def _keyword(annotation: ast.expr | None, default: ast.expr | None) -> Keyword:
    kind = Any if annotation is None else _kind(annotation)
    if default is None:
        return Keyword(kind, attrs.NOTHING)
    try:
        value = ast.literal_eval(default)
    except ValueError:
        return Keyword(kind, ast.unparse(default))
    plain = type(value) if isinstance(value, bool | float | str) else Any
    return Keyword(plain if annotation is None else kind, value)


def _kind(annotation: ast.expr) -> Any:
    """The type that an annotation names, if settings can have it; Callable for functions and tensors; else Any."""
    match annotation:
        case ast.Constant(value=None):
            return types.NoneType
        case ast.Constant(value=str() as text):
            return _kind(ast.parse(text, mode="eval").body)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return _KINDS.get(name, Any)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            sides = [left, right]
            kinds = [_kind(x) for x in sides if not (isinstance(x, ast.Name) and x.id in _TENSORS)]
            if kinds == [types.NoneType]:
                return Callable  # a tensor, which no more than a function is a setting
            wide = Any in kinds or sum(kind is not types.NoneType for kind in kinds) != 1
            return Any if wide else Union[tuple(kinds)]  # noqa: UP007  (of values)
        case ast.Subscript(value=ast.Name(id="Literal")):
            return Literal[ast.literal_eval(annotation.slice)]
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=kinds)):
            each = tuple(... if isinstance(x, ast.Constant) and x.value is ... else _kind(x) for x in kinds)
            return Any if Any in each else tuple[each]
        case ast.Subscript(value=ast.Name(id="Callable")):
            return Callable
    return Any


def functions_of(
    part: Component, table: Functions, setting: str, *, also: type | tuple[type, ...] = ()
) -> list[Callable[..., Any]]:
    """Import the functions that a part names; a name of the user's may also be an instance of `also`. Raises
    ValueError, naming the setting, for an unknown name and for one that does not import."""
    if ":" in part.name:
        return [imported(part.name, f"{setting}.name", also=also)]
    if part.name not in table:
        text = f"there is no such name; {did_you_mean(part.name, table)} and module:function"
        raise WrongSetting(f"{setting}.name", part.name, text)
    paths = [path.partition(":") for path in table[part.name]]
    return [getattr(importlib.import_module(module), name) for module, _, name in paths]


def bound(
    part: Component, table: Functions, setting: str, *, also: type | tuple[type, ...] = ()
) -> list[Callable[..., Any]]:
    """Import the functions that a part names (`functions_of`), and bind to each the given keywords that it takes.

    Raises ValueError, naming the setting, for what does not import and for a keyword that no function takes.
    """
    functions = functions_of(part, table, setting, also=also)
    takes = [_taken(fn) for fn in functions]
    signature = signature_of(part.name, table)
    known = {} if signature is None else signature.keywords
    given = {k: called_with(v, known.get(k)) for k, v in part.keywords.items()}
    for name in given:
        if not any(names is None or name in names for names in takes):
            text = _no_keyword(part.name, name, list(dict.fromkeys(name for names in takes for name in names or ())))
            raise WrongSetting(f"{setting}.{name}", given[name], text)
    each = [{k: v for k, v in given.items() if names is None or k in names} for names in takes]
    return [partial(fn, **own) if own else fn for fn, own in zip(functions, each, strict=True)]


def takes(fn: Callable[..., Any], name: str) -> bool:
    """Whether a function takes a keyword of that name."""
    names = _taken(fn)
    return names is None or name in names


def _taken(fn: Callable[..., Any]) -> Sequence[str] | None:
    """Names of the keywords that a function takes; None if it takes arbitrary ones, or its signature is unknown."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    if any(x.kind is x.VAR_KEYWORD for x in parameters):
        return None
    return [x.name for x in parameters if x.kind is not x.POSITIONAL_ONLY]
