"""Our updates and steps keep the laws, and every law catches the mistake it is there for."""

from functools import partial

import attrs
import pytest
import torch

from fppo import batch as batches
from fppo import laws, losses, metrics, tree
from fppo.key import Key
from fppo.laws import layout, updates
from fppo.metrics import masked_mean, term
from fppo.runtime import checkpoint
from fppo.steps.actor import PolicyTerms, SelectiveLoss, UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop, Objective, update, weighted_sum
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.popart import UpdatePopart
from fppo.steps.train_state import Scale, init_state, optimizer_step
from tests import tiny


@pytest.fixture
def few(monkeypatch):
    """Examples of two rows and more: those between are for smaller counter-examples."""
    monkeypatch.setattr(updates, "SIZES", updates.SIZES[1::2])
    monkeypatch.setattr(layout, "SIZES", layout.SIZES[2:])


@pytest.mark.slow
def test_our_updates_keep_the_laws(few):
    laws.check_update(losses.ppo_clip)
    chosen_by_noise = partial(losses.select_clip_cov, ratio=0.3, low=-50.0, high=50.0)
    laws.check_update(SelectiveLoss(losses.clip_cov, chosen_by_noise), modes=("token-mean",))
    laws.check_update_fn(UpdateCritic, head="value", modes=("token-mean", "seq-mean-token-sum-norm"))
    bins = partial(UpdateCritic, loss_fn=partial(losses.hl_gauss, low=-2.0, high=2.0))
    laws.check_update_fn(bins, head="value", outputs=5, modes=("token-mean",))
    laws.check_update_fn(popart, head="value", modes=("token-mean",))


def popart(**bound):
    """PopArt's first update."""
    update = UpdatePopart(stage=UpdateCritic(**bound), rate=0.3)
    return lambda state, batch: update(tree.replace(state, scale=Scale()), batch, key=Key(0))


def local_mean(log_probs, old, advantages, mask):
    loss, report = losses.ppo_clip(log_probs, old, advantages, mask)
    return loss / mask.sum().clamp(min=1), report


def first_row_counts_twice(log_probs, old, advantages, mask):
    loss, report = losses.gpg(log_probs, old, advantages, mask)
    return torch.cat([2 * loss[:1], loss[1:]]), report


def mean_over_padding(log_probs, old, advantages, mask):
    loss, report = losses.gpg(log_probs, old, advantages, mask)
    return loss / mask.shape[1], report


def local_metric(log_probs, old, advantages, mask):
    loss, _ = losses.gpg(log_probs, old, advantages, mask)
    return loss, {"actor/spread": masked_mean(log_probs / mask.sum().clamp(min=1), mask)}


def infinite(log_probs, old, advantages, mask):
    return (log_probs.where(mask, 0.0) * torch.inf).where(mask, 0.0), {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_fn", "law", "words"),
    [
        (local_mean, "micro-batch split", "in micro-batches of 1, the gradient of"),
        (first_row_counts_twice, "micro-batch split", "2 x 1"),
        (local_metric, "micro-batch split", "metric actor/spread"),
        (mean_over_padding, "padding width", "1 x 1"),
        (infinite, "finite", "1 x 1"),
    ],
)
def test_a_broken_loss_is_shown_with_the_smallest_batch_on_which_it_is_broken(loss_fn, law, words, monkeypatch):
    monkeypatch.setattr(updates, "SIZES", updates.SIZES[:4])
    with pytest.raises(laws.LawViolation) as caught:
        laws.check_update(loss_fn, modes=("token-mean", "token-sum"))
    assert caught.value.law == law
    assert loss_fn.__name__ in str(caught.value)
    assert words in str(caught.value)
    assert "weight_mode" in str(caught.value)


def by_place(**settings):
    def update(state, batch):
        place = 1.0 + torch.arange(len(batch.tokens), dtype=torch.float64)[:, None]
        scaled = tree.replace(batch, advantages=batch.advantages * place)
        return UpdateActor(loss_fn=losses.gpg, **settings)(state, scaled)

    return update


def by_packing(*, forward, **settings):
    terms = PolicyTerms(temperature=1.0 if forward.remove_padding else 1.1)
    return UpdateActor(forward=forward, loss_fn=losses.gpg, terms=terms, **settings)


def by_mode(*, loop, **settings):
    if loop.weight_mode == "seq-mean-token-mean" and loop.micro_batching.size == 1:
        loop = attrs.evolve(loop, weight_mode="token-mean")
    return UpdateActor(loss_fn=losses.gpg, loop=loop, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "law", "words"),
    [
        (by_place, "row order", "with the rows in the order"),
        (by_packing, "packing", "remove_padding=False"),
        (by_mode, "micro-batch split", "weight_mode = 'seq-mean-token-mean'"),
    ],
)
def test_a_broken_update_is_caught(broken, law, words, few):
    with pytest.raises(laws.LawViolation) as caught:
        laws.check_update_fn(broken, modes=("token-mean", "seq-mean-token-mean"))
    assert caught.value.law == law
    assert words in str(caught.value)


