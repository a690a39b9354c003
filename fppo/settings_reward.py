"""The settings of how a response is scored."""

from __future__ import annotations

import attrs

from fppo.settings_fields import above, at_least, setting


@attrs.frozen(kw_only=True)
class RewardModelSettings:
    """A reward model: a classifier or a critic, whose number at the last token is added to the reward functions'."""

    path: str | None = setting(None)
    """A model with a sequence- or token-classification head or a value head; None: no reward model."""
    weight: float = setting(1.0)
    """The factor of its score."""
    label: str | None = setting(None)
    """The label whose number is the score, by name or number, where the head has several."""
    tokenizer: str | None = setting(None)
    """Where its tokenizer is; None: in path, if that one differs; else it reads the policy's tokens."""
    chat: bool | None = setting(None)
    """Put texts for a tokenizer of its own through that one's chat template; None: where data.chat does so."""
    micro_batch_size: int | None = setting(None, at_least(1))
    """Sequences per forward pass; None: by token_budget, or as the actor."""
    token_budget: int | None = setting(None, at_least(1))
    """Tokens per forward pass; None: by micro_batch_size, or as the actor."""


@attrs.frozen(kw_only=True)
class RewardSettings:
    """How a response is scored."""

    functions: tuple[str, ...] = setting(())
    """Reward functions, added up: built-in names, or module:function for your own."""
    weights: tuple[float, ...] = setting(())
    """A factor for each function; none: 1 for each."""
    time_limit: float = setting(10.0, above(0))
    """Seconds that scoring one response may take; then it scores 0 and is counted."""
    workers: int = setting(1, at_least(1))
    """Processes that run the reward functions."""
    pattern: str | None = setting(None)
    """The regular expression of the built-in regular_expression."""
    overlong_buffer: int = setting(0, at_least(0))
    """Tokens before rollout.max_tokens over which a length penalty grows (DAPO); 0: none."""
    overlong_penalty: float | None = setting(None, above(0))
    """The length penalty of a response that reaches rollout.max_tokens; None: 1."""
    model: RewardModelSettings = setting(RewardModelSettings)
    """A reward model."""
