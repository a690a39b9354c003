"""Flags, settings and files arrive where a command's work is done."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import pytest
from transformers import LlamaConfig, PreTrainedConfig

from fppo._errors import UsageError
from fppo.assembly.environments import maker_of
from fppo.commands import check, serve
from fppo.commands.options import ServeOptions
from fppo.key import Key
from fppo.laws.expectation import KL
from fppo.rollout.engine import Sampling
from fppo.serve.service import Bounds
from fppo.settings import files
from fppo.settings.rollout import EnvironmentSettings
from fppo.studies.bias import of_run
from fppo.studies.plan.needs import RunNeeds
from tests import tiny_run
from tests.rollout.environments import Count


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


NEEDS = RunNeeds(
    gpu="h100",
    ranks=4,
    memory=3.0 * 2**30,
    tensors={"update actor": 2.0 * 2**30},
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
    assert "(125%): it does not fit (docs/guides/memory.md); " in check.needs_lines(over, settings, 32e9)[0]


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


def test_a_model_is_served_in_the_dtype_and_place_of_the_flags():
    found = serve.settings_of_model(
        ServeOptions(targets=("m",), compute_dtype="bfloat16", exact=True, device="cpu"), "m"
    )
    assert (found.model.path, found.model.compute_dtype, found.rollout.exact, found.device) == (
        *("m", "bfloat16"),
        *(True, "cpu"),
    )


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
