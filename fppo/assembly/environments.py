"""The environment that settings name: how it is made and run, its prompts and its rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from fppo import data
from fppo.data import PromptSet
from fppo.data.tokenizers import begun_once, within
from fppo.environments import EnvironmentRunner, Message
from fppo.environments.runner import PlayerRunner, is_asynchronous
from fppo.fields import WrongSetting, only
from fppo.rewards.environment import environment_reward
from fppo.rewards.functions import RewardFn
from fppo.rollout.turns.observations import ChatTemplate, Encode
from fppo.serve.agents import Agent
from fppo.settings.component import bound, functions_of
from fppo.settings.rollout import EnvironmentSettings, TurnsSettings
from fppo.settings.tables import ENVIRONMENTS

PATH = "rollout.environment"


def maker_of(section: EnvironmentSettings) -> tuple[Callable[[], Any], bool]:
    """The function that makes the settings' environment, and whether it is known to have coroutines.

    Raises ValueError, naming the setting, if the name does not import, is no environment, or does not take the
    keywords.
    """
    if section.is_agent:
        return partial(_itself, agent_of(section)), True
    (named,) = functions_of(section, ENVIRONMENTS, PATH, also=object)
    fn = named.func if isinstance(named, partial) else named
    if not isinstance(fn, type) and all(callable(getattr(fn, name, None)) for name in ("reset", "step")):
        if section.keywords:
            text = f"is an environment, which takes no keywords, not {sorted(section.keywords)}; name its class"
            raise WrongSetting(f"{PATH}.name", section.name, text)
        return partial(_itself, fn), is_asynchronous(fn)
    if not callable(fn) or (isinstance(fn, type) and not (hasattr(fn, "reset") and hasattr(fn, "step"))):
        text = "is no environment: name a class with reset and step, or a function that returns such an object"
        raise WrongSetting(f"{PATH}.name", section.name, text)
    (made,) = bound(section, ENVIRONMENTS, PATH, also=object)
    return made, is_asynchronous(fn)


def agent_of(section: EnvironmentSettings) -> Agent:
    """The agent of the settings. Raises ValueError, naming the setting, where it does not import."""
    (made,) = bound(section, ENVIRONMENTS, PATH, also=object)
    return made()


def _itself(environment: Any) -> Any:
    return environment


def environment_runner(section: EnvironmentSettings, turns: TurnsSettings) -> PlayerRunner:
    """The settings' environment, in processes; close it, or use it in a `with` statement."""
    make, asynchronous = maker_of(section)
    limits = only(turns, "time_limit", "workers", "concurrency", "retries")
    return EnvironmentRunner(make, name=section.name, asynchronous=asynchronous, **limits)


def prompt_encoder(
    tokenizer: PreTrainedTokenizerBase, encode: Encode, vocabulary: int
) -> Callable[[Sequence[Message]], list[int]]:
    """The encoder of messages as a prompt, in tokens below `vocabulary`: by the chat template if `encode` is one, else
    as the messages' text."""
    return partial(_encoded, tokenizer, encode if isinstance(encode, ChatTemplate) else None, vocabulary)


def _encoded(
    tokenizer: PreTrainedTokenizerBase, chat: ChatTemplate | None, vocabulary: int, messages: Sequence[Message]
) -> list[int]:
    if chat is not None:
        return within(chat.prompt(messages), vocabulary)
    text = "".join(message["content"] for message in messages)
    return within(list(begun_once(tokenizer, text, tokenizer.encode(text))), vocabulary)


def episode_prompts(count: int, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """`count` prompts without content, which the environment fills; the extras of each row hold its number."""
    pad: Any = tokenizer.pad_token_id
    numbers = [{"number": number} for number in range(count)]
    return data.prompt_set([[pad]] * count, tokenizer, sources="environment", extras=numbers)


def environment_terms(section: EnvironmentSettings) -> dict[str, tuple[RewardFn, float]]:
    """The environment's reward as a term of the score: its name, function and weight; empty without an environment."""
    return {"environment": (environment_reward, 1.0)} if section.used else {}
