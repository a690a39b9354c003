"""Mixtures of experts in passes and updates: a column of chosen experts, their loads, and the routers' losses."""

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

LOAD, BALANCE, Z = "expert_load", "balance_loss", "router_z_loss"  # names of metrics, after a prefix


class _RoutedRows(Protocol):
    """The columns that the routers' part of a pass reads."""

    @property
    def attention_mask(self) -> Tensor: ...  # [B, S] bool
    @property
    def response_mask(self) -> Tensor: ...  # [B, T] bool


class RouterSums(NamedTuple):
    """Sums for each router over the tokens of a pass, on all ranks with its rows; gradients are each rank's shares."""

    probs: Float[Tensor, "l e"]  # softmax of the router's logits
    squares: Float[Tensor, ""]  # squared logsumexp of the logits, over all routers


class RouterTotals(NamedTuple):
    """Totals of a mini-batch over all ranks: its number of tokens, and each expert's fraction of the choices."""

    tokens: Float[Tensor, ""]
    fractions: Float[Tensor, "l e"] | None


@attrs.frozen(eq=False)
class RouterLosses:
    """The losses of routers in the passes of a mini-batch with these totals, each with its coefficient.

    Load balance: for each router E sum_i f_i P_i, where f_i is the fraction of choices of expert i and P_i its mean
    probability (Switch Transformers, arXiv:2101.03961, eq. 4); 1 if all are equal. z: each router's mean squared
    logsumexp of the logits (ST-MoE, arXiv:2202.08906, eq. 5). Both are summed over routers, over the passes of a
    mini-batch and over the stages of a pipeline. Raises ValueError for a `balance_coef` without the totals of choices.
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
        """The contribution of a pass to each loss."""
        tokens, fractions, terms = self.totals.tokens.clamp(min=1.0).to(sums.probs), self.totals.fractions, {}
        if self.balance_coef and fractions is not None:
            probs = (fractions.to(sums.probs) * sums.probs).sum()
            terms[BALANCE] = self.balance_coef * fractions.shape[1] * probs / tokens
        if self.z_coef:
            terms[Z] = self.z_coef * sums.squares / tokens
        return terms


@attrs.frozen(eq=False)
class RoutedPass:
    """The routers' part of a pass, for this rank's N tokens of a packed row.

    `places` are the packed tokens' indices among all ranks' tokens. Its first entries belong to the tokens at the
    indices `index` of rows [B, S]; without `index` the rows are padded. If rows share tokens, `index` and `places` [R]
    have an entry for every row's token, and `times` counts how many rows with a response a token belongs to.
    """

    routes: Routes
    counted: Tensor  # [N] bool: tokens of rows with a response
    shape: tuple[int, ...]
    index: Tensor | None = None
    places: Tensor | None = None
    times: Tensor | None = None  # [N] int64; None: each token counts once


def counted(attention_mask: Mask, response_mask: Mask) -> Mask:
    """The tokens [B, S] that count for the routers: those of rows with a response."""
    return attention_mask & response_mask.any(1, keepdim=True)


def check_routers(model: Model, remedy: str) -> tuple[Router, ...]:
    """The model's routers. Raises ValueError if the model has none, or if they cannot report their choices; `remedy`
    names the setting to leave out."""
    if model.compile_layers:
        raise ValueError(f"compiled layers do not report their routers' choices: {remedy}, or compile_layers")
    if not model.routers:
        raise ValueError(f"model type {model.config.model_type!r} has no routers of experts that fppo knows: {remedy}")
    return model.routers


def reports_loads(model: Model) -> bool:
    """Whether updates of a model report the loads of its experts."""
    return bool(model.routers) and not model.compile_layers


def own_routers(model: Model) -> list[int]:
    """The indices, in `Model.routers`, of the routers in the layers that this rank runs."""
    layers = {layer for span in model.spans for layer in span.layers} or range(len(model.layers))
    return [number for number, router in enumerate(model.routers) if router.layer in layers]


def check_biases(model: Model, remedy: str) -> None:
    """Raise ValueError for a model whose routers have no biases to adjust; `remedy` names the setting to leave out."""
    if model.frozen is not None:
        raise ValueError(f"the biases of routers are in the frozen base of an adapter: {remedy}")
    if not any(router.bias for router in check_routers(model, remedy)):
        raise ValueError(f"model type {model.config.model_type!r} has no router with a bias to balance by: {remedy}")


def columns(rows: _RoutedRows, *, router_outputs: Sequence[str], replay: bool) -> dict[str, Tensor]:
    """The rows' columns [B, S, ...] that the routers' part of a pass needs; none if the pass neither reports routers'
    outputs (`router_outputs`) nor replays choices."""
    if not (router_outputs or replay):
        return {}
    found = {"counted": counted(rows.attention_mask, rows.response_mask)}
    if replay:
        routed = getattr(rows, "routed", None)
        if routed is None:
            raise ValueError(
                "replay=True, and the rows have no `routed`: annotate them with a pass that reports it, or sample them "
                "with an engine that does"
            )
        found["routed"] = routed
    return found


def routed_pass(
    columns: Mapping[str, Tensor],
    rows: _RoutedRows,
    router_outputs: Sequence[str],
    *,
    index: Tensor | None = None,
    places: Tensor | None = None,
) -> RoutedPass | None:
    """The routers' part of a pass over tokens with these columns [N, ...] that reports these outputs; None without
    columns. `index` and `places` are as in `RoutedPass`."""
    if not columns:
        return None
    routes, times = Routes(columns.get("routed"), own="routed" in router_outputs), columns.get("times")
    counted = columns["counted"] if times is None else times > 0
    return RoutedPass(routes, counted, tuple(rows.attention_mask.shape), index, places, times)


def times_of(counted: Mask, real: Tensor, places: Tensor, total: int) -> Int[Tensor, " n"]:
    """For each of `total` packed tokens, the number of counted tokens of rows that it stands for: int64 [total].

    The rows' tokens are at the indices `real` [R] of `counted` [B, S], and at `places` [R] of the packed row.
    """
    times = torch.zeros(total, dtype=torch.int64, device=counted.device)
    return times.index_add_(0, places, counted.flatten()[real].long())


def of_routers(
    routed: RoutedPass | None, outputs: Sequence[str], model: Model, mesh: Mesh, pad: Callable[..., Tensor]
) -> dict[str, Any]:
    """Compute the requested `outputs` that routers report, by name; {} for a pass without them. `pad` unpacks
    tokens."""
    if routed is None:
        return {}
    makes: dict[str, Callable[[], Any]] = {
        "routed": lambda: chosen(routed, model, mesh.token_axis, pad),
        "loads": lambda: own_loads(routed, model, mesh.token_axis),
        "router_sums": lambda: router_sums(routed, model, mesh),
    }
    return {name: make() for name, make in makes.items() if name in outputs}


def chosen(routed: RoutedPass, model: Model, axis: Axis, pad: Callable[..., Tensor]) -> Int[Tensor, "b s l k"]:
    """The routers' own choices of experts, uint8 or int32 [B, S, L, k]; zeros at padding and for routers of other
    pipeline stages. Complete on every rank of the axis that cuts rows. `pad` is the kernel that unpacks tokens."""
    whole = gather_sequence(experts_of(routed.routes.routed, model.routers, routed.counted), axis)
    if routed.index is None or routed.places is None:
        return whole.view(*routed.shape, *whole.shape[1:])
    return pad(whole[routed.places], routed.index, routed.shape)


@torch.no_grad()
def loads(experts: Int[Tensor, "n l k"], times: Tensor, count: int) -> Float[Tensor, "l e"]:
    """Count how often each expert was chosen, by router: float64 [L, E]. `experts` [N, L, k] are the k choices of each
    of N tokens at L routers, `count` is E, the number of experts, and `times` [N] is how often each token counts, 0
    outside the mask."""
    n, routers, k = experts.shape
    ones = times.double()[:, None].expand(n, k).flatten()
    empty = ones.new_zeros(count)
    return torch.stack([empty.index_add(0, experts[:, i].flatten().long(), ones) for i in range(routers)])


def own_loads(routed: RoutedPass, model: Model, axis: Axis) -> Float[Tensor, "l e"]:
    """The loads of a pass over the ranks of the axis that cuts rows; zeros for routers of other stages."""
    count, told = model.routers[0].experts, dict[int, Tensor]()
    if own := own_routers(model):
        experts = torch.stack([routed.routes.routed[number].chosen for number in own], 1)
        times = routed.counted if routed.times is None else routed.times
        told = dict(zip(own, loads(experts, times, count), strict=True))
    nothing = torch.zeros(count, dtype=torch.float64, device=routed.counted.device)
    return all_reduce(torch.stack([told.get(number, nothing) for number in range(len(model.routers))]), axis)


def router_sums(routed: RoutedPass, model: Model, mesh: Mesh) -> RouterSums:
    """The sums from which the routers' losses are computed; zeros for routers of other pipeline stages."""
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
    """How often a pass's `own` choices of experts differ from the engine's: the fraction of tokens for which some
    router would, and the fraction of all choices. Order does not matter; each row's last token, which the engine did
    not run, is left out."""
    ran = attention_mask & F.pad(attention_mask, (0, 1))[:, 1:]
    differs = (engine.sort(-1).values != own.sort(-1).values).any(-1)  # [B, S, L]
    return {
        "training/rerouted/tokens": metrics.masked_mean(differs.any(-1), ran),
        "training/rerouted/choices": metrics.masked_mean(differs, ran[..., None].expand_as(differs)),
    }


