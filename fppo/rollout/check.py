"""Whether the embedded engine decodes what transformers computes, found out on a small random instance of a model."""

from __future__ import annotations

import torch

from fppo.batch import Column, Prompts
from fppo.key import Key
from fppo.models.model import Model
from fppo.models.probe import compare, make_probe, probe_rows
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo_kernels.record import Kernels

_TOKENS = 4  # that are decoded
_DRAWS = 20  # to have one without a certain token


def check_engine(model: Model) -> None:
    """Decodes a few tokens through the engine's cache, and holds their log-probs against the plain forward's.

    The prompts have different lengths. Raises ValueError that names the model type if they differ.
    """
    probe = make_probe(model)
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
    engine = EmbeddedEngine(model=probe.model, kernels=Kernels.named(), pad_token_id=0)
    for number in range(_DRAWS):
        rollout = engine.generate(probe.params, Ask(prompts, Sampling(max_tokens=_TOKENS), Key(number)))
        # transformers cannot run a response that holds what stands for an image or a video
        said = set(rollout.tokens[:, width:][rollout.response_mask].tolist())
        if vision is None or said.isdisjoint({vision.token, vision.video}):
            break
    for tokens, real, log_probs in zip(rollout.tokens, rollout.attention_mask, rollout.rollout_log_probs, strict=True):
        row = tokens[real]
        expected = probe.expected(row)[-_TOKENS - 1 : -1].log_softmax(-1).gather(1, row[-_TOKENS:, None])[:, 0]
        compare(model.whole_config.model_type, log_probs, expected, "the log-probs of the embedded engine's tokens")
