"""Small cases to plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from transformers import Qwen2Config, Qwen3MoeConfig

from fppo.runtime.mesh import Sharding
from fppo.studies.plan.case import Case, hardware_of
from fppo.studies.plan.plan import plan

SIZES: dict[str, Any] = dict(
    vocab_size=2048,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)


def config(**changes: Any) -> Qwen2Config:
    """Three layers, of which sizes divide by 8."""
    return Qwen2Config(**{**SIZES, **changes})


def mixture(*, chosen: int, **changes: Any) -> Qwen3MoeConfig:
    """Two layers of 8 experts."""
    sizes = dict(num_hidden_layers=2, moe_intermediate_size=64, num_experts=8, head_dim=32)
    return Qwen3MoeConfig(**{**SIZES, **sizes, "num_experts_per_tok": chosen, **changes})


def case(*, stage: int = 3, layers: int = 3, **changes: Any) -> Case:
    """A case on the CPU."""
    settings: dict[str, Any] = dict(
        name="small",
        config=config(num_hidden_layers=layers),
        hardware=hardware_of("cpu"),
        sharding=Sharding(stage=stage),
        tokens=256,
        length=64,
        compute_dtype=None,
        critic=True,
        reference=True,
        full=True,
    )
    return Case(**{**settings, **changes})


def bare(**changes: Any) -> Case:
    """The quickest case: one layer, one pass, no critic."""
    return case(**{"layers": 1, "micro_batches": 1, "critic": False, "reference": False, **changes})


def at_rest(what: Case) -> Mapping[str, float]:
    """Bytes of a rank between stages, by kind: those of a plan that ends before its stages, which have no room."""
    return plan(attrs.evolve(what, hardware=attrs.evolve(what.hardware, memory=1.0)), only_if_fits=True).rest
