"""The recipes that are run, each as a user would by `python -m`, and what its log must say.

The arguments make a recipe small. None of them names a model or a data set: these are the recipe's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import attrs

from tests.cookbook import stand_ins

Metrics = Sequence[Mapping[str, float]]  # one row per step, from the recipe's metrics.jsonl


@attrs.frozen
class Recipe:
    """A recipe of the cookbook: its module and arguments, the rows it must log, and what holds for them.

    `holds` raises AssertionError if the numbers are wrong. `needs` names what stands in for the hub, `shows` what the
    recipe uses of the protocol beside sampling and steps.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    steps: int
    needs: str
    shows: str
    holds: Callable[[Metrics], None]
    before: str | None = None  # a module that makes its data
    package: str | None = None  # one that the recipe imports, and the cookbook does not require
    resumes: bool = False  # the recipe is ended after its last step but one, and called again


def _on_policy(rows: Metrics) -> None:
    """Log-probs of sampling and of training are those of one policy: their gap is a rounding error at each step."""
    for row in rows:
        assert abs(row["optim/kl_sample_train_v1"]) < 1e-4, row["optim/kl_sample_train_v1"]
        assert row["optim/kl_sample_train_v2"] < 1e-6, row["optim/kl_sample_train_v2"]
        assert row["optim/entropy"] > 0


def _rewards(rows: Metrics) -> None:
    assert any(0 < row["reward/total"] < 1 for row in rows), "every answer is right, or none: nothing was trained"


def _trained(rows: Metrics) -> None:
    assert all(row["optim/entropy"] > 0 for row in rows)


def _teacher_is_unsure(rows: Metrics) -> None:
    """The teacher's likeliest tokens have come, with log-probs that make a distribution of some entropy."""
    for row in rows:
        assert 0 < row["sdft/mean_teacher_entropy"] < math.log(row["sdft/topk"]), row["sdft/mean_teacher_entropy"]
        assert 0 < row.get("sdft/reverse_kl_mean", 0.1) < 1, row["sdft/reverse_kl_mean"]


def _falls(name: str) -> Callable[[Metrics], None]:
    def holds(rows: Metrics) -> None:
        first, last = rows[0][name], rows[-1][name]
        assert last < first, f"{name}: {first} to {last}"

    return holds


def _preferred(rows: Metrics) -> None:
    """Policy and reference are one at first: the loss is log 2 there, and falls."""
    first, last = rows[0]["dpo_loss"], rows[-1]["dpo_loss"]
    assert abs(first - math.log(2)) < 1e-4, first
    assert last < first, f"{first} to {last}"


def _taught(rows: Metrics) -> None:
    """The teacher is another model: its log-probs are not the student's."""
    _on_policy(rows)
    assert all(1e-4 < abs(row["teacher_kl"]) < 2 for row in rows), [row["teacher_kl"] for row in rows]


BASE, CHAT, PLAYER, LONG, OLDER = (f"`{name}`" for name in stand_ins.MODELS)
ADAPTER = ("lora_rank=8", "learning_rate=1e-3")
GAME = ("learning_rate=1e-3", "eval_every=0")  # these recipes keep their rank of 32
GROUPS = ("group_size=4", "groups_per_batch=4", "eval_every=0")

