"""Each model is loaded from its own path, in its own dtype, with what its section says of how it runs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from fppo.assembly import parts, rewards
from fppo.fleet import Here
from fppo.key import Key
from fppo.models.model import Model
from fppo.quickstart import small_model
from fppo.runtime.mesh import LOCAL
from fppo.settings.learning import CriticSettings, ValueHeadSettings
from fppo.settings.model import LoraSettings, ModelSettings
from fppo.settings.placement import MeshSettings
from fppo.settings.reward import JudgeSettings, RewardModelSettings
from fppo.steps.micro_batching import MicroBatching

SECTION = ModelSettings(
    path="policy",
    critic_path="critic",
    ref_path="reference",
    teacher_path="teacher",
    config={"a": 1},
    ref_dtype="bfloat16",
    compute_dtype="float16",
    checkpoint_layers="selective",
    compile_layers=True,
    trust_remote_code=True,
)
HEAD = ValueHeadSettings(name="hl_gauss", keywords={"low": -1.0, "high": 1.0, "bins": 21})


@pytest.fixture
def loaded(monkeypatch):
    """Calls of the loader, the last first."""
    asked: list[tuple[Any, ...]] = []
    model = small_model(15, width=16, layers=1)

    def load(directory, *args, **named):
        asked.insert(0, (directory.name, args, named))
        return model, {"w": torch.zeros(1, dtype=named["dtype"])}

    for module in (parts, rewards):
        monkeypatch.setattr(module, "directory_of", lambda path, name: Path(path))
    monkeypatch.setattr(parts.models, "load", load)
    return asked


COMMON = {
    "compute_dtype": torch.float16,
    "checkpoint_layers": "selective",
    "trust_remote_code": True,
    "config": {"a": 1},
    "mesh": LOCAL,
}


def test_the_policy_is_float32_and_the_base_of_an_adapter_as_its_passes(loaded):
    model, _ = parts.load_actor(SECTION, CriticSettings(), LOCAL)
    assert loaded[0] == ("policy", (), COMMON | {"dtype": torch.float32})
    assert model.compile_layers
    parts.load_actor(attrs.evolve(SECTION, lora=LoraSettings(rank=2)), CriticSettings(), LOCAL)
    assert loaded[0] == ("policy", (), COMMON | {"dtype": torch.float16})


@pytest.mark.parametrize(
    ("own", "changes"),
    [
        ({}, {}),
        ({"compute_dtype": "bfloat16"}, {"compute_dtype": torch.bfloat16}),
        ({"checkpoint_layers": False}, {"checkpoint_layers": False}),
    ],
)
def test_a_critic_has_its_path_its_head_and_what_is_its_own(loaded, own, changes):
    parts.load_critic(SECTION, CriticSettings(loss=HEAD, **own), Key(3), LOCAL)
    name, head, named = loaded[0]
    assert (name, head) == ("critic", ("value",))
    key = {"key": Key(3).fold("value head"), "outputs": 21, "dtype": torch.float32}
    assert named == COMMON | key | changes
    parts.load_critic(attrs.evolve(SECTION, critic_path=None), CriticSettings(), Key(3), LOCAL)
    assert loaded[0][0] == "policy"
    assert loaded[0][2]["outputs"] == 1


def test_a_reference_and_a_teacher_have_paths_and_dtypes_of_their_own(loaded):
    parts.load_reference(SECTION, LOCAL)
    assert loaded[0] == ("reference", (), COMMON | {"dtype": torch.bfloat16})
    parts.load_teacher(attrs.evolve(SECTION, ref_dtype="float32", teacher_dtype="bfloat16"), LOCAL)
    assert loaded[0] == ("teacher", (), COMMON | {"dtype": torch.bfloat16})
    parts.load_reference(attrs.evolve(SECTION, ref_path=None, ref_dtype="float32", teacher_dtype="bfloat16"), LOCAL)
    assert loaded[0] == ("policy", (), COMMON | {"dtype": torch.float32})


def test_a_reference_without_a_path_is_a_copy_of_the_policy_in_its_dtype(loaded):
    model, params = small_model(15, width=16, layers=1), {"model.norm.weight": torch.ones(16)}
    section = attrs.evolve(SECTION, ref_path=None)
    same, copied = parts.load_reference(section, LOCAL, (model, params))
    assert same is model
    assert loaded == []
    assert copied["model.norm.weight"].dtype == torch.bfloat16
    kept = parts.load_reference(attrs.evolve(section, ref_dtype="float32"), LOCAL, (model, params))[1]
    assert kept["model.norm.weight"].data_ptr() != params["model.norm.weight"].data_ptr()


@pytest.mark.parametrize(("frozen", "trains"), [(True, False), (False, True)])
def test_a_vision_tower_is_trained_unless_it_is_frozen(frozen, trains):
    @attrs.frozen
    class Tower:
        trains: bool = False

    model = SimpleNamespace(vision=Tower(trains=not trains))
    seen = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts.attrs, "evolve", lambda value, **named: seen.update(named) or value)
        parts._as_set(model, ModelSettings(path="m", freeze_vision=frozen))
    assert seen["trains"] is trains


REWARD = RewardModelSettings(path="scorer", weight=0.25, label="good", dtype="bfloat16", micro_batch_size=3)


def test_a_reward_model_is_loaded_and_run_as_its_section_says(monkeypatch, loaded):
    asked, model = {}, small_model(15, width=16, layers=1)
    monkeypatch.setattr(
        rewards, "load_reward_model", lambda path, **named: asked.update(named, path=path) or (model, {})
    )
    monkeypatch.setattr(rewards, "_own_tokenizer", lambda *args, **named: "own" if named["chat"] else None)
    monkeypatch.setattr(rewards, "check_kernels", lambda *args: None)
    monkeypatch.setattr(rewards, "kernels_of", lambda names: "kernels")
    monkeypatch.setattr(rewards, "model_reward", lambda params, **named: named)
    common = attrs.evolve(SECTION, share_prompts=False)
    how = {"names": {}, "axes": MeshSettings(), "micro_batching": MicroBatching(size=9)}
    here = Here(LOCAL, torch.device("cpu"))
    ((made, weight),) = rewards.reward_model_of(here, REWARD, common, "policy's", chat=True, **how).values()
    fn: Any = made  # what stands in for a reward says what it was made of
    assert asked == {
        "path": Path("scorer"),
        "label": "good",
        "dtype": torch.bfloat16,
        "compute_dtype": torch.float16,
        "trust_remote_code": True,
        "mesh": LOCAL,
    }
    read = fn.pop("read").keywords
    assert read == {"tokenizer": "policy's", "own": "own", "chat": True, "vocabulary": 15}
    assert (fn["micro_batching"], fn["share_prompts"], fn["kernels"]) == (MicroBatching(size=3), False, "kernels")
    assert weight == 0.25
    ((other, _),) = rewards.reward_model_of(here, REWARD, common, "policy's", chat=False, **how).values()
    plain: Any = other
    assert "read" not in plain
    assert rewards.reward_model_of(here, RewardModelSettings(), common, "policy's", chat=True, **how) == {}


@pytest.mark.parametrize(("temperature", "greedy", "drawn"), [(0.0, True, 1.0), (0.5, False, 0.5)])
def test_a_judge_is_asked_as_its_section_says(monkeypatch, loaded, temperature, greedy, drawn):
    section = JudgeSettings(
        path="judge",
        weight=0.25,
        template="{prompt}{response}",
        pattern="(x)",
        chat=False,
        temperature=temperature,
        max_tokens=7,
        max_prompt_tokens=11,
        max_rows=5,
        offload=True,
    )
    engines = []

    @contextlib.contextmanager
    def engine(here, section, kernels, model, params, pad, *, on_host):
        engines.append((section.max_rows, kernels, isinstance(model, Model), pad, on_host))
        yield "engine", "params", ("tensor",)

    monkeypatch.setattr(rewards, "_judge_engine", engine)
    monkeypatch.setattr(rewards, "_judge_tokenizer", lambda directory, *, chat, trust_remote_code: "tokenizer")
    monkeypatch.setattr(rewards.data, "check_vocabulary", lambda *args, **_: None)
    monkeypatch.setattr(rewards, "generation_config", lambda *args, chat: SimpleNamespace(eos_token_id=[4]))
    monkeypatch.setattr(rewards.data, "stop_tokens", lambda tokenizer, *, turn_ends: (3, *turn_ends))
    monkeypatch.setattr(rewards, "check_kernels", lambda *args: None)
    monkeypatch.setattr(rewards, "kernels_of", lambda names: "kernels")
    monkeypatch.setattr(rewards, "LanguageJudge", lambda **named: named)
    here = Here(LOCAL, torch.device("cpu"))
    with rewards.judge_of(here, section, SECTION, "policy's", names={}, axes=MeshSettings(), key=Key(3)) as judges:
        ((judge, weight),) = judges.values()
    assert loaded[0][0] == "judge"
    assert (loaded[0][2]["dtype"], loaded[0][2]["compute_dtype"]) == (torch.float16, torch.float16)
    assert engines == [(5, "kernels", True, 3, True)]
    sampling = judge.pop("sampling")
    assert (sampling.max_tokens, sampling.stop_token_ids, sampling.greedy, sampling.temperature) == (
        *(7, (3, 4)),
        *(greedy, drawn),
    )
    assert weight == 0.25
    assert judge == {
        "engine": "engine",
        "params": "params",
        "tokenizer": "tokenizer",
        "rollout_tokenizer": "policy's",
        "template": "{prompt}{response}",
        "pattern": "(x)",
        "max_prompt_tokens": 11,
        "chat": False,
        "key": Key(3),
        "mesh": LOCAL,
        "together": ("tensor",),
        "vocabulary": 15,
    }
