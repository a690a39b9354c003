"""The settings of how a response is scored."""

from __future__ import annotations

from typing import Literal

import attrs

from fppo.fields import (
    MOST_SECONDS,
    MOST_TOKENS,
    MOST_WORKERS,
    Table,
    above,
    at_least,
    at_most,
    place,
    setting,
    temperature,
)
from fppo.rewards.question import pattern_problem, template_problem
from fppo.settings.rollout import VllmSettings

TEMPLATE = """Rate the response to the prompt from 0 (wrong or useless) to 10 (right and complete).

Prompt:
{prompt}

Reference answer:
{ground_truth}

Response:
{response}

End with one line of the form "Score: number"."""


@attrs.frozen(kw_only=True)
class RewardModelSettings:
    """A reward model: a classifier or a critic, whose number at the last token is added to the reward functions'."""

    path: str | None = setting(None, place)
    """A model with a sequence- or token-classification head or a value head; None: no reward model."""
    weight: float = setting(1.0)
    """The factor of its score."""
    label: str | None = setting(None)
    """The label whose number is the score, by name or number, where the head has several."""
    tokenizer: str | None = setting(None, place)
    """Where its tokenizer is; None: in path, if that one differs; else it reads the policy's tokens."""
    chat: bool | None = setting(None)
    """Put texts for a tokenizer of its own through that one's chat template; None: where data.chat does so."""
    max_tokens: int | None = setting(None, at_least(1), at_most(MOST_TOKENS))
    """The longest row that it reads, prompt and response, in its own tokens; None: any."""
    over_long: Literal["error", "truncate"] = setting("error")
    """What happens to longer rows; truncate keeps the end of them, and counts them."""
    dtype: Literal["float32", "bfloat16"] = setting("float32")
    """The dtype it is kept in, but for its head; bfloat16 halves its memory, and it then runs in that too."""
    micro_batch_size: int | None = setting(None, at_least(1))
    """Sequences per forward pass; None: by token_budget, or as model.forward_token_budget."""
    token_budget: int | None = setting(None, at_least(1))
    """Tokens per forward pass; None: by micro_batch_size, or as model.forward_token_budget."""
    offload: bool | None = setting(None)
    """Keep it in the host's memory between uses (GPUs); None: where model.offload keeps the policy there."""


@attrs.frozen(kw_only=True)
class JudgeSettings:
    """A language model that is asked for a score, which is added to the reward functions'."""

    path: str | None = setting(None, place)
    """The judge: the name or directory of a Hugging Face model, with its tokenizer; None: no judge."""
    weight: float = setting(1.0)
    """The factor of its score."""
    template: str = setting(TEMPLATE, template_problem)
    """What it is asked: a text with {response}, and {prompt} and {ground_truth} where they are wanted."""
    chat: bool = setting(True)
    """Put the question through the judge's chat template."""
    pattern: str = setting(r"Score:\s*(-?\d+(?:\.\d+)?)", pattern_problem)
    """The regular expression that finds the score: the last match's group. No number: no score."""
    temperature: float = setting(0.0, at_least(0), temperature)
    """The sampling temperature; 0: the likeliest token always."""
    max_tokens: int = setting(256, at_least(1), at_most(MOST_TOKENS))
    """The longest answer, in tokens."""
    max_prompt_tokens: int = setting(4096, at_least(2), at_most(MOST_TOKENS))
    """The longest question, in tokens; longer ones lose their middle, and are counted."""
    engine: Literal["embedded", "vllm"] = setting("embedded")
    """What generates its answers: transformers, or a vLLM of its own."""
    max_rows: int = setting(64, at_least(1))
    """Questions that transformers answers at a time."""
    offload: bool | None = setting(None)
    """Keep it on the host between uses (GPUs, transformers); None: where model.offload keeps the policy there."""
    vllm: VllmSettings = setting(VllmSettings)
    """How that vLLM runs; max_model_len None: as long as a question and its answer may be."""

    @property
    def on_vllm(self) -> bool:
        """Whether there is a judge that runs in a vLLM of its own."""
        return self.path is not None and self.engine == "vllm"


@attrs.frozen(kw_only=True)
class RewardSettings:
    """How a response is scored."""

    functions: tuple[str, ...] = setting(())
    """Reward functions, added up: built-in names, or module:function for your own."""
    weights: tuple[float, ...] = setting(())
    """A factor for each function; none: 1 for each."""
    arguments: Table = setting(dict)
    """Keywords of the functions, by their names, as {regular_expression = {pattern = "[0-9]+"}}."""
    time_limit: float = setting(10.0, above(0), at_most(MOST_SECONDS))
    """Seconds that one function may take for one response; after that it has not scored it."""
    batch_time_limit: float | None = setting(None, above(0), at_most(MOST_SECONDS))
    """Seconds a process may lose to late calls of a batch; then these get a tenth, then none; None: 60 or 6 limits."""
    failure_score: float | None = setting(None)
    """A function's score of a response on which it failed; None: the response has none, and nothing learns from it."""
    workers: int = setting(1, at_least(1), at_most(MOST_WORKERS))
    """Processes that run the reward functions."""
    overlap: bool = setting(True)
    """Begin with responses while others are still generated, with functions of single ones that the workers run."""
    overlong_buffer: int = setting(0, at_least(0))
    """Tokens before rollout.max_tokens over which a length penalty grows (DAPO); 0: none."""
    overlong_penalty: float | None = setting(None, above(0))
    """The length penalty of a response that reaches rollout.max_tokens; None: 1."""
    model: RewardModelSettings = setting(RewardModelSettings)
    """A reward model."""
    judge: JudgeSettings = setting(JudgeSettings)
    """A language model that is asked for a score."""
