"""A run of settings with a teacher: what is refused, what it learns, where the teacher is, how it goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import attrs
import pytest
import torch

from fppo import metrics, models, tree
from fppo.assembly.checks import TRAIN
from fppo.assembly.inputs import Inputs
from fppo.assembly.pools import RolePlaces
from fppo.assembly.run import assemble
from fppo.batch import Rollout, narrow
from fppo.commands import actions
from fppo.fleet import Group
from fppo.key import Key
from fppo.models import lora, lora_files
from fppo.models.adapted import Lora
from fppo.pipeline.step import ppo_step
from fppo.pipeline.train import iterate
from fppo.quickstart import CHARACTERS, character_tokenizer, small_model
from fppo.runs import jsonl
from fppo.runtime.mesh import Sharding
from fppo.runtime.simulate import simulate
from fppo.settings import files, places, resolve
from fppo.settings.plan import PlanSettings
from fppo.settings.train import TrainSettings
from fppo.steps import Forward, MicroBatching, compute_log_probs
from fppo.studies.plan.plan import plan
from fppo.studies.plan.run import case_of
from tests import tiny_run
from tests.fleet.threads import Threads

ALONE = {"reward.functions": [], "eval.temperature": 1.0, "data.ground_truth": ""}


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """The tiny task, with a teacher twice as wide and deep."""
    directory = tmp_path_factory.mktemp("task")
    tiny_run.write_task(directory)
    write(directory / "teacher", seed=1, width=32, layers=2)
    return directory


def write(path: Path, *, seed: int, characters: str = CHARACTERS, rows: int | None = None, **shape: int) -> None:
    tokenizer = character_tokenizer(characters)
    model = small_model(rows or len(tokenizer), **shape)
    params = {name: 4 * x for name, x in models.init_params(model, Key(seed)).items()}
    models.save(model, params, path, tokenizer=tokenizer)


def settings(task: Path, changes: Mapping[str, object] = MappingProxyType({})) -> TrainSettings:
    """Four steps of distillation on the tiny task; the reward is only measured."""
    values = {
        "output_dir": str(task / "run"),
        "steps": 4,
        "model": {"path": str(task / "start"), "teacher_path": str(task / "teacher")},
        "data": {"path": [str(task / "train.jsonl")], "eval_path": [str(task / "test.jsonl")]},
        "rollout": {"batch_size": 8, "max_tokens": 3},
        "reward": {"functions": ["exact_match"]},
        "algorithm": {"advantage": "distill"},
        "actor": {"optimizer": {"lr": 1e-3}},
        "checkpoint": {"every": 1},
    }
    return resolve.resolved(files.check(files.replace(files.from_dict(values), changes)), resolve.CPU)[0]


def numbers(run: Path) -> list[dict[str, float]]:
    return [
        {name: x for name, x in line.items() if not name.startswith((*tiny_run.UNLIKE, "time"))}
        for line in jsonl.read(run / "metrics.jsonl")
    ]


@pytest.mark.slow
def test_a_run_without_rewards_learns_from_its_teacher_stops_and_goes_on_bit_for_bit(task, tmp_path):
    def run(name, steps=4):
        given = {**ALONE, "output_dir": str(tmp_path / name), "steps": steps}
        assert actions.train(settings(task, given)) == 0
        return tmp_path / name

    whole, parts = run("whole"), run("parts", steps=2)
    held_out = "val-core/test/reward/mean@1", "val-aux/test/reverse_kl/mean@1"
    before, after = ([line[name] for line in numbers(whole) if name in line] for name in held_out)
    assert before == [-x for x in after]
    assert len(before) == 2
    run("parts")
    states = [{x["step"]: x["state"] for x in jsonl.read(each / "digests.jsonl")} for each in (whole, parts)]
    assert states[0] == states[1]
    assert actions.replay(whole, 3) == 0
    steps = [line for line in numbers(whole) if "actor/teacher_kl" in line]
    assert len(steps) == 4
    assert all(line["critic/score/mean"] == -line["reward/reverse_kl"] for line in steps)
    assert steps[0]["actor/teacher_kl"] == pytest.approx(-steps[0]["critic/advantages/mean"], rel=1e-5)


def test_the_policy_as_its_own_teacher_moves_nothing(task):
    with assemble(
        settings(task, {"model.teacher_path": str(task / "start"), "actor.optimizer.weight_decay": 0.0})
    ) as made:
        after, experience, report = ppo_step(made.run, program=made.program, draw=made.draw)
        found = metrics.report(report)
        assert found["actor/teacher_kl"] == 0
        assert not experience.advantages.any()
        assert all(torch.equal(after.actor.params[name], x) for name, x in made.run.actor.params.items())
        held_out = metrics.report(made.evaluate(made.run))
    assert held_out["val-aux/test/reverse_kl/mean@1"] == pytest.approx(0, abs=1e-6)  # by the engine's log-probs
    assert "val-core/test/reward/mean@1" in held_out  # of the reward


@pytest.mark.slow
def test_a_teacher_with_prompts_of_its_own_knows_what_the_policy_does_not(task):
    """Its log-probs are those of the same responses behind the other prompts; the same prompts change no bit."""
    found = {}
    for template in (None, "{prompt}", "{answer}={prompt}"):
        with assemble(settings(task, {"data.teacher_prompt": template})) as made:
            _, found[template], _ = ppo_step(made.run, program=made.program, draw=made.draw)
            tokenizer = made.inputs.tokenizer
    assert torch.equal(found[None].teacher_log_probs, found["{prompt}"].teacher_log_probs)
    rows = found["{answer}={prompt}"]
    assert torch.equal(rows.tokens, found[None].tokens)
    model, params = models.load(task / "teacher")
    width = rows.response_mask.shape[1]
    texts = [tokenizer.decode(x[:-width][y[:-width]]) for x, y in zip(rows.tokens, rows.attention_mask, strict=True)]
    prompts = [tokenizer.encode(f"{a}={text}") for a, text in zip(rows.ground_truth, texts, strict=True)]
    assert len({len(x) for x in prompts}) == 1
    seen = torch.ones(len(prompts), len(prompts[0]), dtype=torch.bool)
    other = tree.replace(
        narrow(Rollout, rows),
        tokens=torch.cat([torch.tensor(prompts), rows.tokens[:, -width:]], 1),
        attention_mask=torch.cat([seen, rows.attention_mask[:, -width:]], 1),
    )
    how = {"forward": Forward(model), "micro_batching": MicroBatching(size=8)}
    expected = compute_log_probs(params, other, **how)
    torch.testing.assert_close(rows.teacher_log_probs, expected, rtol=1e-4, atol=1e-5)
    assert (expected - found[None].teacher_log_probs).abs().max() > 1e-3


def steps_of(made, count=2):
    found = []
    for run, experience, report in iterate(made.run, program=made.program, draw=made.draw, donate=True):
        kept = {name: x for name, x in metrics.report(report).items() if not name.startswith(tiny_run.UNLIKE)}
        found.append((experience.teacher_log_probs.tolist(), experience.advantages.tolist(), kept))
        if run.step == count:
            return found
    raise AssertionError


@pytest.mark.slow
def test_a_teacher_on_ranks_of_its_own_is_one_in_this_process(task):
    given = settings(task, {"device": "cpu"})
    with assemble(given) as made:
        expected = steps_of(made)
    with contextlib.ExitStack() as opened:
        places = RolePlaces({"teacher": opened.enter_context(Group("teacher", Threads()))})
        assert steps_of(opened.enter_context(assemble(given, places=places))) == expected


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["shard", "tensor", "pipeline", "sequence"])
def test_a_teacher_on_a_mesh_is_one_on_a_process(task, tmp_path, axis):
    """The teacher is cut as the policy is; both share a batch's rows over ranks."""
    tiny_run.write_task(tmp_path, layers=2)
    given = settings(tmp_path, {**ALONE, "device": "cpu", "model.teacher_path": str(task / "teacher")})
    with assemble(given) as made:
        expected = steps_of(made, 1)[0]

    def on_rank(mesh):
        with assemble(given, mesh=attrs.evolve(mesh, sharding=Sharding())) as made:
            return steps_of(made, 1)[0]

    for found in simulate({axis: 2}, on_rank):
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-4, atol=1e-5)
        assert found[2]["actor/teacher_kl"] == pytest.approx(expected[2]["actor/teacher_kl"], rel=1e-4)


