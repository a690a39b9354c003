"""Requests for samples: their prompts, how they are drawn, and what else to score, as values."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from tinker import types
from torch import Tensor

from fppo.batch import RowInputs
from fppo.data.images import ImageReader
from fppo.fields import only
from fppo.key import Key
from fppo.rollout.engine import Sampling
from fppo.rollout.requests import Request
from fppo.rollout.scores import Scores
from fppo.serve.texts import Texts
from fppo.serve.tinker.decode import (
    ImagePart,
    InputPart,
    TinkerBounds,
    dense_of,
    joined_input,
    of_type,
    pixels_of,
    refused,
)


@attrs.frozen(kw_only=True, eq=False)
class SampleRules:
    """How a base model is sampled from: its text conversion, the tokens that end an answer, and the limit of a row."""

    texts: Texts
    stop_token_ids: tuple[int, ...]
    limit: int
    seed: int = 0
    images: ImageReader | None = None  # of a base that takes images


@attrs.frozen(kw_only=True, eq=False)
class SampleWork:
    """Samples of a prompt: a row of the engine each, whose draws depend on the key and the row's number alone.

    The first row also scores the prompt. `sparse` are the row pointers and the columns of targets that came as a sparse
    matrix.
    """

    ids: tuple[int, ...]
    inputs: RowInputs | None
    sampling: Sampling
    count: int
    key: Key
    scores: Scores  # of the first row
    top: int  # likeliest tokens to report of each draw
    record: bool  # whether to record the draws, for a loss that needs them
    sparse: tuple[Sequence[int], Sequence[int]] | None = None

    def requests(self, name: str, *, adapter: str | None, owner: str) -> list[Request]:
        """The engine's requests NAME:ROW, one for each sample; `adapter` names the adapter to sample from, if any."""
        others = Scores(drawn_top=self.scores.drawn_top) if self.scores.drawn_top else None
        return [
            Request(
                name=f"{name}:{row}",
                ids=self.ids,
                inputs=self.inputs,
                sampling=self.sampling,
                key=self.key,
                row=row,
                adapter=adapter,
                owner=owner,
                scores=others if row or not self.scores.of_prompt else self.scores,
            )
            for row in range(self.count)
        ]


def sample_request(body: bytes) -> types.SampleRequest:
    """The request of a body. Raises Refusal."""
    return of_type(types.SampleRequest, body)


def sample_work(request: types.SampleRequest, name: str, *, rules: SampleRules, bounds: TinkerBounds) -> SampleWork:
    """The work of a request, whose draws follow from its `name` unless it has a seed. Raises Refusal."""
    pixels = sum(pixels_of(x.data) for x in request.prompt.chunks if isinstance(x, types.ImageChunk))
    if pixels > bounds.pixels:
        raise refused("prompt", f"{pixels:,} pixels in all images; at most {bounds.pixels:,}")
    ids, inputs = _ids(request.prompt, rules)
    if not 0 < request.num_samples <= bounds.samples:
        raise refused("num_samples", f"{request.num_samples}; give 1 to {bounds.samples}")
    params = request.sampling_params
    room = rules.limit - len(ids)
    most = room if params.max_tokens is None else params.max_tokens
    if not 0 < most <= room:
        text = f"the prompt has {len(ids)} tokens, and rows of this model at most {rules.limit}"
        raise refused("sampling_params.max_tokens", f"{most}: {text}; give 1 to {max(room, 1)}")
    sampling = _sampling(params, most, rules, bounds)
    key = Key(rules.seed).fold("tinker", name) if params.seed is None else Key(params.seed % (1 << 64)).fold("seed")
    drawn = request.num_samples * most * request.topk_sample_logprobs
    if drawn > bounds.drawn:
        text = f"{request.num_samples} samples of {most} tokens times {request.topk_sample_logprobs}"
        raise refused("topk_sample_logprobs", f"{text}; at most {bounds.drawn:,}: give a smaller max_tokens, or less")
    given = request.target_prompt_logprobs
    layout = None if given is None else (given.sparse_crow_indices, given.sparse_col_indices or [])
    return SampleWork(
        ids=ids,
        inputs=inputs,
        sampling=sampling,
        count=request.num_samples,
        key=key,
        scores=_scores(request, len(ids), sampling, bounds, rules.texts.vocabulary),
        top=request.topk_sample_logprobs,
        record=bool(request.record_stability_info),
        sparse=None if layout is None or layout[0] is None else (layout[0], layout[1]),
    )


def _ids(prompt: types.ModelInput, rules: SampleRules) -> tuple[tuple[int, ...], RowInputs | None]:
    parts: list[InputPart] = []
    for chunk in prompt.chunks:
        if isinstance(chunk, types.ImageChunk):
            parts.append(ImagePart(chunk.data, chunk.expected_tokens))
        elif isinstance(chunk, types.EncodedTextChunk):
            _check_known(chunk.tokens, rules)
            parts.append([*chunk.tokens])
        else:
            raise refused("prompt", f"a chunk of type {chunk.type}: give tokens, or images as bytes")
    ids, inputs = joined_input(parts, "prompt", rules.images)
    if not 0 < len(ids) < rules.limit:
        raise refused("prompt", f"{len(ids)} tokens; give 1 to {rules.limit - 1}")
    return tuple(ids), inputs


