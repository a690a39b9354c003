"""Generation with transformers' modules on the training parameters themselves: nothing to sync."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from fppo import models
from fppo.batch import Rollout, RowInputs
from fppo.data.stops import StopReader
from fppo.models import lora
from fppo.models.heads import Head, logits_of, vocabulary_head
from fppo.models.lengths import longest_row, over_long
from fppo.models.model import Model
from fppo.models.routing import Routes, experts_of
from fppo.models.rows import RowWise
from fppo.models.seams import Attend, AttentionLayer
from fppo.models.states import check_decodes
from fppo.models.vision_pass import place_images, see, shift_of
from fppo.rollout import cache as caches
from fppo.rollout.banks import BankLayout
from fppo.rollout.decoder import PACKED, Decoder, decoder_of
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.exact import check_exact_engine, head_log_probs, rounded_product
from fppo.rollout.opened import EmbeddedRequests, LoadedPolicy
from fppo.rollout.places import ALIGNED, CHUNK
from fppo.rollout.reading import groups_within, tried
from fppo.rollout.records import (
    DrawnStep,
    Fed,
    FinishedRows,
    Steps,
    assemble,
    check_prompts,
    check_stops,
    experts_of_prompts,
    number_rows,
    response_limits,
)
from fppo.rollout.sampling import Columns, draw
from fppo.rollout.states import PromptStates, States
from fppo.rollout.stepping import (
    Advance,
    DecodingPolicy,
    HeadLogProbs,
    LiveRows,
    Next,
    fixed_steps,
    plain_steps,
    wide_product,
)
from fppo.runtime.graphs import Record, Run, as_graphs
from fppo.runtime.mesh import LOCAL, Mesh, all_reduce
from fppo.steps.experts import check_routers
from fppo_kernels.attention.sdpa import for_any_shape
from fppo_kernels.collectives import Axis, all_gather
from fppo_kernels.linear.float8 import float8
from fppo_kernels.linear.onednn import onednn, packed
from fppo_kernels.linear.plain import plain
from fppo_kernels.padding import Packed, unpad
from fppo_kernels.table import Kernels

_COMPACT = 0.9  # finished rows leave when the share of live rows is lower; 0.6 to 1 measured the same within 5 %
_HALF = 0.5  # the same for recorded steps, since a recording takes as long as several steps


@attrs.frozen(kw_only=True)
class EmbeddedEngine:
    """An engine that runs `model` itself. All rows of a wave decode together; finished rows leave, so that a step costs
    what its live rows cost.

    A draw depends on the key, the row's number and the position alone, whichever rows share the batch. `max_rows`
    bounds the rows of a wave, though all samples of a prompt share a wave. `cache_bytes` bounds the memory for a wave's
    keys and values at their longest, and may split a prompt's samples; None: half of a GPU's free memory, and no bound
    on a CPU. `prefill_tokens` bounds the prompt tokens of one pass (a longer prompt runs alone). `graphs` records
    decoding steps and replays them; None: on a GPU, where they can be recorded.

    On a `mesh` that cuts parameters, they are shards. The ranks of a tensor axis answer the same prompts `together`,
    each with its shard of the weights, the keys and values, and the vocabulary. Parameters cut along other axes are
    gathered first; beside an expert axis all are, and the model runs as it was before it was placed on the mesh.

    With `merges`, adapters are merged once for each `generate`, `open` or update; without it, their factors run. None:
    `lora.decodes_merged` decides.

    With `routed`, rollouts have the experts that the model's routers chose for every token, including prompts.

    An `exact` engine's log-probs are those of a training pass by the same kernels, bit for bit (`laws.check_exact`).

    Raises ValueError if `cache_bytes` cannot hold one row, for a model whose states differ in transformers between
    decoding by one token and a pass over a row, for `graphs` where steps cannot be recorded, for `routed` without
    routers, and for `exact` with inexact parts.
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

    def __attrs_post_init__(self) -> None:
        check_decodes(self.model.skeleton)
        if self.routed:
            check_routers(self.model, "leave out routed (in settings algorithm.router_replay)")
        if self.exact:
            check_exact_engine(self.model, self.kernels, self.mesh)

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
        model, params = self._prepared(params)
        device = next(iter(params.values())).device
        mask = ask.prompts.attention_mask.to(device).bool()
        lengths = check_prompts(mask)
        limits = response_limits(ask)
        _check_positions(model, lengths, limits)
        row_ids = number_rows(ask, device)
        width, n = max(lengths), ask.sampling.n
        tokens, real = ask.prompts.tokens.to(device)[:, -width:], mask[:, -width:]
        inputs = ask.prompts.inputs
        on_step = None if ask.on_finished is None else FinishedRows(ask.on_finished, limits, ask.sampling)
        fed: list[Fed] = []

        def run(skeleton: PreTrainedModel) -> list[DrawnStep]:
            policy = self._policy(model, params, skeleton)
            if self.exact:
                policy = policy._replace(scores=self._scores(model, params, ask.sampling.temperature))
            steps: list[DrawnStep] = []
            for part, draws in self._waves(policy, len(lengths), n, width + max(limits)):
                numbers = torch.arange(part.start, part.stop, device=device)[:, None] * n
                rows = (numbers + torch.arange(draws.start, draws.stop, device=device)).flatten()
                own = None if inputs is None else inputs[part]
                wave = _Wave(tokens[part], real[part], lengths[part], limits[part], rows, row_ids, own)
                steps += _decode(policy, wave, ask, on_step, fed)
            return steps

        with torch.inference_mode(), for_any_shape(device):
            steps = models.bind(model, params, run, kernels=self.kernels)
        with torch.no_grad():  # not in inference mode: the rollout is for autograd to use
            return assemble(steps, fed, ask, row_ids, limits=limits, pad_token_id=self.pad_token_id)

    @contextlib.contextmanager
    def open(
        self, params: Mapping[str, Tensor], *, version: int = 0, most_waiting: int | None = None
    ) -> Iterator[EmbeddedRequests]:
        """Answer requests as they come, with these parameters, until the context ends; see `RequestEngine`. Only the
        thread that opens it may call it.

        `max_rows` bounds the rows that decode together, and `cache_bytes` the memory for keys and values, including
        kept contexts; requests that do not fit wait.
        """
        yield EmbeddedRequests(
            self._loaded,
            params,
            version,
            max_rows=self.max_rows,
            most_waiting=most_waiting,
            together=self.together,
            limit=_limit(self.model),
        )

    def _loaded(self, params: Mapping[str, Tensor]) -> LoadedPolicy:
        """Prepare parameters for an open engine; all ranks of a mesh call at once."""
        model, params = self._prepared(params)
        bound = models.Bound.of(model, params, kernels=self.kernels)
        with torch.inference_mode():
            policy = bound(lambda skeleton: self._policy(model, params, skeleton))
            kept, calls, state_bytes = bound(lambda _: tried(policy))
            budget = self._budget(policy)
        scores, device = partial(self._scores, model, params) if self.exact else None, policy.head.weight.device
        policy = policy if scores is None else policy._replace(scores=scores(1.0))  # for prompts
        recorder = None if policy.record is None else partial(_recorder, device)
        layout = BankLayout.of(kept, device)
        return LoadedPolicy(self.model, bound, policy, layout, calls, state_bytes, budget, scores, recorder)

    def _prepared(self, params: Mapping[str, Tensor]) -> tuple[Model, dict[str, Tensor]]:
        """The model that decodes, and its parameters: shards along its tensor axis, gathered along all others."""
        model, params = lora.decoded(self.model, params, mesh=self.mesh, merges=self.merges)
        params = models.in_compute_dtype(model, params)  # before they are gathered: fewer bytes, and no wide copies
        return models.tensor_parts(model, params, self.mesh)

    def _policy(self, model: Model, params: dict[str, Tensor], skeleton: PreTrainedModel) -> DecodingPolicy:
        """The policy of these parameters, inside `bind`."""
        own = models.output_head(model, params)
        head, product = (own, rounded_product(self.kernels.linear)) if self.exact else _wide(own, self.kernels.linear)
        packs = self.kernels.linear is onednn and not self.exact
        decoder = decoder_of(model.text_of(skeleton), self.kernels.linear, packs=packs)
        columns = self._columns(model, head)
        record = self._record(head.weight.device, decoder, columns.axis)
        routers, budget = model.routers if self.routed else (), self.prefill_tokens
        return DecodingPolicy(model, skeleton, decoder, head, product, columns, self.kernels, budget, record, routers)

    def _scores(self, model: Model, params: dict[str, Tensor], temperature: float) -> HeadLogProbs:
        return head_log_probs(models.output_head(model, params), self.kernels.log_probs, temperature)

    def _record(self, device: torch.device, decoder: Decoder | None, axis: Axis) -> Record | None:
        """The recorder of steps; None if steps are not recorded. Without a `decoder` steps may wait for the device, and
        collectives along `axis` are not replayed."""
        able = decoder is not None and axis.size == 1 and not self.exact
        if self.graphs and not able:
            kind = self.model.config.model_type
            raise ValueError(f"graphs = True: model type {kind!r} has steps that cannot be recorded; leave it out")
        if not able or not (device.type == "cuda" if self.graphs is None else self.graphs):
            return None
        return _recorder(device)

    def _columns(self, model: Model, head: Head) -> Columns:
        """The columns of the logits that the head gives on this rank."""
        axis, (name, _) = models.tensor_axis(model, self.mesh), vocabulary_head(model)
        if model.layout is None or axis.size == 1:
            return Columns(axis, 0, len(head.weight))
        first, _ = model.layout.cuts[name].runs(axis.rank)[0]
        return Columns(axis, first, model.whole_shapes[name][0])

    def _waves(self, policy: DecodingPolicy, prompts: int, n: int, columns: int) -> Iterator[tuple[slice, slice]]:
        """Yield each wave: a slice of the prompts, and a slice of their n draws. Rows may reach `columns` columns."""
        budget = self._budget(policy)
        rows, draws = self.max_rows, n
        if budget is not None:
            one = _row_bytes(policy, _room(policy, columns))
            if one > budget:
                text = (
                    f"one row of {columns} tokens has {one:,} bytes of keys and values: give it more, or fewer tokens"
                )
                raise ValueError(f"cache_bytes = {budget:,}: {text}")
            rows, draws = min(rows, budget // one), min(n, budget // one)
        step = max(1, rows // n)
        for first in range(0, prompts, step):
            for start in range(0, n, draws):
                yield slice(first, min(first + step, prompts)), slice(start, min(start + draws, n))

    def _budget(self, policy: DecodingPolicy) -> int | None:
        """The most bytes of keys and values in a wave; None: no bound."""
        device, budget = policy.head.weight.device, self.cache_bytes
        if budget is None and device.type == "cuda":
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            free = torch.tensor((torch.cuda.mem_get_info(device)[0] + unused) // 2, device=device)
            budget = int(all_reduce(free, policy.columns.axis, dist.ReduceOp.MIN))
        return budget


def _recorder(device: torch.device) -> Record:
    return as_graphs(device) if device.type == "cuda" else _as_it_is


def _as_it_is(run: Run) -> Run:
    return run


class _Wave(NamedTuple):
    """Prompts [B, P] that are answered together, and the places of their rows in the rollout."""

    tokens: Tensor
    mask: Tensor
    lengths: Sequence[int]
    limits: Sequence[int]  # the most tokens of each prompt's responses
    rows: Tensor  # [B * n], the rows of each prompt's n draws
    row_ids: Tensor  # of all rows of the rollout
    inputs: Sequence[RowInputs | None] | None

    def each(self, x: Tensor) -> Tensor:
        """Values of each prompt [B, ...], repeated for its draws [B * n, ...]."""
        return x.repeat_interleave(len(self.rows) // len(self.lengths), 0)


def _check_positions(model: Model, lengths: Sequence[int], limits: Sequence[int]) -> None:
    """Raise ValueError if a response may outgrow a table of learned positions (GPT-2, OPT) or the model's longest
    row."""
    total, prompt, most = max((sum(pair), *pair) for pair in zip(lengths, limits, strict=True))
    alike = longest_row(model.config)
    if alike is not None and total > alike:
        raise ValueError(
            f"the longest prompt has {prompt} tokens; with max_tokens = {most} a row may reach {total} tokens: "
            + over_long(model.config, alike)
        )
    tables, limit = _learned_positions(model), getattr(model.config, "max_position_embeddings", None)
    if tables and limit is not None and total > limit:
        raise ValueError(
            f"the longest prompt has {prompt} tokens; with max_tokens = {most} a row may reach "
            f"{total} tokens, but the model has learned {limit} positions ({tables[0]}): "
            "lower max_tokens or leave long prompts out"
        )


def _learned_positions(model: Model) -> list[str]:
    """The tables of learned positions."""
    inside = tuple(f"{path}." for path in model.layers)
    return [
        path
        for path, module in model.skeleton.named_modules()
        if isinstance(module, nn.Embedding)
        and module is not model.skeleton.get_input_embeddings()
        and not path.startswith(inside)
        and f"{model.prefix}{path}.weight" not in model.seeing
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
    if linear is onednn and weight.nbytes <= PACKED:
        weight = packed(weight)
    # what trains has no head of 8 bits either
    return head._replace(weight=weight, bias=bias), plain if linear is float8 else linear


def _row_bytes(policy: DecodingPolicy, columns: int) -> int:
    """Bytes of a row of `columns` columns: its keys, values and states."""
    kept, _, of_states = tried(policy)
    return caches.row_bytes(kept, columns) + of_states


def _prefill(
    policy: DecodingPolicy, wave: _Wave, columns: int, fed: list[Fed]
) -> tuple[Next, caches.Layers, States, list[AttentionLayer]]:
    """Run the wave's prompts, each once, and append the routers' choices to `fed`. Returns the logits [B * n, V] after
    each row's prompt, a cache of `columns` columns with the prompts' keys and values, the states after the prompts, and
    the arguments of each attention call."""
    cache, axis = caches.Layers(), policy.columns.axis
    ends, states, asked = list[Tensor](), list[States](), list[AttentionLayer]()
    n = len(wave.rows) // len(wave.lengths)
    for part in groups_within(wave.lengths, policy.prefill_tokens):
        packed = unpad(wave.tokens[part], wave.mask[part], multiple=axis.size)
        prompts: caches.Layers = {}
        asked.clear()
        attend = caches.prefill_attention(policy.kernels.attention, packed.lengths, prompts, asked)
        carried = PromptStates(packed.lengths, policy.model)
        routes = policy.routes()
        hidden = _hidden(policy, packed, wave, part, RowWise(attend, carried), routes)
        count = part.stop - part.start
        if routes is not None:
            experts = experts_of(routes.routed, policy.routers, packed.tokens)
            fed.append(experts_of_prompts(experts, packed.index, wave.rows.view(-1, n)[part], wave.mask.shape[1]))
        states.append(carried.states_(count, n))
        ends.append(all_gather(hidden, axis)[packed.lengths.cu_seqlens[1 : count + 1].long() - 1])
        cache = cache or caches.allocate(prompts, len(wave.rows), columns, zeroed=policy.record is not None)
        caches.write_prompts_(cache, part.start * n, prompts, packed.index, (count, wave.mask.shape[1]), n)
    last = torch.cat(ends)
    after = Next(wave.each(logits_of(policy.head, last, policy.product)), wave.each(last))
    return after, cache, States.joined_(states), asked


def _hidden(
    policy: DecodingPolicy, packed: Packed, wave: _Wave, part: slice, attend: Attend, routes: Routes | None
) -> Tensor:
    """Compute the hidden states [N, H] of `packed`, the prompts `part` of the wave, with their images."""
    tokens = packed.tokens[None]
    inputs, lengths = None if wave.inputs is None else wave.inputs[part], wave.lengths[part]
    images, positions = place_images(policy.model, inputs, packed.tokens, packed.positions, lengths)
    embedded, deep = (None, None) if images is None else see(policy.model, policy.skeleton, tokens, images)
    positions = positions.unsqueeze(-2)
    return models.forward(policy.text, tokens, positions, attend=attend, routes=routes, embedded=embedded, deep=deep)[0]


def _decode(
    policy: DecodingPolicy, wave: _Wave, ask: Ask, on_step: FinishedRows | None, fed: list[Fed]
) -> list[DrawnStep]:
    """Draw responses to the wave's prompts, and return the steps. The routers' choices are appended to `fed`."""
    rows, sampling = wave.rows, ask.sampling
    most, width = max(wave.limits), wave.mask.shape[1]
    total = width + most
    columns = _room(policy, min(total, width + CHUNK))
    after, cache, states, asked = _prefill(policy, wave, columns, fed)
    stops = _stop_table(sampling, policy.columns.size, rows.device)
    pads = wave.each(width - wave.mask.sum(1, keepdim=True))
    shifts = torch.tensor([[shift_of(policy.model, x)] for x in wave.inputs or [None] * len(wave.lengths)])
    live = LiveRows(cache, columns, pads, pads - wave.each(shifts.to(pads.device)), states)
    step_of = _steps(policy, asked, total, alike=not shifts.any())
    advance = step_of(live)
    done = torch.zeros_like(rows, dtype=torch.bool)
    last = wave.each(torch.tensor(wave.limits, device=rows.device)) - 1
    reader = None if sampling.stop_texts is None else StopReader(sampling.stop_texts)
    ends = bool(sampling.stop_token_ids) or reader is not None or min(wave.limits) < most
    steps = Steps(policy.scores)
    for t in range(most):
        if t % CHUNK == 0:
            places = ask.offset + torch.arange(t, min(t + CHUNK, most), device=rows.device)
            uniforms = ask.key.uniform(wave.row_ids[rows], places)
        drawn = draw(after.logits, uniforms[:, t % CHUNK], sampling, policy.columns)
        step = DrawnStep(rows, t, *drawn)
        steps.add(step, after.hidden)
        stopped = stops[drawn.tokens] if ends or on_step is not None else done
        if reader is not None:
            stopped = stopped | _completed(reader, rows, drawn.tokens)
        if on_step is not None:
            on_step(step, stopped)
        new, changed = drawn.tokens, False
        if ends:
            done = done | stopped | (last == t)
            left = len(done) - int(done.sum())
            if left == 0:
                break
            if changed := left < len(done) * (_COMPACT if policy.record is None else _HALF):
                keep, holes = _survivors(done, left)
                live = _compact_(live, keep, holes, width + t)
                rows, done, uniforms, new, last = (x[keep] for x in (rows, done, uniforms, new, last))
        if t + 1 == most:
            break
        column = width + t
        if column == live.columns:
            live, changed = _grow_(live, policy, column, total), True
        advance = step_of(live) if changed else advance
        after = advance(new, column)
        if after.experts is not None:
            fed.append(Fed(rows, torch.full_like(rows, t), after.experts))
    return steps.taken()


def _steps(
    policy: DecodingPolicy, asked: Sequence[AttentionLayer], length: int, *, alike: bool
) -> Callable[[LiveRows], Advance]:
    if policy.record is None:
        return plain_steps(policy, asked, length, alike=alike)
    return fixed_steps(policy, asked, length, policy.record)


def _room(policy: DecodingPolicy, columns: int) -> int:
    """The number of columns to allocate for `columns`. A recorded step reads all of them, so the number is rounded up
    to suit kernels."""
    return columns if policy.record is None else -(-columns // ALIGNED) * ALIGNED


def _compact_(live: LiveRows, keep: Tensor, holes: Tensor, used: int) -> LiveRows:
    """Keep the live rows, as `_survivors` has chosen `keep` and `holes`, with the first `used` columns of their
    cache."""
    cache = caches.compact_(live.cache, holes, keep[holes], len(keep), used)
    return LiveRows(cache, live.columns, live.pads[keep], live.starts[keep], live.states.take_(keep))


def _grow_(live: LiveRows, policy: DecodingPolicy, used: int, most: int) -> LiveRows:
    """Widen the rows' cache beyond its `used` columns, to at most `most`."""
    columns = _room(policy, min(most, used + max(CHUNK, used // 2)))
    caches.grow_(live.cache, used, columns, zeroed=policy.record is not None)
    return live._replace(columns=columns)


def _completed(reader: StopReader, rows: Tensor, tokens: Tensor) -> Tensor:
    """Find the rows whose new token completes a stop text: bool [R]. `rows` [R] are the rows' numbers, `tokens` [R] the
    new tokens."""
    pairs = zip(rows.tolist(), tokens.tolist(), strict=True)
    return torch.tensor([reader.ends(row, token) for row, token in pairs], device=tokens.device)


def _stop_table(sampling: Sampling, size: int, device: torch.device) -> Tensor:
    """Make a table of the stop tokens in a vocabulary of `size` = V tokens: bool [V]."""
    check_stops(sampling, size)
    table = torch.zeros(size, dtype=torch.bool, device=device)
    table[list(sampling.stop_token_ids)] = True
    return table


def _survivors(done: Tensor, left: int) -> tuple[Tensor, Tensor]:
    """Choose a live row for each of the first `left` places; `left` rows are live, that is, not `done`. Returns these
    rows [left], and the places whose own rows are done, which later live rows fill."""
    keep = torch.arange(left, device=done.device)
    holes = done[:left].nonzero()[:, 0]
    keep[holes] = left + (~done[left:]).nonzero()[:, 0]
    return keep, holes
