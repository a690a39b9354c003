"""What an update loop refuses: sizes that the batch has not, and sources that fit one update alone."""

from functools import partial

import pytest

from fppo import losses
from fppo.steps.actor import update_actor
from fppo.steps.critic import update_critic
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
    update = partial(update_actor, loss_fn=losses.ppo_clip) if head == "lm" else update_critic
    run = partial(
        update, init_state(params, OPTIMIZER), tiny.experience(0, 4), forward=Forward(model), optimizer=OPTIMIZER
    )
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
    run = partial(
        update_actor,
        init_state(params, OPTIMIZER),
        tiny.experience(0, 4),
        forward=Forward(model),
        loss_fn=losses.ppo_clip,
        loop=Loop(**{"mini_batch_size": 4, "micro_batching": CUT, **changes}),
        optimizer=OPTIMIZER,
    )
    assert run()[0].step == (1 if fits else 2)
    if fits:
        run(old_log_probs="update")
    else:
        with pytest.raises(ValueError, match=r"old_log_probs='update' with .*the ratio is not 1; give 'pass'"):
            run(old_log_probs="update")
