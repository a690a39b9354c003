"""The arguments of the smaller commands; no torch, so that their help answers at once."""

from __future__ import annotations

from typing import Annotated

import attrs
import tyro


@attrs.frozen(kw_only=True)
class Quickstart:
    """Train a small model on an addition task, from nothing to a report, in two minutes."""

    output_dir: str = "runs/quickstart"
    """The directory for everything that the run writes."""
    seed: int = 0
    """The seed of all random draws."""
    exact: bool = False
    """Sample with the log-probs that training computes, bit for bit (rollout.exact)."""


@attrs.frozen(kw_only=True)
class Replay:
    """Recompute a step of a run from the nearest checkpoint and name the first number that differs."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The output_dir of the run."""
    step: int
    """The step to recompute."""
    device: str | None = None
    """The device; None: the run's own, the only one that is sure to give its bits."""


@attrs.frozen(kw_only=True)
class Export:
    """Write the policy of a run as a Hugging Face directory with a model card."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The output_dir of the run."""
    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TARGET")]
    """The directory to write."""
    step: int | None = None
    """The step of the checkpoint; None: the last."""
    critic: bool = False
    """Write the critic instead of the policy, as a token classifier with one label."""
    merge: bool = False
    """Write an adapter merged with its base, as a whole model, instead of PEFT's files."""
    device: str = "cpu"
    """The device for the parameters; the host's memory suffices."""
    push: str | None = None
    """Upload the directory to the Hugging Face hub under this name, as me/my-model, after hf auth login."""
    public: bool = False
    """Let everyone read what is uploaded; else the repository is private."""


@attrs.frozen(kw_only=True)
class Report:
    """Draw the curves of a run and write its report.html."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The output_dir of the run."""


@attrs.frozen(kw_only=True)
class TraceOptions:
    """Write a timeline of a run's last steps as a Chrome trace, for ui.perfetto.dev or chrome://tracing."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The output_dir of the run."""
    out: str | None = None
    """The file to write; None: trace/trace.json in the run's directory."""


@attrs.frozen(kw_only=True)
class DiffOptions:
    """Print the first difference of two runs: the step, and the stage that made it. Exits with 0 if equal, else 1."""

    runs: Annotated[tyro.conf.Positional[tuple[str, str]], tyro.conf.arg(metavar="RUN RUN")]
    """The output_dirs of the two runs."""


@attrs.frozen(kw_only=True)
class AuditOptions:
    """Put another trainer's losses and estimators through the laws, or recompute a batch that it wrote.

    TRAINER is trl, verl, openrlhf, or a function or tuple of your own as module:adapters. Exits with 0 if no law is
    broken but by a convention, and no number of the batch differs, else 1.
    """

    trainer: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="TRAINER")] = None
    """The trainer; None with --dump."""
    batches: bool = False
    """Print the smallest batch that breaks each law, too, as lines of Python."""
    json: str | None = None
    """Write everything to this JSON file; -: print it."""
    dump: str | None = None
    """A safetensors file with the tensors of a batch: recompute them, and print the first row that differs."""
    preset: str = "none"
    """Names of the tensors in the file: those of trl or verl; none: ours."""
    map: tuple[str, ...] = ()
    """Single names, as old_log_probs=logprobs.old, beside the preset's."""
    group_size: int | None = None
    """Rows of a group, which follow each other, for a file without groups."""
    estimator: str = "grpo"
    """The estimator of the advantages: gae, grpo, rloo, opo, gpg, grpo_passk or reinforce_plus_plus_baseline."""
    estimator_settings: tuple[str, ...] = ()
    """Keywords of the estimator, as gamma=1.0 lam=0.95 scale=none."""
    whiten: bool = False
    """Whiten the advantages."""
    loss: str = "ppo_clip"
    """The policy loss, by its name in fppo.losses."""
    loss_settings: tuple[str, ...] = ()
    """Keywords of the loss, as clip_low=0.2 dual_clip=none."""
    mode: str = "token-mean"
    """The weights of the tokens: token-mean, seq-mean-token-mean, ..."""
    horizon: float | None = None
    """The constant length of the mode seq-mean-token-sum-norm."""
    tolerance: float = 1e-3
    """How far a number may be from ours, absolute plus relative."""
