"""The outputs of a run's models for rows, each from a pass of its own: none needs the results of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import attrs
from torch import Tensor

from fppo import batch as batches
from fppo import metrics
from fppo.advantages import disagreement
from fppo.metrics import Metrics
from fppo.runtime.mesh import DATA_AXES, Mesh, place_on, ranks_on
from fppo.runtime.offload import OnHost
from fppo.steps.critic import as_it_is
from fppo.steps.forward import compute_outputs, compute_values
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.outputs import Forward, Rows, TokenOutputs
from fppo.steps.packed import masks_of, saves_enough
from fppo.steps.ranks import collect, imbalance, shares
from fppo.steps.recorded import Recorder
from fppo.steps.shared import SortedRows
from fppo.steps.train_state import Params

R = TypeVar("R", bound=Rows)
PolicyFn = Callable[..., TokenOutputs]  # (params, rows, outputs=...) -> these outputs, each [B, T]
ValueFn = Callable[[Params, Rows], Tensor]  # (a critic's params, rows) -> values [B, T]
BalanceFn = Callable[[SortedRows], Metrics]  # rows -> how evenly ranks share their work
Role = Literal["actor", "ref", "critic"]
RouterReplay = Literal["none", "rollout", "old_log_probs", "all"]
View = Callable[[Any], Any]  # rows -> the rows that a critic sees instead
Fetch = Callable[[Params], Params | OnHost]  # makes parameters available to a pass
ConfidenceFn = Callable[[Params, Tensor, Tensor, Tensor, Tensor | None], Tensor]  # `steps.confidence_values`
HiddenFn = Callable[[Params, Tensor, Tensor, Tensor | None], Tensor]  # `steps.hidden_values`
TruthSigns = Callable[[Any], Tensor]  # rows -> `data.truth_signs`


@attrs.frozen(kw_only=True)
class Passes:
    """The passes over a batch. Every rank gets all rows, computes a share of them, and returns all results."""

    policy: PolicyFn
    reference: PolicyFn
    values: ValueFn | None = None  # for a critic that is a model
    confidence: ConfidenceFn | None = None  # for a critic that reads log-probs and entropies of the policy's pass
    hidden: HiddenFn | None = None  # for a critic that reads hidden states of that pass
    truth_signs: TruthSigns | None = None  # more features for a privileged critic: agreement with the truth
    balance: BalanceFn = lambda rows: {}

    @property
    def read(self) -> tuple[str, ...]:
        """The outputs of the policy's pass that a critic without a model reads, beside the log-probs."""
        return ("entropy",) if self.confidence is not None else ("hidden",) if self.hidden is not None else ()


class ReadValues(NamedTuple):
    """Values [B, T], of an ensemble the mean; the disagreement of an ensemble's members; and the truth's features [B,
    T, F] that a privileged critic read."""

    values: Tensor
    disagreement: Tensor | None = None
    truth_signs: Tensor | None = None


def read_values(passes: Passes, params: Params, log_probs: Tensor, out: TokenOutputs, rows: Rows) -> ReadValues:
    """The values of a critic without a model, from the log-probs [B, T] and the other outputs of the policy's pass that
    it reads."""
    mask, signs = rows.response_mask, passes.truth_signs and passes.truth_signs(rows)
    if passes.confidence is not None:
        values = passes.confidence(params, log_probs, required(out.entropy), mask, signs)
    else:
        assert passes.hidden is not None
        values = passes.hidden(params, required(out.hidden), mask, signs)
    each = (values, None) if values.dim() == 2 else (values.mean(0), disagreement(values))
    return ReadValues(*each, signs)


def as_they_are(params: Params) -> Params | OnHost:
    """Return the parameters unchanged."""
    return params


