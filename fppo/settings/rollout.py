"""The settings of how responses are sampled, and which of them are trained on."""

from __future__ import annotations

from typing import Annotated, Literal

import attrs
import tyro

from fppo.fields import (
    MOST_ROWS,
    MOST_SECONDS,
    MOST_TOKENS,
    MOST_WORKERS,
    Table,
    above,
    at_least,
    at_most,
    below,
    nonempty,
    place,
    setting,
    temperature,
    word_or,
)
from fppo.rollout.vllm.options import VllmOptions
from fppo.settings.component import given, named
from fppo.settings.tables import AGENT, ENVIRONMENTS

CUTS = ("top_k", "top_p", "min_p")  # settings that keep some tokens from being drawn


def _ids(values: tuple[int, ...]) -> str | None:
    return "must be 0 or more, each" if any(x < 0 for x in values) else None


def _extra_last(cls: type, fields: list[attrs.Attribute]) -> list[attrs.Attribute]:
    """Put the field `extra`, vLLM's own arguments, last."""
    return sorted(fields, key=lambda field: field.name == "extra")


@attrs.frozen(kw_only=True, field_transformer=_extra_last)
class VllmSettings(VllmOptions):
    """How vLLM runs, where rollout.engine is vllm."""

    send: Literal["all", "changed"] = setting("all")
    """Send all parameters at every sync, or those that changed."""
    bucket_mb: int = setting(256, at_least(1))
    """MiB of parameters that are gathered and sent at once."""
    probe: Literal["first", "always", "never"] = setting("first")
    """After which syncs the log-probs of some tokens are held against the trainer's."""


@attrs.frozen(kw_only=True)
class TurnsSettings:
    """Who answers the policy's turns, which end where a response does: the model's ends, rollout.stop."""

    respond: str | None = setting(None)
    """calculator, or module:function of the conversation so far, or module:game; None: a response is one turn."""
    max_turns: int = setting(8, at_least(1), at_most(MOST_TOKENS))
    """Turns of a response at most."""
    turn_tokens: int | None = setting(None, at_least(1), at_most(MOST_TOKENS))
    """The longest turn, in tokens; one that is cut ends the response. None: only rollout.max_tokens bounds it, with all
    that it is told."""
    failure: str = setting("error")
    """What the policy is told where respond raises or takes too long; empty: the response ends there."""
    time_limit: float = setting(10.0, above(0), at_most(MOST_SECONDS))
    """Seconds that a call may take."""
    workers: int = setting(1, at_least(1), at_most(MOST_WORKERS))
    """Processes that calls run in, on each rank; the calculator needs none."""
    concurrency: int = setting(64, at_least(1), at_most(MOST_ROWS))
    """Calls of a coroutine at a time, in each process; other functions take one call at a time."""
    thinking: Literal["keep", "drop"] = setting("keep")
    """Where the chat template leaves out earlier thoughts: keep (the policy reads on what it sampled), or drop (each
    turn is a row of its own, whose prompt is as the template has the conversation then)."""
    retries: int = setting(0, at_least(0), at_most(100))
    """How often a call that raises, hangs or crashes is made again before it counts as failed."""


@attrs.frozen(kw_only=True)
class EnvironmentSettings:
    """An environment that rewards the policy's turns, and any of its keywords; rollout.turns bounds its episodes."""

    name: str = named("none", ENVIRONMENTS, "an environment")
    """none, an adapter, agent, or module:name of your own: a class, or a function that returns an environment."""
    episodes: int = setting(1024, at_least(1))
    """Prompts of an epoch, where the environment gives them: without data.path."""
    eval_episodes: int = setting(0, at_least(0))
    """Held-out prompts that the environment gives, in place of data.eval_path's; 0: those."""
    failure: Literal["drop", "score", "raise"] = setting("drop")
    """An episode that fails: drop (no score, not trained on), score (it ends, with its rewards so far), or raise."""
    keywords: Table = given()

    @property
    def used(self) -> bool:
        """Whether there is an environment."""
        return self.name != "none"

    @property
    def is_agent(self) -> bool:
        """Whether it is an agent, a program that speaks to the policy over HTTP."""
        return self.name == AGENT

    @property
    def has_held_out(self) -> bool:
        """Whether it gives prompts to evaluate on."""
        return self.used and self.eval_episodes > 0


