"""What makes a run beside its settings: the code of functions that settings name, versions of packages, commits.

Each start leaves its own in `starts/step_NNNNNNNN.json`, by the step that it went on from, unless all is as before.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import platform
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import attrs
import cattrs
from packaging.requirements import Requirement

from fppo._errors import json_of
from fppo.runtime.exports import write_whole
from fppo.settings import component, files, modules
from fppo.settings.train import TrainSettings

_NAME = re.compile(r"step_(\d{8})\.json")


@attrs.frozen(kw_only=True)
class Origin:
    """What a start of a run is made of."""

    versions: Mapping[str, str]
    """Python's version, fppo's, and those of the packages that fppo may use and that are installed."""
    commits: Mapping[str, str]
    """The git commit of fppo, and of each module of the user's, where they lie in a repository."""
    code: Mapping[str, str]
    """The source of each module of the user's that settings name a function of."""


def origin_of(settings: TrainSettings) -> Origin:
    """What a run with these settings is made of now."""
    versions = {"python": platform.python_version(), "fppo": metadata.version("fppo")}
    for name in sorted({Requirement(line).name for line in metadata.requires("fppo") or ()}):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    places = {"fppo": Path(__file__)}
    code = {}
    for _, function in modules.own_functions(settings):
        module = function.partition(":")[0]
        if (place := component.source_of(module)) is not None:
            places[module] = place
            code[module] = importlib.util.decode_source(place.read_bytes())
    commits = {name: commit for name, place in places.items() if (commit := commit_of(place.resolve())) is not None}
    return Origin(versions=versions, commits=commits, code=code)


def commit_of(path: Path) -> str | None:
    """The commit that is checked out in the git repository around a path; None if there is no repository, or none."""
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


def record(settings: TrainSettings, step: int) -> list[str]:
    """Writes what a start that goes on from `step` is made of; lines on what is new since the last start.

    What a start from a later step left is dropped, as `starts.record` does.
    """
    directory, now = Path(settings.output_dir) / files.STARTS, origin_of(settings)
    recorded = {int(match[1]): x for x in sorted(directory.glob("*.json")) if (match := _NAME.fullmatch(x.name))}
    for start, file in recorded.items():
        if start > step:
            file.unlink()
    before = [_read(file) for file in recorded.values()]
    kept = [origin for start, origin in zip(recorded, before, strict=True) if start <= step]
    if not kept or kept[-1] != now:
        text = json.dumps(attrs.asdict(now), indent=1) + "\n"
        write_whole(directory / f"step_{step:08d}.json", text.encode())
    if not before:
        return []
    if (last := before[-1]) is None:
        return [f"what the last start was made of cannot be read in {directory}"]
    return changes(last, now)


def _read(file: Path) -> Origin | None:
    """What a start was made of; None if its file is damaged."""
    try:
        return cattrs.structure(json_of(file.read_text(encoding="utf-8")), Origin)
    except Exception:  # cattrs raises groups of errors, and files what they like
        return None


def changes(before: Origin, now: Origin) -> list[str]:
    """Lines on what differs between two starts."""
    lines = []
    for module, text in now.code.items():
        if module in before.code and before.code[module] != text:
            lines.append(f"the code of {module} is another: {_counted(before.code[module], text)}")
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
    """How many lines were put in and taken out."""
    lines = list(difflib.unified_diff(before.splitlines(), now.splitlines(), n=0))[2:]
    put, taken = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return f"{put} lines in it are new, {taken} are gone"


def untested(versions: Mapping[str, str], required: Sequence[str]) -> list[str]:
    """Lines on packages whose version is outside of what fppo was tested with, as its requirements say."""
    lines = []
    for requirement in map(Requirement, required):
        version = versions.get(requirement.name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            lines.append(
                f"{requirement.name} {version} is outside of what fppo was tested with, {requirement.specifier}"
            )
    return lines


def untested_here() -> list[str]:
    """Lines on the packages of this environment, as `untested` has them."""
    required = [line for line in metadata.requires("fppo") or () if Requirement(line).marker is None]
    return untested({name: metadata.version(name) for name in (Requirement(line).name for line in required)}, required)
