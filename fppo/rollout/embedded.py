"""Generation with transformers' modules on the training parameters themselves: nothing to sync."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from fppo import devices, models
from fppo.batch import Rollout
from fppo.models import lora
from fppo.models.heads import Head, vocabulary_head
from fppo.models.lengths import longest_row
from fppo.models.model import Model
from fppo.models.states import check_decodes
from fppo.rollout.answered import answered
from fppo.rollout.decoder import Decoder, decoder_of, packing_of
from fppo.rollout.drafts import Drafter, text_drafts
from fppo.rollout.engine import Ask
from fppo.rollout.exact import check_exact_engine, head_log_probs, rounded_product
from fppo.rollout.fitted import FittedSizes
from fppo.rollout.opened import EmbeddedRequests, LoadedPolicy, MemoryBudget
from fppo.rollout.prefill import trial_token
from fppo.rollout.sampling import Columns
from fppo.rollout.stepping import (
    DecodingPolicy,
    HeadLogProbs,
    wide_product,
)
from fppo.runtime.graphs import Record, Run, as_graphs
from fppo.runtime.mesh import LOCAL, Mesh, all_reduce
from fppo.steps.experts import check_routers
from fppo_kernels.collectives import Axis
from fppo_kernels.linear.bfloat16 import bfloat16
from fppo_kernels.linear.cpp import Joined
from fppo_kernels.linear.float8 import float8
from fppo_kernels.linear.plain import plain
from fppo_kernels.table import Kernels

_COMPACT = 0.9  # finished rows leave when the share of live rows is lower; 0.6 to 1 measured the same within 5 %
_HALF = 0.5  # the same for recorded steps, since a recording takes as long as several steps


@attrs.frozen(kw_only=True)
class EmbeddedEngine:
    """An engine that runs `model` itself. Rows decode together; finished rows leave, and waiting ones take their
    places.

    A draw depends on the key, the row's number and the position alone, whichever rows share the batch. `max_rows`
    bounds the rows that decode together, and `cache_bytes` the memory for their keys and values at their longest; None:
    half of a GPU's free memory, and no bound on a CPU. `prefill_tokens` bounds the prompt tokens of one pass (a longer
    prompt runs alone). `graphs` records decoding steps and replays them; None: on a GPU, where they can be recorded.

    With `halve_on_oom`, a step that runs out of memory is repeated with half as many rows or prompt tokens, which the
    engine remembers; a row that does not fit by itself raises RunFailed.

    On a `mesh` that cuts parameters, they are shards. The ranks of a tensor axis answer the same prompts `together`,
    each with its shard of the weights, the keys and values, and the vocabulary. Parameters cut along other axes are
    gathered first; beside an expert axis all are, and the model runs as it was before it was placed on the mesh.

    With `merges`, adapters are merged once for each `generate`, `open` or update; without it, their factors run. None:
    `lora.decodes_merged` decides.

    With `routed`, rollouts have the experts that the model's routers chose for every token, including prompts.

    An `exact` engine's log-probs are those of a training pass by the same kernels, bit for bit (`laws.check_exact`).

    With `draft_tokens`, up to so many tokens of a row are drafted by the `drafter` and checked in one pass. Tokens and
    log-probs stay the same. Steps are then not recorded.

    Raises ValueError if `cache_bytes` cannot hold one row, for a model whose states differ in transformers between
    decoding by one token and a pass over a row, for `graphs` where steps cannot be recorded, for `routed` without
    routers, for `exact` with inexact parts, for `halve_on_oom` on a tensor axis, and for `draft_tokens` with `routed`,
    `graphs` or a model with states.
    """

    model: Model
    kernels: Kernels
    pad_token_id: int
    max_rows: int = 1024
    cache_bytes: int | None = None
    prefill_tokens: int = 16384
    graphs: bool | None = None
    mesh: Mesh = LOCAL
    routed: bool = False
    merges: bool | None = None
    exact: bool = False
    halve_on_oom: bool = False
    _fitted: FittedSizes = attrs.field(factory=FittedSizes, init=False, eq=False, repr=False)
    draft_tokens: int = 0
    drafter: Drafter = text_drafts

    def __attrs_post_init__(self) -> None:
        check_decodes(self.model.skeleton)
        if self.routed:
            check_routers(self.model, "leave out routed (in settings algorithm.router_replay)")
        if self.exact:
            check_exact_engine(self.model, self.kernels, self.mesh)
        if self.halve_on_oom and self.together:
            raise ValueError(
                f"halve_on_oom = True: the {self.mesh['tensor'].size} ranks of a tensor axis decode together, so none "
                'can repeat a step alone; give cache_bytes (rollout.cache_gb) as a number, not as "auto"'
            )
        if self.draft_tokens:
            _check_drafts(self)

    @property
    def together(self) -> tuple[str, ...]:
        """Mesh axes whose ranks answer the same prompts together, and so must all get the same requests."""
        return ("tensor",) if models.tensor_axis(self.model, self.mesh).size > 1 else ()

    def generate(self, params: Mapping[str, Tensor], ask: Ask) -> Rollout:
        """`ask.sampling.n` responses to each prompt; row j of the prompt with row id i has row id i * n + j.

        T is the longest response in the batch. A response is followed by `pad_token_id`, with False in the masks and
        zero in the log-probs, which are float32 (float64 from float64 parameters). `groups` are the prompts' row ids.
        Raises ValueError for no prompts, for empty ones or ones not padded on the left, and for responses that may
        outgrow the model's learned positions or the length for which its rope is made.
        """
        device, opening = devices.home_of(next(iter(params.values())).device), self.open(params, version=ask.version)
        del params  # what was fetched for this call is given back once the engine has its own copies
        with opening as requests:
            return answered(requests, ask, pad_token_id=self.pad_token_id, device=device)

    @contextlib.contextmanager
    def open(
        self, params: Mapping[str, Tensor], *, version: int = 0, most_waiting: int | None = None
    ) -> Iterator[EmbeddedRequests]:
        """Answer requests as they come, with these parameters, until the context ends; see `RequestEngine`. Only the
        thread that opens it may call it.

        `max_rows` bounds the rows that decode together, and `cache_bytes` the memory for keys and values, including
        kept contexts; requests that do not fit wait.
        """
        requests = EmbeddedRequests(
            self._loaded,
            params,
            version,
            max_rows=self.max_rows,
            most_waiting=most_waiting,
            together=self.together,
            limit=_limit(self.model),
            fitted=self._fitted if self.halve_on_oom else None,
            draft_tokens=self.draft_tokens,
            drafter=self.drafter,
        )
        del params
        yield requests

    def _loaded(self, params: Mapping[str, Tensor]) -> LoadedPolicy:
        """Prepare parameters for an open engine; all ranks of a mesh call at once."""
        model, params = self._prepared(params)
        bound = models.Bound.of(model, params, kernels=self.kernels)
        with torch.inference_mode():
            policy = bound(lambda skeleton: self._policy(model, params, skeleton))
            budget = self._budget(bound, policy)
        scores = partial(self._scores, model, params) if self.exact else None
        policy = policy if scores is None else policy._replace(scores=scores(1.0))  # for prompts
        recorder = None if policy.record is None else partial(_recorder, policy.device)
        return LoadedPolicy(self.model, bound, policy, budget, scores, recorder)

    def _prepared(self, params: Mapping[str, Tensor]) -> tuple[Model, dict[str, Tensor]]:
        """The model that decodes, and its parameters: shards along its tensor axis, gathered along all others."""
        model, params = lora.decoded(self.model, params, mesh=self.mesh, merges=self.merges)
        params = models.in_compute_dtype(model, params)  # before they are gathered: fewer bytes, and no wide copies
        return models.tensor_parts(model, params, self.mesh)

    def _policy(self, model: Model, params: dict[str, Tensor], skeleton: PreTrainedModel) -> DecodingPolicy:
        """The policy of these parameters, inside `bind`."""
        own = models.output_head(model, params)
        head, product = (own, rounded_product(self.kernels.linear)) if self.exact else _wide(own, self.kernels.linear)
        kernels, packs = self.kernels, not self.exact
        decoder = decoder_of(
            model.text_of(skeleton), kernels.linear, packs=packs, decode_attention=kernels.decode_attention
        )
        columns = self._columns(model, head)
        record = self._record(head.weight.device, decoder, columns.axis)
        routers, budget = model.routers if self.routed else (), self.prefill_tokens
        return DecodingPolicy(model, skeleton, decoder, head, product, columns, self.kernels, budget, record, routers)

    def _scores(self, model: Model, params: dict[str, Tensor], temperature: float) -> HeadLogProbs:
        return head_log_probs(models.output_head(model, params), self.kernels.log_probs, temperature)

    def _record(self, device: torch.device, decoder: Decoder | None, axis: Axis) -> Record | None:
        """The recorder of steps; None if steps are not recorded. Without a `decoder` steps may wait for the device, and
        collectives along `axis` are not replayed."""
        able = decoder is not None and axis.size == 1 and not self.exact and not self.draft_tokens
        if self.graphs and not able:
            kind = self.model.config.model_type
            raise ValueError(f"graphs = True: model type {kind!r} has steps that cannot be recorded; leave it out")
        if not able or not (devices.kind_of(device).graphs if self.graphs is None else self.graphs):
            return None
        return _recorder(device)

    def _columns(self, model: Model, head: Head) -> Columns:
        """The columns of the logits that the head gives on this rank."""
        axis, (name, _) = models.tensor_axis(model, self.mesh), vocabulary_head(model)
        if model.layout is None or axis.size == 1:
            return Columns(axis, 0, len(head.weight))
        first, _ = model.layout.cuts[name].runs(axis.rank)[0]
        return Columns(axis, first, model.whole_shapes[name][0])

    def _budget(self, bound: models.Bound, policy: DecodingPolicy) -> MemoryBudget | None:
        """The bound of the memory for keys and values; None: no bound."""
        device, most = policy.device, self.cache_bytes
        if most is None and not devices.is_accelerator(device) and not self.halve_on_oom:
            return None
        token, row = bound(lambda _: trial_token(policy))
        if most is None and devices.is_accelerator(device):
            unused = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
            free = torch.tensor((torch.accelerator.get_memory_info(device)[0] + unused) // 2, device=device)
            most = int(all_reduce(free, policy.columns.axis, dist.ReduceOp.MIN))
        return MemoryBudget(most, token, row)


def _check_drafts(engine: EmbeddedEngine) -> None:
    """Raise ValueError if an engine cannot check drafts."""
    number, kind = engine.draft_tokens, engine.model.config.model_type
    reasons = {
        "give 0 for none, or the most tokens of a draft": number < 0,
        f"layers of model type {kind!r} carry states, which cannot go back behind a draft; leave it out": (
            engine.model.stateful
        ),
        "experts of drafted tokens are not reported; leave out routed (in settings algorithm.router_replay)": (
            engine.routed
        ),
        "steps with drafts are not recorded; leave graphs out": engine.graphs is True,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"draft_tokens = {number}: {reason}")


def _recorder(device: torch.device) -> Record:
    return as_graphs(device) if devices.kind_of(device).graphs else _as_it_is


def _as_it_is(run: Run) -> Run:
    return run


def _learned_positions(model: Model) -> list[str]:
    """The tables of learned positions."""
    inside = tuple(f"{path}." for path in model.layers)
    return [
        path
        for path, module in model.skeleton.named_modules()
        if isinstance(module, nn.Embedding)
        and module is not model.skeleton.get_input_embeddings()
        and not path.startswith(inside)
        and f"{model.prefix}{path}.weight" not in model.vision_params
    ]


def _limit(model: Model) -> int | None:
    """The most tokens of a row, by its learned positions and by the longest row; None: any number."""
    learned = getattr(model.config, "max_position_embeddings", None) if _learned_positions(model) else None
    return min((x for x in (longest_row(model.config), learned) if x is not None), default=None)


def _wide(head: Head, linear: Callable[..., Tensor]) -> tuple[Head, Callable[..., Tensor]]:
    """A head and its product that give logits in float32 or wider, as the training pass computes them."""
    if head.weight.is_cuda and type(head.weight) is Tensor and head.weight.dtype.itemsize == 2:
        return head, wide_product
    wide = torch.promote_types(head.weight.dtype, torch.float32)
    bias = None if head.bias is None else head.bias.to(wide)
    weight = head.weight.to(wide)
    wide_head = head._replace(weight=weight, bias=bias)
    if linear in (float8, bfloat16):  # what trains has no rounded head either
        return wide_head, plain
    if (packing := packing_of(linear, weight.nbytes)) is not None:
        return wide_head, partial(_with_weight, linear, packing(weight))
    return wide_head, linear


def _with_weight(
    linear: Callable[..., Tensor], own: Tensor | Joined, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """The product with `own`, which is laid out for it, in place of `weight`."""
    del weight
    return linear(x, own, bias)
