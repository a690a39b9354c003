"""Which models of a run are held against what before any weights are read, with stand-ins for models and checks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from fppo.assembly import inputs, rewards, teacher
from fppo.assembly.inputs import Tried
from fppo.runtime.mesh import Mesh
from fppo.settings.model import ModelSettings
from fppo.settings.reward import JudgeSettings, RewardModelSettings, RewardSettings
from fppo.settings.train import DataSettings
from fppo_kernels.collectives import Axis
from tests import tiny_run

MESH = Mesh({"shard": Axis(8)})
PATHS = {"model__path": "p", "model__critic_path": "c", "model__ref_path": "r"}
TAUGHT = {"algorithm__advantage": "distill", "model__teacher_path": "t", "actor__epochs": 1, **tiny_run.NO_KL}
POOLS = {
    "placement__pools": {
        "a": {"ranks": 2, "tensor": 2},
        "b": {"ranks": 3, "pipeline": 3},
        "d": {"ranks": 2, "sequence": 2},
        "e": {"ranks": 4, "context": 4},
    },
    "placement__roles__actor": "a",
    "placement__roles__critic": "b",
    "placement__roles__reference": "d",
    "placement__roles__reward": "e",
    "reward__model__path": "w",
}


def sizes(mesh: Any) -> dict[str, int]:
    return {name: axis.size for name, axis in mesh.axes.items() if axis.size > 1}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Arguments of each check by its name; a config is its model's path, a model its path and head."""
    found: dict[str, list[Any]] = {}

    def noting(name: str, of: Any) -> Any:
        def check(*args: Any, **named: Any) -> None:
            found.setdefault(name, []).append(of(*args, **named))

        return check

    def bare(section: Any, critic: Any = None) -> Any:
        return (section.path, "lm") if critic is None else (section.critic_path or section.path, "value")

    def axes(own: Any) -> dict[str, int]:
        return {name: size for name, size in own.sizes(own.shard or 0).items() if size > 1}

    monkeypatch.setattr(inputs, "config_place", lambda path, name: (path, name))
    monkeypatch.setattr(inputs, "config_of", lambda section, place: place[0])
    monkeypatch.setattr(inputs, "bare_model", bare)
    monkeypatch.setattr(inputs, "kernels_need_check", lambda names, *, compiled: True)
    monkeypatch.setattr(inputs.data, "vocabulary_size", lambda config: f"rows of {config}")
    for name, of in {
        "check_scorers": lambda reward, common, words, mesh, *, pool, rows: (pool[0], sizes(pool[1]), sizes(mesh)),
        "check_teacher": lambda section, words, configs: (words, sorted(configs)),
        "check_family": lambda config, *, tensor_parallel, alone: (config, tensor_parallel, alone),
        "check_kernels": lambda names, model, own: (*model, axes(own)),
        "check_mesh": lambda config, pool, mesh: (config, pool, sizes(mesh)),
        "check_base": lambda kind, config, pool, mesh: (kind, config, pool, sizes(mesh)),
        "check_length": lambda config, rows, rollout, how, privileged: (config, privileged),
        "check_vision": lambda section, config: config,
    }.items():
        monkeypatch.setattr(inputs, name, noting(name, of))
    monkeypatch.setattr(
        inputs.data, "check_vocabulary", noting("words", lambda words, configs, *, any_text: (configs, any_text))
    )
    monkeypatch.setattr(inputs.data, "check_tokens", noting("tokens", lambda prompts, rows: (prompts, rows)))
    return found


def checked(tmp_path: Any, *, trained: bool = True, **changes: Any) -> None:
    settings = tiny_run.settings(tmp_path, **{"model__path": "p", **changes})
    tried = Tried()
    sets: Any = [SimpleNamespace(name="train"), SimpleNamespace(name="held out")]
    words: Any = "tokenizer"
    inputs._check_models(settings, words, sets, MESH, tried, trained=trained)
    assert tried.problems == []


