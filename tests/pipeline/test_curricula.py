"""Runs whose prompts a curriculum chooses: what it learns of, and that they stop, go on and replay bit for bit."""

from functools import partial

import pytest
import torch

from fppo import data, tree
from fppo.assembly.run import assemble
from fppo.commands import actions, compare
from fppo.data import Course, DataCursor
from fppo.pipeline.draw import SampleGroups
from fppo.pipeline.program import SampleBatch
from fppo.pipeline.train import iterate
from fppo.runs import jsonl
from fppo.settings import files
from fppo.settings.compare import CompareSettings
from fppo.settings.plan import PlanSettings
from fppo.studies.plan.needs import needs_of
from fppo.tree import replace
from tests import tiny_run
from tests.pipeline.test_sample import PAD, _draw, _rollout, _run, _score


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    tiny_run.write_task(directory)
    return directory


CURRICULUM = {"data__curriculum": "learnability", "data__curriculum__explore": 0.2}


def rounds():
    """A curriculum of a test's own: the prompts in rounds, by a state of its own."""
    return data.Curriculum(
        init=lambda prompts: {"next": torch.tensor(0), "of": torch.tensor(len(prompts))},
        choose=lambda known, key, step, size: (known["next"] + torch.arange(size)) % known["of"],
        update=lambda known, indices, scores: known | {"next": known["next"] + 2},
    )


def _digests(directory):
    return {line["step"]: line["state"] for line in jsonl.read(directory / "digests.jsonl")}


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_with_a_curriculum_stops_goes_on_and_replays_bit_for_bit(task, tmp_path, ahead):
    given = CURRICULUM | {"rollout__ahead": ahead, "actor__optimizer__schedule": "constant"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert actions.train(tiny_run.settings(task, output_dir=str(whole), **given)) == 0
    for steps in (2, 4):
        actions.train(tiny_run.settings(task, output_dir=str(parts), steps=steps, **given))
    assert _digests(whole) == _digests(parts)
    assert actions.replay(whole, 4) == 0
    lines = [line for line in jsonl.read(whole / "metrics.jsonl") if line["step"]]
    shares = [line["curriculum/seen"] for line in lines]
    assert shares == sorted(shares)
    assert 0 < shares[-1] <= 1


def test_the_state_learns_from_the_scores_of_its_prompts(task):
    with assemble(tiny_run.settings(task, rollout__n=2, **CURRICULUM)) as assembly:
        run, experience, _ = next(iterate(assembly.run, program=assembly.program, draw=assembly.draw))
        numbers = {name: i for i, name in enumerate(assembly.inputs.prompts.ids)}
    known = run.cursor.course.known
    assert (run.cursor.course.step, run.cursor.position) == (1, 4)
    counted = known.successes + known.failures
    expected = torch.zeros(24).double()
    for name in experience.ids:
        expected[numbers[name]] += 1
    assert counted.tolist() == expected.tolist()
    assert float(known.successes.sum()) == float(experience.outcome.sum())


def test_a_curriculum_of_ones_own_chooses(task):
    own = {"data__curriculum": f"{__name__}:rounds"}
    with assemble(tiny_run.settings(task, **own)) as assembly:
        names = assembly.inputs.prompts.ids
        steps = iterate(assembly.run, program=assembly.program, draw=assembly.draw)
        drawn = [list(experience.ids) for _, (_, experience, _) in zip(range(2), steps)]
    assert drawn == [[names[i] for i in range(first, first + 8)] for first in (0, 2)]


def test_a_run_without_a_curriculum_has_the_state_that_it_had(task):
    with assemble(tiny_run.settings(task)) as assembly:
        paths = [path for path, _ in tree.leaves_with_paths(assembly.run.cursor)]
        assert paths == [".epoch", ".position"]
        assert assembly.program.sample == SampleBatch()


def test_groups_that_are_dropped_are_learned_of_too():
    """Else prompts that are always solved, or never, would be drawn again and again."""
    learned = []

    def learn(cursor, scored):
        learned.append((cursor.course.step, *scored.ids))
        return replace(cursor, course=replace(cursor.course, step=cursor.course.step + 1)), {}

    def draw(cursor):
        prompts, after = _draw(2)(cursor)
        return prompts, replace(after, course=cursor.course)

    table = {"0": [1, 1], "1": [0, 2], "2": [0, 0], "3": [1, 2]}
    cursor = DataCursor(course=Course(known=0))
    sample = SampleGroups(pad_token_id=PAD, learn=learn)
    batch, cursor, _ = sample(
        _run(step=7, cursor=cursor), draw=draw, rollout=partial(_rollout, n=2), score=partial(_score, table=table)
    )
    assert list(batch.ids) == ["1", "1", "3", "3"]
    assert learned == [(7, "0", "0", "1", "1"), (7, "2", "2", "3", "3")]
    assert cursor.course.step == 8


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"data.curriculum": "learnabilty"}, "did you mean learnability"),
        ({"data.curriculum": "learnability", "data.curriculum.dekay": 0.5}, "did you mean decay"),
        ({"data.curriculum": "easy_to_hard"}, "data.curriculum.steps = None: easy_to_hard needs it"),
        ({"data.curriculum": "learnability", "data.shuffle": False}, "leave one of them out"),
        ({"data.curriculum": "learnability", "data.sampler": "a:b"}, "chooses the prompts"),
    ],
)
def test_settings_that_do_not_fit_are_refused(task, changes, text):
    settings = files.replace(tiny_run.settings(task), changes)
    with pytest.raises(ValueError, match=text):
        files.check(settings)


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ({"data__curriculum": f"{__name__}:_digests_of_none"}, "it returned a NoneType"),
        ({"data__curriculum": "mixture", "data__curriculum__begin": {"gsm8k": 1.0}}, "no prompt is of source 'gsm8k'"),
    ],
)
def test_a_curriculum_that_does_not_fit_the_prompts_is_refused_before_any_work(task, own, text):
    with pytest.raises(ValueError, match=text), assemble(tiny_run.settings(task, **own)):
        pass


def _digests_of_none():
    return None


@pytest.mark.slow
def test_variants_of_a_comparison_and_a_plan_know_curricula(task):
    settings = files.replace(tiny_run.settings(task), {"data.curriculum": "mixture", "data.curriculum.power": 0.5})
    asked = CompareSettings(
        vary=("data.curriculum=none,learnability,mixture+data.curriculum.power=0.5",), metrics=("curriculum/seen",)
    )
    runs = [next(iter(seeds.values())) for seeds in compare.plan(settings, asked).values()]
    found = [(run.data.curriculum.name, run.data.curriculum.keywords) for run in runs]
    assert found == [("none", {}), ("learnability", {}), ("mixture", {"power": 0.5})]
    wrong = CompareSettings(vary=("data.curriculum=learnability+data.curriculum.decay=2.0",), metrics=("a",))
    with pytest.raises(ValueError, match=r"learnability\(decay=2.0\): decay = 2.0: must be 0 to 1"):
        compare.plan(settings, wrong)
    assert needs_of(settings, PlanSettings(gpu="cpu")).fits


def test_settings_of_a_mixture_survive_a_file(task, tmp_path):
    own = {"data.curriculum": "mixture", "data.curriculum.begin": {"train.jsonl": 1.0}, "data.curriculum.steps": 9}
    settings = files.replace(tiny_run.settings(task), own)
    files.save(settings, tmp_path / "a.toml")
    assert files.load(tmp_path / "a.toml") == settings
