"""Functions of one's own are looked at before a run, in a script and by settings, and not if that is turned off."""

from functools import partial

import attrs
import pytest
import torch

from fppo import advantages, laws, losses, models
from fppo.advantages import Advantages
from fppo.assembly.run import assemble
from fppo.pipeline import Program, checks, local_passes, stages
from fppo.rollout import EmbeddedEngine, Sampling
from fppo.settings.files import SettingsError
from fppo.steps import Forward, Loop, MicroBatching, SelectiveLoss, UpdateActor, UpdateCritic, adamw, init_state, muon
from fppo_kernels import table
from fppo_kernels.adamw import adamw_
from fppo_kernels.attention.eager import eager
from fppo_kernels.gae.loop import loop
from fppo_kernels.table import Kernels
from tests import tiny, tiny_run
from tests.models.families import OWN as OTHERS


def scalar(log_probs, old_log_probs, advantages, mask):
    per_token, report = losses.ppo_clip(log_probs, old_log_probs, advantages, mask)
    return per_token.mean(), report


def without_advantages(rows, rewards):
    return Advantages(rewards * float("nan"), rewards)


def of_scores(scores, mask, groups):
    return scores / 0.0


def halved(*args, **keywords):
    return 0.5 * eager(*args, **keywords)


def tripled(*args, selected):
    per_token, report = losses.clip_cov(*args, selected=selected)
    return torch.stack([per_token] * 3), report


def no_returns(rewards, values, mask, **keywords):
    return loop(rewards, values, mask, **keywords)[0], values


def forgetful(params, grads, exp_avgs, *args, **keywords):
    adamw_(params, grads, [torch.zeros_like(m) for m in exp_avgs], *args, **keywords)


ADAMW = adamw(lambda step: 1e-3)


def program(
    loss_fn=losses.ppo_clip,
    advantage_fn=None,
    attention=None,
    optimizer=ADAMW,
    critic_optimizer=ADAMW,
    model=None,
    **changes,
):
    kernels = Kernels.named() if attention is None else attrs.evolve(Kernels.named(), attention=attention)
    policy = Forward(model or models.build(tiny.config()), kernels=kernels)
    return Program(
        rollout=stages.RollOut(engine=None, sampling=Sampling(n=3)),
        score=stages.Score(score=None),
        annotate=stages.Annotate(passes=local_passes(policy, micro_batching=MicroBatching(size=1))),
        estimate=stages.Estimate(advantage_fn=advantage_fn, max_tokens=3),
        update_actor=UpdateActor(forward=policy, loss_fn=loss_fn, loop=None, optimizer=optimizer),
        update_critic=UpdateCritic(forward=policy, loop=None, optimizer=critic_optimizer),
        **changes,
    )


WRONG = [
    ({"loss_fn": scalar}, 'loss_fn: scalar breaks the law "per token"'),
    ({"loss_fn": partial(scalar)}, "loss_fn: partial(scalar) breaks"),
    ({"loss_fn": SelectiveLoss(tripled, losses.select_clip_cov)}, "loss_fn: tripled breaks"),
    ({"advantage_fn": without_advantages}, "advantage_fn: without_advantages breaks"),
    ({"advantage_fn": of_scores}, "advantage_fn: of_scores breaks"),
    ({"attention": halved}, "attention: halved breaks"),
    (
        {"advantage_fn": partial(advantages.gae, kernel=no_returns)},
        "gae: no_returns breaks",
    ),
    ({"optimizer": adamw(lambda step: 1e-3, kernel=forgetful)}, "adamw: forgetful breaks"),
    ({"critic_optimizer": adamw(lambda step: 1e-3, kernel=forgetful)}, "adamw: forgetful breaks"),
    ({"optimizer": muon(lambda step: 1e-3, kernel=forgetful)}, "adamw: forgetful breaks"),
]


@pytest.mark.parametrize(("bound", "words"), WRONG, ids=range(len(WRONG)))
def test_a_program_of_a_script_looks_at_what_is_bound_to_its_stages(bound, words):
    with pytest.raises(laws.LawViolation) as caught:
        program(**bound)
    assert str(caught.value).startswith(words)
    assert str(caught.value).endswith("Program(check=False) starts all the same.")
    assert not program(**bound, check=False).check


