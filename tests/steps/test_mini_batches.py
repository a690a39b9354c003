"""What an update draws by its key: mini-batches anew in every epoch, and selections by tempered log-probs."""

import attrs
import pytest
import torch

from fppo import losses
from fppo.batch import Experience
from fppo.key import Key
from fppo.steps.actor import PolicyTerms, SelectiveLoss, UpdateActor
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop, Objective, update
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from tests import tiny
from tests.steps.test_objectives import _plain

MODEL, PARAMS = tiny.model_and_params("lm")
BATCH = tiny.experience(4, 8)
STILL = adamw(schedule("constant", 0.0), max_grad_norm=None)  # the policy does not move: calls differ by their draws
EPOCHS, SIZE = 3, 4


@attrs.frozen
class Call:
    """What a selection was called with."""

    log_probs: torch.Tensor
    old: torch.Tensor
    noise: torch.Tensor


def selections(name="clip_cov", key=None, temperature=1.0, epochs=EPOCHS, size=SIZE, source="pass") -> list[Call]:
    """The calls of a selection over an update, in order."""
    calls: list[Call] = []

    def select(log_probs, old_log_probs, advantages, mask, *, noise):
        calls.append(Call(log_probs.detach().clone(), old_log_probs, noise))
        return getattr(losses, f"select_{name}")(log_probs, old_log_probs, advantages, mask, noise=noise)

    UpdateActor(
        forward=Forward(MODEL),
        loss_fn=SelectiveLoss(getattr(losses, name), select),
        loop=Loop(mini_batch_size=size, micro_batching=MicroBatching(size=3), epochs=epochs),
        optimizer=STILL,
        terms=PolicyTerms(temperature=temperature),
        old_log_probs=source,
    )(init_state(PARAMS, STILL), BATCH, key=key or Key(5))
    return calls


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_selections_see_the_log_probs_of_the_tempered_policy(name, temperature):
    """Those that the loss has, of which the old ones are too; by transformers' own model, row by row."""
    (call,) = selections(name, temperature=temperature, epochs=1, size=8)
    module = _plain(PARAMS)
    for row, seen in by_row(BATCH, [call.old], [call.log_probs])[0].items():
        mask = BATCH.response_mask[row]
        tokens = BATCH.tokens[row][BATCH.attention_mask[row]]
        logits = module(tokens[None]).logits[0, :-1] / temperature
        of_tokens = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        present = BATCH.attention_mask[row][-mask.shape[0] :]
        expected = torch.zeros(mask.shape[0], dtype=torch.float64)
        expected[present] = of_tokens[-int(present.sum()) :]
        torch.testing.assert_close(seen[mask], expected[mask], rtol=1e-6, atol=1e-6)


def by_row(batch: Experience, olds, columns):
    """The columns' rows by the rows' numbers in the batch, which their old log-probs tell."""
    found = []
    for old, column in zip(olds, columns, strict=True):
        rows = {}
        for number, own in enumerate(batch.old_log_probs):
            if own.any():
                place = next((place for place, other in enumerate(old) if torch.equal(own, other)), None)
                rows |= {} if place is None else {number: column[place]}
        found.append(rows)
    return found


@pytest.mark.slow
def test_a_selection_draws_anew_in_every_mini_batch_of_every_epoch():
    calls = selections()
    assert len(calls) == EPOCHS * len(BATCH.row_ids) // SIZE
    noises = by_row(BATCH, [call.old for call in calls], [call.noise for call in calls])
    of_row: dict[int, list[torch.Tensor]] = {}
    for rows in noises:
        for row, noise in rows.items():
            of_row.setdefault(row, []).append(noise)
    for drawn in of_row.values():
        assert len(drawn) == EPOCHS
        assert not any(torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    for call in calls:  # rows of one prompt too
        assert len({tuple(row) for row in call.noise.tolist()}) == len(call.noise)
    again = selections()
    assert all(torch.equal(one.noise, other.noise) for one, other in zip(calls, again, strict=True))
    other = selections(key=Key(6))
    assert not any(torch.equal(one.noise, two.noise) for one in calls for two in other)


def test_one_mini_batch_selects_by_another_draw_in_every_epoch():
    """With the same rows in each epoch only the draw can tell epochs apart."""
    calls = selections(size=len(BATCH.row_ids))
    noises = by_row(BATCH, [call.old for call in calls], [call.noise for call in calls])
    assert len(noises) == EPOCHS
    for row in noises[0]:
        assert not any(torch.equal(noises[i][row], noises[j][row]) for i in range(EPOCHS) for j in range(i))


def split_of(key: Key | None) -> list[list[int]]:
    """The rows of each mini-batch of an update."""
    split: list[list[int]] = []

    def prepare(params, mini, *, forward):
        split.append(mini.rows.row_ids.tolist())
        return mini.own

    update(
        init_state(PARAMS, STILL),
        BATCH,
        forward=Forward(MODEL),
        objective=Objective(loss=lambda out, rows, weights: (0.0 * out.log_probs.sum(), {}), prepare=prepare),
        loop=Loop(mini_batch_size=3, micro_batching=MicroBatching(size=8), epochs=4),
        optimizer=STILL,
        key=key,
    )
    return split


@pytest.mark.slow
def test_mini_batches_are_drawn_anew_in_every_epoch_and_each_row_comes_once():
    split = split_of(Key(2))
    epochs = [split[i : i + 3] for i in range(0, 12, 3)]
    for one in epochs:
        assert [len(mini) for mini in one] == [3, 3, 2]
        assert sorted(row for mini in one for row in mini) == list(range(8))
    assert not any(epochs[i] == epochs[j] for i in range(4) for j in range(i))
    assert split == split_of(Key(2)) != split_of(Key(3))
    in_order = split_of(None)
    assert in_order == [[0, 1, 2], [3, 4, 5], [6, 7]] * 4


def test_a_selection_has_the_old_log_probs_of_the_loss():
    """An update that takes them from its own pass has ratios of 1: they are the log-probs themselves."""
    (own,) = selections(epochs=1, size=8, source="update")
    assert torch.equal(own.old, own.log_probs)
    for source in ("pass", "engine", "auto"):
        (call,) = selections(epochs=1, size=8, source=source)
        assert torch.equal(call.log_probs, own.log_probs)
        assert not torch.equal(call.old, call.log_probs)


@pytest.mark.parametrize("source", ["pass", "engine", "update", "auto"])
def test_the_gap_to_the_engine_is_reported_where_no_pass_before_the_update_has_measured_it(source):
    stage = UpdateActor(
        forward=Forward(MODEL),
        loss_fn=losses.ppo_clip,
        loop=Loop(mini_batch_size=8, micro_batching=MicroBatching(size=3)),
        optimizer=STILL,
        old_log_probs=source,
    )
    _, report = stage(init_state(PARAMS, STILL), BATCH)
    gap = {name for name in report if name.startswith(("training/rollout_", "rollout_corr/"))}
    assert bool(gap) == (source in ("engine", "update"))
