"""The environment that settings name: what makes it, what its prompts are as tokens, and its part of the score."""

from __future__ import annotations

from typing import Any

import pytest

from fppo.assembly.environments import (
    environment_terms,
    episode_prompts,
    maker_of,
    prompt_encoder,
)
from fppo.quickstart import CHARACTERS, character_tokenizer
from fppo.rewards.environment import environment_reward
from fppo.rollout.turns.observations import ChatTemplate, PlainText
from fppo.settings.rollout import EnvironmentSettings
from tests.rollout import environments as worlds

HERE = "tests.assembly.test_environments"
COUNT = "tests.rollout.environments:Count"
made = worlds.Count(prompt="own {}")


def one_of_these(*, most: int = 9) -> worlds.Count:
    """A function that returns an environment."""
    return worlds.Count(most=most)


class Silent:
    """No environment: it has no step."""

    def reset(self, row: Any, seed: int) -> None: ...


NOT_CALLABLE = 3


@pytest.mark.parametrize(
    ("name", "keywords", "of", "asynchronous"),
    [
        (COUNT, {}, {"prompt": "{}", "most": 4}, False),
        (COUNT, {"most": 7, "prompt": "x"}, {"prompt": "x", "most": 7}, False),
        ("tests.rollout.environments:Later", {"most": 7}, {"most": 7}, True),
        (f"{HERE}:one_of_these", {}, {"most": 9}, False),
        (f"{HERE}:one_of_these", {"most": 2}, {"most": 2}, False),
        (f"{HERE}:made", {}, {"prompt": "own {}"}, False),
    ],
)
def test_a_class_a_function_or_an_object_is_an_environment(name, keywords, of, asynchronous):
    make, coroutines = maker_of(EnvironmentSettings(name=name, keywords=keywords))
    world = make()
    assert {x: getattr(world, x) for x in of} == of
    assert coroutines is asynchronous
    assert (make() is world) is (name == f"{HERE}:made")


@pytest.mark.parametrize(
    ("name", "keywords", "text"),
    [
        (f"{HERE}:made", {"most": 2, "a": 1}, r"takes no keywords, not \['a', 'most'\]; name its class"),
        (f"{HERE}:Silent", {}, "is no environment: name a class with reset and step"),
        (f"{HERE}:NOT_CALLABLE", {}, "is no environment"),
        (COUNT, {"mst": 2}, "no such keyword; did you mean most"),
    ],
)
def test_what_is_no_environment_is_refused_by_its_setting(name, keywords, text):
    with pytest.raises(ValueError, match=rf"^rollout\.environment\.\w+ = .*{text}"):
        maker_of(EnvironmentSettings(name=name, keywords=keywords))


MESSAGES = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]


@pytest.mark.parametrize(("vocabulary", "less"), [(15, 0), (9, 1)])
def test_prompts_of_messages_are_their_texts_or_as_the_chat_template_has_them(vocabulary, less):
    """Without the tokens that the model has no rows for."""
    words = character_tokenizer(CHARACTERS)
    ids = words.encode("1+2=3")
    kept = [token for token in ids if token < vocabulary]
    assert (len(kept) < len(ids)) == bool(less)
    assert prompt_encoder(words, PlainText(words), vocabulary)(MESSAGES) == kept
    words.chat_template = "{% for m in messages %}={{ m.content }}{% endfor %}"
    shown = [token for token in words.encode("=1+2==3") if token < vocabulary]
    assert prompt_encoder(words, ChatTemplate(words), vocabulary)(MESSAGES) == shown


def test_prompts_without_content_have_numbers():
    words = character_tokenizer(CHARACTERS)
    found = episode_prompts(3, words)
    assert [list(x) for x in found.tokens] == [[words.pad_token_id]] * 3
    assert list(found.sources) == ["environment"] * 3
    assert [dict(x) for x in found.extras] == [{"number": number} for number in range(3)]


def test_an_environment_is_a_part_of_the_score_by_its_own_numbers():
    assert environment_terms(EnvironmentSettings(name=COUNT)) == {"environment": (environment_reward, 1.0)}
    assert environment_terms(EnvironmentSettings()) == {}
