"""Flags, settings and files arrive where a command's work is done."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig

from fppo._errors import UsageError
from fppo.assembly.environments import maker_of
from fppo.commands import ablate, audit, check, distributed, output, plan, serve
from fppo.commands.actions import ALONE
from fppo.commands.options import AuditOptions, ServeOptions
from fppo.key import Key
from fppo.laws.expectation import KL
from fppo.rollout.engine import Sampling
from fppo.runs import sampling
from fppo.serve.service import Bounds
from fppo.settings import files
from fppo.settings.ablate import AblateSettings
from fppo.settings.plan import PlanSettings
from fppo.settings.rollout import EnvironmentSettings
from fppo.studies.bias import of_run
from fppo.studies.plan.case import Role
from fppo.studies.plan.needs import RunNeeds
from fppo.studies.plan.search import TOKENS, Remedy
from tests import tiny, tiny_run
from tests.rollout.environments import Count
from tests.studies.plan.cases import case


def test_a_run_that_is_studied_has_the_settings_own_math(tmp_path):
    changes = {
        "actor__weight_mode": "seq-mean-token-mean",
        "algorithm__kl__coef": 0.03,
        "algorithm__kl__kind": "k1+",
        "algorithm__advantage": "rloo",
        "algorithm__whiten": True,
        "rollout__n": 4,
        "rollout__batch_size": 16,
    }
    found = of_run.run_bias(tiny_run.settings(tmp_path, **changes), "sizes")
    step = found.step
    assert (step.mode, step.n, step.kl, step.old_log_probs) == ("seq-mean-token-mean", 4, KL("k1+", 0.03), "pass")
    assert (step.correct, found.sizes, found.lag, found.whitens) == (None, "sizes", 0.0, True)


def test_a_run_with_a_kl_in_its_loss_and_the_engines_log_probs(tmp_path):
    changes = {
        "algorithm__kl__coef": 0.0,
        "algorithm__kl__controller": "fixed",
        "algorithm__kl__horizon": 10000,
        "actor__kl_coef": 0.2,
        "actor__kl_kind": "k2",
        "algorithm__old_log_probs": "engine",
        "algorithm__advantage": "reinforce_plus_plus",
        "rollout__n": 4,
    }
    found = of_run.run_bias(tiny_run.settings(tmp_path, **changes), "sizes")
    assert (found.step.kl, found.step.old_log_probs) == (KL("k2", 0.2, where="loss"), "engine")
    assert (found.lag, found.step.n) == (of_run.LAG, 2)  # it has no groups


def test_a_group_has_no_more_rows_than_can_be_listed(tmp_path):
    many = tiny_run.settings(tmp_path, algorithm__advantage="rloo", rollout__n=8)
    assert of_run.run_bias(many, "sizes").step.n == 4
    for n in (1, 2, 3):
        own = files.replace(many, {"rollout.n": n})
        assert of_run.run_bias(own, "sizes").step.n == max(2, n)


def test_a_correction_is_studied_where_the_engine_lies_off_the_policy(tmp_path):
    corrected = of_run.run_bias(tiny_run.settings(tmp_path, algorithm__correction__name="rollout"), "sizes")
    assert corrected.lag == of_run.LAG > of_run.run_bias(tiny_run.settings(tmp_path), "sizes").lag == 0.0


@pytest.mark.parametrize(
    ("advantage", "whiten", "expected"),
    [("gae", None, True), ("gae", False, False), ("rloo", None, False), ("rloo", True, True)],
)
def test_a_run_s_own_word_on_whitening_comes_before_its_estimator_s(tmp_path, advantage, whiten, expected):
    of = tiny_run.settings(tmp_path, algorithm__advantage=advantage, rollout__n=4)
    of = attrs.evolve(of, algorithm=attrs.evolve(of.algorithm, whiten=whiten))
    assert of_run.run_bias(of, "sizes").whitens is expected


def test_a_batch_is_audited_by_the_recipe_of_the_flags(monkeypatch):
    asked = []
    monkeypatch.setattr(audit.dump, "load", lambda *args: args)
    monkeypatch.setattr(audit.dump, "compare", lambda batch, recipe: asked.append((batch, recipe)) or [])
    monkeypatch.setattr(audit.dump, "text", lambda stages: "")
    monkeypatch.setattr(audit.dump, "to_json", lambda stages: "")
    options = AuditOptions(
        dump="a.safetensors",
        preset="trl",
        map=("old_log_probs=logprobs.old",),
        group_size=3,
        estimator="rloo",
        estimator_settings=("gamma=0.5", "scale=none"),
        whiten=True,
        loss="cispo",
        loss_settings=("clip_low=0.1,dual_clip=none",),
        mode="token-sum",
        horizon=7.0,
        tolerance=0.25,
    )
    assert audit.audit(options) == 0
    ((batch, recipe),) = asked
    assert batch == ("a.safetensors", audit.dump.PRESETS["trl"], {"old_log_probs": "logprobs.old"}, 3)
    assert recipe == audit.dump.Recipe(
        estimator="rloo",
        estimator_settings={"gamma": 0.5, "scale": "none"},
        whiten=True,
        loss="cispo",
        loss_settings={"clip_low": 0.1, "dual_clip": None},
        mode="token-sum",
        horizon=7.0,
        tolerance=0.25,
    )


@pytest.mark.parametrize(("outcomes", "status"), [((), 0), (("equal", "differs"), 1), (("equal", "equal"), 0)])
def test_one_stage_that_differs_is_a_fault(monkeypatch, outcomes, status):
    monkeypatch.setattr(audit.dump, "load", lambda *args: args)
    stages = [SimpleNamespace(outcome=outcome) for outcome in outcomes]
    monkeypatch.setattr(audit.dump, "compare", lambda batch, recipe: stages)
    monkeypatch.setattr(audit.dump, "text", lambda stages: "")
    monkeypatch.setattr(audit.dump, "to_json", lambda stages: "")
    assert audit.audit(AuditOptions(dump="a.safetensors")) == status


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_ablation_has_the_sizes_and_limits_of_its_flags(monkeypatch, interrupted):
    asked = {}
    shown = SimpleNamespace(interrupted=interrupted, rows=(), to_json=lambda: "")
    monkeypatch.setattr(ablate, "run_all", lambda ops, **named: asked.update(named, ops=ops) or shown)
    monkeypatch.setattr(ablate.text, "table", lambda ablation, width: "")
    options = AblateSettings(
        op=("gae",), shapes=("B=3,T=5",), dtypes=("float64",), repeats=7, law_seconds=2.5, device="cpu"
    )
    assert ablate.ablate(options) == (130 if interrupted else 0)
    del asked["progress"], asked["table"]
    assert asked == {
        "ops": ["gae"],
        "shapes": [{"B": 3, "T": 5}],
        "dtypes": ("float64",),
        "repeats": 7,
        "law_seconds": 2.5,
        "device": torch.device("cpu"),
    }


def remedy(what):
    return Remedy({TOKENS: 192, "mesh.stage": 3}, SimpleNamespace(case=what))


def test_passes_of_a_remedy_are_named_as_the_run_has_them(tmp_path):
    """By tokens or by sequences, and the critic's where it has the actor's."""
    both = tiny_run.settings(tmp_path, actor__micro_batch_size=4, critic__token_budget=999)
    assert plan._flags(both, remedy(case())) == {
        "mesh.stage": 3,
        "actor.micro-batch-size": 3,
        "critic.token-budget": 192,
    }
    own = case(roles={"critic": Role(tokens=64)})
    assert plan._flags(both, remedy(own)) == {"mesh.stage": 3, "actor.micro-batch-size": 3}
    policy = case(only=("actor",))  # whose critic is elsewhere
    assert plan._flags(both, remedy(policy)) == {"mesh.stage": 3, "actor.micro-batch-size": 3}
    alone = case(only=("critic",))
    assert plan._flags(both, remedy(alone)) == {"mesh.stage": 3, "critic.token-budget": 192}
    assert plan._flags(both, Remedy({"mesh.stage": 3}, SimpleNamespace(case=own))) == {"mesh.stage": 3}


NEEDS = RunNeeds(
    gpu="h100",
    ranks=4,
    memory=3.0 * 2**30,
    available=4.0 * 2**30,
    host=2.0 * 2**30,
    step=90.0,
    prompt=12,
    response=1500,
    pace=None,
    run=7200.0,
    checkpoint=5e9,
    model=25e6,
    disk=16e9,
)


def test_what_a_run_needs_is_said_in_its_own_units(tmp_path):
    settings = tiny_run.settings(tmp_path, steps=80, checkpoint__keep=2)
    memory, time, disk = check.needs_lines(NEEDS, settings, 32e9)
    assert memory.startswith("memory    3.00 GiB of 4.00 GiB a rank (75%): it fits; 4 x h100; ")
    assert memory.endswith("a process of the host 2.00 GiB")
    begins = "time      about 90 s a step, 2 h for 80 steps, with prompts of 12 tokens and responses of all 1,500, "
    assert time == f"{begins}at usual parts of the peak of a h100; without rewards by functions, evaluations and files"
    assert disk == (
        "disk      up to 16 GB: 2 checkpoints of 5 GB and one under way, a model of 25 MB, samples; 32 GB are free"
    )
    over = attrs.evolve(NEEDS, memory=5.0 * 2**30)
    assert "(125%): it does not fit; " in check.needs_lines(over, settings, 32e9)[0]


@pytest.mark.parametrize(("free", "found"), [(16e9, 0), (15.9e9, 1)])
def test_a_disk_that_is_too_small_is_a_fault(free, found):
    faults = check._faults(NEEDS, free, check.Rewarded(scores=()))
    assert len(faults) == found
    assert all(text == "the run writes up to 16 GB, and 15.9 GB are free" for text in faults)


def test_lengths_of_prompts_are_those_of_most_and_of_all():
    prompts = SimpleNamespace(tokens=[(0,) * length for length in range(1, 201)])
    (line,) = check._lengths(prompts)
    assert line.endswith("in tokens: 1 to 200, median 100.5, 99 % up to 198")
    for count, most in ((101, 100), (100, 99), (2, 1), (1, 1)):
        prompts = SimpleNamespace(tokens=[(0,) * length for length in range(count, 0, -1)])
        assert check._lengths(prompts)[0].endswith(f" up to {most}")


def test_a_batch_that_is_sampled_is_said_with_its_pace(tmp_path):
    scored = tiny.experience(0, 8)
    tokens = int(scored.response_mask.sum())
    line = sampling._summary(tiny_run.settings(tmp_path, steps=12), 3, scored, {"critic/score/mean": 0.25}, 0.5)
    assert line == f"batch  3/12  score 0.250  length {tokens / 8:.1f}  tok/s {2 * tokens}"


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(
    ("options", "config", "row"),
    [
        ({}, None, 4096),
        ({}, {"max_position_embeddings": 512, "rope_parameters": YARN}, 1024),
        ({}, {"max_position_embeddings": 512}, 512),
        ({"row_tokens": 100}, {"max_position_embeddings": 512}, 100),
        ({"row_tokens": 9000}, {"max_position_embeddings": 1 << 20}, 9000),
    ],
)
def test_a_servers_rows_are_as_long_as_flags_and_model_let_them(options, config, row):
    policy = SimpleNamespace(
        model=SimpleNamespace(config=PreTrainedConfig() if config is None else LlamaConfig(**config))
    )
    given = ServeOptions(targets=("m",), max_tokens=7, requests=9, **options)
    assert serve.bounds_of(given, policy) == Bounds(row_tokens=row, answer_tokens=7, requests=9)


def test_a_server_of_longer_rows_than_the_model_was_made_for_is_refused_by_name():
    policy = SimpleNamespace(model=SimpleNamespace(config=LlamaConfig(max_position_embeddings=512)))
    with pytest.raises(UsageError, match="--row-tokens 1000: the model was made for rows of 512 tokens"):
        serve.bounds_of(ServeOptions(targets=("m",), row_tokens=1000), policy)


def test_a_server_answers_as_its_flags_say_or_as_the_run_does():
    policy = SimpleNamespace(texts="texts", sampling=Sampling(max_tokens=3, n=4, temperature=0.5, top_p=0.25))
    bounds = Bounds()
    own = serve.sources_of(ServeOptions(targets=("a/b",), seed=3), policy, bounds, "a/b")
    assert (own.texts, own.key, own.bounds, own.model) == ("texts", Key(3), bounds, "b")
    assert own.sampling == attrs.evolve(policy.sampling, n=1)
    asked = ServeOptions(targets=("a/b",), temperature=0.75, top_p=0.125, name="mine")
    given = serve.sources_of(asked, policy, bounds, "a/b")
    assert (given.model, given.sampling) == ("mine", attrs.evolve(own.sampling, temperature=0.75, top_p=0.125))
    likeliest = serve.sources_of(ServeOptions(targets=("a/b",), temperature=0.0), policy, bounds, "a/b")
    assert likeliest.sampling == attrs.evolve(own.sampling, greedy=True)
    policy.sampling = likeliest.sampling  # as of a run that takes them
    assert serve.sources_of(asked, policy, bounds, "a/b").sampling == given.sampling


def test_newer_checkpoints_are_looked_for_now_and_then(monkeypatch):
    clock, newest, loaded = [0.0], [4], []
    monkeypatch.setattr(serve, "now", lambda: clock[0])
    monkeypatch.setattr(serve.saved, "newest", lambda directory: newest[0])
    monkeypatch.setattr(serve, "_loaded", lambda *given: loaded.append(given) or ("params", 10 * given[-1]))
    follow = serve.FollowedRun(Path("run"), "policy", 5.0, 4)
    for at, there, expected in (
        (4.9, 6, None),
        (5.0, 4, None),
        (9.0, 6, None),
        (10.0, 6, ("params", 60)),
        (15.0, 6, None),
        (20.0, 8, ("params", 80)),
    ):
        clock[0], newest[0] = at, there
        assert follow() == expected, at
    assert loaded == [(Path("run"), "policy", step) for step in (6, 8)]


def test_a_model_is_served_in_the_dtype_and_place_of_the_flags():
    found = serve.settings_of_model(
        ServeOptions(targets=("m",), compute_dtype="bfloat16", exact=True, device="cpu"), "m"
    )
    assert (found.model.path, found.model.compute_dtype, found.rollout.exact, found.device) == (
        *("m", "bfloat16"),
        *(True, "cpu"),
    )


def test_episodes_of_one_server_are_in_files_with_numbers_in_a_row(tmp_path, monkeypatch):
    """Each has those that came since the one before, grouped by their names."""
    made, saved = [], []
    monkeypatch.setattr(serve, "rollout_of_rows", lambda rows, **named: made.append((rows, named)) or "rollout")
    monkeypatch.setattr(serve.batches, "save", lambda rollout, path: saved.append(path.name) or path.touch())
    (tmp_path / "episodes_000001.safetensors").touch()  # an earlier server's
    writer = serve.EpisodeFiles(tmp_path, 13, most=3)
    for name, rows in (("a", ["r1"]), ("b", ["r2", "r3"]), ("c", ["r4"])):
        writer.add(name, rows)
    writer.close()
    assert saved == ["episodes_000002.safetensors", "episodes_000003.safetensors"]
    assert made[0] == (
        ["r1", "r2", "r3"],
        {"pad_token_id": 13, "groups": [0, 1, 1], "columns": {"ids": ["a", "b", "b"]}},
    )
    assert made[1][0] == ["r4"]
    episodes = SimpleNamespace(names=lambda: ["d", "e"], take=lambda name: [f"of {name}"])
    writer.end(episodes)
    assert made[2][0] == ["of d", "of e"]


def test_a_model_is_served_before_its_first_update_and_a_run_after_so_many(tmp_path, monkeypatch):
    policy = SimpleNamespace(params={"w": 1})
    asked = []
    monkeypatch.setattr(serve, "served_policy", lambda settings, *, begins: asked.append(begins) or policy)
    assert serve._policy(ServeOptions(targets=("m",)), str(tmp_path / "m")) == (policy, {"w": 1}, 0, None)
    (tmp_path / serve.session.SETTINGS).touch()
    monkeypatch.setattr(serve.starts, "load", lambda directory: tiny_run.settings(tmp_path))
    monkeypatch.setattr(serve.saved, "newest", lambda directory, step=None: 4)
    monkeypatch.setattr(serve.saved, "bare", lambda settings: settings)
    run = SimpleNamespace(step=4, actor=SimpleNamespace(params="params", step=32))
    monkeypatch.setattr(serve.saved, "policy", lambda model, path, *, device: run)
    policy.model, policy.device = "model", "cpu"
    found = serve._policy(ServeOptions(targets=("m",)), str(tmp_path))
    assert found == (policy, "params", 32, None)
    *_, follow = serve._policy(ServeOptions(targets=("m",), follow=2.0), str(tmp_path))
    assert isinstance(follow, serve.FollowedRun)
    assert asked == [True, False, False]
    with pytest.raises(serve.UsageError, match="no checkpoint of step 3"):
        serve._policy(ServeOptions(targets=("m",), step=3), str(tmp_path))


@pytest.mark.parametrize(("attempt", "expected"), [(0, "never"), (1, "auto")])
def test_ranks_that_are_started_again_go_on_from_their_own_checkpoints(tmp_path, monkeypatch, attempt, expected):
    place = SimpleNamespace(world=1, started=True, attempt=attempt, local_rank=0)
    monkeypatch.setattr(distributed.Place, "of_environment", lambda: place)
    seen = []
    settings = tiny_run.settings(tmp_path, resume="never", device="cpu")
    assert distributed.run(lambda settings, here: seen.append((settings.resume, here)) or 3, settings, []) == 3
    assert seen == [(expected, ALONE)]


INSTANCE, NUMBER = Count(), 3


def test_an_environment_that_is_made_already_takes_no_keywords():
    name = f"{__name__}:INSTANCE"
    make, asynchronous = maker_of(EnvironmentSettings(name=name))
    assert make() is INSTANCE
    assert not asynchronous
    with pytest.raises(ValueError, match=r"is an environment, which takes no keywords, not \['a'\]; name its class"):
        maker_of(EnvironmentSettings(name=name, keywords={"a": 1}))
    with pytest.raises(ValueError, match=r"NUMBER': is no environment: name a class"):
        maker_of(EnvironmentSettings(name=f"{__name__}:NUMBER", keywords={"a": 1}))


@pytest.mark.parametrize("place", [None, "-", "new/x.json"])
def test_results_are_shown_in_words_or_as_numbers_and_written_with_a_line_break(tmp_path, capsys, place):
    path = place if place in (None, "-") else str(tmp_path / place)
    output.show("words", '{"a": "é"}\n\n', path)
    assert capsys.readouterr().out == ('{"a": "é"}\n\n\n' if place == "-" else "words\n")
    written = [file.read_text(encoding="utf-8") for file in tmp_path.rglob("*.json")]
    assert written == ([] if place in (None, "-") else ['{"a": "é"}\n'])


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("tries", [True, False])
def test_what_would_help_is_sought_where_it_is_asked_for_and_needed(tmp_path, monkeypatch, fits, tries):
    """For the pool, by the flags of the run."""
    estimate, shown = SimpleNamespace(fits=fits), []
    found = Remedy({TOKENS: 192}, SimpleNamespace(case=case()))
    monkeypatch.setattr(plan, "plan", lambda case: {"case": estimate}[case])
    monkeypatch.setattr(plan, "remedies", lambda given: [found] if given is estimate else None)
    monkeypatch.setattr(plan.text, "of_plan", lambda *given: shown.append(given) or ["text"])
    monkeypatch.setattr(plan.text, "numbers_of_plan", lambda *given: shown.append(given) or {"numbers": 1})
    options = PlanSettings(gpu="cpu", tries=tries)
    made = plan._planned(tiny_run.settings(tmp_path), options, "case", "p")
    assert made == (["text"], {"numbers": 1}, fits)
    flags = {"actor.token-budget": 192, "critic.token-budget": 192}
    helping = [attrs.evolve(found, pool="p", flags=flags)] if tries and not fits else None
    assert shown == [(estimate, helping)] * 2