def router_totals(rows: Annotated, model: Model) -> RouterTotals:
    """Totals of a whole mini-batch, from its rows' column of chosen experts."""
    mask = counted(rows.attention_mask, rows.response_mask).flatten()
    tokens = mask.sum().double()
    if rows.routed is None:
        return RouterTotals(tokens, None)
    counts = loads(rows.routed.flatten(0, 1), mask, model.routers[0].experts)
    return RouterTotals(tokens, counts / counts.sum(1, keepdim=True).clamp(min=1.0))


def router_terms(
    loads: Tensor | None, sums: RouterSums | None, losses: RouterLosses | None, prefix: str
) -> tuple[list[Tensor], Metrics]:
    """The losses of a pass's routers, 0-d tensors to be added to the pass's loss, and the metrics of loads and losses,
    with names that begin with `prefix`."""
    report: Metrics = {} if loads is None else {f"{prefix}/{LOAD}": Sum(loads)}
    terms = {} if losses is None or sums is None else losses.of(sums)
    return [*terms.values()], report | {f"{prefix}/{name}": metrics.term(x) for name, x in terms.items()}


def with_router_terms(report: Metrics, prefix: str, others: Sequence[Metrics], axis: Axis) -> Metrics:
    """Add the router metrics of all other pipeline stages to `report`, which holds the last stage's metrics on all
    ranks; `others` are the metrics of this rank's stages before the last. Every rank must call."""
    own, added = metrics.merge(*others), Metrics()
    for name in (f"{prefix}/{x}" for x in (LOAD, BALANCE, Z)):
        if (last := report.get(name)) is not None:
            mine = own.get(name, [torch.zeros_like(x) for x in last])
            added[name] = type(last)(*(all_reduce(x.to(like), axis) for x, like in zip(mine, last, strict=True)))
    return metrics.merge(report, added)


