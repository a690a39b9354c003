"""Mixtures of experts in passes and updates: the experts chosen as a column, their load, and the routers' losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from fppo import metrics
from fppo.batch import Annotated
from fppo.metrics import Mean, Metrics, Sum
from fppo.models.model import Model
from fppo.models.routing import Router, Routes, experts_of
from fppo.runtime import fsdp
from fppo.runtime.mesh import Mesh, all_reduce
from fppo.shapes import Mask
from fppo.steps.train_state import Params
from fppo_kernels.collectives import Axis, same
from fppo_kernels.shapes import Float, Int
from fppo_kernels.ulysses import gather_sequence

LOAD, BALANCE, Z = "expert_load", "balance_loss", "router_z_loss"  # the names of metrics, after a prefix


class _RoutedRows(Protocol):
    """The columns of a record that routers' parts of passes read."""

    @property
    def attention_mask(self) -> Tensor: ...  # [B, S] bool
    @property
    def response_mask(self) -> Tensor: ...  # [B, T] bool


class RouterSums(NamedTuple):
    """Sums for each router over the tokens of a pass on all ranks with its rows: gradients are each rank's shares."""

    probs: Float[Tensor, "l e"]  # softmax of the router's logits
    squares: Float[Tensor, ""]  # squared logsumexp of the logits, of all routers


class RouterTotals(NamedTuple):
    """Totals of a mini-batch, over all ranks: its tokens, and the part of its choices that fell to each expert."""

    tokens: Float[Tensor, ""]
    fractions: Float[Tensor, "l e"] | None


@attrs.frozen(eq=False)
class RouterLosses:
    """The losses of routers in the passes of a mini-batch with these totals, each with its factor.

    Load balance: of each router E sum_i f_i P_i, with f_i the part of the choices that fell to expert i and P_i its
    mean probability (Switch Transformers, arXiv:2101.03961, eq. 4); 1 where all are equal. z: the mean squared
    logsumexp of the logits of each router (ST-MoE, arXiv:2202.08906, eq. 5). The losses of all routers add up, and so
    do those of the passes of a mini-batch and of the stages of a pipeline. Raises ValueError for a factor of the first
    without the totals of choices.
    """

    totals: RouterTotals
    balance_coef: float = 0.0
    z_coef: float = 0.0

    def __attrs_post_init__(self) -> None:
        if self.balance_coef and self.totals.fractions is None:
            raise ValueError(
                f"balance_coef={self.balance_coef} needs the experts of the whole mini-batch beforehand: give rows "
                "with `routed`, and a forward with replay=True"
            )

    def of(self, sums: RouterSums) -> dict[str, Float[Tensor, ""]]:
        """A pass's part of each."""
        tokens, fractions, terms = self.totals.tokens.clamp(min=1.0).to(sums.probs), self.totals.fractions, {}
        if self.balance_coef and fractions is not None:
            probs = (fractions.to(sums.probs) * sums.probs).sum()
            terms[BALANCE] = self.balance_coef * fractions.shape[1] * probs / tokens
        if self.z_coef:
            terms[Z] = self.z_coef * sums.squares / tokens
        return terms


@attrs.frozen(eq=False)
class RoutedPass:
    """The routers' part of a pass: of this rank's tokens N of a packed row, of which each token is at `places` among
    all ranks' tokens, and the first are those at the places `index` of rows [B, S]; without these, of padded rows.

    Of rows that share tokens, `index` and `places` [R] are those of the tokens of all rows, and each token counts as
    often as it is in a row that counts, `times`.
    """

    routes: Routes
    counted: Tensor  # [N] bool
    shape: tuple[int, ...]
    index: Tensor | None = None
    places: Tensor | None = None
    times: Tensor | None = None  # [N] int64; None: once each


def counted(attention_mask: Mask, response_mask: Mask) -> Mask:
    """The tokens [B, S] that count for the routers: those of rows with a response."""
    return attention_mask & response_mask.any(1, keepdim=True)


def check_routers(model: Model, what: str) -> tuple[Router, ...]:
    """The model's routers. Raises ValueError that says what is to be left out if it has none, or they do not tell."""
    if model.compile_layers:
        raise ValueError(f"compiled layers do not tell what their routers choose: {what}, or compile_layers")
    if not model.routers:
        raise ValueError(f"model type {model.config.model_type!r} has no routers of experts that fppo knows: {what}")
    return model.routers


def reports_loads(model: Model) -> bool:
    """Whether passes of a model tell the loads of its experts, as updates of it report them."""
    return bool(model.routers) and not model.compile_layers


def own_routers(model: Model) -> list[int]:
    """The numbers of the routers that a rank runs in a pass."""
    layers = {layer for span in model.spans for layer in span.layers} or range(len(model.layers))
    return [number for number, router in enumerate(model.routers) if router.layer in layers]


def check_biases(model: Model, what: str) -> None:
    """Raise ValueError that says what is to be left out for a model whose routers have no biases to move."""
    if model.frozen is not None:
        raise ValueError(f"the biases of routers are in the frozen base of an adapter: {what}")
    if not any(router.bias for router in check_routers(model, what)):
        raise ValueError(f"model type {model.config.model_type!r} has no router with a bias to balance by: {what}")


