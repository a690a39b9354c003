"""Writes a line into the log of the tests' costs when this interpreter starts, forks, or starts another program.

It also has what is imported looked through for garbage less often: that took a sixth of a process' imports. Python
imports it at the start of each process that inherits the tests' PYTHONPATH; `tests/costs.py` reads the log.
"""

import gc
import os
import sys

_LOG, _CAUSE = "FPPO_TESTS_LOG", "FPPO_TESTS_CAUSE"
_COMPILERS = ("g++", "gcc", "c++", "cc", "clang", "clang++", "ninja", "nvcc", "ptxas")


def note(kind: str) -> None:
    """One more process, or program compiled, on behalf of whoever the environment names."""
    log, cause = os.environ.get(_LOG), os.environ.get(_CAUSE)
    if log and cause:
        with open(log, "a") as file:
            file.write(f"{cause}\t{kind}\n")


def _heard(event: str, arguments: tuple) -> None:
    if event == "subprocess.Popen":
        program = os.path.basename(os.fsdecode(arguments[0] or arguments[1][0]))
        if program in _COMPILERS:
            note("compiled")
        elif not program.startswith("python"):  # that says so itself
            note("processes")


def _forked() -> None:
    """One more process. A copy of a fork server is on behalf of the test that runs now, of which the server's own
    environment does not know: it names the test that first needed one."""
    log, cause = os.environ.get(_LOG), os.environ.get(_CAUSE)
    if log and cause and any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
        worker = cause.partition("\t")[0]
        with open(f"{log}.{worker}") as file:
            os.environ[_CAUSE] = f"{worker}\t{file.read()}"
    note("processes")


def watch() -> None:
    """Notes what this process starts from now on."""
    sys.addaudithook(_heard)
    os.register_at_fork(after_in_child=_forked)


if __name__ == "sitecustomize" and os.environ.get(_LOG):
    note("processes")
    watch()
    gc.set_threshold(100_000, 50, 100)
