"""Settings reach the run: each has a reader, and the program is what they say."""

import ast
from pathlib import Path
from typing import get_args

import pytest
import torch

import fppo
from fppo import models
from fppo.assembly import parts as loading
from fppo.assembly import program as programs
from fppo.assembly import rewards as loading_rewards
from fppo.assembly import run as assembly
from fppo.key import Key
from fppo.pipeline import estimators
from fppo.quickstart import CHARACTERS, character_tokenizer, small_model
from fppo.runtime.mesh import LOCAL
from fppo.settings import files
from fppo.settings.train import ActorSettings, AdvantageName, LossSettings, OptimizerSettings
from tests import tiny_run

PACKAGE = Path(fppo.__file__).parent
READERS = ("assembly", "runs", "commands", "settings/files.py", "settings/checks*.py")


def _attributes_read() -> set[str]:
    files = [file for name in READERS for file in PACKAGE.glob(name if "." in name else f"{name}/*.py")]
    trees = [ast.parse(file.read_text()) for file in files]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    named = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} | named


def test_every_setting_has_a_reader():
    read = _attributes_read()
    names = [(path, path.rpartition(".")[2]) for path in files.paths()]
    assert [path for path, name in names if not {name, f"{name}_"} & read] == []  # from_: Python reserves its name


def test_the_program_has_the_settings_scalars(tmp_path):
    tiny_run.write_task(tmp_path)
    given = tiny_run.settings(
        tmp_path,
        actor__kl_coef=0.3,
        actor__entropy_coef=0.01,
        algorithm__lam=0.5,
        rollout__temperature=0.7,
        critic__value_clip=0.25,
        critic__warmup_steps=2,
    )
    with assembly.assembled(given) as parts:
        program = parts.program
        assert program.update_actor.keywords["kl_coef"] == 0.3
        assert program.update_actor.keywords["entropy_coef"] == 0.01
        assert program.update_actor.keywords["temperature"] == 0.7
        assert program.annotate.keywords["temperature"] == 0.7
        assert program.update_critic.keywords["clip"] == 0.25
        assert program.critic_warmup == 2
        assert not program.update_actor.keywords["on_policy"]  # two epochs
        assert parts.run.ref is not None
        assert parts.run.critic is not None


def test_on_policy_is_taken_when_one_update_makes_the_ratio_1(tmp_path):
    tiny_run.write_task(tmp_path)
    once = {"actor__epochs": 1, "actor__mini_batch_size": 8, "algorithm__kl__coef": 0.0}
    once |= {"algorithm__kl__controller": "fixed", "algorithm__kl__horizon": 10000}
    for changes, expected in ((once, True), (once | {"actor__mini_batch_size": 4}, False)):
        with assembly.assembled(tiny_run.settings(tmp_path, **changes)) as parts:
            assert parts.program.update_actor.keywords["on_policy"] is expected
            assert parts.program.annotate.keywords["by_engine"] is expected


def test_the_schedule_spans_all_updates():
    optimizer = programs.optimizer_of(OptimizerSettings(lr=1.0, schedule="linear", max_grad_norm=0.0), 10)
    assert optimizer.max_grad_norm is None
    assert optimizer.schedule(0) == 1.0
    assert optimizer.schedule(10) == 0.0


def test_losses_by_name_take_their_scalars():
    loss, select = programs.policy_loss(
        ActorSettings(loss=LossSettings(name="clip_cov", clip_low=0.1, select_ratio=0.5))
    )
    assert loss.keywords == {"clip_low": 0.1}
    assert select.keywords == {"ratio": 0.5, "clip_low": 0.1}


def test_every_estimator_is_a_setting():
    assert get_args(AdvantageName) == estimators.NAMES


@pytest.mark.parametrize(
    ("sinks_in", "dtype", "missing"),
    [("lm", "bfloat16", "sinks"), ("value", "bfloat16", "sinks"), ("none", "float32", "float32")],
)
def test_a_kernel_that_lacks_what_a_model_needs_is_refused_before_any_work(
    tmp_path, monkeypatch, sinks_in, dtype, missing
):
    tiny_run.write_task(tmp_path)
    needs = frozenset({"sinks"})
    monkeypatch.setattr("fppo.models.attention_needs", lambda model: needs if model.head == sinks_in else frozenset())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given = tiny_run.settings(tmp_path, model__attention="varlen", model__compute_dtype=dtype)
    words = rf"attention/varlen has no {missing}, which is needed; there are \['eager'"
    with pytest.raises(ValueError, match=words), assembly.assembled(given):
        pass


def test_a_reward_model_is_asked_too(tmp_path, monkeypatch):
    tiny_run.write_task(tmp_path)
    monkeypatch.setattr("fppo.models.attention_needs", lambda model: frozenset({"softcap"}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    policy = small_model(len(character_tokenizer(CHARACTERS)), width=16, layers=1)
    judge = models.build(policy.config, "value")
    models.save(judge, models.init_params(judge, Key(0)), tmp_path / "judge")
    given = tiny_run.settings(tmp_path, model__attention="varlen", reward__model__path=str(tmp_path / "judge"))
    with pytest.raises(ValueError, match="attention/varlen has no float32 and no softcap"):
        loading_rewards.reward_model_of(given, loading.load_tokenizer(given), LOCAL, torch.device("cpu"))
