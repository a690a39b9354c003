"""What an update loop refuses: sizes that the batch has not, and sources that fit one update alone."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fppo import losses
from fppo.key import Key
from fppo.steps.actor import UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from tests import tiny

OPTIMIZER = adamw(schedule("constant", 1e-3))
CUT = MicroBatching(size=4)


@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_mini_batch_is_no_larger_than_the_batch(head):
    model, params = tiny.model_and_params(head)
    make = partial(UpdateActor, loss_fn=losses.ppo_clip) if head == "lm" else UpdateCritic
    make = partial(make, forward=Forward(model), optimizer=OPTIMIZER)
    run = lambda **how: make(**how)(init_state(params, OPTIMIZER), tiny.experience(0, 4))  # noqa: E731
    with pytest.raises(ValueError, match="mini_batch_size=5: the batch has 4 rows; give at most as many"):
        run(loop=Loop(mini_batch_size=5, micro_batching=CUT))
    assert run(loop=Loop(mini_batch_size=4, micro_batching=CUT))[0].step == 1


@pytest.mark.parametrize("changes", [{"mini_batch_size": 0}, {"epochs": 0}])
def test_a_loop_without_an_update_is_refused(changes):
    with pytest.raises(ValueError, match="=0: give 1 or more"):
        Loop(**{"mini_batch_size": 1, "micro_batching": CUT, **changes})


@pytest.mark.parametrize(("changes", "fits"), [({}, True), ({"epochs": 2}, False), ({"mini_batch_size": 2}, False)])
def test_old_log_probs_of_the_update_itself_are_for_one_update(changes, fits):
    model, params = tiny.model_and_params()
    loop = Loop(**{"mini_batch_size": 4, "micro_batching": CUT, **changes})
    make = partial(UpdateActor, forward=Forward(model), loss_fn=losses.ppo_clip, loop=loop, optimizer=OPTIMIZER)
    run = lambda **how: make(**how)(init_state(params, OPTIMIZER), tiny.experience(0, 4))  # noqa: E731
    assert run()[0].step == (1 if fits else 2)
    if fits:
        run(old_log_probs="update")
    else:
        with pytest.raises(ValueError, match=r"old_log_probs='update' with .*the ratio is not 1; give 'pass'"):
            run(old_log_probs="update")


def test_episodes_of_a_prompt_are_drawn_together_whatever_rows_lie_between_them():
    """Episodes 7 and 9 are of one prompt, 8 and 4 of another; 7 and 9 have two rows each, one of them apart."""
    rows = SimpleNamespace(
        row_ids=torch.arange(6),
        groups=torch.tensor([0, 0, 1, 0, 1, 0]),
        episodes=torch.tensor([7, 7, 8, 9, 4, 9]),
    )
    loop = Loop(mini_batch_size=2, micro_batching=CUT, by_prompt=True)
    for seed in range(20):
        parts = {frozenset(part.tolist()) for part in loop.mini_batches(rows, Key(seed))}
        assert parts == {frozenset({0, 1, 3, 5}), frozenset({2, 4})}
