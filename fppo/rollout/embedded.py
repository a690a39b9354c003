"""Generation with transformers' modules on the training parameters themselves: nothing to sync."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import attrs
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fppo import models
from fppo.batch import Rollout
from fppo.data.stops import StopReader
from fppo.models.heads import Head, logits_of
from fppo.models.model import Model, longest_row, over_long
from fppo.rollout import cache as caches
from fppo.rollout.engine import Ask, OnFinished, Sampling
from fppo.rollout.records import check_prompts, check_stops, number_rows, response_limits, rollout_of
from fppo.rollout.sampling import draw
from fppo.runtime import fsdp
from fppo.runtime.mesh import LOCAL, Mesh
from fppo_kernels.attention.sdpa import for_any_shape
from fppo_kernels.padding import unpad
from fppo_kernels.record import Kernels

_CHUNK = 128  # columns by which the cache first exceeds the prompts
_COMPACT = 0.9  # finished rows leave when the live share falls below; 0.6 to 1 measured the same within 5 %


@attrs.frozen(kw_only=True)
class EmbeddedEngine:
    """An engine on `model` itself. All rows of a wave decode together; finished rows leave, so that a step costs what
    its live rows cost.

    A draw depends on the key, the row's number and the position alone, whichever rows share the batch. `max_rows`
    bounds the rows of a wave, hence the memory for keys and values (a prompt's samples share a wave, however many);
    `prefill_tokens` bounds the prompt tokens of one pass (a longer prompt runs alone). On a `mesh` that cuts parameters
    they are shards, and gathered whole first.
    """

    model: Model
    kernels: Kernels
    pad_token_id: int
    max_rows: int = 1024
    prefill_tokens: int = 16384
    mesh: Mesh = LOCAL

    def generate(self, params: Mapping[str, Tensor], ask: Ask) -> Rollout:
        """`ask.sampling.n` responses to each prompt; row j of the prompt with row id i has row id i * n + j.

        T is the longest response in the batch. What follows a response is `pad_token_id`, with False in the masks and
        zero in the log-probs, which are float32 (float64 from float64 parameters). `groups` are the prompts' row ids.
        Raises ValueError for no prompts, for empty ones or ones not padded on the left, and for responses that may
        outgrow the model's learned positions or the length for which its rope is made.
        """
        with torch.no_grad():
            params = fsdp.gather(params, self.model.shapes, self.mesh)
        device = next(iter(params.values())).device
        mask = ask.prompts.attention_mask.to(device).bool()
        lengths = check_prompts(mask)
        limits = response_limits(ask)
        _check_positions(self.model, lengths, limits)
        row_ids = number_rows(ask, device)
        width, n = max(lengths), ask.sampling.n
        tokens, real = ask.prompts.tokens.to(device)[:, -width:], mask[:, -width:]
        on_step = None if ask.on_finished is None else _FinishedRows(ask.on_finished, limits, ask.sampling)

        def run(skeleton: PreTrainedModel) -> list[_Step]:
            policy = _Policy(skeleton, _wide(models.output_head(self.model, params)), self.kernels, self.prefill_tokens)
            steps: list[_Step] = []
            for prompts in torch.arange(len(lengths)).split(max(1, self.max_rows // n)):
                part = slice(int(prompts[0]), int(prompts[-1]) + 1)
                rows = torch.arange(part.start * n, part.stop * n, device=device)
                wave = _Wave(tokens[part], real[part], lengths[part], limits[part], rows, row_ids)
                steps += _decode(policy, wave, ask, on_step)
            return steps

        with torch.inference_mode(), for_any_shape(device):
            steps = models.bind(self.model, params, run)
        with torch.no_grad():  # not in inference mode: the rollout is for autograd to use
            return _assemble(steps, ask, row_ids, limits=limits, pad_token_id=self.pad_token_id)


class _Policy(NamedTuple):
    """What a forward pass needs, inside `bind`."""

    skeleton: PreTrainedModel
    head: Head  # in float32 or wider, as the training pass computes its logits
    kernels: Kernels
    prefill_tokens: int


class _Wave(NamedTuple):
    """Prompts [B, P] that are answered together, and where their rows stand in the rollout."""

    tokens: Tensor
    mask: Tensor
    lengths: Sequence[int]
    limits: Sequence[int]  # the most tokens of each prompt's responses
    rows: Tensor  # [B * n]
    row_ids: Tensor  # of all rows of the rollout


class _Step(NamedTuple):
    """One token of each live row: what row rows[i] of the rollout got at one position."""

    rows: Tensor
    position: int
    tokens: Tensor
    log_probs: Tensor
    sampling_log_probs: Tensor


class _FinishedRows:
    """Calls `on_finished` for rows as they finish, from the steps of all waves."""

    def __init__(self, on_finished: OnFinished, limits: Sequence[int], sampling: Sampling) -> None:
        self._on_finished = on_finished
        self._limits = [limit for limit in limits for _ in range(sampling.n)]
        self._open: dict[int, list[int]] = {row: [] for row in range(len(self._limits))}

    def __call__(self, step: _Step, stops: Tensor) -> None:
        """Takes the step's tokens in, and which of them stop their rows; rows that ended before, and are still among
        the live ones, are passed over."""
        for row, token, stopped in zip(step.rows.tolist(), step.tokens.tolist(), stops.tolist(), strict=True):
            response = self._open.get(row)
            if response is None:
                continue
            response.append(token)
            if stopped or len(response) == self._limits[row]:
                del self._open[row]
                self._on_finished(row, response, "stop" if stopped else "length")


def _check_positions(model: Model, lengths: Sequence[int], limits: Sequence[int]) -> None:
    """Raises ValueError if a response may outgrow a table of learned positions (GPT-2, OPT) or the longest row."""
    total, prompt, most = max((sum(pair), *pair) for pair in zip(lengths, limits, strict=True))
    alike = longest_row(model.config)
    if alike is not None and total > alike:
        raise ValueError(
            f"the longest prompt has {prompt} tokens; with max_tokens = {most} a row may reach {total} tokens: "
            + over_long(model.config, alike)
        )
    inside = tuple(f"{path}." for path in model.layers)
    tables = [
        path
        for path, module in model.skeleton.named_modules()
        if isinstance(module, nn.Embedding)
        and module is not model.skeleton.get_input_embeddings()
        and not path.startswith(inside)
    ]
    limit = getattr(model.config, "max_position_embeddings", None)
    if tables and limit is not None and total > limit:
        raise ValueError(
            f"the longest prompt has {prompt} tokens; with max_tokens = {most} a row may reach "
            f"{total} tokens, but the model has learned {limit} positions ({tables[0]}): "
            "lower max_tokens or leave long prompts out"
        )


def _wide(head: Head) -> Head:
    wide = torch.promote_types(head.weight.dtype, torch.float32)
    return head._replace(weight=head.weight.to(wide), bias=None if head.bias is None else head.bias.to(wide))


def _passes(lengths: Sequence[int], budget: int) -> Iterator[slice]:
    """Consecutive prompts of at most `budget` tokens together."""
    start, total = 0, 0
    for i, length in enumerate(lengths):
        if i > start and total + length > budget:
            yield slice(start, i)
            start, total = i, 0
        total += length
    yield slice(start, len(lengths))


def _prefill(policy: _Policy, wave: _Wave, n: int, columns: int) -> tuple[Tensor, caches.Layers]:
    """The logits [B * n, V] after each prompt and the cache of the prompts' keys and values, each prompt run once."""
    cache: caches.Layers = {}
    logits = []
    for part in _passes(wave.lengths, policy.prefill_tokens):
        packed = unpad(wave.tokens[part], wave.mask[part])
        prompts: caches.Layers = {}
        attend = caches.prefill_attention(policy.kernels.attention, packed, prompts)
        hidden = models.forward(policy.skeleton, packed.tokens[None], packed.positions[None], attend=attend)[0]
        logits.append(logits_of(policy.head, hidden[packed.lengths.cu_seqlens[1:].long() - 1]))
        cache = cache or caches.allocate(prompts, len(wave.lengths) * n, columns)
        shape = len(packed.lengths.lengths), wave.mask.shape[1]
        caches.write_prompts_(cache, part.start * n, prompts, packed.index, shape, n)
    return torch.cat(logits).repeat_interleave(n, 0), cache


def _decode(policy: _Policy, wave: _Wave, ask: Ask, on_step: _FinishedRows | None) -> list[_Step]:
    """Responses to the wave's prompts."""
    rows, sampling = wave.rows, ask.sampling
    most, width = max(wave.limits), wave.mask.shape[1]
    total = width + most
    columns = min(total, width + _CHUNK)
    logits, cache = _prefill(policy, wave, sampling.n, columns)
    stops = _stop_table(sampling, logits)
    positions = wave.mask.sum(1, keepdim=True).repeat_interleave(sampling.n, 0)
    first, bias = _padding(width - positions, columns, cache)
    done = torch.zeros_like(rows, dtype=torch.bool)
    last = torch.tensor(wave.limits, device=rows.device).repeat_interleave(sampling.n) - 1
    reader = None if sampling.stop_texts is None else StopReader(sampling.stop_texts)
    ends = bool(sampling.stop_token_ids) or reader is not None or min(wave.limits) < most
    steps: list[_Step] = []
    for t in range(most):
        if t % _CHUNK == 0:
            places = torch.arange(t, min(t + _CHUNK, most), device=rows.device)
            uniforms = ask.key.uniform(wave.row_ids[rows], places)
        drawn = draw(logits, uniforms[:, t % _CHUNK], sampling)
        steps.append(_Step(rows, t, *drawn))
        stopped = (
            stops[drawn.tokens] if reader is None else stops[drawn.tokens] | _completed(reader, rows, drawn.tokens)
        )
        if on_step is not None:
            on_step(steps[-1], stopped)
        new = drawn.tokens[:, None]
        if ends:
            done = done | stopped | (last == t)
            left = len(done) - int(done.sum())
            if left == 0:
                break
            if left < len(done) * _COMPACT:
                keep, holes = _survivors(done, left)
                cache = caches.compact_(cache, holes, keep[holes], left, width + t)
                columns_of_rows = (rows, done, positions, uniforms, new, last)
                rows, done, positions, uniforms, new, last = (x[keep] for x in columns_of_rows)
                first, bias = _padding(width + t - positions, columns, cache)
        if t + 1 == most:
            break
        column = width + t
        if column == columns:
            columns = min(total, column + max(_CHUNK, column // 2))
            cache = caches.grow(cache, column, columns)
            first, bias = _padding(column - positions, columns, cache)
        attend = caches.decode_attention(cache, column, first, bias)
        hidden = models.forward(policy.skeleton, new, positions, attend=attend)[:, 0]
        logits = logits_of(policy.head, hidden)
        positions = positions + 1
    return steps


def _completed(reader: StopReader, rows: Tensor, tokens: Tensor) -> Tensor:
    """bool [R], True where a row's new token completes a text that ends it."""
    pairs = zip(rows.tolist(), tokens.tolist(), strict=True)
    return torch.tensor([reader.ends(row, token) for row, token in pairs], device=tokens.device)


def _stop_table(sampling: Sampling, logits: Tensor) -> Tensor:
    """bool [V], True at stop tokens."""
    size = logits.shape[1]
    check_stops(sampling, size)
    table = torch.zeros(size, dtype=torch.bool, device=logits.device)
    table[list(sampling.stop_token_ids)] = True
    return table


def _padding(pads: Tensor, columns: int, cache: caches.Layers) -> tuple[int, Tensor | None]:
    """The first column that any row uses, and what hides each row's padding; `pads` int64 [R, 1]."""
    first, last = (int(x) for x in pads.aminmax())
    if first == last:
        return first, None
    hidden = torch.arange(columns, device=pads.device) < pads
    bias = torch.zeros(hidden.shape, dtype=next(iter(cache.values()))[0].dtype, device=pads.device)
    return first, bias.masked_fill_(hidden, -torch.inf)[:, None, None]


def _survivors(done: Tensor, left: int) -> tuple[Tensor, Tensor]:
    """The rows to keep [left], each in its place or, if it stood beyond, in a finished row's; and those places."""
    keep = torch.arange(left, device=done.device)
    holes = done[:left].nonzero()[:, 0]
    keep[holes] = left + (~done[left:]).nonzero()[:, 0]
    return keep, holes


def _assemble(
    steps: Sequence[_Step],
    ask: Ask,
    row_ids: Tensor,
    *,
    limits: Sequence[int],
    pad_token_id: int,
) -> Rollout:
    """The rollout of all steps of all waves."""
    batch, length = len(row_ids), 1 + max(step.position for step in steps)
    place = torch.cat([step.rows * length + step.position for step in steps])

    def lay_out(columns: Sequence[Tensor], fill: float) -> Tensor:
        x = torch.cat(list(columns))
        return x.new_full((batch * length,), fill).index_copy(0, place, x).view(batch, length)

    tokens = lay_out([step.tokens for step in steps], pad_token_id)
    log_probs = lay_out([step.log_probs for step in steps], 0.0)
    sampling_log_probs = lay_out([step.sampling_log_probs for step in steps], 0.0)
    most = torch.tensor(limits, device=place.device).repeat_interleave(ask.sampling.n)
    drawn = lay_out([step.position < most[step.rows] for step in steps], False)
    return rollout_of(ask, tokens, drawn, log_probs, sampling_log_probs, row_ids=row_ids, pad_token_id=pad_token_id)
