"""Columns of a step's batch that pass through the controller: which calls send which columns to a pool, and get which
back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import attrs
import torch
from torch import Tensor

from fppo import batch as batches
from fppo import tree
from fppo.batch import Annotated, Experience, Rollout, Scored
from fppo.data.privileged import TRUTH_SIGNS
from fppo.models import hidden_width
from fppo.pipeline.gap import COMPARED
from fppo.pipeline.teacher import REVERSE_KL
from fppo.settings.component import requires, value_of
from fppo.settings.placement import places_of, pools_of
from fppo.settings.resolve import old_log_probs_source
from fppo.settings.tables import CORRECTIONS, ESTIMATORS
from fppo.settings.train import TrainSettings
from fppo.studies.plan.case import Case
from fppo.studies.plan.passes import model_of, rows_of

Bytes = dict[str, int]  # bytes by the column's name
Critic = Literal["tokens", "confidence", "hidden"]
READS: Mapping[Critic, Sequence[str]] = {"tokens": (), "confidence": ("log_probs", "entropy"), "hidden": ("hidden",)}


class ColumnCall(NamedTuple):
    """A call to a role's pool, by its name in traces: the bytes of columns that it sends, for all ranks there, and of
    columns that it returns."""

    role: str
    call: str
    there: Bytes
    back: Bytes


def column_calls(run: TrainSettings, case: Case) -> dict[str, list[ColumnCall]]:
    """The calls to each pool of a run, planned as `case`, that send or return columns, in the order of a step.

    They are counted as `Group.calls` counts them: once, however many ranks there are. Metrics, handles, columns of
    objects, images and weights are not counted.
    """
    places, pools = places_of(run.placement), pools_of(run.placement)
    ranks = pools[places["actor"]].ranks if "actor" in places else 1
    batch = _Batch(run, _row(run, case))
    calls = [*_before(batch), *_passes(batch, ranks), *_updates(batch)]
    engine = "rollout" if "rollout" in places else "actor"
    calls = [call._replace(role=engine) if call.role == "rollout" else call for call in calls]
    return {pool: [call for call in calls if places.get(call.role) == pool] for pool in sorted(set(places.values()))}


@attrs.frozen
class _Batch:
    """The rows of a run's steps, at their largest width; `row` is one of them, without data."""

    run: TrainSettings
    row: Experience  # one row with every column that it will have, without data

    @property
    def rows(self) -> int:
        """The number of sequences."""
        return self.run.rollout.batch_size

    @property
    def numbers(self) -> int:
        """Bytes of one number for each response token of all rows."""
        return self.rows * self.row.advantages.nbytes

    @property
    def critic(self) -> Critic | None:
        """The critic's input; None without a critic."""
        return self.run.critic.reads if self.run.algorithm.uses_critic else None

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs of the policy's pass besides log-probs."""
        read = [name for name in READS[self.critic or "tokens"] if name != "log_probs"]
        squared, replay = self.row.sum_squared_probs is not None, self.run.algorithm.router_replay
        whole = old_log_probs_source(self.run) == "pass" or bool(read) or squared
        routed = whole if replay == "rollout" else replay != "none"
        return [*read, *["sum_squared_probs"] * squared, *["routed"] * routed]

    @property
    def passed(self) -> int:
        """The number of rows in the policy's pass before the update, in each step after a run's first: all, few to
        compare log-probs on, or 0 without such a pass."""
        source = old_log_probs_source(self.run)
        if source == "pass" or self.outputs:
            return self.rows
        return -(-self.rows // COMPARED) if source == "auto" else 0

    def sizes(self, cls: type, names: Sequence[str] | None = None) -> Bytes:
        """Bytes of the columns that all rows have as a batch of class `cls`; with `names`, only of the columns with
        these names."""
        columns = batches.columns(batches.narrow(cls, self.row))
        if self.run.algorithm.router_replay != "rollout" and not issubclass(cls, Annotated):
            columns.pop("routed", None)  # the policy's pass is the first that reports experts
        sizes = {name: self.rows * x.nbytes for name, x in columns.items() if isinstance(x, Tensor)}
        return {name: x for name, x in sizes.items() if names is None or name in names}


def _before(batch: _Batch) -> Iterator[ColumnCall]:
    """Yield the calls for sampling and scoring."""
    rollout = batch.sizes(Rollout)
    prompts = batch.rows // batch.run.rollout.n
    for count in (batch.rows, prompts) if batch.row.baselines is not None else (batch.rows,):
        part = {name: size * count // batch.rows for name, size in rollout.items()}
        if batch.run.rollout.from_ is None:
            yield ColumnCall("rollout", "generate", _prompts(prompts, batch.run.data.max_prompt_tokens), part)
        yield ColumnCall("reward", "reward_model", part, {"scores": 4 * count})
        if batch.run.loads_teacher:
            numbers = batch.numbers * count // batch.rows
            yield ColumnCall("teacher", "teacher", part, {"teacher_log_probs": numbers})


def _passes(batch: _Batch, ranks: int) -> Iterator[ColumnCall]:
    """Yield the calls between sampling and update: the models' passes over the rows, and the balancing of lengths."""
    scored, numbers, run = batch.sizes(Scored), batch.numbers, batch.run
    found = batch.sizes(Annotated, batch.outputs)
    if batch.passed:
        part = {name: size * batch.passed // batch.rows for name, size in scored.items()}
        found["log_probs"] = numbers * batch.passed // batch.rows
        yield ColumnCall("actor", "old_log_prob", part, found)
    if run.uses_reference:
        again = batch.sizes(Annotated, ("old_log_probs", "routed") if run.algorithm.router_replay == "all" else ())
        yield ColumnCall("reference", "ref", scored | again, {"log_probs": numbers})
    if batch.critic is not None:
        own = batch.sizes(Experience, ("response_mask", "truth_signs"))
        read = {name: found[name] for name in READS[batch.critic]} | own
        sent = scored if batch.critic == "tokens" else read
        yield ColumnCall("critic", "values", sent, {"values": run.critic.ensemble * numbers})
    if ranks > 1:
        yield ColumnCall("actor", "balance", {}, {})  # only lengths


def _updates(batch: _Batch) -> Iterator[ColumnCall]:
    learned = batch.sizes(Experience)
    if batch.critic is not None:
        yield ColumnCall("critic", "update_critic", learned, {})
    own = {name: x for name, x in learned.items() if name not in ("hidden", "truth_signs")}
    yield ColumnCall("actor", "update_actor", own, {})


def _prompts(count: int, length: int) -> Bytes:
    """Bytes of the columns of `count` prompts of `length` tokens, by name."""
    ids = torch.empty(count, length, dtype=torch.int64, device="meta")
    return {"tokens": ids.nbytes, "attention_mask": ids.bool().nbytes, "row_ids": ids[:, 0].nbytes}


def _row(run: TrainSettings, case: Case) -> Experience:
    """One row with every column that it will have, without data."""
    algorithm, critic, reward, replay = run.algorithm, run.critic, run.reward, run.algorithm.router_replay
    reader = critic.reads if run.algorithm.uses_critic else None
    signs = TRUTH_SIGNS if critic.privileged and reader in ("confidence", "hidden") else 0
    more = {"reward_model": reward.model.path, "judge": reward.judge.path}
    with torch.device("meta"):
        row = rows_of(case, 1)
    numbers, routed, width = row.advantages, None, 0
    if replay != "none" or reader == "hidden":
        model = model_of(case, "actor").plain
        chosen = sum(router.chosen * (1 if router.experts <= 1 << 8 else 4) for router in model.routers)
        routed = row.tokens.new_empty(*row.tokens.shape, 1, chosen, dtype=torch.uint8) if replay != "none" else None
        width = hidden_width(model)
    return tree.replace(
        row,
        routed=routed,
        named_scores=dict.fromkeys(
            [*reward.functions, *(x for x in more if more[x] is not None), *[REVERSE_KL] * run.loads_teacher],
            row.scores,
        ),
        baselines=row.scores if requires(algorithm.advantage, ESTIMATORS, "baselines") else None,
        values=None if reader is None else numbers,
        disagreement=numbers if critic.ensemble > 1 else None,
        sum_squared_probs=numbers if requires(algorithm.advantage, ESTIMATORS, "sum_squared_probs") else None,
        entropy=numbers if reader == "confidence" else None,
        hidden=numbers.new_empty(*numbers.shape, width) if reader == "hidden" else None,
        truth_signs=numbers.new_empty(*numbers.shape, signs) if signs else None,
        correction_weights=numbers if value_of(algorithm.correction, CORRECTIONS, "level") is not None else None,
        entropy_mask=numbers.bool() if critic.leave_disputed else None,
    )
