"""The row lengths that a model is made for, and beyond which its positions change for all tokens."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedConfig


def longest_row(config: PreTrainedConfig) -> int | None:
    """The most tokens of a row for which the model's rotary angles are fixed; None without such a limit.

    Beyond it longrope (arXiv:2402.13753) and dynamic NTK change the angles of all tokens in a call, so that a token's
    log-prob would depend on the other rows of the batch and on later tokens.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    sections = [rope, *(x for x in rope.values() if isinstance(x, Mapping))]  # gemma's kinds of layers have one each
    limits: list[int | None] = []
    for section in sections:
        kind = str(section.get("rope_type"))
        limits += [section.get("original_max_position_embeddings")] if kind == "longrope" else []
        limits += [getattr(config, "max_position_embeddings", None)] if "dynamic" in kind else []
    return min((limit for limit in limits if limit is not None), default=None)


def positions(config: PreTrainedConfig) -> int | None:
    """The most tokens of a row that the model was made for: its max_position_embeddings, times the factor of a rope
    that is stretched ("linear", "dynamic", "yarn"); None where its config does not say.

    Beyond it a table of learned positions ends, and the model has never seen the rotary angles.
    """
    text = config.get_text_config()
    most, rope = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None) or {}
    if isinstance(most, bool) or not isinstance(most, int):
        return None
    sections = [rope, *(x for x in rope.values() if isinstance(x, Mapping))]
    factors = [x.get("factor") for x in sections if x.get("rope_type") in ("linear", "dynamic", "yarn")]
    return int(most * max((factor for factor in factors if isinstance(factor, int | float)), default=1))


def over_long(config: PreTrainedConfig, limit: int) -> str:
    """The error message for rows longer than `longest_row`."""
    return (
        f"model type {config.model_type!r} changes the rotary angles of all tokens of a row of more than {limit} (its "
        "rope is longrope or dynamic), those already sampled too; keep rows within that, or change rope_parameters in "
        "the model's config.json to one set of angles: the same short_factor as long_factor, or another rope_type"
    )