def refused(task: Path, teacher: Path) -> str:
    with pytest.raises(files.SettingsError) as caught:
        Inputs(settings=settings(task, {"model.teacher_path": str(teacher)})).need(*TRAIN)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.slow
def test_a_teacher_that_does_not_read_the_policys_tokens_is_refused_with_both_names(task, tmp_path):
    write(tmp_path / "other", seed=1, characters="01234567+89=", width=16, layers=1)
    said = refused(task, tmp_path / "other")
    assert said.startswith(f"model.teacher_path = '{tmp_path / 'other'}': its tokenizer is not that of model.path = ")
    assert f"'{task / 'start'}': 3 tokens differ, as '+', which is number 11 there and number 13 here" in said
    assert "fppo sft" in said
    write(tmp_path / "few", seed=1, rows=14, width=16, layers=1)
    said = refused(task, tmp_path / "few")
    assert f"its embedding has 14 rows, fewer than the 15 of model.path = '{task / 'start'}'" in said
    write(tmp_path / "padded", seed=1, rows=32, width=16, layers=1)
    Inputs(settings=settings(task, {"model.teacher_path": str(tmp_path / "padded")})).need(*TRAIN)
    for file in (tmp_path / "padded").glob("tokenizer*"):
        file.unlink()
    said = refused(task, tmp_path / "padded")
    assert "it has 32 tokens and model.path" in said


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model.teacher_path": None}, "model.teacher_path = None: is not set, and distill holds the policy to it"),
        ({"algorithm.advantage": "distil"}, "there is no such estimator; did you mean distill"),
        ({"algorithm.advantage.gama": 0.5}, "distill has no such keyword; did you mean gamma"),
        ({"reward.functions": []}, "eval.temperature = 0.0: held-out responses are measured by their divergence"),
        ({**ALONE, "algorithm.advantage.score_coef": 1.0}, "score_coef = 1.0: nothing scores the responses"),
        ({**ALONE, "reward.overlong_buffer": 2}, "reward.overlong_buffer = 2: nothing reads it here"),
        ({"algorithm.advantage": "reinforce_plus_plus"}, "model.teacher_path = .*: nothing reads it here"),
        ({"algorithm.kl.coef": 0.1}, "algorithm.kl.coef = 0.1: distill does not read the token rewards"),
        ({"placement.roles.teacher": "t"}, "placement.roles.teacher = 't': there is no such pool"),
    ],
)
def test_settings_that_do_not_fit_a_teacher_are_named(task, changes, text):
    with pytest.raises(files.SettingsError, match=text):
        settings(task, changes)


