"""A check that the embedded engine decodes what transformers computes, on a small random instance of a model."""

from __future__ import annotations

import copy
from functools import partial

import attrs
import torch

from fppo.batch import Column, Prompts
from fppo.key import Key
from fppo.models import lora
from fppo.models.bases import base_kind, quantise
from fppo.models.model import Model, named_state
from fppo.models.probe import Probe, compare, make_probe, probe_rows
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo_kernels.table import Kernels

_TOKENS = 4  # number of decoded tokens
_DRAWS = 20  # number of draws to find prompts without a certain token


def check_engine(model: Model) -> None:
    """Decode a few tokens through the engine's cache, and compare their log-probs with the plain forward pass; with an
    adapter that is not merged for decoding, also compare its factors (and a quantised base) with merged weights.

    The prompts have different lengths. Raises ValueError that names the model type if log-probs differ.
    """
    kind, probe = model.whole_config.model_type, make_probe(model)
    _check_decoded(kind, probe, "the log-probs of the embedded engine's tokens")
    if model.frozen is not None and not lora.decodes_merged(model):
        _check_decoded(kind, _adapted(model, probe), "the log-probs of the embedded engine's tokens with an adapter")


@torch.no_grad()
def _adapted(model: Model, probe: Probe) -> Probe:
    """The probe with an adapter, and with a quantised base if the model has one; its transformers module has merged
    weights."""
    coded = base_kind(model)
    as_base = None if coded is None else partial(quantise, kind=coded)
    adapted, adapter = lora.adapted_probe(model, probe, lora.frozen_of(model).lora, as_base=as_base)
    plain = copy.deepcopy(probe.plain)
    named = named_state(plain)
    for name, x in lora.merged(adapted, adapter).items():
        named[name].copy_(x)
    return attrs.evolve(probe, model=adapted, params=adapter, plain=plain)


def _check_decoded(kind: str, probe: Probe, what: str) -> None:
    rows = [row[: len(row) - _TOKENS] for row in probe_rows(probe)]
    width = max(len(row) for row in rows)
    mask = torch.arange(width) >= torch.tensor([[width - len(row)] for row in rows])
    names, vision = Column(["", ""]), probe.model.vision
    prompts = Prompts(
        tokens=torch.zeros(mask.shape, dtype=torch.int64).masked_scatter(mask, torch.cat(rows)),
        attention_mask=mask,
        row_ids=torch.arange(2),
        ids=names,
        ground_truth=names,
        source=names,
        extras=names,
        inputs=None if vision is None else Column(probe.inputs_of(row) for row in rows),
    )
    engine = EmbeddedEngine(model=probe.model, kernels=Kernels.named(), pad_token_id=0, merges=False)
    for number in range(_DRAWS):
        try:
            rollout = engine.generate(probe.params, Ask(prompts, Sampling(max_tokens=_TOKENS), Key(number)))
        except RuntimeError as error:  # such as an unsupported use of a weight with factors
            raise ValueError(f"the embedded engine cannot run model type {kind!r}: {error}") from error
        # transformers cannot run a response with the placeholder of an image or a video
        said = set(rollout.tokens[:, width:][rollout.response_mask].tolist())
        if vision is None or said.isdisjoint({vision.token, vision.video}):
            break
    for tokens, real, log_probs in zip(rollout.tokens, rollout.attention_mask, rollout.rollout_log_probs, strict=True):
        row = tokens[real]
        expected = probe.expected(row)[-_TOKENS - 1 : -1].log_softmax(-1).gather(1, row[-_TOKENS:, None])[:, 0]
        compare(kind, log_probs, expected, what)
