"""What opens the inputs and the scorers of a run is handed all that settings say: stand-ins note each call in turn."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from fppo.assembly import inputs as inputs_module
from fppo.assembly import rewards as rewards_module
from fppo.assembly import teacher as teacher_module
from fppo.assembly.inputs import EvalInputs, Inputs, Tried
from fppo.data import ChatOptions
from fppo.data.read import Row
from fppo.fleet import HERE, LOCAL_GROUP, Here
from fppo.key import Key
from fppo.pipeline.passes import PolicyPass
from fppo.pipeline.teacher import ScoreByTeacher, TeacherPass
from fppo.rewards.functions import WeightedSum
from fppo.rollout.engine import Sampling
from fppo.runtime.mesh import LOCAL
from fppo.runtime.offload import Lane, OnHost
from fppo.settings.model import ModelSettings
from fppo.settings.modules import kernels_named
from fppo.settings.placement import AxesSettings
from fppo.settings.reward import JudgeSettings, RewardModelSettings, RewardSettings
from fppo.settings.rollout import EnvironmentSettings
from fppo.settings.train import DataSettings, EvalSettings
from fppo.steps.critic import as_it_is
from fppo.steps.micro_batching import MicroBatching
from fppo_kernels.table import Kernels
from tests import tiny_run
from tests.assembly.log import Log

INPUTS: Any = inputs_module
REWARDS: Any = rewards_module
TEACHER: Any = teacher_module
CPU, GPU = torch.device("cpu"), torch.device("cuda")
NAMES = {"attention": "model.attention"}
AXES, MICRO = AxesSettings(tensor=2), MicroBatching(token_budget=77)


# the inputs

OPENED = {
    "model__path": "p",
    "model__compute_dtype": "bfloat16",
    "rollout__n": 2,
    "algorithm__router_replay": "rollout",
    "steps": 7,
    "seed": 3,
    "eval__temperature": 0.5,
    "module_dirs": ["here"],
}
OPENERS = (
    *("search", "_check_values", "_check_rewards", "_check_saved", "check_laws", "_usage", "_check_models"),
    "check_own_kernels",
    *("policy_loss", "advantage_of", "load_tokenizer", "policy_generation", "load_images", "_prompts", "_held_out"),
    *("sampling_of", "eval_sampling_of", "drawing_of", "check_export", "_check_truths", "_check_rows"),
)


@pytest.fixture
def opened(monkeypatch):
    log = Log(monkeypatch, INPUTS)
    for name in OPENERS:
        log.stub(name)
    log.stub("load_images", READER)
    log.stub("device_of", CPU)
    log.stub("kernels_of", KERNELS)
    log.stub("watching_of", {"loggers": {"a": 1}, "observers": {"b": 2}})
    return log


KERNELS = Kernels.named()
READER = SimpleNamespace(processor="the processor")
FIRST = {"_check_values": 0, "_check_models": 4, "_check_rows": 6, "_usage": 4}  # the arguments that are looked at


def _seen(opened: Log) -> list[Any]:
    return [(name, args[: FIRST.get(name, len(args))], named) for name, args, named in opened.every]


@pytest.mark.parametrize("held_out", [True, False])
@pytest.mark.parametrize("own", [{}, {"kernels": Kernels.named(), "device": GPU}], ids=["settings", "given"])
def test_the_inputs_of_a_run_are_opened_as_its_settings_say(tmp_path, monkeypatch, opened, own, held_out):
    settings = tiny_run.settings(tmp_path, **OPENED)
    if not held_out:
        monkeypatch.setattr(INPUTS, "_held_out", lambda *_: None)
    mesh = attrs.evolve(LOCAL)
    made = INPUTS.read_inputs(settings, mesh=mesh, **own)
    model, rows, rollout, names = settings.model, settings.data, settings.rollout, kernels_named(settings)
    actor, algorithm, environment = settings.actor, settings.algorithm, rollout.environment
    words, images, begun = "<load_tokenizer>", READER, "<policy_generation>"
    kernels, device = own.get("kernels", KERNELS), own.get("device", CPU)
    laws = (actor.loss, algorithm.advantage, "<advantage_of>", names, kernels, "<_usage>")
    sets = ["<_prompts>", "<_held_out>"] if held_out else ["<_prompts>"]
    given = "<_held_out>" if held_out else None
    privileged = settings.critic.privileged if settings.uses_critic_model else None
    used = {"reference": settings.uses_reference, "teacher": settings.uses_teacher}
    calls = [
        ("search", (("here",),), {}),
        ("device_of", (settings.device, settings.placement), {}),
        ("kernels_of", (names,), {}),
        ("policy_loss", (actor.loss,), {}),
        ("advantage_of", (algorithm, kernels), {}),
        ("_check_values", (), {}),
        ("_check_rewards", (settings.reward, rollout), {}),
        ("watching_of", (settings.log,), {}),
        ("_check_saved", (rollout,), {"until": 7, "routed": True}),
        ("_usage", (model, rows, rollout, device), {"in_turns": False}),
        ("check_laws", laws, {}),
        ("load_tokenizer", (model, rows), {}),
        ("policy_generation", (model, rows, words), {}),
        ("load_images", (model, rows, words), {}),
        ("_prompts", (rows, environment, words, images), {}),
        ("_held_out", (rows, settings.eval, environment, words, images), {}),
        ("_check_truths", (settings.reward, rollout, "<_prompts>", given), {}),
        ("_check_models", (settings, words, sets, mesh), {}),
        ("_check_rows", (model, rollout, settings.eval, privileged, used, ("<_prompts>", given)), {}),
        ("check_export", (model, "the processor", begun), {}),
        ("sampling_of", (rollout, words, begun), {}),
        ("eval_sampling_of", (settings.eval, rollout, words, begun), {"like": "<sampling_of>"}),
        ("drawing_of", (rows, "<_prompts>", Key(3).fold("data")), {}),
    ]
    left_out = {"device_of", "kernels_of", "check_laws", "_usage"} if own else set()
    left_out |= set() if held_out else {"_held_out"}
    assert _seen(opened) == [call for call in calls if call[0] not in left_out]
    common: dict[str, Any] = {"device": device, "kernels": kernels, "tokenizer": words}
    evaluation = EvalInputs(**common, held_out="<_held_out>", sampling="<eval_sampling_of>")  # pyright: ignore
    whole: dict[str, Any] = {"advantage": "<advantage_of>", "images": images, "generation": begun}
    whole |= {"prompts": "<_prompts>", "drawing": "<drawing_of>", "sampling": "<sampling_of>"}
    whole |= {"loggers": {"a": 1}, "observers": {"b": 2}, "eval": evaluation if held_out else None}
    assert made == Inputs(**common, **whole)


def test_laws_are_not_checked_where_the_run_does_not_want_it_or_something_is_wrong_before(tmp_path, opened):
    settings = tiny_run.settings(tmp_path, **OPENED, check=False)
    INPUTS.read_inputs(settings, mesh=LOCAL)
    assert "check_laws" not in opened.calls


@pytest.mark.parametrize("own", [{}, {"device": GPU}], ids=["settings", "given"])
def test_the_inputs_of_an_evaluation_are_opened_as_its_settings_say(tmp_path, opened, own):
    settings = tiny_run.settings(tmp_path, **OPENED)
    mesh = attrs.evolve(LOCAL)
    made = INPUTS.read_eval_inputs(settings, mesh=mesh, **own)
    model, rows, rollout = settings.model, settings.data, settings.rollout
    words, images, begun = "<load_tokenizer>", READER, "<policy_generation>"
    unused = {"reference": False, "teacher": False}
    calls = [
        ("search", (("here",),), {}),
        ("device_of", (settings.device, settings.placement), {}),
        ("kernels_of", (kernels_named(settings),), {}),
        ("_usage", (model, rows, rollout, own.get("device", CPU)), {"in_turns": False}),
        ("check_own_kernels", (kernels_named(settings), KERNELS, "<_usage>"), {}),
        ("_check_rewards", (settings.reward, rollout), {}),
        ("load_tokenizer", (model, rows), {}),
        ("load_images", (model, rows, words), {}),
        ("_held_out", (rows, settings.eval, rollout.environment, words, images), {}),
        ("_check_truths", (settings.reward, rollout, "<_held_out>"), {}),
        ("policy_generation", (model, rows, words), {}),
        ("eval_sampling_of", (settings.eval, rollout, words, begun), {}),
        ("_check_models", (settings, words, ["<_held_out>"], mesh), {"trained": False}),
        ("_check_rows", (model, rollout, settings.eval, None, unused, (None, "<_held_out>")), {}),
    ]
    assert _seen(opened) == [call for call in calls if not own or call[0] != "device_of"]
    common: dict[str, Any] = {"device": own.get("device", CPU), "kernels": KERNELS, "tokenizer": words}
    assert made == EvalInputs(**common, held_out="<_held_out>", sampling="<eval_sampling_of>")  # pyright: ignore


def test_everything_that_cannot_be_opened_is_named_and_nothing_after_the_tokenizer_is_tried(
    tmp_path, monkeypatch, opened
):
    settings = tiny_run.settings(tmp_path, **OPENED)
    wrong = ("policy_loss", "_check_rewards", "load_tokenizer")

    def refusing(name: str) -> Any:
        def refuse(*args: Any, **named: Any) -> None:
            raise ValueError(f"no {name}")

        return refuse

    for name in wrong:
        monkeypatch.setattr(INPUTS, name, refusing(name))
    with pytest.raises(INPUTS.files.SettingsError) as caught:
        INPUTS.read_inputs(settings, mesh=LOCAL)
    assert caught.value.problems == tuple(f"no {name}" for name in wrong)
    assert {"_check_models", "sampling_of", "check_laws", "policy_generation"}.isdisjoint(opened.calls)


# the prompts


@pytest.mark.parametrize("taught", [None, "hint"])
def test_prompts_are_read_and_encoded_as_their_section_says(monkeypatch, taught):
    log = Log(monkeypatch, INPUTS)
    rows = [Row("d", 1, {"hint": "x"}, "d")]
    log.stub("read_data", rows)
    log.stub("chat_options")
    encoded: list[Any] = []

    @attrs.frozen
    class Encoded:
        ids: tuple[str, ...]
        tokens: tuple[tuple[int, ...], ...]
        extras: tuple[dict[str, Any], ...] = ()

    def encode(*args: Any, **named: Any) -> Encoded:
        encoded.append((args, named))
        if len(encoded) == 1:
            return Encoded(("b", "a"), ((1,), (2,)), ({"x": 1}, {"x": 2}))
        return Encoded(("a", "c", "b"), ((5,), (6,), (7, 8)))

    monkeypatch.setattr(INPUTS.data, "encode_rows", encode)
    section = DataSettings(max_prompt_tokens=9, over_long="drop", teacher_prompt=taught, teacher_prompt_tokens=30)
    section = attrs.evolve(section, pad_token="<pad>")
    found = INPUTS.load_prompts(section, "words", "images")
    problems = log.of("read_data")[0][1]
    assert log.of("read_data")[0][0] == section
    assert log.of("chat_options") == ((section,), {})
    common: dict[str, Any] = {"pad_token": "<pad>", "chat": "<chat_options>"}
    own = {"fields": section.fields, "images": "images", "problems": problems, "max_prompt_tokens": 9}
    assert encoded[0] == ((rows, "words"), {**common, **own, "over_long": "drop"})
    if taught is None:
        assert (len(encoded), found.extras) == (1, ({"x": 1}, {"x": 2}))
        return
    fields = attrs.evolve(section.fields, prompt="hint")
    assert encoded[1:] == [((rows, "words"), {**common, "fields": fields, "max_prompt_tokens": 30})]
    name = INPUTS.TEACHER_PROMPT
    assert found.extras == ({"x": 1, name: [7, 8]}, {"x": 2, name: [5]})
    assert (found.ids, found.tokens) == (("b", "a"), ((1,), (2,)))


@pytest.mark.parametrize(("limit", "kept"), [(None, None), (2, 2), (3, None), (4, None), (1, 1)])
def test_held_out_prompts_are_those_of_their_own_rows_and_so_many(monkeypatch, limit, kept):
    log = Log(monkeypatch, INPUTS)
    log.stub("load_prompts", "abc")
    monkeypatch.setattr(INPUTS.data, "select", lambda prompts, rows: ("selected", prompts, list(rows)))
    section = DataSettings(path=("t",), split="a", rows="m:t", eval_path=("e",), eval_split="b", eval_rows="m:e")
    found = INPUTS.load_held_out(section, EvalSettings(max_prompts=limit), "words", "images")
    assert log.of("load_prompts") == (
        (attrs.evolve(section, path=("e",), split="b", rows="m:e"), "words", "images"),
        {},
    )
    assert found == ("abc" if kept is None else ("selected", "abc", list(range(kept))))


@pytest.mark.parametrize("rows", [{}, {"path": ("t",)}, {"rows": "m:t"}])
@pytest.mark.parametrize("held", [{}, {"eval_path": ("e",)}, {"eval_rows": "m:e"}])
@pytest.mark.parametrize(("count", "most"), [(0, None), (0, 4), (5, None), (5, 4), (3, 4)])
@pytest.mark.parametrize("used", [True, False])
def test_prompts_are_rows_or_those_of_an_environment(monkeypatch, rows, held, count, most, used):
    log = Log(monkeypatch, INPUTS)
    for name in ("load_prompts", "load_held_out"):
        log.stub(name)
    monkeypatch.setattr(INPUTS, "episode_prompts", lambda number, words: ("episodes", number, words))
    section, how = DataSettings(**rows, **held), EvalSettings(max_prompts=most)
    world = EnvironmentSettings(name="my:env" if used else "none", episodes=11, eval_episodes=count)
    expected = ("episodes", 11, "words") if used and not rows else "<load_prompts>"
    assert INPUTS._prompts(section, world, "words", "images") == expected
    given = "<load_held_out>" if held else None
    if used and count:
        given = ("episodes", min(count, most or count), "words")
    assert INPUTS._held_out(section, how, world, "words", "images") == given
    assert log.calls.get("load_prompts", []) == ([] if used and not rows else [((section, "words", "images"), {})])
    asked = [((section, how, "words", "images"), {})] if given == "<load_held_out>" else []
    assert log.calls.get("load_held_out", []) == asked


def test_an_order_of_ones_own_has_a_key_for_each_epoch(monkeypatch):
    seen: list[Any] = []

    def own(prompts: Any, epoch: int, key: Key) -> list[int]:
        seen.append((prompts, epoch, key))
        return [2, 0, 1] if epoch % 2 else [1, 2, 0]

    monkeypatch.setattr(INPUTS, "imported", lambda name, of: own if (name, of) == ("m:o", "data.sampler") else None)
    key, prompts = Key(4).fold("data"), "abc"
    order = INPUTS.order_of("m:o", prompts, key)
    assert [list(order(epoch)) for epoch in (0, 1, 1, 0, 2)] == [[1, 2, 0], [2, 0, 1], [2, 0, 1], [1, 2, 0], [1, 2, 0]]
    assert seen == [(prompts, epoch, key.fold("epoch", epoch)) for epoch in (0, 1, 2)]
    assert INPUTS.order_of(None, prompts, key) is None


# the scorers


@pytest.mark.parametrize("rewarded", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_responses_are_scored_by_all_that_settings_name(tmp_path, monkeypatch, rewarded, apart):
    changes: dict[str, Any] = {"reward__workers": 3, "reward__time_limit": 7.0, "reward__batch_time_limit": 9.0}
    changes |= tiny_run.NO_KL | {"algorithm__advantage": "distill", "actor__epochs": 1, "seed": 5}
    changes |= {"model__teacher_path": "t"}
    changes |= {"model__path": "p", "rollout__max_tokens": 6, "module_dirs": ["here"], "data__teacher_prompt": "q"}
    changes |= {"model__forward_token_budget": 44, "reward__overlap": not apart}
    if not rewarded:
        changes |= {"reward__functions": [], "eval__temperature": 1.0}
    settings = tiny_run.settings(tmp_path, **changes)
    log = Log(monkeypatch, REWARDS)
    for name, enters in {"judge_of": True, "EarlyRewardRunner": True, "SpreadRewardRunner": False}.items():
        log.stub(name, {"judge": ("j", 2.0)} if name == "judge_of" else None, enters=enters)
    log.stub("environment_terms", {"environment": ("e", 1.0)})
    log.stub("_reward_model", {"reward_model": ("m", 3.0)})
    log.stub("teacher_on")
    log.stub("reward_of")
    monkeypatch.setattr(REWARDS, "axes_at", lambda *args: args)
    ran = Log(monkeypatch, REWARDS.rewards)
    ran.stub("RewardRunner", enters=True)
    groups: Any = {"reward": "ranks of it", "teacher": "ranks of that"} if apart else {}
    mesh, names = attrs.evolve(LOCAL), kernels_named(settings)
    with REWARDS.scoring(settings, "words", mesh, GPU, groups) as made:
        pass
    here, section, model = Here(mesh, GPU), settings.reward, settings.model

    def axes(role: str) -> tuple[Any, ...]:
        return settings.placement, role, settings.mesh

    common: dict[str, Any] = {"names": names, "micro_batching": MicroBatching(token_budget=44)}
    (make, *rest), named = log.of("_reward_model")
    group = groups.get("reward", LOCAL_GROUP)
    assert (rest, named) == ([here, group, section.model, ("here",)], {})
    assert (make.func, make.args) == (REWARDS.reward_model_of, ())
    own = {"section": section.model, "common": model, "tokenizer": "words", "axes": axes("reward"), "chat": False}
    assert make.keywords == {**own, **common}
    how = {**common, "module_dirs": ("here",), "prompted": True}
    assert log.of("teacher_on") == ((groups.get("teacher", LOCAL_GROUP), here, model), how)
    judged = {"names": names, "axes": axes("actor"), "key": Key(5).fold("judge")}
    assert log.of("judge_of") == ((here, section.judge, model, "words"), judged)
    assert log.of("environment_terms") == ((settings.rollout.environment,), {})
    parts = {"reward_model": ("m", 3.0), "judge": ("j", 2.0), "environment": ("e", 1.0)}
    assert log.calls.get("reward_of", []) == ([((section, parts), {"max_tokens": 6})] if rewarded else [])
    (reward,), limits = ran.of("RewardRunner")
    assert reward == "<reward_of>" if rewarded else isinstance(reward, WeightedSum) and not reward.terms
    assert limits == {"time_limit": 7.0, "batch_limit": 9.0, "workers": 3}
    assert log.of("EarlyRewardRunner") == (("<RewardRunner>", "words"), {"early": not apart})
    assert log.of("SpreadRewardRunner") == (("<EarlyRewardRunner>", mesh, GPU), {})
    score = {"reward": "<SpreadRewardRunner>", "tokenizer": "words", "failure_score": section.failure_score}
    assert (made.score.func, made.score.args, made.score.keywords) == (REWARDS.rewards.score, (), score)
    assert (made.runner, made.teacher, made.alone) == ("<EarlyRewardRunner>", "<teacher_on>", not rewarded)
    stage: Any = made.at(0.75)
    whole = {"score": made.score, "teacher": "<teacher_on>", "temperature": 0.75, "alone": not rewarded}
    assert isinstance(stage, ScoreByTeacher)
    assert attrs.asdict(stage, recurse=False) == whole
    assert attrs.evolve(made, teacher=None).at(0.75) is made.score


@pytest.mark.parametrize(("penalty", "factor"), [(None, 1.0), (0.0, 0.0), (0.5, 0.5)])
def test_a_reward_is_combined_of_what_its_section_names(monkeypatch, penalty, factor):
    ran = Log(monkeypatch, REWARDS.rewards)
    ran.stub("combine")
    section = RewardSettings(functions=("a", "b"), weights=(2.0, 3.0), overlong_buffer=4, overlong_penalty=penalty)
    section = attrs.evolve(section, arguments={"a": {"x": 1}})
    extra: Any = {"judge": ("j", 2.0)}
    assert REWARDS.reward_of(section, extra, max_tokens=6) == "<combine>"
    own = {"arguments": {"a": {"x": 1}}, "overlong_buffer": 4, "overlong_penalty": factor}
    assert ran.of("combine") == ((("a", "b"), (2.0, 3.0)), {**own, "max_tokens": 6, "extra": extra})


JUDGE = JudgeSettings(
    path="j",
    weight=0.25,
    chat=True,
    template="{prompt}?{response}",
    pattern=r"(\d)",
    max_tokens=7,
    max_prompt_tokens=11,
    temperature=0.5,
)


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("offload", [True, False])
def test_a_judge_has_all_that_its_section_says(monkeypatch, engine, chat, cold, offload):
    section = attrs.evolve(JUDGE, engine=engine, chat=chat, temperature=0.0 if cold else 0.5, offload=offload)
    common = ModelSettings(path="p", compute_dtype="bfloat16" if cold else "float32", trust_remote_code=chat)
    log, mesh, key = Log(monkeypatch, REWARDS), attrs.evolve(LOCAL), Key(8)
    model, begun = SimpleNamespace(config=SimpleNamespace(vocab_size=77)), SimpleNamespace(eos_token_id=[4])
    results = {"generation_config": begun, "_judge_engine": ("engine", "params", ("tensor",)), "kernels_of": KERNELS}
    for name in ("directory_of", "_judge_tokenizer", "check_kernels"):
        log.stub(name)
    for name, result in results.items():
        log.stub(name, result, enters=name == "_judge_engine")
    log.stub("LanguageJudge")
    of_data, of_models = Log(monkeypatch, REWARDS.data), Log(monkeypatch, REWARDS.models)
    of_data.stub("check_vocabulary")
    of_data.stub("stop_tokens", (5, 6))
    of_models.stub("load", (model, "loaded"))
    here = Here(mesh, GPU)
    with REWARDS.judge_of(here, section, common, "words", names=NAMES, axes=AXES, key=key) as found:
        pass
    assert found == {"judge": ("<LanguageJudge>", 0.25)}
    place, own = "<directory_of>", "<_judge_tokenizer>"
    assert log.of("directory_of") == (("j", "reward.judge.path"), {})
    assert log.of("_judge_tokenizer") == ((place,), {"chat": chat, "trust_remote_code": chat})
    narrow = torch.bfloat16 if cold else None
    loading = {"dtype": narrow or torch.float32, "compute_dtype": narrow, "trust_remote_code": chat}
    (where,), named = of_models.of("load")
    assert (where, named.pop("mesh") is mesh, named) == (place, engine == "embedded", loading)
    assert of_data.of("check_vocabulary") == ((own, {"judge": model.config}), {"any_text": True})
    asked = {"chat": ChatOptions() if chat else None}
    assert log.of("generation_config") == ((place, model.config, own), asked)
    assert of_data.of("stop_tokens") == ((own,), {"turn_ends": [4]})
    (at, of, kernels, run, params, pad), rest = log.of("_judge_engine")
    assert (at, of, kernels, run, params, pad) == (here, section, KERNELS, model, "loaded", 5)
    assert rest == {"on_host": offload}
    assert log.of("kernels_of") == ((NAMES,), {})
    assert log.calls.get("check_kernels", []) == ([((NAMES, model, AXES), {})] if engine == "embedded" else [])
    sampling = Sampling(max_tokens=7, stop_token_ids=(5, 6), greedy=cold, temperature=1.0 if cold else 0.5)
    whole = {"engine": "engine", "params": "params", "tokenizer": own, "rollout_tokenizer": "words", "chat": chat}
    whole |= {"template": "{prompt}?{response}", "pattern": r"(\d)", "max_prompt_tokens": 11, "sampling": sampling}
    whole |= {"key": key, "mesh": mesh, "together": ("tensor",), "vocabulary": 77}
    assert log.of("LanguageJudge") == ((), whole)


SCORER = RewardModelSettings(path="w", weight=0.5, label="good", dtype="bfloat16", micro_batch_size=3)


@pytest.mark.parametrize("own", [None, "its words"])
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("offload", [True, False])
def test_a_reward_model_has_all_that_its_section_says(monkeypatch, own, chat, offload):
    section = attrs.evolve(SCORER, offload=offload)
    common = ModelSettings(path="p", compute_dtype="bfloat16", trust_remote_code=chat, share_prompts=not chat)
    log, mesh = Log(monkeypatch, REWARDS), attrs.evolve(LOCAL)
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=77))
    for name in ("directory_of", "check_kernels", "on_device", "to_host", "model_reward"):
        log.stub(name)
    log.stub("load_reward_model", (model, "loaded"))
    log.stub("kernels_of", KERNELS)
    monkeypatch.setattr(REWARDS, "_own_tokenizer", lambda *args, **named: seen.append((args, named)) or own)
    seen: list[Any] = []
    here = Here(mesh, CPU)
    how = {"names": NAMES, "axes": AXES, "chat": chat, "micro_batching": MICRO}
    found = REWARDS.reward_model_of(here, section, common, "words", **how)
    assert found == {"reward_model": ("<model_reward>", 0.5)}
    assert log.of("directory_of") == (("w", "reward.model.path"), {})
    loading = {"label": "good", "dtype": torch.bfloat16, "compute_dtype": torch.bfloat16, "trust_remote_code": chat}
    assert log.of("load_reward_model") == (("<directory_of>",), {**loading, "mesh": mesh})
    assert log.of("check_kernels") == ((NAMES, model, AXES), {})
    assert seen == [((section, common, "words", model.config), {"chat": chat})]
    assert log.of("on_device") == (("loaded", CPU), {})
    (params,), named = log.of("model_reward")
    if offload:
        assert isinstance(params, OnHost)
        assert (params.params, params.lane.device) == ("<to_host>", CPU)
        assert log.of("to_host") == (("<on_device>",), {})
    else:
        assert (params, "to_host" in log.calls) == ("<on_device>", False)
    read = named.pop("read", None)
    whole = {"model": model, "kernels": KERNELS, "mesh": mesh, "micro_batching": MicroBatching(size=3)}
    assert named == {**whole, "share_prompts": not chat}
    if own is None:
        assert read is None
        return
    assert (read.func, read.args) == (REWARDS.encode, ())
    assert read.keywords == {"tokenizer": "words", "own": own, "chat": chat, "vocabulary": 77}


def test_a_rank_of_a_group_makes_its_reward_model_and_its_teacher_with_modules_of_the_users(monkeypatch):
    here = Here(LOCAL, CPU)
    for module, make in ((REWARDS, "_make_reward_model"), (TEACHER, "_make")):
        searched: list[Any] = []
        monkeypatch.setattr(module, "search", searched.append)
        made: list[Any] = []
        result = {"reward_model": ("scores", 0.5)} if module is REWARDS else "teaches"
        found = getattr(module, make)(here, ["d"], lambda at, made=made, result=result: made.append(at) or result)
        assert (searched, made) == ([["d"]], [here])
        assert found == ("scores" if module is REWARDS else "teaches")


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("offload", [True, False])
def test_a_teacher_has_all_that_its_section_says(monkeypatch, prompted, offload):
    section = ModelSettings(path="p", teacher_path="t", teacher_offload=offload, remove_padding=prompted)
    section = attrs.evolve(section, share_prompts=offload)
    log, mesh = Log(monkeypatch, TEACHER), attrs.evolve(LOCAL)
    log.stub("load_teacher", ("model", "loaded"))
    log.stub("kernels_of", KERNELS)
    for name in ("on_device", "to_host", "fetch_of"):
        log.stub(name)
    monkeypatch.setattr(TEACHER, "Forward", lambda *args, **named: ("forward", args, named))
    here = Here(mesh, CPU)
    made = TEACHER.teacher_on(
        LOCAL_GROUP, here, section, names=NAMES, micro_batching=MICRO, module_dirs=["d"], prompted=prompted
    )
    forward = ("forward", ("model", KERNELS, mesh), {"remove_padding": prompted, "share_prompts": offload})
    policy = PolicyPass(forward=forward, micro_batching=MICRO, fetch="<fetch_of>")  # pyright: ignore
    view = TEACHER.data.with_teacher_prompt if prompted else as_it_is
    params: Any = "<to_host>" if offload else "<on_device>"
    assert made == TeacherPass(params=params, policy=policy, view=view)
    assert log.of("load_teacher") == ((section, mesh), {})
    assert log.of("on_device") == (("loaded", CPU), {})
    (kind, lane), _ = log.of("fetch_of")
    assert kind == ("all" if offload else section.offload)
    assert isinstance(lane, Lane)
    assert lane.device == CPU


def test_a_teacher_of_a_group_is_made_and_called_there(monkeypatch):
    called: list[Any] = []
    group: Any = SimpleNamespace(call=lambda *args, **named: called.append((args, named)) or "made")
    monkeypatch.setattr(TEACHER, "on", lambda *args, **named: ("on", args, named))
    section = ModelSettings(teacher_path="t")
    how: dict[str, Any] = {"names": NAMES, "micro_batching": MICRO, "prompted": True}
    made = TEACHER.teacher_on(group, Here(LOCAL, CPU), section, module_dirs=["d"], **how)
    assert made == ("on", (group, "made"), {"label": "teacher"})
    ((fn, here, dirs, make), named) = called[0]
    assert (fn, here, dirs, named) == (TEACHER._make, HERE, ["d"], {"stays": True, "label": "make teacher"})
    assert isinstance(make, partial)
    assert (make.func, make.args, make.keywords) == (TEACHER.make_teacher, (), {"section": section, **how})


def test_attempts_that_fail_in_ways_to_mend_are_collected():
    tried = Tried()

    def fail(error: Exception) -> Any:
        raise error

    assert tried(lambda: 3) == 3
    assert tried(lambda: fail(ValueError("a"))) is None
    assert tried(lambda: fail(FileNotFoundError("b"))) is None
    assert tried(lambda: fail(ValueError("a"))) is None
    with pytest.raises(KeyError):
        tried(lambda: fail(KeyError("c")))
    error = tried.error()
    assert error.problems == ("a", "b")
    assert error.__cause__ is tried.problems[0]
