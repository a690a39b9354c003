"""Requests for samples: their prompts, how they are drawn, and what is to be scored beside, as values."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from tinker import types
from torch import Tensor

from fppo.key import Key
from fppo.rollout.engine import Sampling
from fppo.rollout.requests import Request
from fppo.serve.texts import Texts
from fppo.serve.tinker.futures import Refusal
from fppo.serve.tinker.decode import TinkerBounds, dense_of, of_type, refused


@attrs.frozen(kw_only=True, eq=False)
class SampleRules:
    """The parts of sampling that a base has: its texts, the tokens that end an answer, the most tokens of a row."""

    texts: Texts
    stop_token_ids: tuple[int, ...]
    limit: int
    seed: int = 0


@attrs.frozen(kw_only=True, eq=False)
class SampleWork:
    """Samples of a prompt: a row of the engine each, whose draws depend on the key and the row's number alone."""

    ids: tuple[int, ...]
    sampling: Sampling
    count: int
    key: Key

    def requests(self, name: str) -> list[Request]:
        """The engine's requests."""
        return [
            Request(name=f"{name}:{row}", ids=self.ids, sampling=self.sampling, key=self.key, row=row)
            for row in range(self.count)
        ]


def sample_request(body: bytes) -> types.SampleRequest:
    """The request of a body. Raises Refusal."""
    return of_type(types.SampleRequest, body)


def sample_work(request: types.SampleRequest, name: str, *, rules: SampleRules, bounds: TinkerBounds) -> SampleWork:
    """The work of a request, whose draws follow from its `name` unless it has a seed. Raises Refusal."""
    ids = _ids(request.prompt, rules)
    if not 0 < request.num_samples <= bounds.samples:
        raise refused("num_samples", f"{request.num_samples}; give 1 to {bounds.samples}")
    params = request.sampling_params
    room = rules.limit - len(ids)
    most = room if params.max_tokens is None else params.max_tokens
    if not 0 < most <= room:
        text = f"the prompt has {len(ids)} tokens, and rows of this model at most {rules.limit}"
        raise refused("sampling_params.max_tokens", f"{most}: {text}; give 1 to {max(room, 1)}")
    _check_scores(request, len(ids), bounds)
    key = Key(rules.seed).fold("tinker", name) if params.seed is None else Key(params.seed % (1 << 64)).fold("seed")
    return SampleWork(
        ids=ids, sampling=_sampling(params, most, rules, bounds), count=request.num_samples, key=key
    )


def _ids(prompt: types.ModelInput, rules: SampleRules) -> tuple[int, ...]:
    ids: list[int] = []
    for chunk in prompt.chunks:
        if not isinstance(chunk, types.EncodedTextChunk):
            raise refused("prompt", f"a chunk of type {chunk.type}: this model takes text alone")
        ids.extend(chunk.tokens)
    if not 0 < len(ids) < rules.limit:
        raise refused("prompt", f"{len(ids)} tokens; give 1 to {rules.limit - 1}")
    wrong = next((token for token in ids if not 0 <= token < rules.texts.vocabulary), None)
    if wrong is not None:
        raise refused("prompt", f"the token {wrong} is none of the model's {rules.texts.vocabulary}")
    return tuple(ids)


def _sampling(params: types.SamplingParams, most: int, rules: SampleRules, bounds: TinkerBounds) -> Sampling:
    tokens, texts = _stops(params.stop, rules, bounds)
    stop_tokens, stop_texts = rules.texts.stops(texts) if texts else ((), None)
    greedy = params.temperature == 0
    try:
        return Sampling(
            temperature=1.0 if greedy else params.temperature,
            greedy=greedy,
            top_k=None if params.top_k == -1 else params.top_k,
            top_p=params.top_p,
            max_tokens=most,
            stop_token_ids=tuple(dict.fromkeys((*tokens, *stop_tokens))),
            stop_texts=stop_texts,
        )
    except ValueError as error:
        raise refused("sampling_params", str(error)) from error


def _stops(
    stop: str | Sequence[str] | Sequence[int] | None, rules: SampleRules, bounds: TinkerBounds
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The tokens and the texts that end an answer: without any named, those of the model."""
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


def _check_scores(request: types.SampleRequest, length: int, bounds: TinkerBounds) -> None:
    scored = ("prompt_logprobs", "topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k")
    given = [name for name in scored if getattr(request, name)]
    if request.target_prompt_logprobs is not None:
        given.append("target_prompt_logprobs")
    if given:
        raise Refusal(f"{given[0]}: this server does not score prompts yet", status=400)
    del length, bounds


def targets_of(request: types.SampleRequest, length: int, bounds: TinkerBounds) -> Tensor | None:
    """The targets of a prompt of so many tokens [P - 1, K] int64, -1 for none. Raises Refusal."""
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
