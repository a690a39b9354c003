"""A check that vLLM runs the model that it was sent: its log-probs of some tokens against the model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fppo import models
from fppo.batch import RowInputs
from fppo.key import Key
from fppo.models.model import Model
from fppo.models.vision_pass import place_images
from fppo.rollout.sync import SyncError
from fppo.rollout.vllm.vision import probe_row
from fppo.runtime.mesh import Mesh, device_of
from fppo.runtime.parts import dtypes_of
from fppo_kernels.table import Kernels

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3, "float16": 0.1}  # mean difference of log-probs, by vLLM's dtype
_TOKENS = 16
_TABLE = Kernels.named(log_probs="reference")


class ProbeRow(NamedTuple):
    """A row, and the index of its first token whose log-prob is compared."""

    tokens: list[int]
    start: int
    inputs: RowInputs | None = None


def probes(model: Model, limit: int) -> list[ProbeRow]:
    """Rows of at most `limit` tokens: one with text, and for a model that takes images one with an image."""
    count = min(_TOKENS, limit)
    uniforms = Key(0).fold("probe").uniform(torch.zeros(1, dtype=torch.int64), count)[0]
    tokens = (uniforms * model.config.vocab_size).long().tolist()
    text = ProbeRow(tokens, max(count // 2, 1))
    seen = None if model.vision is None else probe_row(model, tokens, limit)
    return [text] if seen is None else [text, ProbeRow(seen[0], len(seen[0]) - count // 2, seen[1])]


@torch.no_grad()
def own_log_probs(model: Model, params: Mapping[str, Tensor], mesh: Mesh, probe: ProbeRow) -> Tensor:
    """The model's log-probs of the probe's tokens from its start on, float32 [n] on the CPU. Every rank of a mesh that
    cuts parameters must call; each runs the whole model, with one layer at a time in memory."""
    start, tokens = probe.start, torch.tensor(probe.tokens, device=device_of(params))
    attend = models.padded_attention(torch.ones(1, len(tokens), dtype=torch.bool, device=tokens.device))
    places = torch.arange(len(tokens), device=tokens.device)
    images, places = place_images(model.unplaced or model, [probe.inputs], tokens, places, [len(tokens)])
    dtypes, whole = dtypes_of(params, mesh), model.unplaced or model
    starts = [f"{whole.prefix}{path}." for path in whole.layers]

    def gathered(start: str) -> dict[str, Tensor]:
        names = [name for name in whole.shapes if name.startswith(start)]
        tensors = models.whole_params(model, params, mesh, names=names, dtypes=dtypes)
        return {name.removeprefix(start): x for name, x in tensors.items()}

    def apply_layer(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return models.call_layer(whole, index, layer, gathered(starts[index]), args, kwargs)

    outside = [name for name in whole.shapes if not name.startswith(tuple(starts))]
    root = models.whole_params(model, params, mesh, names=outside, dtypes=dtypes)
    hidden = models.hidden_states(whole, root, tokens, places, attend=attend, apply_layer=apply_layer, received=images)
    head = models.output_head(whole, root)
    outputs = _TABLE.log_probs(
        hidden[start - 1 : len(tokens) - 1],
        head.weight,
        tokens[start:],
        bias=head.bias,
        softcap=head.softcap,
        scale=head.scale,
    )
    return outputs.log_probs.cpu()


def compare_log_probs(ours: Tensor, theirs: Tensor, dtype: str) -> None:
    """Raise SyncError if our log-probs and vLLM's differ by more than the dtype's tolerance, on average."""
    gap = float((ours - theirs).abs().mean())
    tolerance = TOLERANCE[dtype]
    if not gap <= tolerance:
        raise SyncError(
            f"after the sync vLLM's log-probs of {len(theirs)} tokens lie {gap:.2g} from the model's, on average; "
            f"{tolerance} is allowed: vLLM runs this model otherwise, or did not take all weights in"
        )
