"""The arguments of commands that take few; no torch, so that their help answers at once."""

from __future__ import annotations

from typing import Annotated

import attrs
import tyro


@attrs.frozen(kw_only=True)
class Quickstart:
    """Trains a small model on an addition task, from nothing to a report, in two minutes."""

    output_dir: str = "runs/quickstart"
    """The directory for everything that the run writes."""
    seed: int = 0
    """What every random draw of the run follows from."""


@attrs.frozen(kw_only=True)
class Replay:
    """Computes a step of a run again from the nearest checkpoint and names the first number that differs."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The output_dir of the run."""
    step: int
    """The step."""
    device: str | None = None
    """Where tensors live; None: where the run had them, whose bits no other device may give."""


@attrs.frozen(kw_only=True)
class Export:
    """Writes the policy of a run as a Hugging Face directory."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The output_dir of the run."""
    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TARGET")]
    """The directory to write."""
    step: int | None = None
    """The step of the checkpoint; None: the last."""
    critic: bool = False
    """Write the critic in place of the policy, as a token classifier with one label."""
    merge: bool = False
    """Write an adapter merged with its base, as a whole model, in place of PEFT's files."""
    device: str = "cpu"
    """Where the parameters are read to: the host's memory will do."""


@attrs.frozen(kw_only=True)
class Report:
    """Draws the curves of a run and writes its report.html."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The output_dir of the run."""


@attrs.frozen(kw_only=True)
class TraceOptions:
    """Writes who worked when in the last steps of a run as a Chrome trace, for ui.perfetto.dev or chrome://tracing."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The output_dir of the run."""
    out: str | None = None
    """The file to write; None: trace/trace.json in the run's directory."""


@attrs.frozen(kw_only=True)
class DiffOptions:
    """Says where two runs first differ: in which step, in what which stage has made. 0 if they are equal, else 1."""

    runs: Annotated[tyro.conf.Positional[tuple[str, str]], tyro.conf.arg(metavar="RUN RUN")]
    """The output_dirs of the two runs."""