@attrs.frozen(kw_only=True)
class FilterSettings:
    """Which responses are not trained on."""

    groups: bool = setting(False)
    """Drop prompts whose responses all came to the same, and sample others in their place (DAPO)."""
    by: str = setting("score", nonempty("give score, or the name of a reward function"))
    """What is compared: score (without what only shapes it, as the length penalty), or one function's part of it."""
    max_draws: int = setting(10, at_least(1), at_most(10_000))
    """How often prompts are drawn for one step at most; what is missing then is filled up, and not trained on."""
    truncated: bool = setting(False)
    """Leave responses that reached rollout.max_tokens out of the loss."""


@attrs.frozen(kw_only=True)
class RolloutSettings:
    """How responses are sampled. Batch sizes count sequences, here and everywhere."""

    batch_size: int = setting(64, at_least(1), at_most(MOST_ROWS))
    """Sequences per step: prompts times n."""
    n: int = setting(1, at_least(1), at_most(MOST_ROWS))
    """Responses to each prompt; it must divide batch_size."""
    temperature: float = setting(1.0, above(0), temperature)
    """The sampling temperature, which training uses too."""
    top_k: int | None = setting(None, at_least(1))
    """Sample among the k likeliest tokens only; None: among all."""
    top_p: float = setting(1.0, above(0), at_most(1))
    """Sample among the likeliest tokens that together have this probability."""
    min_p: float = setting(0.0, at_least(0), below(1))
    """Sample among tokens with at least this share of the likeliest token's probability; 0: among all."""
    max_tokens: int = setting(256, at_least(1), at_most(MOST_TOKENS))
    """The longest response, in tokens."""
    stop: tuple[str, ...] = setting(())
    """Texts that end a response, with the token that completes one, beside the model's and the chat template's ends."""
    stop_token_ids: tuple[int, ...] = setting((), _ids)
    """Tokens that end a response too, by their ids."""
    engine: Literal["embedded", "vllm"] = setting("embedded")
    """What generates: transformers on the training parameters themselves, or vLLM on a copy that is sent to it."""
    cache_gb: Literal["auto"] | float | None = setting(None, word_or("auto", above(0)))
    """GiB of keys and values that the embedded engine holds; None: half of a GPU's free memory, no bound on a CPU;
    auto: at most that, as many as fit."""
    vllm: VllmSettings = setting(VllmSettings)
    """How vLLM runs."""
    exact: bool = setting(False)
    """Sample with the log-probs that training computes, bit for bit, and take them for the old ones."""
    draft_tokens: int = setting(0, at_least(0), at_most(64))
    """The most tokens that are drafted from a row's own text and its prompt's other responses, and checked in one pass:
    faster where texts repeat themselves, with the same tokens. 0: none."""
    gap: Literal["warn", "stop", "off"] = setting("warn")
    """What to do where the engine's probabilities differ from the policy's by more than the dtypes explain."""
    turns: TurnsSettings = setting(TurnsSettings)
    """What answers the policy's turns, for responses of several of them."""
    environment: EnvironmentSettings = setting(EnvironmentSettings)
    """An environment that answers and rewards the policy's turns."""
    ahead: int = setting(0, at_least(0), at_most(1000))
    """Steps by which responses are sampled ahead, with the weights of that earlier step, while others train."""
    interrupt: int = setting(0, at_least(0))
    """Tokens after which a response that is sampled ahead goes on with newer weights, if there are any; 0: never."""
    filter: FilterSettings = setting(FilterSettings)
    """Which responses are not trained on."""
    save: bool = setting(False)
    """Write every step's responses to the directory rollouts, for rollout.from."""
    from_: Annotated[str | None, tyro.conf.arg(name="from")] = setting(None, place, name="from")
    """Train on the responses in this directory, in the order of their steps, instead of sampling any."""

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of keys and values that the embedded engine may hold; None: as many as the device has for them."""
        given = self.cache_gb
        return None if given is None or isinstance(given, str) else round(given * 2**30)
