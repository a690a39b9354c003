"""The workflows of a public forge: what they run exists, and what they use is pinned. No network."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
KNOWN = {"python", "python3.11", "test", "auditwheel"}  # of the runner, or of the container
MODULES = {"pip", "build"}
PHASES = {int(x) for x in re.findall(r"\b(?:phase|beside) (\d+) ", (ROOT / ".ci" / "run").read_text())}


def problems(text: str) -> list[str]:
    """What is wrong with a workflow, in lines."""
    flow: dict[Any, Any] = yaml.safe_load(text)
    found = [f"no {key}" for key in ("name", "permissions", "jobs") if key not in flow]
    found += [] if flow.get(True) else ["no on"]  # YAML 1.1 reads the key as a truth value
    for name, job in flow.get("jobs", {}).items():
        found += [f"{name} needs {other}" for other in job.get("needs", []) if other not in flow["jobs"]]
        numbers = job.get("strategy", {}).get("matrix", {}).get("phases", [])
        found += [f"{name}: no phase {x}" for each in numbers for x in each.split() if int(x) not in PHASES]
        for step in job["steps"]:
            used, command = step.get("uses"), step.get("run", "")
            if used is not None and not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used):
                found.append(f"{name}: {used} is not pinned to a commit")
            words = shlex.split(command, comments=True)
            if used is None and not (words and (words[0] in KNOWN or (ROOT / words[0]).is_file())):
                found.append(f"{name}: no command {command!r}")
            if "-m" in words and words[words.index("-m") + 1] not in MODULES:
                found.append(f"{name}: no module in {command!r}")
            phases = [x for x in words[1:] if words[0] == ".ci/run" and x.isdecimal()]
            found += [f"{name}: no phase {x}" for x in phases if int(x) not in PHASES]
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_what_exists_and_pins_what_it_uses(path):
    assert problems(path.read_text()) == []


def test_problems_are_found():
    ci, release = (path.read_text() for path in WORKFLOWS)
    changed = {
        ci.replace("@11bd71901bbe5b1630ceea73d27597364c9af683", "@v4"): "is not pinned",
        ci.replace(".ci/run $", ".ci/rnu $"): "no command",
        ci.replace('"9 10"', '"9 77"'): "no phase 77",
        ci.replace("permissions:", "permission:"): "no permissions",
        release.replace("-m build", "-m bulid"): "no module",
        release.replace(".ci/run 2 14", ".ci/run 2 41"): "no phase 41",
        release.replace("[plain, kernels]", "[plain, kernel]"): "needs kernel",
        release.replace("on:", "off:", 1): "no on",
    }
    assert [text for text, said in changed.items() if not any(said in line for line in problems(text))] == []


def test_pull_requests_run_every_phase():
    """The first installs, the twelfth repeats failed tests."""
    flow = yaml.safe_load(WORKFLOWS[0].read_text())
    numbers = " ".join(flow["jobs"]["ci"]["strategy"]["matrix"]["phases"]).split()
    assert sorted(map(int, numbers)) == sorted(PHASES - {1, 12})


def test_kernels_are_built_for_releases_of_torch_that_are_allowed():
    """Those that a release names are within the bounds."""
    from packaging.requirements import Requirement

    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bound = next(x.specifier for x in map(Requirement, required) if x.name == "torch")
    built = yaml.safe_load(WORKFLOWS[1].read_text())["jobs"]["kernels"]["env"]["FPPO_BUILD_KERNELS"].split(",")
    assert built
    assert all(release in bound for release in built)
