"""Each file on the page of algorithms is a whole run, and no built-in loss or estimator lacks its words there."""

from __future__ import annotations

import tomllib

import pytest

from fppo.assembly.idle import idle_lines
from fppo.settings import files, tables

from .pages import ROOT, Block, blocks

PAGE = ROOT / "docs" / "algorithms.md"
BASE, *RUNS = [block for block in blocks(PAGE) if block.language == "toml"]
TEXT = PAGE.read_text()


def heading_of(block: Block) -> str:
    """The heading above a block."""
    above = TEXT.splitlines()[: block.line]
    return next(line.removeprefix("## ") for line in reversed(above) if line.startswith("## "))


@pytest.mark.parametrize("block", RUNS, ids=heading_of)
def test_the_file_of_an_algorithm_is_a_run_behind_the_first_one(block):
    settings = files.check(files.from_dict(tomllib.loads(BASE.text + block.text)))
    assert settings.has_reward
    idle = [line for line in idle_lines(settings) if settings.actor.loss.keywords or "actor.loss" not in line]
    assert idle == []  # all that it sets has an effect
    assert settings.model.path == "Qwen/Qwen2.5-0.5B-Instruct"


def test_the_file_of_an_algorithm_has_its_estimator_and_its_loss():
    settings = {heading_of(block): files.from_dict(tomllib.loads(BASE.text + block.text)) for block in RUNS}
    named = {name: (each.algorithm.advantage.name, each.actor.loss.name) for name, each in settings.items()}
    grouped = {name: ("grpo", "ppo_clip") for name in ("GRPO", "DAPO", "Dr. GRPO")}
    grouped |= {"GSPO": ("grpo", "gspo"), "CISPO": ("grpo", "cispo"), "RLOO": ("rloo", "ppo_clip")}
    alone = {"PPO with a critic": ("gae", "ppo_clip"), "VAPO": ("gae", "ppo_clip"), "ReMax": ("remax", "ppo_clip")}
    assert named == grouped | alone | {"REINFORCE++": ("reinforce_plus_plus", "ppo_clip")}


@pytest.mark.parametrize("name", [*tables.POLICY_LOSSES, *tables.ESTIMATORS])
def test_every_loss_and_estimator_is_on_the_page(name):
    assert f"`{name}`" in TEXT or f'"{name}"' in TEXT
