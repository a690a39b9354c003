"""Loggers of other packages, whose failures do not end the run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Protocol

from fppo._errors import words_of

FAILED = "log/failures"  # the metric that counts failed calls of loggers


class _Logger(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class Guarded:
    """A logger whose exceptions are caught: the first is printed on standard error, all are counted and their number
    printed at close.

    It is called again at the next step, since networks recover. A broken pipe ends the run, as everywhere.
    """

    def __init__(self, name: str, logger: _Logger) -> None:
        self._name, self._logger = name, logger
        self.failures = 0  # calls that have failed

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on the metrics of a step."""
        self._try(f"at step {step}", lambda: self._logger.log(step, metrics))

    def close(self) -> None:
        """Close the logger, and print the number of failures if there were several."""
        self._try("at its end", self._logger.close)
        if self.failures > 1:
            print(f"log.loggers: {self._name} has failed {self.failures} times; the run is whole", file=sys.stderr)

    def _try(self, when: str, call: Callable[[], None]) -> None:
        try:
            call()
        except BrokenPipeError:
            raise
        except (Exception, SystemExit) as error:
            self.failures += 1
            if self.failures == 1:
                text = f"log.loggers: {self._name} failed {when}, and the run goes on: {words_of(error)}"
                print(text, file=sys.stderr, flush=True)