def test_a_teacher_that_is_not_there_is_named_before_anything_is_loaded(task):
    (problem,) = places.place_problems(settings(task, {"model.teacher_path": "./nowhere"}))
    assert str(problem).startswith("model.teacher_path = './nowhere': there is no such file")


@pytest.mark.slow
def test_a_plan_has_the_teachers_memory_and_its_pass(task):
    taught = settings(task, {"model.teacher_dtype": "bfloat16"})
    alone = settings(task, {"algorithm.advantage": "reinforce_plus_plus", "model.teacher_path": None})
    with_teacher, without = (plan(case_of(each, PlanSettings(gpu="cpu"))) for each in (taught, alone))
    assert [x.name for x in with_teacher.stages] == ["teacher", *(x.name for x in without.stages)]
    own = sum(x.numel() for x in models.init_params(small_model(15, width=32, layers=2), Key(0)).values())
    assert with_teacher.parameters["teacher"] == own
    assert with_teacher.rest["teacher's parameters"] == 2 * own
    assert with_teacher.seconds > without.seconds


def words(group, number):
    """What stands before the prompt of a wrong response: the right answer."""
    return None if group.each[number].score == 1 else f"{group.ground_truth}={group.prompt}"


ITSELF = {
    "model.teacher_path": None,
    "model.teacher_decay": 0.5,
    "data.teacher_prompt": "tests.assembly.test_teacher:words",
    "rollout.n": 2,
    "actor.distill.name": "jensen_shannon",
    "actor.distill.beta": 0.3,
    "actor.distill.top": 3,
}


