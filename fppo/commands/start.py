"""Where every command begins: ctrl-C ends it with one line, also while it is being loaded."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

STOPPED = 130  # the exit status of a command that ctrl-C ended
_IMPORTING = "<frozen importlib._bootstrap>"  # the file of whatever imports


def main() -> int:
    """Runs the command that the process' arguments name; the exit status."""
    guarded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, as behind nohup
    if guarded:
        signal.signal(signal.SIGINT, _interrupt)
    status = STOPPED
    try:
        from fppo.commands import cli

        status = cli.main()
    except KeyboardInterrupt:  # before or behind what `cli.main` does
        _say()
    if guarded:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(status))  # all that is left is Python's own end
    return status


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt. Amid an import, where that may be caught, or come out as another error, it ends the
    process: what is imported has nothing yet that is to be put in order."""
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