def one_column(rows, rewards):
    return Advantages(rewards.sum(1, keepdim=True), rewards)


def test_wrong_shapes_are_refused_where_nothing_was_looked_at():
    """By a script that calls updates and stages itself."""
    model, params = tiny.model_and_params()
    adam = adamw(lambda step: 1e-3)
    loop, state = Loop(mini_batch_size=4, micro_batching=MicroBatching(size=2)), init_state(params, adam)
    batch = tiny.experience(0, 4)
    with pytest.raises(ValueError, match=r"the policy loss is \[\], expected \[B, T\] = \[2, 6\]"):
        UpdateActor(forward=Forward(model), loss_fn=scalar, loop=loop, optimizer=adam)(state, batch)
    with pytest.raises(ValueError, match=r"the estimator gave advantages \[4, 1\], expected \[B, T\] = \[4, 6\]"):
        stages.Estimate(advantage_fn=one_column, max_tokens=6)(batch, losses.KLState(coef=0.0))


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(laws.LawViolation) as caught:
        program(scalar, without_advantages, halved)
    for name in ("loss_fn", "advantage_fn", "attention"):
        assert f"{name}: " in str(caught.value)


def test_a_model_that_was_built_and_runs_otherwise_is_refused(monkeypatch):
    """One that is loaded was looked at as it was; a script may build its own."""
    wrong = models.build(OTHERS["gpt_neo"])
    with pytest.raises(ValueError, match="cannot run model type 'gpt_neo': its layers compute attention in code of th"):
        program(model=wrong)
    program(model=wrong, check=False)
    checked = []
    monkeypatch.setattr(checks, "check_engine", checked.append)
    good = models.build(tiny.config())
    engine = EmbeddedEngine(model=good, kernels=Kernels.named(), pad_token_id=0)
    made = program()
    attrs.evolve(made, rollout=attrs.evolve(made.rollout, engine=engine))
    assert checked == [good]


def test_a_swapped_stage_is_looked_at_too():
    good = program()
    with pytest.raises(laws.LawViolation, match="scalar breaks"):
        attrs.evolve(good, update_actor=attrs.evolve(good.update_actor, loss_fn=scalar))
    attrs.evolve(good, update_actor=lambda state, batch, *, key, donate: (state, {}))  # nothing to look at


def test_what_is_the_librarys_own_is_not_looked_at():
    assert not any(checks.is_own(getattr(losses, name)) for name in ("ppo_clip", "gspo", "kl_cov"))
    assert not checks.is_own(partial(losses.ppo_clip, clip_low=0.1))
    assert not any(checks.is_own(fn) for fn in attrs.asdict(Kernels.named(), recurse=False).values())
    assert not checks.is_own(table.get("log_probs", "reference"))
    assert checks.is_own(partial(scalar))


OWN = {
    "actor__loss__name": f"{__name__}:scalar",
    "algorithm__advantage__name": f"{__name__}:without_advantages",
    "model__attention": f"{__name__}:halved",
}


def halved_gae(rewards, values, mask, *, gamma, lam):
    return tuple(x / 2 for x in table.get("gae", "scan")(rewards, values, mask, gamma=gamma, lam=lam))


@pytest.mark.parametrize("named", [OWN, {"algorithm__gae": f"{__name__}:halved_gae"}])
def test_a_run_by_settings_is_refused_before_any_work(tmp_path, named):
    settings = tiny_run.settings(tmp_path, **named)  # there is neither a model nor a prompt
    with pytest.raises(SettingsError) as caught, assemble(settings):
        pass
    assert len(caught.value.problems) == len(named) + 1
    assert "is not a directory with a model" in str(caught.value)
    for name, value in named.items():
        assert f"{name.replace('__', '.')} = {value!r}: " in str(caught.value)
    assert "--no-check, or check = false at the top of the file" in str(caught.value)


@pytest.mark.parametrize("off", [{"check": False}, {}])
def test_looking_can_be_turned_off_and_kernels_that_are_compared_may_be_wrong(tmp_path, off):
    tiny_run.write_task(tmp_path)
    with assemble(tiny_run.settings(tmp_path, **OWN, **off), kernels=None if off else Kernels.named()) as assembly:
        assert checks.field(assembly.program.update_actor, "loss_fn") is scalar
