"""Whether vLLM runs the model that was sent: the log-probs of some tokens, its own and the model's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from fppo import models
from fppo.key import Key
from fppo.models.model import Model
from fppo.rollout.sync import SyncError
from fppo.runtime.mesh import Mesh, device_of
from fppo.steps.sharded import opened
from fppo_kernels.collectives import all_gather
from fppo_kernels.record import Kernels

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3, "float16": 0.1}  # mean difference of a log-prob, by vLLM's dtype
_TOKENS = 16
_TABLE = Kernels.named(log_probs="reference")


def probe_tokens(model: Model, limit: int) -> tuple[Tensor, int]:
    """Some tokens [N], at most `limit`, and the first whose log-prob is compared."""
    count = min(_TOKENS, limit)
    uniforms = Key(0).fold("probe").uniform(torch.zeros(1, dtype=torch.int64), count)[0]
    return (uniforms * model.config.vocab_size).long(), max(count // 2, 1)


@torch.no_grad()
def own_log_probs(model: Model, params: Mapping[str, Tensor], mesh: Mesh, tokens: Tensor, start: int) -> Tensor:
    """The model's log-probs of tokens [N] from `start` on, float32 on the CPU. Every rank of a mesh that cuts
    parameters calls."""
    tokens, axis = tokens.to(device_of(params)), mesh["tensor"]
    row = F.pad(tokens, (0, -len(tokens) % axis.size))  # each rank has a slice of it between blocks
    attend = models.padded_attention(torch.ones(1, len(row), dtype=torch.bool, device=row.device))
    places = torch.arange(len(row), device=row.device)
    root, apply_layer = opened(dict(params), model, mesh)
    hidden = all_gather(models.hidden_states(model, root, row, places, attend=attend, apply_layer=apply_layer), axis)
    head = models.output_head(model, root)
    outputs = _TABLE.log_probs(
        hidden[start - 1 : len(tokens) - 1],
        head.weight,
        tokens[start:],
        bias=head.bias,
        softcap=head.softcap,
        scale=head.scale,
        axis=axis,
    )
    return outputs.log_probs.cpu()


def compare_log_probs(ours: Tensor, theirs: Tensor, dtype: str) -> None:
    """Raises SyncError if they differ by more, on average, than the dtype explains."""
    gap = float((ours - theirs).abs().mean())
    tolerance = TOLERANCE[dtype]
    if not gap <= tolerance:
        raise SyncError(
            f"after the sync vLLM's log-probs of {len(theirs)} tokens lie {gap:.2g} from the model's, on average; "
            f"{tolerance} is allowed: vLLM runs this model otherwise, or did not take all weights in"
        )
