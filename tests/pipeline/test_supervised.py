"""A step of a supervised run by what it hands to its update, and held-out losses against a loop over tokens."""

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import metrics
from fppo.data.cursor import DataCursor
from fppo.key import Key
from fppo.pipeline.program import RunState
from fppo.pipeline.supervised import EvaluateLoss, Imitation, imitate_step, imitate_steps
from fppo.steps.clock import Clock, at_step
from fppo.steps.outputs import TokenOutputs
from fppo.steps.supervised import demonstrations
from fppo.steps.train_state import TrainState

BATCH = demonstrations([[5], [6, 7, 8]], [[1, 2, 3], [4]], pad_token_id=0)


def drawn(cursor):
    return BATCH, attrs.evolve(cursor, position=cursor.position + 2)


@pytest.mark.parametrize("clock", [None, Clock()])
def test_a_step_updates_the_policy_by_its_own_key_and_moves_cursor_step_and_clock(clock):
    calls = []

    def update(state, batch, *, key, donate):
        calls.append((state, batch, key, donate))
        after = attrs.evolve(state, params={"w": state.params["w"] + 1}, step=state.step + 3)
        return after, {"supervised/nll_loss": metrics.mean(2.0), "supervised/skipped": metrics.mean(0.0)}

    state = TrainState(params={"w": torch.zeros(1)}, opt=None, step=7, clock=clock)
    run = RunState(actor=state, key=Key(4), cursor=DataCursor(position=2), step=5)
    done, batch, report = imitate_step(run, imitation=Imitation(draw=drawn, update=update, steps=9), donate=True)
    ((seen, of_update, key, donate),) = calls
    assert of_update is BATCH
    assert batch is BATCH
    assert (key, donate) == (Key(4).fold("step", 5).fold("actor"), True)
    expected = None if clock is None else at_step(clock, 5, 9)
    assert (seen.clock is None and clock is None) or attrs.asdict(seen.clock) == attrs.asdict(expected)
    assert (done.step, done.cursor.position, done.actor.step, done.key) == (6, 4, 10, Key(4))
    assert done.actor.params["w"].item() == 1
    if clock is not None:
        assert (done.actor.clock.first, done.actor.clock.step, done.actor.clock.steps) == (5, 0, 0)
    numbers = metrics.report(report)
    assert numbers.pop("timing_s/update_actor") >= 0
    assert numbers == {
        "supervised/nll_loss": 2.0,
        "supervised/skipped": 0.0,
        "perf/total_num_tokens": 8.0,
        "row_length/mean": 4.0,
        "row_length/max": 4.0,
        "response_length/mean": 2.0,
    }
    steps = imitate_steps(run, imitation=Imitation(draw=drawn, update=update, steps=9))
    assert [next(steps)[0].step for _ in range(2)] == [6, 7]


@given(st.integers(0, 99))
def test_held_out_losses_are_means_over_imitated_tokens_by_source(seed):
    """In nats per token, of all batches together, however many tokens each has of a source."""
    g = torch.Generator().manual_seed(seed)
    batches, numbers = [], []
    for rows in (3, 2):
        lengths = torch.randint(1, 5, (rows,), generator=g).tolist()
        imitated = [[bool(x) for x in (torch.rand(n, generator=g) < 0.7).tolist()] for n in lengths]
        batch = demonstrations([[5]] * rows, [[6] * n for n in lengths], pad_token_id=0, imitated=imitated)
        batches.append((batch, [f"s{i % 2}" for i in range(rows)]))
        log_probs = -torch.rand(batch.response_mask.shape, generator=g, dtype=torch.float64)
        numbers.append(log_probs.where(batch.response_mask, torch.nan))
    asked = []

    def policy(params, rows, *, outputs):
        asked.append((params, outputs))
        return TokenOutputs(log_probs=next(x for (batch, _), x in zip(batches, numbers) if batch is rows))

    run = RunState(actor=TrainState(params={"own": torch.ones(1)}, opt=None, step=0), key=Key(0))
    report = EvaluateLoss(batches=lambda: batches, policy=policy)(run)
    assert asked == [(run.actor.params, ("log_probs",))] * 2
    for source in ("s0", "s1"):
        losses = [
            -x[row, t].item()
            for (batch, sources), x in zip(batches, numbers, strict=True)
            for row, t in batch.response_mask.nonzero().tolist()
            if sources[row] == source
        ]
        found = report[f"val-core/{source}/nll_loss/mean@1"]
        assert found.count.item() == len(losses)
        assert found.total.item() == pytest.approx(sum(losses))
    assert len(report) == 2
