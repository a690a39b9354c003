"""Ends of commands: messages of errors, and exit statuses."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import traceback
from pathlib import Path

from fppo._errors import RunFailed, UsageError, is_of_python, of_exit, printable
from fppo.settings import files

_OWN = Path(__file__).parent.parent
TRACEBACK = "--traceback"
_MOST = 40_000  # characters of a message with all its lines
TRAINING = ("quickstart", "train", "compare")  # commands that resume


def status_of(error: Exception, name: str, *, show: bool) -> int:
    """Print an error of the command `name`, with `show` its traceback too, and return the exit status.

    Errors whose message is not meant for users are raised again, unless their text would harm a terminal.
    """
    if isinstance(error, BrokenPipeError) and _is_abandoned():
        return 128 + signal.SIGPIPE
    if name in TRAINING and _lacks_memory(error):
        helps = 'token_budget = "auto" cuts passes, and rollout.cache_gb = "auto" what is sampled at once'
        error.add_note(f"out of memory: {helps}; then run the same command again to resume")
        error.add_note("docs/guides/memory.md says what else helps")
    trace = "".join(traceback.format_exception(error))
    if not _is_for_the_user(error):
        if _cut(trace) == trace:
            raise error
        _say(_cut(trace).rstrip("\n"))
        return 1
    if show:
        _say(_cut(trace).rstrip("\n"))
    hint = "" if show or isinstance(error, files.SettingsError | UsageError) else f"\n({TRACEBACK} shows where)"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        then = ", then run the same command to resume from the last checkpoint" if name in TRAINING else ""
        error.add_note(f"the disk is full; free space{then}")
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    _say(f"fppo {name}: {_words(error)}{_cut(notes)}{hint}")
    return 1 if isinstance(error, RunFailed) else 2


def _lacks_memory(error: Exception) -> bool:
    """Whether there was no memory for a tensor, and the error does not say itself what would help."""
    if isinstance(error, RunFailed):
        return False
    memory = sys.modules.get("fppo.steps.memory")  # if nothing has imported torch, no tensor was made
    return memory is not None and memory.out_of_memory(error)


def _say(text: str) -> None:
    """Print to standard error; if that fails, there is no other place for a message."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def status_of_exit(error: SystemExit, name: str, *, show: bool) -> int:
    """The exit status of a command ended by `sys.exit`. Exits of the argument parser and of ranks are raised again; one
    in user code is reported as a failed run."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    others = [file for file in files if not file.is_relative_to(_OWN) and not is_of_python(str(file))]
    if files[-1].is_relative_to(_OWN) or (others and "tyro" in others[0].parts):
        raise error
    return status_of(RunFailed(of_exit(error)), name, show=show)


def _words(error: Exception) -> str:
    """The message of an error, without control characters; "FILE: reason" for an operating system's error about a
    file."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return printable(f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}")
    return _cut(str(error))


def _cut(text: str) -> str:
    """Shorten long lines of a text and the text as a whole, and escape control characters."""
    return printable("\n".join(printable(line) for line in text.split("\n")), _MOST, lines=True)


def _is_abandoned() -> bool:
    """Whether the program that reads standard output, such as `head`, has ended. If so, discard all further output."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if not output.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _is_for_the_user(error: Exception) -> bool:
    """Whether the message of an error is meant for users."""
    if isinstance(error, ValueError | OSError):
        return True
    from fppo.fleet import GroupDied
    from fppo.rollout.sync import SyncError
    from fppo.rollout.vllm.host import EngineFailure
    from fppo.runtime.checkpoint import CheckpointError
    from fppo.runtime.failure import PeerError

    return isinstance(error, CheckpointError | PeerError | EngineFailure | GroupDied | SyncError)