def columns(rows: _RoutedRows, *, tells: Sequence[str], replay: bool) -> dict[str, Tensor]:
    """The columns of the rows for the routers' part of a pass, [B, S, ...]; none if these neither report nor replay."""
    if not (tells or replay):
        return {}
    found = {"counted": counted(rows.attention_mask, rows.response_mask)}
    if replay:
        routed = getattr(rows, "routed", None)
        if routed is None:
            raise ValueError(
                "replay=True, and the rows have no `routed`: annotate them with a pass that tells it, or sample them "
                "with an engine that does"
            )
        found["routed"] = routed
    return found


def routed_pass(
    columns: Mapping[str, Tensor],
    rows: _RoutedRows,
    tells: Sequence[str],
    *,
    index: Tensor | None = None,
    places: Tensor | None = None,
) -> RoutedPass | None:
    """The routers' part of a pass over tokens with these columns [N, ...], which tells these outputs; None without
    columns."""
    if not columns:
        return None
    routes, times = Routes(columns.get("routed"), own="routed" in tells), columns.get("times")
    counted = columns["counted"] if times is None else times > 0
    return RoutedPass(routes, counted, tuple(rows.attention_mask.shape), index, places, times)


def times_of(counted: Mask, real: Tensor, places: Tensor, total: int) -> Int[Tensor, " n"]:
    """How many of the tokens `real` [R] (places in `counted` [B, S]) that count each of `total` tokens stands for, of
    which these are at `places` [R]."""
    times = torch.zeros(total, dtype=torch.int64, device=counted.device)
    return times.index_add_(0, places, counted.flatten()[real].long())


def of_routers(
    routed: RoutedPass | None, outputs: Sequence[str], model: Model, mesh: Mesh, pad: Callable[..., Tensor]
) -> dict[str, Any]:
    """Compute the outputs that routers report."""
    if routed is None:
        return {}
    makes: dict[str, Callable[[], Any]] = {
        "routed": lambda: chosen(routed, model, mesh.token_axis, pad),
        "loads": lambda: own_loads(routed, model, mesh.token_axis),
        "router_sums": lambda: router_sums(routed, model, mesh),
    }
    return {name: make() for name, make in makes.items() if name in outputs}


def chosen(routed: RoutedPass, model: Model, axis: Axis, pad: Callable[..., Tensor]) -> Int[Tensor, "b s l k"]:
    """The experts that routers choose by themselves, uint8 or int32 [B, S, L, k], zeros at padding, and for routers of
    other stages of a pipeline; all of what the ranks of the axis that cuts rows have."""
    whole = gather_sequence(experts_of(routed.routes.routed, model.routers, routed.counted), axis)
    if routed.index is None or routed.places is None:
        return whole.view(*routed.shape, *whole.shape[1:])
    return pad(whole[routed.places], routed.index, routed.shape)


@torch.no_grad()
def loads(experts: Int[Tensor, "n l k"], times: Tensor, count: int) -> Float[Tensor, "l e"]:
    """How many of the choices [N, L, k] of tokens that count so many `times` [N] fell to each of `count` experts,
    float64."""
    n, routers, k = experts.shape
    ones = times.double()[:, None].expand(n, k).flatten()
    empty = ones.new_zeros(count)
    return torch.stack([empty.index_add(0, experts[:, i].flatten().long(), ones) for i in range(routers)])


def own_loads(routed: RoutedPass, model: Model, axis: Axis) -> Float[Tensor, "l e"]:
    """The loads of a pass, over the ranks of the axis that cuts rows; zeros for routers of other stages."""
    count, told = model.routers[0].experts, dict[int, Tensor]()
    if own := own_routers(model):
        experts = torch.stack([routed.routes.routed[number].chosen for number in own], 1)
        times = routed.counted if routed.times is None else routed.times
        told = dict(zip(own, loads(experts, times, count), strict=True))
    nothing = torch.zeros(count, dtype=torch.float64, device=routed.counted.device)
    return all_reduce(torch.stack([told.get(number, nothing) for number in range(len(model.routers))]), axis)


def router_sums(routed: RoutedPass, model: Model, mesh: Mesh) -> RouterSums:
    """The sums that the routers' losses are made of; zeros for routers of other stages of a pipeline."""
    probs, squares = dict[int, Tensor](), []
    for number in own_routers(model):
        logits = routed.routes.routed[number].logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        own, square = logits.softmax(-1), logits.logsumexp(-1).square()
        if routed.times is not None:
            own, square = own * routed.times[:, None], square * routed.times
        probs[number] = own.where(routed.counted[:, None], 0.0).sum(0)
        squares.append(square.where(routed.counted, 0.0).sum())
    zero = torch.zeros(model.routers[0].experts, device=routed.counted.device)
    zero = next(iter(probs.values()), zero).detach() * 0.0
    every = torch.stack([probs.get(number, zero) for number in range(len(model.routers))])
    own = [same(x, mesh["tensor"]) for x in (every, torch.stack(squares or [zero[0]]).sum())]
    return RouterSums(*(all_reduce(x.detach(), mesh.token_axis) + (x - x.detach()) for x in own))


