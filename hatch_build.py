"""The build hook of the wheel: with FPPO_BUILD_KERNELS it compiles the kernels in C++ into it.

The variable names the releases of torch for which the wheel is: `FPPO_BUILD_KERNELS=2.13.0,2.14.1 python -m build`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "FPPO_BUILD_KERNELS"
FLAGS = ["-O3", "-DNDEBUG", "-std=c++20", "-fPIC", "-shared", "-fopenmp", "-fno-trapping-math", "-fno-signed-zeros"]


def compiled(text: str, level: str, out: Path, compiler: str) -> None:
    """Compile a program for a level of x86-64. Raises RuntimeError with the compiler's words."""
    command = [compiler, *FLAGS, "-Wno-psabi", f"-march={level}", "-x", "c++", "-", "-o", str(out)]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{out.name} does not compile for {level}: {done.stderr.strip()}")


class KernelsHook(BuildHookInterface):
    """Compiles all programs for all levels, and adds them to the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries and the tag of the platform, if the variable is set."""
        asked = os.environ.get(VARIABLE, "")
        if not asked:
            return
        releases = asked.split(",")
        if not all(re.fullmatch(r"\d+\.\d+\.\d+", release) for release in releases):
            raise ValueError(f"{VARIABLE} names releases of torch, such as 2.13.0,2.14.1, got {asked!r}")
        if version == "editable":
            raise ValueError(f"{VARIABLE} is for wheels; an installation in place compiles kernels at their first use")
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            raise ValueError(f"{VARIABLE}: kernels are built in on Linux on x86-64, not on {sysconfig.get_platform()}")
        sys.path.insert(0, str(Path(self.root) / "kernels"))
        from fppo_kernels import prebuilt

        compiler = os.environ.get("CXX", "g++")
        said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        self._folder = Path(tempfile.mkdtemp())
        facts = {"torch": releases, "compiler": said.splitlines()[0], "flags": FLAGS}
        (self._folder / "build.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = []
            for level in prebuilt.LEVELS:
                (self._folder / level).mkdir()
                for path in prebuilt.paths():
                    out = self._folder / level / prebuilt.file_name(path)
                    jobs.append(pool.submit(compiled, prebuilt.program(path), level, out, compiler))
            for job in jobs:
                job.result()
        build_data["force_include"][str(self._folder)] = f"fppo_kernels/{prebuilt.LIBRARIES}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled, which the wheel has now."""
        if folder := getattr(self, "_folder", None):
            shutil.rmtree(folder)