def test_every_model_with_a_path_of_its_own_is_held_against_everything(tmp_path, seen):
    checked(tmp_path, **PATHS)
    assert seen["words"] == [({"actor": "p", "critic": "c", "reference": "r"}, False)]
    assert seen["check_kernels"] == [("p", "lm", {}), ("c", "value", {}), ("r", "lm", {})]
    whole = "", {"shard": 8}
    assert seen["check_mesh"] == [("p", *whole), ("c", *whole), ("r", *whole)]
    assert seen["check_base"] == [("float", "p", *whole)]
    assert seen["check_length"] == [("p", 0), ("c", 0), ("r", 0)]
    assert seen["check_vision"] == ["p", "c", "r"]
    assert [(x.name, rows) for x, rows in seen["tokens"]] == [("train", "rows of p"), ("held out", "rows of p")]
    assert seen["check_scorers"] == [("", {"shard": 8}, {"shard": 8})]
    assert seen.keys() & {"check_teacher", "check_family"} == set()


def test_models_of_the_policys_own_weights_are_held_against_their_own_meshes(tmp_path, seen):
    checked(tmp_path, **POOLS)
    of = {name: f"placement.pools.{name}: " for name in "abde"}
    on = {"a": {"tensor": 2}, "b": {"pipeline": 3}, "d": {"sequence": 2}, "e": {"context": 4}}
    assert seen["words"] == [({"actor": "p"}, False)]
    assert seen["check_mesh"] == [("p", of[name], on[name]) for name in "abd"]
    assert seen["check_kernels"] == [("p", "lm", {"tensor": 2}), ("p", "value", {"pipeline": 3})]
    assert seen["check_scorers"] == [(of["e"], on["e"], {"shard": 8})]
    assert seen["check_base"] == [("float", "p", of["a"], on["a"])]


def test_the_truth_lengthens_the_rows_of_the_model_that_reads_it(tmp_path, seen):
    checked(tmp_path, critic__privileged=3, **PATHS)
    assert seen["check_length"] == [("p", 0), ("c", 3), ("r", 0)]
    assert seen["words"][0][1] is True
    seen.clear()
    checked(tmp_path, critic__privileged=3)
    assert seen["check_length"] == [("p", 3)]
    seen.clear()
    checked(tmp_path, critic__privileged=3, critic__reads="hidden")
    assert seen["check_length"] == [("p", 0)]


@pytest.mark.parametrize(("most", "longer"), [(600, 88), (512, 0), (100, 0)])
def test_a_teachers_own_prompts_lengthen_its_rows(tmp_path, seen, most, longer):
    own = {"data__teacher_prompt": "x", "data__teacher_prompt_tokens": most}
    checked(tmp_path, **TAUGHT, **own)
    assert seen["check_length"] == [("p", 0), ("t", longer)]
    assert seen["check_teacher"] == [("tokenizer", ["actor", "teacher"])]
    assert seen["words"] == [({"actor": "p"}, False)]  # it has checks of its own
    assert seen["check_kernels"] == [("p", "lm", {}), ("t", "lm", {})]
    assert seen["check_vision"] == ["p", "t"]


def test_a_teacher_without_prompts_of_its_own_reads_the_policys(tmp_path, seen):
    checked(tmp_path, **TAUGHT)
    assert seen["check_length"] == [("p", 0), ("t", 0)]


@pytest.mark.parametrize(("rank", "of_critic"), [(2, True), (0, False)])
def test_a_base_in_codes_is_held_against_the_meshes_of_all_that_stand_on_it(tmp_path, seen, rank, of_critic):
    pools = POOLS | {"model__lora__rank": 4, "model__lora__base": "nf4", "model__lora__critic_rank": rank}
    checked(tmp_path, **pools)
    of_policy = ("nf4", "p", "placement.pools.a: ", {"tensor": 2})
    expected = [of_policy, ("nf4", "p", "placement.pools.b: ", {"pipeline": 3})]
    assert seen["check_base"] == expected[: 1 + of_critic]


def test_an_evaluation_holds_the_policy_alone_and_a_teacher(tmp_path, seen):
    checked(tmp_path, trained=False, **PATHS)
    assert seen["words"] == [({"actor": "p"}, False)]
    assert seen["check_kernels"] == [("p", "lm", {})]
    assert seen["check_mesh"] == [("p", "", {"shard": 8})]
    assert seen["check_length"] == [("p", 0)]
    seen.clear()
    checked(tmp_path, trained=False, **TAUGHT)
    assert [x[0] for x in seen["check_mesh"]] == ["p", "t"]
    seen.clear()
    checked(tmp_path, trained=False, **POOLS)  # where the policy is evaluated there are no pools
    assert seen["check_mesh"] == [("p", "", {"shard": 8})]