def rerouted(engine: Int[Tensor, "b s l k"], own: Int[Tensor, "b s l k"], attention_mask: Mask) -> Metrics:
    """How often a pass by itself would choose other experts than the engine did: the share of tokens for which some
    router would, and the share of all choices; in whatever order, and without each row's last token, which the engine
    did not run."""
    ran = attention_mask & F.pad(attention_mask, (0, 1))[:, 1:]
    differs = (engine.sort(-1).values != own.sort(-1).values).any(-1)  # [B, S, L]
    return {
        "training/rerouted/tokens": metrics.masked_mean(differs.any(-1), ran),
        "training/rerouted/choices": metrics.masked_mean(differs, ran[..., None].expand_as(differs)),
    }


def router_totals(rows: Annotated, model: Model) -> RouterTotals:
    """The totals of a whole mini-batch, by the experts that its rows say were chosen."""
    mask = counted(rows.attention_mask, rows.response_mask).flatten()
    tokens = mask.sum().double()
    if rows.routed is None:
        return RouterTotals(tokens, None)
    counts = loads(rows.routed.flatten(0, 1), mask, model.routers[0].experts)
    return RouterTotals(tokens, counts / counts.sum(1, keepdim=True).clamp(min=1.0))


def router_terms(
    loads: Tensor | None, sums: RouterSums | None, losses: RouterLosses | None, prefix: str
) -> tuple[list[Tensor], Metrics]:
    """The terms that the routers of a pass add to its loss, 0-d tensors; and their metrics."""
    report: Metrics = {} if loads is None else {f"{prefix}/{LOAD}": Sum(loads)}
    terms = {} if losses is None or sums is None else losses.of(sums)
    return [*terms.values()], report | {f"{prefix}/{name}": metrics.term(x) for name, x in terms.items()}


def with_router_terms(report: Metrics, prefix: str, others: Sequence[Metrics], axis: Axis) -> Metrics:
    """The metrics of the last stage of a pipeline, on all ranks, those of routers with what this rank's `others` told;
    every rank must call."""
    own, added = metrics.merge(*others), Metrics()
    for name in (f"{prefix}/{x}" for x in (LOAD, BALANCE, Z)):
        if (last := report.get(name)) is not None:
            mine = own.get(name, [torch.zeros_like(x) for x in last])
            added[name] = type(last)(*(all_reduce(x.to(like), axis) for x, like in zip(mine, last, strict=True)))
    return metrics.merge(report, added)


def split_loads(report: Metrics, prefix: str, routers: Sequence[Router]) -> tuple[Metrics, Tensor | None]:
    """A whole mini-batch's metrics, with each router's largest load over the mean in place of the loads, and these; and
    what the fullest rank of an expert axis has, or would have, for each size that it could have."""
    name = f"{prefix}/{LOAD}"
    sums = report.get(name)
    if not isinstance(sums, Sum):
        return report, None
    highest = sums.value.amax(1) / sums.value.mean(1).clamp(min=1e-9)
    rest = {key: metric for key, metric in report.items() if key != name}
    by_layer = {f"{name}/{router.layer}": metrics.mean(x) for router, x in zip(routers, highest, strict=True)}
    count = sums.value.shape[1]
    fullest = {
        f"{name}/of_{ranks}_ranks": metrics.mean(rank_loads(sums.value, ranks).max())
        for ranks in range(2, count + 1)
        if count % ranks == 0
    }
    return rest | by_layer | fullest | {f"{name}/max": metrics.mean(highest.max())}, sums.value


def rank_loads(loads: Float[Tensor, "l e"], ranks: int) -> Float[Tensor, " r"]:
    """The load of the experts on each of `ranks` ranks of an expert axis, all layers together, over the mean of the
    ranks: 1 where all have as much."""
    own = loads.view(len(loads), ranks, -1).sum((0, 2))
    return own / own.mean().clamp(min=1e-9)


@torch.no_grad()
def balanced(
    params: Params, loads: Float[Tensor, "l e"], model: Model, mesh: Mesh, *, rate: float, unless: Metrics
) -> Params:
    """The parameters with each router's bias moved by the rule of loss-free balancing (arXiv:2408.15664): up by `rate`
    for experts of a load below the mean, down for those above, `unless` the optimizer `skipped` the update."""
    skipped = unless.get("skipped")
    size = rate * (1.0 - skipped.total) if isinstance(skipped, Mean) else torch.tensor(rate, dtype=torch.float64)
    moved = dict(params)
    for router, load in zip(model.routers, loads, strict=True):
        if router.bias in moved:
            step = size.to(load) * (load.mean() - load).sign().view(model.whole_shapes[router.bias])
            own = fsdp.shard({router.bias: step}, mesh)[router.bias]
            moved[router.bias] = moved[router.bias] + own.to(moved[router.bias])
    return moved