def split_loads(report: Metrics, prefix: str, routers: Sequence[Router]) -> tuple[Metrics, Tensor | None]:
    """Replace the loads in a mini-batch's metrics by each router's maximal load over the mean; return the metrics and
    the loads. Also reports the fullest rank of an expert axis, for each size that the axis has or could have."""
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
    """The load of the experts on each of `ranks` ranks of an expert axis, over all layers, relative to the mean:
    [R]."""
    own = loads.view(len(loads), ranks, -1).sum((0, 2))
    return own / own.mean().clamp(min=1e-9)


@torch.no_grad()
def balanced(
    params: Params, loads: Float[Tensor, "l e"], model: Model, mesh: Mesh, *, rate: float, unless: Metrics
) -> Params:
    """Adjust each router's bias by the rule of loss-free balancing (arXiv:2408.15664): up by `rate` for experts with a
    load below the mean, down for those above. Unchanged if the metrics `unless` say that the update was `skipped`."""
    skipped = unless.get("skipped")
    size = rate * (1.0 - skipped.total) if isinstance(skipped, Mean) else torch.tensor(rate, dtype=torch.float64)
    moved = dict(params)
    for router, load in zip(model.routers, loads, strict=True):
        if router.bias in moved:
            step = size.to(load) * (load.mean() - load).sign().view(model.whole_shapes[router.bias])
            own = fsdp.shard({router.bias: step}, mesh)[router.bias]
            moved[router.bias] = moved[router.bias] + own.to(moved[router.bias])
    return moved
