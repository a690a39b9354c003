"""The entry point of all commands: ctrl-C ends one with a single line, even while it is being loaded.

What must be set before torch is loaded is set here.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from fppo.runtime.barriers import choose_waiting

STOPPED = 130  # the exit status of a command ended by ctrl-C
_IMPORTING = "<frozen importlib._bootstrap>"  # the file name in frames of imports


def main() -> int:
    """Run the command that the process's arguments name, and return the exit status."""
    _open_closed()
    guarded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, as behind nohup
    if guarded:
        signal.signal(signal.SIGINT, _interrupt)
    status = STOPPED
    choose_waiting(os.environ)
    try:
        from fppo.commands import cli

        status = cli.main()
    except KeyboardInterrupt:  # outside `cli.main`
        _say()
    if guarded:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(status))  # only Python's own shutdown is left
    return status


def _open_closed() -> None:
    """Open standard streams that a shell has closed (`>&-`) on the null device: else the next opened file would take
    their numbers, and get the printed text."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, number)  # for processes that are started, too
            os.set_inheritable(number, True)
            if opened != number:
                os.close(opened)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt. During an import, which may catch it or turn it into another error, end the process:
    modules being imported hold nothing to clean up."""
    del number
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            _say()
            os._exit(STOPPED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _say() -> None:
    name = next((word for word in sys.argv[1:2] if not word.startswith("-")), "")
    os.write(2, f"{f'fppo {name}'.strip()}: interrupted\n".encode())