def spread_loss(out, rows, weights, *, report):
    """A loss of one's own, with a term of its own; `report` makes the term's metric."""
    loss, sums = weighted_sum({"mine/likelihood": -out.log_probs, "mine/uncertainty": 0.1 * out.entropy}, weights)
    squares = (weights * out.log_probs.square()).sum()
    return loss + squares, sums | {"mine/squares": report(squares)}


def own_update(*, report=term, **settings):
    objective = Objective(loss=partial(spread_loss, report=report), outputs=("log_probs", "entropy"))
    return partial(update, objective=objective, prefix="mine", **settings)


@pytest.mark.slow
def test_a_term_of_ones_own_objective_counts_once_for_a_mini_batch_under_any_name(few):
    laws.check_update_fn(own_update, modes=("token-mean",))
    laws.check_layout_fn(own_update, modes=("token-mean",), max_ranks=2, each=1)
    batch, loop = tiny.experience(3, 6), Loop(mini_batch_size=3, micro_batching=MicroBatching(size=1))
    state, parts = init_state(PARAMS, OPTIMIZER), []
    own = own_update(forward=Forward(MODEL), loop=loop, optimizer=OPTIMIZER)
    _, report = own(state, batch)
    for numbers in (range(3), range(3, 6)):
        rows = batches.rows(batch, numbers)
        state, part = own(state, rows)
        parts.append(metrics.report(part))
    found = metrics.report(report)
    for name in ("mine/likelihood", "mine/uncertainty", "mine/squares"):
        assert found[name] == pytest.approx(sum(part[name] for part in parts) / 2), name


@pytest.mark.slow
def test_a_term_that_counts_once_for_a_micro_batch_is_caught():
    with pytest.raises(laws.LawViolation, match="metric mine/squares") as caught:
        laws.check_update_fn(partial(own_update, report=metrics.mean), modes=("token-mean",))
    assert caught.value.law == "micro-batch split"


MODEL, PARAMS = tiny.model_and_params()
OPTIMIZER = adamw(lambda step: 0.01 / (step + 1))


def actor_step(state, donate=False):
    return UpdateActor(
        forward=Forward(MODEL),
        loss_fn=losses.ppo_clip,
        loop=Loop(mini_batch_size=2, micro_batching=MicroBatching(size=1)),
        optimizer=OPTIMIZER,
    )(state, tiny.experience(state.step, 4), donate=donate)[0]


@pytest.mark.slow
def test_training_resumes_from_its_checkpoints_bit_for_bit(tmp_path):
    state = init_state(PARAMS, OPTIMIZER)

    def save(state):
        return checkpoint.begin_save(state, tmp_path, state.step).wait()

    laws.check_resume(
        actor_step, state, save=save, load=lambda path: checkpoint.load(state, tmp_path, int(path.name[5:]))
    )


def forgetful(state):
    return tree.replace(state, opt=init_state(state.params, OPTIMIZER).opt)


def test_a_checkpoint_that_forgets_the_moments_is_caught():
    with pytest.raises(laws.LawViolation, match=r"\.opt\.mu\['model.embed_tokens.weight'\] has other bits") as caught:
        laws.check_resume(actor_step, init_state(PARAMS, OPTIMIZER), save=lambda state: state, load=forgetful)
    assert {name: int(x) for name, x in caught.value.example.items()} == {"n": 1, "m": 0}


def test_a_step_with_a_memory_of_its_own_does_not_resume():
    calls = []

    def step(state):
        calls.append(state)
        return {"x": state["x"] + len(calls)}

    with pytest.raises(laws.LawViolation, match=r"step breaks the law \"resume\"(.|\n)*\['x'\]"):
        laws.check_resume(step, {"x": torch.zeros(2)}, save=tree.copy, load=tree.copy)


def test_updates_donate_and_are_pure():
    laws.check_donation(actor_step, init_state(PARAMS, OPTIMIZER))
    laws.check_purity(actor_step, init_state(PARAMS, OPTIMIZER))
    grads = tree.map(torch.ones_like, PARAMS)
    laws.check_purity(optimizer_step, init_state(PARAMS, OPTIMIZER), grads, optimizer=OPTIMIZER)


def overwrites(state, *, donate):
    return {"x": (state["x"].mul_(2) if donate else state["x"] * 2)}


def rounds(state, *, donate):
    return {"x": state["x"] * 2 + (1e-3 if donate else 0.0)}


def overwrites_always(state, *, donate):
    return {"x": state["x"].mul_(2)}


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (overwrites, "overwritten, not emptied"),
        (rounds, "with donation ['x'] has other bits"),
        (overwrites_always, "without donation it changed its argument"),
    ],
)
def test_a_false_donation_is_caught(step, words):
    with pytest.raises(laws.LawViolation) as caught:
        laws.check_donation(step, {"x": torch.ones(3)})
    assert words in str(caught.value)


@attrs.define
class Counter:
    calls: int = 0

    def __call__(self, x):
        self.calls += 1
        return x + self.calls


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x: x.add_(1), "it changed its argument: [0][0] has other bits"),
        (lambda x: x + torch.rand(()), "torch's global generator"),
        (Counter(), "a second call gave another result"),
    ],
)
def test_an_impure_function_is_caught(fn, words):
    with pytest.raises(laws.LawViolation) as caught:
        laws.check_purity(fn, torch.ones(3))
    assert words in str(caught.value)