@pytest.mark.slow
def test_a_policy_that_teaches_itself_stops_and_goes_on_bit_for_bit_with_its_average(task, tmp_path):
    def run(name, **changes):
        own = {**ITSELF, "output_dir": str(tmp_path / name), **changes}
        assert actions.train(settings(task, own)) == 0
        return tmp_path / name

    whole, parts, fixed = run("whole"), run("parts", steps=2), run("fixed", **{"model.teacher_decay": 1.0})
    run("parts")
    states, resumed, others = (
        {x["step"]: x["state"] for x in jsonl.read(each / "digests.jsonl")} for each in (whole, parts, fixed)
    )
    assert resumed == states
    assert others[4] != states[4]  # the average is part of it
    assert actions.replay(whole, 3) == 0
    steps = [line for line in numbers(whole) if "teacher/taught" in line]
    assert len(steps) == 4
    assert all("actor/distill_loss" in line for line in steps)


def nothing(group, number):
    """None for each response."""


def number_of(group, number):
    """A number where a prompt is wanted."""
    return number + 7


@pytest.mark.slow
def test_a_run_says_that_none_of_its_responses_is_taught(task, tmp_path, capsys):
    changes = {"data.teacher_prompt": f"{__name__}:nothing", "output_dir": str(tmp_path / "run"), "steps": 1}
    assert actions.train(settings(task, {**ITSELF, **changes})) == 0
    assert "step 1: no response is taught: data.teacher_prompt returned None for each" in capsys.readouterr().err


@pytest.mark.slow
def test_a_number_in_place_of_a_teachers_prompt_is_named(task, tmp_path):
    changes = {"data.teacher_prompt": f"{__name__}:number_of", "output_dir": str(tmp_path / "run")}
    with pytest.raises(
        ValueError, match=r"data.teacher_prompt: .* for response 0 to .*: got 7; return text, messages or"
    ):
        actions.train(settings(task, {**ITSELF, **changes}))


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["shard", "sequence", "pipeline", "group"])
def test_a_policy_that_teaches_itself_on_a_mesh_or_in_a_pool_does_so_on_a_process(task, tmp_path, axis):
    tiny_run.write_task(tmp_path, layers=2)
    given = settings(tmp_path, {**ITSELF, "device": "cpu"})
    with assemble(given) as made:
        expected = steps_of(made)[-1]

    def on_rank(mesh):
        with assemble(given, mesh=attrs.evolve(mesh, sharding=Sharding())) as made:
            return steps_of(made)[-1]

    if axis == "group":
        with contextlib.ExitStack() as opened:
            places = RolePlaces({"actor": opened.enter_context(Group("actor", Threads()))})
            found = [steps_of(opened.enter_context(assemble(given, places=places)))[-1]]
    else:
        found = simulate({axis: 2}, on_rank)
    for each in found:
        torch.testing.assert_close(torch.tensor(each[0]), torch.tensor(expected[0]), rtol=1e-4, atol=1e-5)
        assert each[2]["actor/distill_loss"] == pytest.approx(expected[2]["actor/distill_loss"], rel=1e-3)


def first_rows(task, changes):
    with assemble(settings(task, {"model.teacher_path": None, **changes})) as made:
        return ppo_step(made.run, program=made.program, draw=made.draw)[1]


def halves(row):
    return "one" if row["ground_truth"] in "01234" else {"one": 0.25, "two": 0.75}