def test_vllm_is_asked_about_the_policys_family_and_turns_may_have_any_text(tmp_path, seen):
    vllm = {"rollout__engine": "vllm", "rollout__vllm__host": "process", "rollout__vllm__tensor_parallel": 2}
    checked(tmp_path, **vllm, model__lora__rank=2, model__lora__send="alone")
    assert seen["check_family"] == [("p", 2, True)]
    seen.clear()
    checked(tmp_path, **vllm, rollout__turns__respond="tests.rollout.functions:adder")
    assert seen["check_family"] == [("p", 2, False)]
    assert seen["words"] == [({"actor": "p"}, True)]


def test_problems_of_several_models_are_all_noted(tmp_path, seen, monkeypatch):
    def wrong(config, *_):
        raise ValueError(f"of {config}")

    monkeypatch.setattr(inputs, "check_mesh", wrong)
    monkeypatch.setattr(inputs, "check_length", wrong)
    tried = Tried()
    inputs._check_models(tiny_run.settings(tmp_path, **PATHS), "tokenizer", [], MESH, tried)
    assert [str(problem) for problem in tried.problems] == ["of p", "of c", "of r"] * 2
    assert tried.error().problems == ("of p", "of c", "of r")  # each once


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
@pytest.mark.parametrize("chat", [None, True, False])
def test_scorers_are_held_against_their_own_files_and_meshes(monkeypatch, engine, chat):
    log: list[Any] = []

    def noting(name: str, result: Any = None) -> Any:
        return lambda *args, **named: log.append((name, args, named)) or (result(*args) if callable(result) else result)

    for place in ("directory_of", "config_place"):
        monkeypatch.setattr(rewards, place, lambda path, name: log.append((name, (path,), {})) or f"{path} there")
    monkeypatch.setattr(rewards, "find_reward_model", noting("find", lambda path: (f"{path} found", 0)))
    monkeypatch.setattr(rewards, "read_config", noting("config", lambda directory: f"config of {directory}"))
    monkeypatch.setattr(rewards, "check_mesh", noting("mesh"))
    monkeypatch.setattr(rewards, "_own_tokenizer", noting("own"))
    monkeypatch.setattr(rewards, "_judge_tokenizer", noting("judge", "judge's words"))
    monkeypatch.setattr(rewards.data, "check_vocabulary", noting("vocabulary"))
    section = RewardSettings(
        model=RewardModelSettings(path="r", label="good", chat=chat),
        judge=JudgeSettings(path="j", engine=engine, chat=False),
    )
    common = ModelSettings(path="p", trust_remote_code=True)
    words: Any = "words"
    pool, rows = ("pool: ", Mesh({"tensor": Axis(2)})), DataSettings(chat=True)
    rewards.check_scorers(section, common, words, MESH, pool=pool, rows=rows)
    remote = {"trust_remote_code": True}
    of_judge = [("mesh", ("config of j there", "", MESH), {})] if engine == "embedded" else []
    assert log == [
        ("reward.model.path", ("r",), {}),
        ("find", ("r",), {"label": "good", **remote}),
        ("config", ("r found",), remote),
        ("mesh", ("config of r found", *pool), {}),
        ("own", (section.model, common, "words", "config of r found"), {"chat": chat is not False}),
        ("reward.judge.path", ("j",), {}),
        ("config", ("j there",), remote),
        ("judge", ("j there",), {"chat": False, **remote}),
        *of_judge,
        ("vocabulary", ("judge's words", {"judge": "config of j there"}), {"any_text": True}),
    ]
    log.clear()
    rewards.check_scorers(RewardSettings(), common, words, MESH, pool=pool, rows=rows)
    assert log == []


WORDS = SimpleNamespace(chat_template="a", get_vocab=lambda: {"x": 0})
OTHER = SimpleNamespace(chat_template="b", get_vocab=lambda: {"x": 0})
LESS = SimpleNamespace(chat_template=None, get_vocab=lambda: {"y": 0})
ALIKE = SimpleNamespace(chat_template=None, get_vocab=lambda: {"x": 0})


