"""What a clip range does to the update: loss, clipped tokens and gradient for many ranges at once, by torch.func.vmap.

The log-probs are fixed: a policy that has moved away from the one that sampled. "cosine" compares the gradient of the
loss, by the log-probs, with the gradient without any clipping: how much of its direction the clipped update keeps.
"""

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fppo import losses
from fppo.key import Key
from fppo.metrics import Mean

RANGES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)


def synthetic(rows: int, width: int, moved: float, key: Key) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log_probs, old_log_probs, advantages, mask), [rows, width]: the log-ratio has the spread `moved`."""
    generator = key.generator()
    old = -torch.rand(rows, width, generator=generator) * 3
    log_probs = (old + moved * torch.randn(rows, width, generator=generator)).clamp(max=0.0)
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, width)
    mask = torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=generator)
    return log_probs, old, advantages, mask


def loss_at(clip: Tensor, log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(The token-mean PPO loss, the fraction of clipped tokens) at a clip range, a 0-d tensor."""
    per_token, report = losses.ppo_clip(log_probs, old, advantages, mask, clip_low=clip, clip_high=clip, dual_clip=None)
    weights = losses.loss_weights(mask, "token-mean", totals=losses.count_totals(mask))
    clipped = report["actor/pg_clipfrac"]
    assert isinstance(clipped, Mean)
    return (weights * per_token).sum(), clipped.total / clipped.count


def sweep(ranges: Tensor, *batch: Tensor) -> dict[str, Tensor]:
    """The columns of the table, each with one entry per range."""
    at = grad_and_value(loss_at, argnums=1, has_aux=True)
    grads, (loss, clipped) = vmap(at, in_dims=(0, None, None, None, None))(ranges, *batch)
    whole, _ = at(torch.tensor(torch.inf), *batch)
    cosine = torch.cosine_similarity(grads.flatten(1), whole.flatten()[None])
    return {"clip range": ranges, "clip fraction": clipped, "loss": loss, "cosine": cosine}


def main() -> dict[str, Tensor]:
    columns = sweep(torch.tensor(RANGES), *synthetic(256, 64, 0.15, Key(0)))
    print("".join(f"{name:>15}" for name in columns))
    for row in zip(*columns.values(), strict=True):
        print("".join(f"{x.item():>15.4f}" for x in row))
    return columns


if __name__ == "__main__":
    main()
