"""Origins of a run besides its settings: code of the users' functions, versions, commits, and what bits depend on.

Each start writes them to `starts/step_NNNNNNNN.json`, by the step that it resumed from, unless nothing has changed.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import inspect
import json
import platform
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import attrs
import cattrs
from packaging.requirements import Requirement

from fppo._errors import json_of
from fppo.rewards.functions import Reward
from fppo.runs import bits
from fppo.runtime.exports import write_whole
from fppo.settings import component, files, modules
from fppo.settings.train import TrainSettings

_NAME = re.compile(r"step_(\d{8})\.json")


@attrs.frozen(kw_only=True)
class Origin:
    """The versions, commits and user code of a start, and what its bits depend on."""

    versions: Mapping[str, str]
    """The versions of Python, fppo, and fppo's installed requirements."""
    commits: Mapping[str, str]
    """The git commits of fppo and of the users' modules, for those in a repository."""
    code: Mapping[str, str]
    """The sources of the users' modules whose functions settings name, and of functions that `fppo.train` was given."""
    ground: Mapping[str, str] = attrs.field(factory=dict)
    """The grounds of its bits (`bits.ground`); empty for a start that did not record them."""


def origin_of(settings: TrainSettings, given: Mapping[str, Reward]) -> Origin:
    """The current origin of a run with these settings, and with the functions that `fppo.train` was given by name."""
    versions = {"python": platform.python_version(), "fppo": metadata.version("fppo"), **installed()}
    places = {"fppo": Path(__file__)}
    code = {}
    for name, function in given.items():
        with contextlib.suppress(OSError, TypeError):  # typed at a prompt, or an object
            code[name] = inspect.getsource(cast(Any, function))
    for _, function in modules.own_functions(settings):
        module = function.partition(":")[0]
        if (place := component.source_of(module)) is not None:
            places[module] = place
            code[module] = importlib.util.decode_source(place.read_bytes())
    commits = {name: commit for name, place in places.items() if (commit := commit_of(place.resolve())) is not None}
    return Origin(versions=versions, commits=commits, code=code, ground=bits.ground())


@functools.cache
def installed() -> Mapping[str, str]:
    """The versions of fppo's installed requirements, read once in a process."""
    versions = {}
    for name in sorted({Requirement(line).name for line in metadata.requires("fppo") or ()}):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return MappingProxyType(versions)


def commit_of(path: Path) -> str | None:
    """The commit checked out in the git repository around a path; None without a repository or a commit."""
    for directory in path.parents:
        git = directory / ".git"
        if git.is_file():  # of a worktree, or of a submodule
            git = directory / git.read_text().removeprefix("gitdir:").strip()
        if (git / "HEAD").is_file():
            return _head(git)
    return None


def _head(git: Path) -> str | None:
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head
    name = head.removeprefix("ref:").strip()
    shared = git / "commondir"
    common = git / shared.read_text().strip() if shared.is_file() else git
    if (common / name).is_file():
        return (common / name).read_text().strip()
    packed = common / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else []
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)


def record(settings: TrainSettings, step: int, given: Mapping[str, Reward] = MappingProxyType({})) -> list[str]:
    """Write down the origin of a start, that is the versions, commits, user code and machine that it runs with. `step`
    is the step that it resumes from, `given` the functions that `fppo.train` was given, by name.

    Returns lines on changes since the last start, to be printed after "going on from step N"; none for the first start,
    or without changes. Removes the origins of starts from later steps, as `starts.record` does.
    """
    directory, now = Path(settings.output_dir) / files.STARTS, origin_of(settings, given)
    files_of = recorded(directory.parent)
    before = [_read(file) for file in files_of.values()]
    for start, file in files_of.items():
        if start > step:
            file.unlink()
    kept = [origin for start, origin in zip(files_of, before, strict=True) if start <= step]
    if not kept or kept[-1] != now:
        text = json.dumps(attrs.asdict(now), indent=1) + "\n"
        write_whole(directory / f"step_{step:08d}.json", text.encode())
    if not before:
        return []
    if (last := before[-1]) is None:
        return [f"with other code, perhaps: the origin of the last start cannot be read in {directory}"]
    told = {"with other code": changes(last, now), "with other bits ahead": bits.unlike(last.ground, now.ground)}
    return [f"{what}: {'; '.join(lines)}" for what, lines in told.items() if lines]


def recorded(directory: Path) -> dict[int, Path]:
    """The files of the origins of a run's starts, by the steps that they resumed from, ascending."""
    places = sorted((directory / files.STARTS).glob("*.json"))
    return {int(match[1]): place for place in places if (match := _NAME.fullmatch(place.name))}


def load(directory: Path, step: int) -> Origin | None:
    """The origin of the start that made a step of the run in a directory; None without one, or if it is damaged."""
    found = recorded(directory)
    before = [start for start in found if start < step]
    return _read(found[max(before)]) if before else None


def _read(file: Path) -> Origin | None:
    """The origin in a start's file; None if it is damaged."""
    try:
        return cattrs.structure(json_of(file.read_text(encoding="utf-8")), Origin)
    except Exception:  # cattrs raises groups of errors, damaged files any exception
        return None


def changes(before: Origin, now: Origin) -> list[str]:
    """Lines on the differences between two origins."""
    lines = []
    for module, text in now.code.items():
        if module in before.code and before.code[module] != text:
            lines.append(f"the code of {module} has changed: {_counted(before.code[module], text)}")
    for name in sorted({*before.versions, *now.versions}):
        old, new = before.versions.get(name, "none"), now.versions.get(name, "none")
        if old != new:
            lines.append(f"{name} {old} -> {new}")
    for name in sorted({*before.commits} & {*now.commits}):
        old, new = before.commits[name], now.commits[name]
        if old != new:
            lines.append(f"the commit of {name} {old[:10]} -> {new[:10]}")
    return lines


def _counted(before: str, now: str) -> str:
    """The numbers of added and removed lines, as text."""
    lines = list(difflib.unified_diff(before.splitlines(), now.splitlines(), n=0))[2:]
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return f"{added} lines added, {removed} removed"


def untested(versions: Mapping[str, str], required: Sequence[str]) -> list[str]:
    """Lines on packages with versions outside fppo's requirements, the tested ones."""
    lines = []
    for requirement in map(Requirement, required):
        version = versions.get(requirement.name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            lines.append(
                f"{requirement.name} {version} is outside the versions fppo was tested with, {requirement.specifier}"
            )
    return lines


def untested_here() -> list[str]:
    """Describe installed packages whose versions are outside fppo's requirements, one line each; see `untested`."""
    required = [line for line in metadata.requires("fppo") or () if Requirement(line).marker is None]
    return untested(installed(), required)