@attrs.frozen(kw_only=True)
class PolicyPass:
    """Compute a policy's outputs for rows. `fetch` makes its parameters available; `record` runs passes of few tokens
    on a GPU by one launch each."""

    forward: Forward
    micro_batching: MicroBatching
    temperature: float = 1.0
    fetch: Fetch = as_they_are
    record: Recorder | None = None

    def __call__(self, params: Params, rows: Rows, *, outputs: Sequence[str]) -> TokenOutputs:
        """Compute the outputs of these names for all rows, [B, T] each."""
        share = share_of(rows, self.forward)
        out = compute_outputs(
            self.fetch(params),
            share.own,
            forward=self.forward,
            micro_batching=self.micro_batching,
            outputs=outputs,
            temperature=self.temperature,
            record=self.record,
        )
        columns = {name: share.collected(x) for name, x in out._asdict().items() if x is not None}
        return TokenOutputs()._replace(**columns)


@attrs.frozen(kw_only=True)
class ValuePass:
    """Compute a critic's values of rows, as `view` shows them to it: `data.with_truth`, for example."""

    forward: Forward
    micro_batching: MicroBatching
    fetch: Fetch = as_they_are
    view: View = as_it_is
    record: Recorder | None = None

    def __call__(self, params: Params, rows: Rows) -> Tensor:
        """Compute the values of all rows, [B, T]."""
        share, forward = share_of(self.view(rows), self.forward), self.forward
        given = {"forward": forward, "micro_batching": self.micro_batching, "record": self.record}
        return share.collected(compute_values(self.fetch(params), share.own, **given))


def local_passes(
    policy: Forward,
    critic: Forward | None = None,
    *,
    confidence: ConfidenceFn | None = None,
    micro_batching: MicroBatching,
    temperature: float = 1.0,
    replay: RouterReplay = "none",
    fetch: Callable[[Role, Params], Params | OnHost] = lambda role, params: params,
) -> Passes:
    """Make the passes of models in this process: of a policy and its reference, and of a critic that is a model, or
    that reads the policy's `confidence`. `fetch` makes a role's parameters available to its passes."""

    def of_policy(role: Role, replayed: RouterReplay) -> PolicyPass:
        forward = attrs.evolve(policy, replay=replay == replayed)
        given = {"micro_batching": micro_batching, "temperature": temperature}
        return PolicyPass(forward=forward, fetch=partial(fetch, role), **given)

    of_critic = {"micro_batching": micro_batching, "fetch": partial(fetch, "critic")}
    return Passes(
        policy=of_policy("actor", "rollout"),
        reference=of_policy("ref", "all"),
        values=None if critic is None else ValuePass(forward=critic, **of_critic),
        confidence=confidence,
        balance=partial(balance_of, forward=policy),
    )


class Share(NamedTuple, Generic[R]):
    """This rank's share (`own`) of rows that all ranks hold, and the row indices of every data rank's share."""

    own: R
    places: list[list[int]]
    mesh: Mesh

    def collected(self, x: Tensor) -> Tensor:
        """Gather the results of all ranks' shares, on every rank and in the rows' order."""
        return collect(x, self.places, self.mesh)


def share_of(rows: R, forward: Forward) -> Share[R]:
    """This rank's share of the rows, of equal work for the model."""
    mesh = forward.mesh
    masks = masks_of(rows, forward)
    places = shares(forward.model, masks.lengths, mesh, masks.sorted())
    own = rows if len(places) == 1 else batches.rows(rows, places[place_on(mesh, DATA_AXES)])
    return Share(own, places, mesh)


def balance_of(rows: SortedRows, forward: Forward) -> Metrics:
    """The metric perf/imbalance, how unequal the data ranks' work on these rows is; empty on a single rank."""
    if ranks_on(forward.mesh, DATA_AXES) == 1:
        return {}
    alike = saves_enough(rows, forward)
    lengths = [length for _, length in sorted(zip(rows.order, rows.lengths, strict=True))]
    places = shares(forward.model, lengths, forward.mesh, rows if alike else None)
    return {"perf/imbalance": metrics.mean(imbalance(forward.model, rows if alike else rows.apart(), places))}


def required(x: Tensor | None) -> Tensor:
    """Return an output of a pass that was requested, so that it is never None."""
    assert x is not None
    return x
