"""The columns of a step's batch that go through the controller: which call takes which to a pool, and what it gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import attrs
import torch
from torch import Tensor

from fppo import batch as batches
from fppo.batch import Annotated, Column, Experience, Rollout, Scored
from fppo.pipeline.gap import COMPARED
from fppo.pipeline.stages import RouterReplay
from fppo.steps.actor import OldLogProbs

Bytes = dict[str, int]  # by the column's name
Critic = Literal["model", "confidence", "hidden"]
READS: Mapping[Critic, Sequence[str]] = {"model": (), "confidence": ("log_probs", "entropy"), "hidden": ("hidden",)}


@attrs.frozen(kw_only=True)
class Batch:
    """What a step's rows are, as wide as they may become, and what is done with them as far as columns come of it."""

    prompts: int
    n: int = 1  # responses to each
    prompt: int = 512  # tokens
    response: int = 256
    terms: Sequence[str] = ()  # of the reward, by name
    sampled: bool = True  # by an engine; otherwise they are read
    greedy: bool = False  # each prompt has a greedy response beside (ReMax)
    old_log_probs: OldLogProbs = "pass"
    sum_squared: bool = False  # of the probabilities, which the policy's pass gives
    critic: Critic | None = None
    members: int = 1  # of it
    hidden: int = 0  # numbers of a state that it reads
    truth_signs: int = 0  # numbers that it knows of the truth at each token
    reference: bool = False
    replay: RouterReplay = "none"
    routed: int = 0  # bytes of the experts that a token has
    weighed: bool = False  # for being off-policy
    undisputed: bool = False  # the tokens that have an entropy bonus are chosen

    @property
    def rows(self) -> int:
        """Sequences."""
        return self.prompts * self.n

    @property
    def outputs(self) -> list[str]:
        """What the policy's pass gives beside log-probs."""
        read = [name for name in READS[self.critic or "model"] if name != "log_probs"]
        whole = self.old_log_probs == "pass" or bool(read) or self.sum_squared
        routed = whole if self.replay == "rollout" else self.replay != "none"
        return [*read, *["sum_squared_probs"] * self.sum_squared, *["routed"] * routed]

    @property
    def passed(self) -> int:
        """Rows of the policy's pass before the update, in a step behind a run's first."""
        if self.old_log_probs == "pass" or self.outputs:
            return self.rows
        return -(-self.rows // COMPARED) if self.old_log_probs == "auto" else 0


class ColumnCall(NamedTuple):
    """A call to the pool of a role, by the name that a trace has for it; and the bytes of the columns that it is sent,
    which all ranks there read, and of those that come back."""

    role: str
    call: str
    there: Bytes
    back: Bytes


def column_calls(batch: Batch, places: Mapping[str, str], ranks: int = 1) -> list[ColumnCall]:
    """The calls of a step that take columns or give some, to roles in pools (`places` has the pool of each role), in
    the order of a step. `ranks` are those of the actor's pool.

    They are counted as `Group.calls` counts them: once, however many ranks there are. Metrics, handles, the objects of
    rows, images and weights are not counted.
    """
    calls = [call for each in (_before(batch), _passes(batch, ranks), _updates(batch)) for call in each]
    engine = "rollout" if "rollout" in places else "actor"
    calls = [call._replace(role=engine) if call.role == "rollout" else call for call in calls]
    return [call for call in calls if call.role in places]


def _before(batch: Batch) -> Iterator[ColumnCall]:
    """What samples and scores."""
    rollout = _rows(batch, Rollout, batch.rows)
    for count in (batch.rows, batch.prompts) if batch.greedy else (batch.rows,):
        part = {name: size * count // batch.rows for name, size in rollout.items()}
        if batch.sampled:
            yield ColumnCall("rollout", "generate", _prompts(batch), part)
        yield ColumnCall("reward", "reward_model", part, {"scores": 4 * count})


def _passes(batch: Batch, ranks: int) -> Iterator[ColumnCall]:
    """What models say of the rows before they are updated."""
    scored, numbers = _rows(batch, Scored, batch.rows), 4 * batch.rows * batch.response
    found = {name: x for name, x in _rows(batch, Annotated, batch.rows).items() if name in batch.outputs}
    if batch.passed:
        part = {name: size * batch.passed // batch.rows for name, size in scored.items()}
        found["log_probs"] = 4 * batch.passed * batch.response
        yield ColumnCall("actor", "old_log_prob", part, found)
    if batch.reference:
        more = ("old_log_probs", "routed") if batch.replay == "all" else ()
        again = {name: x for name, x in _rows(batch, Annotated, batch.rows).items() if name in more}
        yield ColumnCall("reference", "ref", scored | again, {"log_probs": numbers})
    if batch.critic is not None:
        read = {name: found[name] for name in READS[batch.critic]} | {"response_mask": batch.rows * batch.response}
        read |= {"truth_signs": numbers * batch.truth_signs} if batch.truth_signs else {}
        sent = scored if batch.critic == "model" else read
        yield ColumnCall("critic", "values", sent, {"values": batch.members * numbers})
    if ranks > 1:
        yield ColumnCall("actor", "balance", {}, {})  # lengths alone


def _updates(batch: Batch) -> Iterator[ColumnCall]:
    learned = _rows(batch, Experience, batch.rows)
    if batch.critic is not None:
        yield ColumnCall("critic", "update_critic", learned, {})
    own = {name: x for name, x in learned.items() if name not in ("hidden", "truth_signs")}
    yield ColumnCall("actor", "update_actor", own, {})


def _rows(batch: Batch, cls: type, count: int) -> Bytes:
    """Bytes of the columns that so many rows have as a `cls`."""
    columns = batches.columns(batches.narrow(cls, _row(batch)))
    if batch.replay != "rollout" and not issubclass(cls, Annotated):
        columns.pop("routed", None)  # the policy's pass is the first to tell of experts
    return {name: count * x.nbytes for name, x in columns.items() if isinstance(x, Tensor)}


def _prompts(batch: Batch) -> Bytes:
    """Bytes of the prompts' columns."""
    ids = torch.empty(batch.prompts, batch.prompt, dtype=torch.int64, device="meta")
    return {"tokens": ids.nbytes, "attention_mask": ids.bool().nbytes, "row_ids": ids[:, 0].nbytes}


def _row(batch: Batch) -> Experience:
    """One row with every column that it comes to have, without its numbers."""
    ids = torch.empty(1, batch.prompt + batch.response, dtype=torch.int64, device="meta")
    number, numbers = torch.empty(1, device="meta"), torch.empty(1, batch.response, device="meta")
    object_ = Column([None])
    return Experience(
        tokens=ids,
        attention_mask=ids.bool(),
        response_mask=numbers.bool(),
        rollout_log_probs=numbers,
        sampling_log_probs=numbers,
        row_ids=ids[:, 0],
        groups=ids[:, 0],
        versions=ids[:, 0],
        finish=object_,
        ids=object_,
        ground_truth=object_,
        source=object_,
        extras=object_,
        routed=ids.new_empty(*ids.shape, 1, batch.routed, dtype=torch.uint8) if batch.replay != "none" else None,
        scores=number,
        named_scores=dict.fromkeys(batch.terms, number),
        baselines=number if batch.greedy else None,
        old_log_probs=numbers,
        ref_log_probs=numbers if batch.reference else None,
        values=None if batch.critic is None else numbers,
        disagreement=numbers if batch.members > 1 else None,
        sum_squared_probs=numbers if batch.sum_squared else None,
        entropy=numbers if batch.critic == "confidence" else None,
        hidden=numbers.new_empty(*numbers.shape, batch.hidden) if batch.critic == "hidden" else None,
        truth_signs=numbers.new_empty(*numbers.shape, batch.truth_signs) if batch.truth_signs else None,
        token_rewards=numbers,
        advantages=numbers,
        returns=numbers,
        correction_weights=numbers if batch.weighed else None,
        entropy_mask=numbers.bool() if batch.undisputed else None,
    )