def _check_known(tokens: Sequence[int], rules: SampleRules) -> None:
    wrong = next((token for token in tokens if not 0 <= token < rules.texts.vocabulary), None)
    if wrong is not None:
        raise refused("prompt", f"the token {wrong} is none of the model's {rules.texts.vocabulary}")


def _sampling(params: types.SamplingParams, most: int, rules: SampleRules, bounds: TinkerBounds) -> Sampling:
    tokens, texts = _stops(params.stop, rules, bounds)
    stop_tokens, stop_texts = rules.texts.stops(texts) if texts else ((), None)
    try:
        return Sampling(
            max_tokens=most,
            stop_token_ids=tuple(dict.fromkeys((*tokens, *stop_tokens))),
            stop_texts=stop_texts,
        ).with_options(only(params, "temperature", "top_k", "top_p"))
    except ValueError as error:
        raise refused("sampling_params", str(error)) from error


def _stops(
    stop: str | Sequence[str] | Sequence[int] | None, rules: SampleRules, bounds: TinkerBounds
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The tokens and the texts that end an answer, as the request names them; the model's own if `stop` is None."""
    if stop is None:
        return rules.stop_token_ids, ()
    given = [stop] if isinstance(stop, str) else [*stop]
    if len(given) > bounds.stops:
        raise refused("sampling_params.stop", f"{len(given)} of them; at most {bounds.stops}")
    texts = tuple(each for each in given if isinstance(each, str))
    tokens = tuple(each for each in given if not isinstance(each, str))
    if any(not 0 < len(text) <= 1000 for text in texts):
        raise refused("sampling_params.stop", "give texts of 1 to 1000 characters")
    if any(not 0 <= token < rules.texts.vocabulary for token in tokens):
        raise refused("sampling_params.stop", f"tokens are 0 to {rules.texts.vocabulary - 1}")
    return tokens, texts


def _scores(
    request: types.SampleRequest, length: int, sampling: Sampling, bounds: TinkerBounds, vocabulary: int
) -> Scores:
    """The log-probs to report for a prompt of `length` tokens. They are the model's own, so at temperatures other than
    1 drawn tokens are scored as well. Refuses more than `bounds` or the model's `vocabulary` of tokens allow."""
    top, k = request.topk_prompt_logprobs, request.prompt_alt_tokens_k
    for name, width in (("topk_prompt_logprobs", top), ("prompt_alt_tokens_k", k)):
        if not 0 <= width * length <= bounds.scored:
            raise refused(name, f"{width}: {length} tokens times that; at most {bounds.scored:,}")
    if not 0 <= request.topk_sample_logprobs <= bounds.drawn_top:
        raise refused("topk_sample_logprobs", f"{request.topk_sample_logprobs}; give 0 to {bounds.drawn_top}")
    targets = targets_of(request, length, bounds)
    if targets is not None and targets.shape[1] > vocabulary:
        text = f"{targets.shape[1]} targets of each token: the model has {vocabulary} tokens"
        raise refused("target_prompt_logprobs", text)
    last = request.prompt_logprobs_last_n
    if last is not None and not (request.prompt_logprobs and 1 <= last < length):
        raise refused("prompt_logprobs_last_n", f"{last}: give 1 to {length - 1}, with prompt_logprobs")
    return Scores(
        prompt=bool(request.prompt_logprobs),
        last=last,
        prompt_top=top,
        targets=targets,
        draws=k,
        drawn_top=max(request.topk_sample_logprobs, int(sampling.temperature != 1.0)),
    )


def targets_of(request: types.SampleRequest, length: int, bounds: TinkerBounds) -> Tensor | None:
    """The targets [P - 1, K] int64 of a prompt of `length` tokens, -1 for none. Raises Refusal."""
    given, name = request.target_prompt_logprobs, "target_prompt_logprobs"
    if given is None:
        return None
    shape = given.shape
    if given.dtype != "int64" or shape is None or len(shape) != 2 or min(shape) < 1 or shape[0] != length - 1:
        raise refused(name, f"give int64 ids of shape [{length - 1}, K], not {given.dtype} {shape}")
    if length * shape[1] > bounds.scored:
        raise refused(name, f"{length} tokens times {shape[1]} targets; at most {bounds.scored:,}")
    values = np.asarray(given.data, dtype=np.int64)
    if given.sparse_crow_indices is None:
        if len(values) != shape[0] * shape[1]:
            raise refused(name, f"shape {shape} with {len(values)} numbers")
        return torch.from_numpy(values.reshape(shape))
    rows, columns = np.asarray(given.sparse_crow_indices), np.asarray(given.sparse_col_indices or [], dtype=np.int64)
    return torch.from_numpy(dense_of(values, rows, columns, shape, name, fill=-1))
