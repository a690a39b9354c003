"""The API reference, a page for each room with every public module in it, and llms.txt, an index of all pages.

A hook of mkdocs, which writes both from the tree whenever it is built; `pages` and `llms` need no mkdocs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SOURCES = (ROOT, ROOT / "kernels")


def modules() -> dict[str, Path]:
    """The public modules by their names, packages before what is in them."""
    names: dict[str, Path] = {}
    for source, package in zip(SOURCES, ("fppo", "fppo_kernels"), strict=True):
        for path in (source / package).rglob("*.py"):
            parts = list(path.relative_to(source).with_suffix("").parts)
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            if not any(part.startswith("_") for part in parts):
                names[".".join(parts)] = path
    return dict(sorted(names.items()))


def exported(path: Path) -> list[str]:
    """The names in a module's `__all__`; none if it has none, or not as a plain list."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def foreign(path: Path) -> set[str]:
    """The names that a module imports from other packages than ours, which have no place in our reference."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    others = [node for node in imports if (node.module or "").split(".")[0] not in ("fppo", "fppo_kernels")]
    return {alias.asname or alias.name for node in others for alias in node.names}


def defined(path: Path) -> list[str]:
    """The public names that a module defines at its top level."""
    names: list[str] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.append(name)
    return [name for name in dict.fromkeys(names) if not name.startswith("_")]


def room_of(module: str) -> str:
    """The page that a module is on: its package, or "values" for the modules of the top floor."""
    top, *rest = module.split(".")
    if top == "fppo_kernels":
        return top
    return rest[0] if rest and (ROOT / top / rest[0]).is_dir() else "values"


def pages() -> dict[str, str]:
    """The pages in Markdown by the names of their rooms."""
    names = modules()
    contents = {module: defined(path) for module, path in names.items()}
    texts: dict[str, list[str]] = {}
    for module, path in names.items():
        room = room_of(module)
        own = contents[module]
        places = {name: each for each in names if each.startswith(f"{module}.") for name in contents[each]}
        lines = texts.setdefault(room, [f"# {room if room in ('values', 'fppo_kernels') else f'fppo.{room}'}"])
        lines.append(f"::: {module}" + ("" if own else "\n    options: {members: false}"))
        others = [name for name in exported(path) if name not in own and name not in foreign(path)]
        for name in [name for name in others if name not in places]:
            lines.append(f"::: {module}.{name}")  # what a private module defines
        links = [f"[`{name}`][{places.get(name, module)}.{name}]" for name in others]
        if links:
            lines.append(f"Import from `{module}`: {', '.join(links)}.")
    return {room: "\n\n".join(lines) + "\n" for room, lines in texts.items()}


def first_sentence(text: str) -> str:
    """The first sentence of a page's prose, as plain text; of a page of the API reference, that of its first module."""
    if module := re.search(r"^::: (\S+)", text, re.MULTILINE):
        text = ast.get_docstring(ast.parse(modules()[module[1]].read_text(encoding="utf-8"))) or ""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = next((part for part in re.split(r"\n\s*\n", text) if re.match(r"\s*[\w`\[*]", part)), "")
    prose = " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose).split())
    return re.split(r"(?<=[.?!]) ", prose, maxsplit=1)[0].rstrip(":")


def llms(title: str, summary: str, nav: list[dict[str, Any]], read: Callable[[str], str]) -> str:
    """The text of llms.txt (llmstxt.org): for each page of the navigation a line with its link and its first sentence.

    `nav` is that of mkdocs.yml, its sections one level deep, and `read` returns the Markdown of a page.
    """
    single = [entry for entry in nav if isinstance(*entry.values(), str)]
    sections = {"Pages": single}
    for entry in nav:
        sections |= {} if entry in single else entry
    parts = [f"# {title}", f"> {summary}", "`fppo guide` prints a guide for agents, with programs that run."]
    for section, entries in sections.items():
        lines = [
            f"- [{name}]({page.removesuffix('.md')}.html): {first_sentence(read(page))}"
            for entry in entries
            for name, page in entry.items()
        ]
        parts += [f"## {section}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def on_config(config: Any) -> Any:
    """Adds the pages to the navigation."""
    config.nav.append({"API reference": [{room: f"api/{room}.md"} for room in pages()]})
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the pages and llms.txt to what is built."""
    from mkdocs.structure.files import File

    for room, text in pages().items():
        files.append(File.generated(config, f"api/{room}.md", content=text))
    read = lambda page: files.src_uris[page].content_string  # noqa: E731
    index = llms(config.site_name, config.site_description, config.nav, read)
    files.append(File.generated(config, "llms.txt", content=index))
    return files
