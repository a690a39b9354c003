"""What a release would push: a wheel that has everything, runs without the tree, and is what the sdist builds."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import fppo
from fppo_kernels import prebuilt
from fppo_kernels.table import lacks_cpp_compiler

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("hatchling"), reason="needs hatchling"),
    pytest.mark.skipif(not importlib.util.find_spec("build"), reason="needs build"),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the repository"),
]
PREPARE = """
from pathlib import Path
from fppo import quickstart
from fppo.settings import files
quickstart.prepare(Path("quick"), 0, steps=2)
files.save(files.replace(quickstart.settings(Path("quick"), 0), {"steps": 2}), Path("quick.toml"))
"""
RUN = """
output_dir = "mine"
steps = 200

[model]
path = "quick/warm"

[data]
path = ["train.jsonl"]
eval_path = ["test.jsonl"]
prompt = "{question}="
ground_truth = "answer"

[rollout]
batch_size = 8
max_tokens = 4

[reward]
functions = ["exact_match", "my_rewards:politeness"]
weights = [1.0, 0.1]

[algorithm]
advantage = "gae"
kl = { coef = 0.01 }
"""


def _built_by(*options: str, out: Path, **variables: str) -> Path:
    """The wheel that `python -m build` makes of the tree."""
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


class Installed:
    """An environment with the wheel, which sees the packages of this one, but not the tree; and an empty directory."""

    def __init__(self, place: Path, wheel: Path) -> None:
        self.home, self.bin = place / "home", place / "venv" / "bin"
        self.told = ""  # on standard error, by the last program
        self.home.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
        python = str(self.bin / "python")
        command = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet"]
        subprocess.run([*command, str(wheel)], check=True)
        others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        own = next((place / "venv").glob("lib/python*/site-packages"))
        (own / "others.pth").write_text("\n".join(others) + "\n")  # in which no .pth file, as the tree's, is read

    def run(self, name: str, *arguments: str, **variables: str) -> str:
        """What a program of the environment prints."""
        kept = {key: x for key, x in os.environ.items() if not key.startswith("PYTHON")} | variables
        command = [str(self.bin / name), *arguments]
        done = subprocess.run(command, cwd=self.home, env=kept, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{name} {arguments}: {done.stdout}{done.stderr}"
        self.told = " ".join(done.stderr.split())
        return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that the sdist builds, without built-in kernels."""
    return _built_by(out=tmp_path_factory.mktemp("dist"), FPPO_BUILD_KERNELS="")


def test_the_wheel_has_every_file_of_the_packages_and_the_sdist_builds_the_same(wheel, tmp_path):
    listed = subprocess.run(
        ["git", "ls-files", "fppo", "kernels/fppo_kernels"], cwd=ROOT, capture_output=True, text=True
    )
    found = _contents(wheel)
    for name in listed.stdout.split():
        assert found.get(name.removeprefix("kernels/")) == (ROOT / name).read_bytes(), name
    assert wheel.name == f"fppo-{fppo.__version__}-py3-none-any.whl"
    assert _contents(_built_by("--wheel", out=tmp_path, FPPO_BUILD_KERNELS="")) == found


def test_a_run_needs_the_wheel_alone(wheel, tmp_path):
    installed = Installed(tmp_path, wheel)
    assert "quickstart" in installed.run("fppo", "--help")
    assert installed.run("fppo", "guide").startswith("---\nname: fppo\n")
    found = json.loads(installed.run("fppo", "env", "--json"))
    assert (found["fppo"], found["commit"], found["built_in"]) == (fppo.__version__, None, prebuilt.NONE)
    where = installed.run("python", "-c", "import fppo, fppo_kernels; print(fppo.__file__, fppo_kernels.__file__)")
    assert all(Path(path).is_relative_to(tmp_path) for path in where.split())
    installed.run("python", "-c", PREPARE)
    installed.run("fppo", "train", "quick.toml")
    assert (installed.home / "quick" / "checkpoints" / "step_00000002").is_dir()
    assert (installed.home / "quick" / "report.html").is_file()
    for name in ("train", "test"):
        rows = [{"question": f"1+{number}", "answer": f"{1 + number}"} for number in range(8)]
        (installed.home / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (installed.home / "my_rewards.py").write_text("def politeness(sample):\n    return 0.0\n")
    (installed.home / "run.toml").write_text(RUN)
    assert "politeness" in installed.run("fppo", "check", "run.toml")


@pytest.mark.skipif(lacks_cpp_compiler() is not None, reason="needs a C++ compiler")
@pytest.mark.skipif(not isinstance(prebuilt.level_here(), str), reason="needs a processor with AVX2, on Linux")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels in C++ are for machines without a GPU")
def test_kernels_that_are_built_in_run_without_a_compiler(tmp_path):
    release = torch.__version__.partition("+")[0]
    wheel = _built_by("--wheel", out=tmp_path / "dist", FPPO_BUILD_KERNELS=f"2.11.0,{release}")
    assert wheel.name == f"fppo-{fppo.__version__}-py3-none-linux_x86_64.whl"
    assert sum(name.endswith(".so") for name in _contents(wheel)) == len(prebuilt.LEVELS) * len(prebuilt.paths())
    installed = Installed(tmp_path, wheel)
    alone = {"PATH": str(installed.bin)}
    said = json.loads(installed.run("fppo", "env", "--json", **alone))
    assert said["compiler"] == "no C++ compiler (g++ or clang++) is installed"
    assert said["computes"]["kernels in C++"] == said["built_in"]
    assert said["built_in"].startswith(f"built in for {prebuilt.level_here()} by ")
    laws = "from fppo import laws; from fppo_kernels import table\n"
    laws += "[laws.check_kernel(op, table.get(op, 'cpp')) for op in ('glu', 'rms_norm', 'rotary')]"
    installed.run("python", "-c", laws, **alone)
    installed.run("python", "-c", PREPARE, **alone)
    installed.run("fppo", "train", "quick.toml", **alone)
    assert 'attention = "cpp"' in (installed.home / "quick" / "settings.toml").read_text()
    ground = json.loads((installed.home / "quick" / "starts" / "step_00000000.json").read_text())["ground"]
    assert ground["kernels in C++"] == said["built_in"]
    facts = next(tmp_path.glob("venv/lib/*/site-packages/fppo_kernels/_libraries/build.json"))
    facts.write_text(facts.read_text().replace(f'"{release}"', '"2.12.0"'))  # for other releases
    resumed = " ".join(installed.run("fppo", "train", "quick.toml", "--steps", "3", **alone).split())  # lines are cut
    assert f"kernels in C++: those built in are for torch 2.11.0, 2.12.0, and this is {torch.__version__}" in resumed
    assert f"kernels in C++ {said['built_in']} -> not set" in installed.told


@pytest.mark.parametrize(("releases", "said"), [("yes", "such as 2.13.0,2.14.1, got 'yes'"), ("2.13", "got '2.13'")])
def test_the_variable_names_releases(tmp_path, releases, said):
    with pytest.raises(AssertionError, match=said):
        _built_by("--wheel", out=tmp_path, FPPO_BUILD_KERNELS=releases)
