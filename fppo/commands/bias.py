"""The work of `fppo bias`, after its arguments are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from fppo._errors import UsageError
from fppo.advantages.columns import WEIGHTS, OfRows, columns_of, name_of, whitens
from fppo.assembly.functions import advantage_of, loss_correction, policy_loss
from fppo.bias import text
from fppo.bias.run import RunBias, lines_of
from fppo.bias.study import WorldSizes, is_loss, study
from fppo.commands import output
from fppo.laws.expectation import KL, SCORE, StepMath
from fppo.settings.bias import BiasSettings
from fppo.settings.resolve import old_log_probs_source
from fppo.settings.train import TrainSettings
from fppo.steps.actor import SelectiveLoss
from fppo.workers.imports import imported, search
from fppo_kernels.table import Kernels

LAG = 0.1  # the assumed distance of a run's engine from its policy, if anything corrects for it
MOST = 4  # rows of a group: with two prompts, all batches are listed in a second


def run(of: TrainSettings | None, options: BiasSettings) -> int:
    """Print the tables, or what a run optimises, and write the files that were asked for; returns 0."""
    transformers_logging.set_verbosity_error()
    sizes = WorldSizes(
        vocabulary=options.vocabulary, horizon=options.horizon, worlds=options.worlds, groups=tuple(options.n)
    )
    width = min(shutil.get_terminal_size((120, 24)).columns, 140)
    if of is not None:
        found = lines_of(run_bias(of, sizes))
        numbers: Any = {"run": found.numbers}
        shown = "\n".join(found.lines)
    else:
        own = {place.rpartition(":")[2]: imported(place, "--with") for place in options.with_}
        _check_own(own)
        tables = list(study(options.names, sizes, own))
        numbers, shown = {"tables": [text.plain(table) for table in tables]}, text.terminal(tables, width)
        if options.markdown is not None:
            output.write(options.markdown, text.markdown(tables))
        if options.png is not None:
            from fppo.bias import chart  # here: it loads matplotlib

            chart.save(tables, Path(options.png))
    output.show(shown, json.dumps(numbers, indent=1), options.json)
    return 0


def _check_own(own: dict[str, Any]) -> None:
    """Raises UsageError for functions that are neither an estimator nor a policy loss."""
    for name, fn in own.items():
        try:
            is_loss(fn)
        except ValueError as error:
            raise UsageError(f"--with {name}: neither a policy loss nor an estimator: {error}") from error


def run_bias(of: TrainSettings, sizes: WorldSizes) -> RunBias:
    """The math of a run's step, in groups of at most four rows. Raises UsageError for a loss that selects tokens by
    noise, whose batches cannot be listed."""
    search(of.module_dirs)
    loss_fn, estimator = policy_loss(of.actor.loss), advantage_of(of.algorithm, Kernels.named())
    correct = loss_correction(of.algorithm.correction, of.actor.loss)
    if isinstance(loss_fn, SelectiveLoss):
        name = name_of(loss_fn.loss_fn)
        raise UsageError(f"actor.loss.name = {of.actor.loss.name!r}: {name} selects tokens by noise; give another loss")
    estimator = estimator({SCORE: 1.0})
    needed, _ = columns_of(estimator.fn) if isinstance(estimator, OfRows) else ([], [])
    kl = None
    if of.algorithm.kl.coef > 0:
        kl = KL(of.algorithm.kl.kind, of.algorithm.kl.coef)
    elif of.actor.kl_coef > 0:
        kl = KL(of.actor.kl_kind, of.actor.kl_coef, where="loss")
    engine = old_log_probs_source(of) == "engine"
    step = StepMath(
        estimator=estimator,
        loss_fn=loss_fn,
        mode=of.actor.weight_mode,
        n=max(2, min(of.rollout.n, MOST)) if "groups" in needed else 2,
        kl=kl,
        correct=correct,
        old_log_probs="engine" if engine else "pass",
    )
    return RunBias(
        step=step,
        sizes=sizes,
        lag=LAG if engine or correct is not None or WEIGHTS in needed else 0.0,
        whitens=whitens(estimator) if of.algorithm.whiten is None else of.algorithm.whiten,
    )
