"""The rules of the rooms, read off the source: `python -m tests.house` draws the imports by room.

A room is a folder of `fppo`, and the package `fppo_kernels`. The modules beside the folders are the room `core`; but
what starts the library, `fppo` itself and `__main__`, counts with `commands`. A room imports only rooms of earlier
floors, or of its own floor as long as no circle comes of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLOORS = (
    ("fppo_kernels",),
    ("core",),
    ("losses", "runtime", "data"),
    ("advantages",),
    ("models", "workers", "fleet"),
    ("steps", "environments"),
    ("rollout", "laws"),
    ("rewards", "serve"),
    ("pipeline", "settings"),
    ("assembly", "quickstart"),
    ("runs",),
    ("report",),
    ("studies",),
    ("commands",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# may touch the world
EDGES = ("data", "runtime", "workers", "fleet", "rollout", "serve", "quickstart", "runs", "report", "commands")
IN_PLACE = ("fppo_kernels", "fppo.tree")  # may write into memory that their caller has given up
FILE_LINES, FUNCTION_LINES, EXPERIMENT_LINES = 600, 60, 60


# no docstring begins with these words, which lean on the name, and no name of a function or class holds the others
OPENINGS = ("Of", "Those", "That", "It", "As", "The same", "What")
WORDS = ("asked", "told", "tells", "there")


@cache
def sources(root: Path = ROOT) -> dict[str, ast.Module]:
    """The syntax trees of both packages by module."""
    files = [(root, path) for path in (root / "fppo").rglob("*.py")]
    files += [(root / "kernels", path) for path in (root / "kernels").rglob("*.py")]
    names = {".".join(path.relative_to(base).with_suffix("").parts): path for base, path in files}
    return {name.removesuffix(".__init__"): ast.parse(path.read_text("utf-8")) for name, path in sorted(names.items())}


def room_of(module: str) -> str:
    """The room that a module or package stands in."""
    first, *rest = module.split(".")
    if first == "fppo" and (not rest or rest == ["__main__"]):
        return "commands"
    return first if first != "fppo" else rest[0] if rest[0] in FLOOR or rest[1:] else "core"


def imports(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, module of ours) of every import, wherever it stands; relative imports are refused."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{module}:{node.lineno}: a relative import; write the whole name")
            names = [node.module or ""]
            if node.module == "fppo":
                names = [f"fppo.{alias.name}" for alias in node.names if alias.name != "__version__"]
        yield from ((node.lineno, name) for name in names if name.split(".")[0] in ("fppo", "fppo_kernels"))


def arrows(root: Path = ROOT) -> dict[tuple[str, str], list[str]]:
    """The places, as module:line, at which a room imports another, by (importer, imported)."""
    result: dict[tuple[str, str], list[str]] = {}
    for module, tree in sources(root).items():
        for line, name in imports(module, tree):
            pair = room_of(module), room_of(name)
            if pair[0] != pair[1]:
                result.setdefault(pair, []).append(f"{module}:{line}")
    return result


def circles(pairs: set[tuple[str, str]]) -> list[str]:
    """Rooms, or modules, that import each other, straight or through others."""
    rest = set(pairs)
    while leaves := {b for _, b in rest} - {a for a, _ in rest}:
        rest = {(a, b) for a, b in rest if b not in leaves}
    while tops := {a for a, _ in rest} - {b for _, b in rest}:
        rest = {(a, b) for a, b in rest if a not in tops}
    return sorted({room for pair in rest for room in pair})


def module_arrows(root: Path = ROOT) -> set[tuple[str, str]]:
    """(importer, imported) of modules, also inside of functions, but for types alone; a package for what is no module
    of it."""
    trees = sources(root)
    pairs: set[tuple[str, str]] = set()
    for module, tree in trees.items():
        blocks = [
            node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ]
        for_types = {id(node) for block in blocks for node in ast.walk(block)}
        for node in ast.walk(tree):
            if id(node) in for_types:
                continue
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                below = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in trees else node.module for name in below]
            else:
                continue
            pairs |= {(module, name) for name in names if name in trees and name != module}
    return pairs


def drawing(root: Path = ROOT) -> str:
    """The floors from the bottom up, each room with the rooms that it imports, lowest first."""
    seen: dict[str, set[str]] = {}
    for a, b in arrows(root):
        seen.setdefault(a, set()).add(b)
    lines: list[str] = []
    for number, rooms in enumerate(FLOORS):
        for room in rooms:
            below = sorted(seen.get(room, ()), key=lambda name: (FLOOR.get(name, 99), name))
            lines.append(f"{number:>2}  {room:<12} {' '.join(below)}".rstrip())
    return "\n".join(lines)


def prose(root: Path = ROOT) -> Iterator[str]:
    """Docstrings that begin with one of `OPENINGS`, and names that hold one of `WORDS`."""
    for module, tree in sources(root).items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            name = "" if isinstance(node, ast.Module) else node.name
            text = " ".join((ast.get_docstring(node) or "").split())
            if opening := next((x for x in OPENINGS if re.match(rf"{x}\b", text)), None):
                yield f"{module}.{name}: the docstring begins with {opening!r}; begin with a verb or noun phrase"
            parts = re.findall("[A-Z]?[a-z]+", name)
            if word := next((x for x in WORDS if x in map(str.lower, parts)), None):
                yield f"{module}.{name}: the name holds {word!r}; take the field's word"


def openings(root: Path = ROOT) -> Iterator[str]:
    """Rooms of several modules whose docstring does not say what flows in and out and where to begin, or names there
    what does not exist."""
    trees = sources(root)
    for room, tree in trees.items():
        if room.count(".") > (room.startswith("fppo.")) or not any(module.startswith(f"{room}.") for module in trees):
            continue
        text = ast.get_docstring(tree) or ""
        if room != "fppo" and not re.search(r"In:\s.*Out:\s.*Begin with `", text, re.DOTALL):
            yield f"{room}: the docstring has no `In:`, `Out:` and `Begin with`"
        for module, name in re.findall(r"`(\w+)(?:\.(\w+))?`", text.partition("Begin with")[2]):
            found = trees.get(f"{room}.{module}")
            if found is None or (name and name not in {getattr(node, "name", "") for node in found.body}):
                yield f"{room}: its docstring begins with {module}.{name}, which does not exist"


def takers(room: str, kind: str, root: Path = ROOT) -> list[str]:
    """The functions of a room, also those inside of others, with a parameter annotated as a class of that name, and
    the classes with a field of it."""
    found: list[str] = []
    for module, tree in sources(root).items():
        for node in ast.walk(tree) if room_of(module) == room else ():
            annotations: list[ast.expr | None] = []
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = node.args
                own = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg]
                annotations = [argument.annotation for argument in own if argument]
            elif isinstance(node, ast.ClassDef):
                annotations = [field.annotation for field in node.body if isinstance(field, ast.AnnAssign)]
            if any(x and re.search(rf"\b{kind}\b", ast.unparse(x)) for x in annotations):
                found.append(f"{module}.{getattr(node, 'name', '')}")
    return found


def doubles(root: Path = ROOT) -> dict[str, list[str]]:
    """The modules of each class name that stands in several of them."""
    found: dict[str, list[str]] = {}
    for module, tree in sources(root).items():
        for name in {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}:
            found.setdefault(name, []).append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def sizes(root: Path = ROOT) -> Iterator[str]:
    """Files, functions and experiments that are too long to be read in one sitting."""
    for base, limit in (("fppo", FILE_LINES), ("kernels", FILE_LINES), ("experiments", FILE_LINES), ("tests", 0)):
        for path in sorted((root / base).rglob("*.py")):
            most = EXPERIMENT_LINES if path.parent == root / "experiments" else limit
            text = path.read_text("utf-8")
            if most and (lines := text.count("\n")) > most:
                yield f"{path.relative_to(root)}: {lines} lines, over {most}"
            for node in ast.walk(ast.parse(text)) if base in ("fppo", "kernels") else ():
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    lines = (node.end_lineno or node.lineno) - node.lineno + 1
                    if lines > FUNCTION_LINES:
                        place = f"{path.relative_to(root)}:{node.lineno}"
                        yield f"{place}: {node.name} has {lines} lines, over {FUNCTION_LINES}"


def side_effects(root: Path = ROOT) -> Iterator[str]:
    """Global state anywhere; prints, reads of the environment and writes into arguments outside the edges."""
    for module, tree in sources(root).items():
        room = room_of(module)
        for node in ast.walk(tree):
            place = f"{module}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Global):
                yield f"{place}: global state"
            if room in EDGES:
                continue
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                yield f"{place}: print in the library"
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                yield f"{place}: reads the environment in the library"
            if isinstance(node, ast.FunctionDef) and not module.startswith(IN_PLACE) and not node.name.startswith("__"):
                yield from (f"{module}:{line}: {node.name} writes into {name}" for line, name in _writes(node))


def _writes(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """Where a function writes into what it was called with: `x[...] = `, `x += ` or `x.add_()`.

    One whose name ends with an underscore says that it does, as torch's do; a method may be torch's own interface.
    """
    arguments = function.args
    own = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    if function.name.endswith("_") or "self" in own:
        return
    own -= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in ast.walk(function):
        written: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            written = [target.value for target in node.targets if isinstance(target, ast.Subscript)]
        elif isinstance(node, ast.AugAssign):
            written = [node.target.value if isinstance(node.target, ast.Subscript) else node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr[-1] == "_":
            written = [node.func.value]
        yield from ((node.lineno, name.id) for name in written if isinstance(name, ast.Name) and name.id in own)


if __name__ == "__main__":
    print(drawing())
