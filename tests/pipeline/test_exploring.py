"""The entropy bonus of a step follows its controller, whose state is the run's."""

from functools import partial

import attrs
import pytest
import torch

from fppo import losses, metrics, tree
from fppo.assembly.run import assemble
from fppo.losses import EntropyState
from fppo.pipeline.step import ppo_step
from fppo.pipeline.train import iterate
from fppo.runtime import checkpoint
from fppo.runtime.simulate import simulate
from fppo.settings.files import replace as with_settings
from fppo.steps.actor import PolicyTerms, UpdateActor
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import sgd
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from tests import tiny, tiny_run
from tests.pipeline.test_step import BATCH, Stages, run_of

RULE = partial(losses.update_entropy, target=0.5, rate=0.1)


class Reporting(Stages):
    """Stages whose update of the actor reports an entropy of 0.3."""

    def update(self, role):
        stage = super().update(role)

        def reporting(*given, **options):
            after, report = stage(*given, **options)
            return after, report | {f"{role}/entropy": metrics.mean(0.6, 2.0)}

        return reporting


@pytest.mark.parametrize("waits", [False, True])
def test_a_step_has_the_factor_of_its_state_and_moves_it(waits):
    """Not where the actor waits for the critic."""
    stages, before = Reporting(), EntropyState(coef=0.02)
    program = stages.program(hold_entropy=RULE, critic_warmup=9 * waits)
    after, experience, report = ppo_step(run_of(entropy=before), program=program, draw="draw")
    assert experience is BATCH  # whose digest does not depend on it: the state's does
    assert stages.calls["critic"][1].entropy_coef is None
    if waits:
        assert after.entropy is before
        assert "actor/entropy_coef" not in report
        return
    assert stages.calls["actor"][1].entropy_coef.tolist() == [0.02] * 4
    assert metrics.report(report)["actor/entropy_coef"] == 0.02
    assert torch.equal(after.entropy.coef, RULE(before, metrics.mean(0.6, 2.0)).coef)
    assert after.entropy.coef > before.coef


def test_a_state_and_its_rule_belong_together():
    for run, rule in ((run_of(entropy=EntropyState(coef=0.0)), None), (run_of(), RULE)):
        with pytest.raises(ValueError, match=r"RunState\.entropy and Program\.hold_entropy belong together"):
            ppo_step(run, program=Reporting().program(hold_entropy=rule), draw="draw")


def test_a_batch_s_factor_is_that_of_the_terms_on_every_mesh():
    """And quantiles are the same for any cut into micro-batches and ranks."""
    model, params = tiny.model_and_params("lm", layers=1)
    batch, optimizer = tiny.experience(3, 6), sgd(schedule("constant", 1.0), max_grad_norm=None)
    factor = attrs.evolve(batch, entropy_coef=torch.full((6,), 0.3, dtype=torch.float64))

    def run(batch, coef, size, mesh):
        loop = Loop(mini_batch_size=6, micro_batching=MicroBatching(size=size))
        terms = PolicyTerms(entropy_coef=coef, entropy_quantiles=True)
        update = UpdateActor(
            forward=Forward(model, mesh=mesh), loss_fn=losses.ppo_clip, loop=loop, optimizer=optimizer, terms=terms
        )
        after, report = update(init_state(params, optimizer), batch)
        return after.params, metrics.report(report)

    (expected, said), *_ = simulate({"replicate": 1}, lambda mesh: run(batch, 0.3, 6, mesh))
    assert said["actor/entropy/p10"] <= said["actor/entropy/p50"] <= said["actor/entropy/p90"]
    cases = [(factor, 0.0, 6, 1), (factor, 9.0, 1, 2), (batch, 0.3, 2, 2)]
    for given_, coef, size, ranks in cases:
        for found, report in simulate({"replicate": ranks}, partial(run, given_, coef, size)):
            for name, x in expected.items():
                torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-11)
            for percent in (10, 50, 90):
                assert report[f"actor/entropy/p{percent}"] == said[f"actor/entropy/p{percent}"]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    tiny_run.write_task(directory)
    return directory


def _steps(settings, begin=None, count=3):
    """The runs after each of so many steps, and the metrics."""
    with assemble(settings) as assembly:
        run = assembly.run if begin is None else begin(assembly)
        steps = iterate(run, program=assembly.program, draw=assembly.draw)
        return [(run, metrics.report(report)) for run, _, report in (next(steps) for _ in range(count))]


@pytest.mark.slow
def test_a_resumed_run_goes_on_bit_for_bit(task, tmp_path):
    control = {"target": 1.1, "unit": "start", "rate": 0.1}
    settings = with_settings(tiny_run.settings(task), {f"actor.entropy_control.{k}": x for k, x in control.items()})
    settings = with_settings(settings, {"actor.entropy_coef": 0.01, "actor.entropy_quantiles": True})
    whole = _steps(settings)
    factors = [report["actor/entropy_coef"] for _, report in whole]
    assert factors[0] == 0.01
    assert len(set(factors)) == 3
    checkpoint.begin_save(whole[0][0], tmp_path, 1).wait()
    rest = _steps(settings, begin=lambda assembly: checkpoint.load(assembly.run, tmp_path, 1), count=2)
    assert tree.digest(rest[-1][0]) == tree.digest(whole[-1][0])
    assert rest[-1][1]["actor/entropy_coef"] == factors[-1]