RUN = (
    Recipe(
        name="rl_loop",
        module="rl_loop",
        arguments=("batch_size=8", "group_size=8", "max_tokens=12", "save_every=1", *ADAPTER),
        steps=2,
        needs=f"`openai/gsm8k`, {BASE}",
        shows="`stable_reinforce` with provenance, stops as text, checkpoints",
        holds=_rewards,
    ),
    Recipe(
        name="rl_loop, gspo",
        module="rl_loop",
        arguments=("batch_size=8", "group_size=8", "max_tokens=12", "loss_fn=gspo", *ADAPTER),
        steps=2,
        needs=f"`openai/gsm8k`, {BASE}",
        shows="`gspo` with its mask of sampled tokens",
        holds=_rewards,
    ),
    Recipe(
        name="sl_loop",
        module="sl_loop",
        arguments=("batch_size=24", "lora_rank=8", "learning_rate=1e-2"),
        steps=3,
        needs=f"`HuggingFaceH4/no_robots`, {BASE}",
        shows="`cross_entropy`",
        holds=_falls("train_mean_nll"),
    ),
    Recipe(
        name="rl_basic",
        module="rl_basic",
        arguments=("max_tokens=12", "num_epochs=3", *ADAPTER),  # in groups of 16, which no argument changes
        steps=3,
        needs=f"`openai/gsm8k`, {BASE}",
        shows="`importance_sampling`, a run that goes on from its checkpoint",
        holds=_on_policy,
        resumes=True,
    ),
    Recipe(
        name="sl_basic",
        module="sl_basic",
        arguments=("num_epochs=2", "eval_every=1", "lora_rank=8", "learning_rate=1e-2"),
        steps=3,
        needs=f"`HuggingFaceH4/no_robots`, {BASE}",
        shows="log-probs of held-out data",
        holds=_falls("test/nll"),
    ),
    Recipe(
        name="math_rl",
        module="math_rl.train",
        arguments=("max_tokens=16", *GROUPS, *ADAPTER),
        steps=2,
        needs=CHAT,
        shows="`stable_reinforce`, stops as ids",
        holds=_on_policy,
    ),
    Recipe(
        name="math_rl, off policy",
        module="math_rl.train",
        arguments=("max_tokens=16", "max_steps_off_policy=1", "loss_fn=ppo", *GROUPS, *ADAPTER),
        steps=3,
        needs=CHAT,
        shows="`ppo`, sampling beside training",
        holds=_trained,
    ),
    Recipe(
        name="guess_number",
        module="multiplayer_rl.guess_number.train",
        arguments=("batch_size=2", "group_size=2", "max_tokens=12", *GAME),
        steps=1,
        needs=PLAYER,
        shows="ten turns",
        holds=_on_policy,
    ),
    Recipe(
        name="twenty_questions",
        module="multiplayer_rl.twenty_questions.train",
        arguments=("batch_size=2", "group_size=2", "max_tokens=12", *GAME),
        steps=1,
        needs=f"{PLAYER}, {CHAT}",
        shows="another model that answers",
        holds=_on_policy,
    ),
    Recipe(
        name="text_arena",
        module="multiplayer_rl.text_arena.train",
        arguments=("batch_size=8", "num_train_datapoints=16", "num_test_datapoints=2", "max_tokens=4", *GAME),
        steps=2,
        needs=f"{PLAYER}; `textarena`",
        shows="two players, who are one policy",
        holds=_on_policy,
        package="textarena",
    ),
    Recipe(
        name="dpo",
        module="preference.dpo.train",
        arguments=("batch_size=8", "learning_rate=1e-3"),
        steps=3,
        needs=f"`Anthropic/hh-rlhf`, {BASE}",
        shows="a loss on the client's side, log-probs of a snapshot",
        holds=_preferred,
    ),
    Recipe(
        name="shorter",
        module="preference.shorter.train",
        arguments=("batch_size=2", "group_size=4", "max_tokens=12", *GAME),
        steps=2,
        needs=PLAYER,
        shows="log-probs of earlier samples by newer weights",
        holds=_on_policy,
    ),
    Recipe(
        name="on_policy_distillation",
        module="distillation.on_policy_distillation",
        arguments=("max_tokens=12", *GROUPS, *ADAPTER),
        steps=4,
        needs=f"`zwhe99/DeepMath-103K`, {BASE}, {CHAT}",
        shows="log-probs of a teacher",
        holds=_taught,
    ),
    Recipe(
        name="sdft",
        module="sdft.train",
        arguments=("groups_per_batch=4", "max_tokens=12", "topk=5", "eval_every=0", *ADAPTER),
        steps=3,
        needs=f"`hicai-zju/SciKnowEval`, {OLDER}",
        shows="top-k log-probs of prompts, `cross_entropy` with k targets",
        holds=_teacher_is_unsure,
    ),
    Recipe(
        name="sdft, reverse",
        module="sdft.train",
        arguments=("groups_per_batch=4", "max_tokens=12", "topk=5", "reverse=True", "eval_every=0", *ADAPTER),
        steps=3,
        needs=f"`hicai-zju/SciKnowEval`, {OLDER}",
        shows="a loss on the client's side with k targets",
        holds=_teacher_is_unsure,
    ),
    Recipe(
        name="prompt_distillation",
        module="prompt_distillation.train",
        arguments=("batch_size=4", "eval_every=0", *ADAPTER),
        steps=3,
        needs=f"`multilingual.txt`, {LONG}",
        shows="data that the model has written",
        holds=_falls("train_mean_nll"),
        before="prompt_distillation.create_data",
    ),
    Recipe(
        name="rl_numerics_check",
        module="rl_numerics_check.train",
        arguments=(
            f"model_name={stand_ins.LONG}",  # its own, without the suffix that names a context length
            "renderer_name=qwen3_5_disable_thinking",
            "task.num_pages_min=1",
            "task.num_pages_max=2",
            "task.page_chars=200",
            "task.words=time",
            "group_size=4",
            "groups_per_batch=2",
            "max_tokens=48",
            *ADAPTER,
        ),
        steps=2,
        needs=f"`Salesforce/wikitext`, {LONG}",
        shows="calls of tools; log-probs of sampling and training agree",
        holds=_on_policy,
    ),
)