@pytest.mark.parametrize(
    ("named", "beside", "chat", "asked", "expected"),
    [
        (None, None, False, None, None),  # it has none
        (None, WORDS, True, None, None),  # it reads the policy's tokens
        (None, OTHER, True, None, OTHER),
        (None, OTHER, False, None, None),
        (None, ALIKE, True, None, None),
        (None, LESS, False, None, LESS),
        (None, LESS, True, None, "no chat template"),
        (WORDS, None, True, None, WORDS),  # it is named
        (WORDS, LESS, True, True, WORDS),
        (None, WORDS, True, True, "leave it out, or name its tokenizer"),
        (None, None, False, False, "leave it out, or name its tokenizer"),
    ],
)
def test_a_reward_model_has_a_tokenizer_of_its_own_where_the_policys_tokens_say_something_else(
    monkeypatch, named, beside, chat, asked, expected
):
    opened: list[Any] = []
    vocabularies: list[Any] = []

    def opening(path, name, remote):
        opened.append((path, name, remote))
        return named if name == "reward.model.tokenizer" else beside

    monkeypatch.setattr(rewards, "directory_of", lambda path, name: f"{path} there")
    monkeypatch.setattr(rewards, "has_tokenizer", lambda directory: beside is not None)
    monkeypatch.setattr(rewards, "open_tokenizer", opening)
    monkeypatch.setattr(rewards, "config_place", lambda path, name: f"{path} there")
    monkeypatch.setattr(rewards, "config_of", lambda section, place: f"config of {place}")
    monkeypatch.setattr(rewards.data, "check_vocabulary", lambda *args, **more: vocabularies.append((args, more)))
    section = RewardModelSettings(path="r", tokenizer="t" if named else None, chat=asked)
    common: Any = ModelSettings(path="p", trust_remote_code=True)
    policy: Any = WORDS

    def find() -> Any:
        return rewards._own_tokenizer(section, common, policy, "config", chat=chat)

    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            find()
        return
    assert find() is expected
    if named:
        assert opened == [("t", "reward.model.tokenizer", True)]
    else:
        assert opened == ([("r there", "reward.model.path", True)] if beside else [])
    if expected is not None:
        assert vocabularies == [((expected, {"reward model": "config"}), {"any_text": True})]
    else:
        configs = {"policy": "config of p there", "reward model": "config"}
        others = {"reward model": beside} if beside else {}
        assert vocabularies == [((WORDS, configs), {"tokenizers": others})]


def test_a_teacher_is_held_to_the_policys_tokens_and_rows(monkeypatch):
    """Added tokens may differ, and it may have more rows; its own code runs where the policy's may."""

    def words(known: dict[str, int], **added: int) -> Any:
        return SimpleNamespace(get_vocab=lambda: known | added, get_added_vocab=lambda: added)

    asked, ours = [], words({"a": 0, "b": 1, "d": 2}, e=3)
    monkeypatch.setattr(teacher, "config_place", lambda path, name: f"{path}, {name}")
    monkeypatch.setattr(teacher, "has_tokenizer", lambda directory: True)
    monkeypatch.setattr(teacher.data, "vocabulary_size", lambda config: config)
    monkeypatch.setattr(teacher, "open_tokenizer", lambda *args: asked.append(args) or theirs)
    section = ModelSettings(path="p", teacher_path="t", trust_remote_code=True)
    theirs = words({"d": 2, "b": 1, "a": 0}, f=9)
    teacher.check_teacher(section, ours, {"actor": 5, "teacher": 7})
    assert asked == [("t, model.teacher_path", "model.teacher_path", True)]
    with pytest.raises(ValueError, match=r"has 4 rows, fewer than the 5 of model\.path = 'p'"):
        teacher.check_teacher(section, ours, {"actor": 5, "teacher": 4})
    theirs = words({"a": 0, "b": 2, "c": 1}, f=9)
    for own, named in ((section, "model.path = 'p'"), (attrs.evolve(section, tokenizer="w"), "model.tokenizer = 'w'")):
        with pytest.raises(ValueError, match="its tokenizer is not that of") as caught:
            teacher.check_teacher(own, ours, {"actor": 5, "teacher": 7})
        text = f"{named}: 3 tokens differ, as 'd', which is none there and number 2 here; a teacher reads"
        assert text in str(caught.value)
    monkeypatch.setattr(teacher, "has_tokenizer", lambda directory: False)
    teacher.check_teacher(section, ours, {"actor": 1500, "teacher": 1500})
    with pytest.raises(ValueError, match=r"it has 2,000 tokens and model\.path = 'p' has 1,500, and there is no token"):
        teacher.check_teacher(section, ours, {"actor": 1500, "teacher": 2000})
