"""Models, rows and prompts of a plan: random ones, for nothing is downloaded."""

from __future__ import annotations

import math

import torch
from gpu_tools import Plan, Shape
from torch import Tensor
from transformers import Qwen2Config

from fppo import batch as batches
from fppo import models, tree
from fppo.batch import Column, Experience, Prompts
from fppo.models.model import Model
from fppo.models.recompute import Recompute


def build(shape: Shape, plan: Plan, *, recompute: Recompute = False) -> Model:
    """A Qwen2 that computes in the plan's dtype."""
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    compute = None if plan.dtype == torch.float32 else plan.dtype
    return models.build(config, compute_dtype=compute, checkpoint_layers=recompute)


def parameters(model: Model, device: torch.device) -> dict[str, Tensor]:
    """Float32 parameters, drawn on the device: 1.5 B of them take a minute on a host."""
    g = torch.Generator(device).manual_seed(0)

    def drawn(name: str, shape: torch.Size) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=device)
        return torch.randn(shape, generator=g, device=device).mul_(0.02)

    return {name: drawn(name, shape) for name, shape in model.shapes.items()}


def prompts(rows: int, longest: int, vocabulary: int, seed: int) -> Prompts:
    """Prompts of a quarter of the longest length to all of it, another set for each seed."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(max(longest // 4, 1), longest + 1, (rows, 1), generator=g)
    mask = torch.arange(longest) >= longest - lengths
    blank = Column([None] * rows)
    return Prompts(
        tokens=torch.randint(2, vocabulary, (rows, longest), generator=g).where(mask, 0),
        attention_mask=mask,
        row_ids=torch.arange(rows),
        ids=blank,
        ground_truth=blank,
        source=blank,
        extras=blank,
    )


def experience(plan: Plan, seed: int, vocabulary: int) -> Experience:
    """A batch on the plan's device, whose lengths no other seed has; nearly all of it are responses."""
    rows, longest, most = plan.rows
    g = torch.Generator().manual_seed(1000 + seed)
    asked = prompts(rows, longest, vocabulary, seed)
    mask = torch.arange(most) < torch.randint(max(3 * most // 4, 1), most + 1, (rows, 1), generator=g)
    tokens = torch.randint(2, vocabulary, (rows, most), generator=g).where(mask, 0)
    noise = torch.randn(rows, most, generator=g).where(mask, 0.0)
    columns = dict.fromkeys(("rollout_log_probs", "sampling_log_probs", "old_log_probs"), -math.log(vocabulary) * mask)
    columns |= dict.fromkeys(("token_rewards", "advantages", "returns", "values"), noise)
    whole = batches.extend(
        Experience,
        asked,
        tokens=torch.cat([asked.tokens, tokens], 1),
        attention_mask=torch.cat([asked.attention_mask, mask], 1),
        response_mask=mask,
        groups=torch.arange(rows),
        versions=torch.zeros(rows, dtype=torch.int64),
        finish=Column(["stop"] * rows),
        scores=torch.zeros(rows),
        named_scores={},
        **columns,
    )
    return tree.map(lambda x: x.to(plan.device), whole)