@pytest.mark.slow
def test_several_teachers_each_teach_their_rows_and_one_has_the_bits_of_a_teacher(task, tmp_path):
    write(tmp_path / "two", seed=7, width=16, layers=1)
    one, two = str(task / "teacher"), str(tmp_path / "two")
    alone = {path: first_rows(task, {"model.teacher_path": path}).teacher_log_probs for path in (one, two)}
    assert torch.equal(first_rows(task, {"model.teachers": {"one": one}}).teacher_log_probs, alone[one])
    named = {"model.teachers": {"one": one, "two": two}}
    half = first_rows(task, named).teacher_log_probs
    torch.testing.assert_close(half, (alone[one] + alone[two]) / 2)
    given = {"model.teacher_weights": {"one": 0.25, "two": 0.75}}
    torch.testing.assert_close(first_rows(task, named | given).teacher_log_probs, alone[one] / 4 + 0.75 * alone[two])
    rows = first_rows(task, named | {"model.teacher_by": "tests.assembly.test_teacher:halves"})
    first = torch.tensor([x in "01234" for x in rows.ground_truth])[:, None]
    assert 0 < first.sum() < 8
    expected = alone[one].where(first, alone[one] / 4 + 0.75 * alone[two])
    torch.testing.assert_close(rows.teacher_log_probs, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"a row's teacher is 'train', and model\.teachers has no"):
        first_rows(task, named | {"model.teacher_by": "source"})


@pytest.mark.slow
def test_teachers_that_are_adapters_stand_on_one_base(task, tmp_path):
    """Their log-probs are those of models with the adapters merged."""
    base, start = models.load(task / "start")
    taught, merged = {}, {}
    for name, seed in (("one", 1), ("two", 2)):
        model, adapter = lora.adapt(base, start, Lora(2, 16.0, ("all-linear",), "standard", ()), key=Key(seed))
        noise = Key(seed).generator()
        adapter = {x: y + 0.2 * torch.randn(y.shape, generator=noise) for x, y in adapter.items()}
        lora_files.save(model, adapter, tmp_path / name, base=str(task / "start"))
        models.save(base, lora.merged(model, adapter), tmp_path / f"{name}-whole", tokenizer=character_tokenizer())
        taught[name], merged[name] = str(tmp_path / name), str(tmp_path / f"{name}-whole")
    found = [first_rows(task, {"model.teachers": each}).teacher_log_probs for each in (taught, merged)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    write(tmp_path / "other", seed=1, characters="01234567+89=", width=16, layers=1)
    given = {"model.teacher_path": None, "model.teachers": {"one": taught["one"], "two": str(tmp_path / "other")}}
    with pytest.raises(files.SettingsError, match=r"model\.teachers\.two = '.*': its tokenizer is not that of"):
        Inputs(settings=settings(task, given)).need(*TRAIN)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model.teacher_decay": 0.5}, r"model\.teacher_path = .*: nothing reads it here"),
        ({**ITSELF, "data.teacher_prompt": None, "model.teacher_decay": 0}, "it would read what the policy reads"),
        ({**ITSELF, "reward.functions": []}, r"model\.teacher_decay = 0\.5: only a reward tells"),
        ({**ALONE, "data.teacher_prompt": "a:b"}, r"data\.teacher_prompt = 'a:b': makes prompts from scores"),
        ({**ITSELF, "mesh.tensor": 2}, r"mesh\.tensor = 2: actor\.distill reads whole distributions"),
        ({**ITSELF, "actor.distill.name": "none"}, r"actor\.distill\.beta"),
        ({"actor.distill.name": "kl"}, "there is no such divergence"),
        ({"model.teachers": {"a": "b"}}, r"model\.teacher_path = .*: model\.teachers has several"),
        ({"model.teachers": {"a": 1}}, r"model\.teachers = .*: must be directories by name"),
        ({"model.teacher_by": "source"}, r"model\.teacher_by = 'source': nothing reads it here"),
        (
            {"model.teacher_path": None, "model.teachers": {"a": "b", "c": "d"}, "model.teacher_weights": {"a": 1.0}},
            r"model\.teacher_weights = .*: give each of model\.teachers a number",
        ),
        (
            {"model.teacher_path": None, "model.teachers": {"a": "b", "c": "d"}, "actor.distill.name": "forward_kl"},
            "distributions of several teachers are not mixed",
        ),
    ],
)
def test_settings_that_do_not_fit_these_teachers_are_named(task, changes, text):
    with pytest.raises(files.SettingsError, match=text):
        settings(task, changes)
