"""Every metric of an update against its definition, token by token, over mini-batches and epochs of unequal sizes.

The policy does not move, so that all passes see the same numbers; they are those of passes of their own.
"""

import math
from functools import partial
from types import SimpleNamespace

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import batch as batches
from fppo import losses, metrics
from fppo.batch import Experience
from fppo.key import Key
from fppo.models import flops
from fppo.steps import experts
from fppo.steps.actor import PolicyTerms, UpdateActor, rollout_gap
from fppo.steps.clock import Clock, Timeline, at_step
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward, compute_outputs, compute_values
from fppo.steps.hidden import UpdateHidden, hidden_values, init_hidden
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw, sgd
from fppo.steps.packed import masks_and_tokens
from fppo.steps.ranks import saved_work
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from fppo.tree import replace
from tests import tiny

ACTOR, ACTOR_PARAMS = tiny.model_and_params("lm")
CRITIC, CRITIC_PARAMS = tiny.model_and_params("value", seed=1)
STILL = adamw(schedule("constant", 0.0), max_grad_norm=None)
ROWS, SIZE, EPOCHS, HORIZON, LOW, HIGH, DUAL, MARGIN = 7, 4, 2, 9, 0.1, 0.3, 1.2, 0.4
SPLIT = [range(4), range(4, 7)]  # the rows of each mini-batch
MODES = [*losses.MODES]


def weight_of(batch: Experience, rows: range, row: int, mode: str) -> float:
    """The weight of a token of a row, in the mini-batch of these rows."""
    lengths = [int(batch.response_mask[i].sum()) for i in rows]
    count = sum(1 for n in lengths if n)
    own = int(batch.response_mask[row].sum())
    if mode == "token-mean":
        return 1 / sum(lengths)
    if mode == "token-sum":
        return 1.0
    return {"seq-mean-token-sum": 1.0, "seq-mean-token-mean": 1 / own, "seq-mean-token-sum-norm": 1 / HORIZON}[
        mode
    ] / count


def make_loop(mode: str, cut: MicroBatching) -> Loop:
    horizon = HORIZON if mode == "seq-mean-token-sum-norm" else None
    return Loop(mini_batch_size=SIZE, micro_batching=cut, epochs=EPOCHS, weight_mode=mode, horizon=horizon)


def make_batch(seed: int) -> Experience:
    """Rows with weights of a correction, tokens without an entropy bonus, and outcomes that are no scores."""
    batch, g = tiny.experience(seed, ROWS), torch.Generator().manual_seed(seed)
    shape = batch.response_mask.shape
    old = compute_outputs(ACTOR_PARAMS, batch, forward=Forward(ACTOR), micro_batching=MicroBatching(ROWS)).log_probs
    assert old is not None
    apart = 0.4 * torch.randn(shape, generator=g, dtype=torch.float64)
    return batches.extend(
        Experience,
        batch,
        old_log_probs=(old + apart).where(batch.response_mask, torch.nan),
        rollout_log_probs=(old + 0.1 * apart).where(batch.response_mask, torch.nan),
        correction_weights=torch.rand(shape, generator=g, dtype=torch.float64),
        entropy_mask=torch.rand(shape, generator=g) < 0.6,
        scores=torch.randn(ROWS, generator=g),
        outcomes=torch.randn(ROWS, generator=g),
    )


def policy_terms(batch: Experience, terms: PolicyTerms, row: int, column: int, new: float, entropy: float) -> dict:
    """The terms of a token's loss, and what the metrics count of it."""
    old, ref, a, c, explored = (
        getattr(batch, name)[row, column].item()
        for name in ("old_log_probs", "ref_log_probs", "advantages", "correction_weights", "entropy_mask")
    )
    ratio = math.exp(new - old)
    plain, clipped = -a * ratio, -a * min(max(ratio, 1 - LOW), 1 + HIGH)
    loss = max(plain, clipped)
    cut = a < 0 and loss > -a * DUAL
    kl = math.exp(ref - new) - 1 - (ref - new)
    return {
        "pg_loss": c * (-a * DUAL if cut else loss),
        "entropy_loss": -terms.entropy_coef * entropy * explored,
        "kl_loss": terms.kl_coef * ratio * c * kl,
        "entropy": entropy,
        "pg_clipfrac": clipped > plain,
        "pg_clipfrac_lower": cut,
        "ppo_kl": old - new,
    }


@pytest.mark.parametrize("mode", MODES)
def test_the_actors_metrics_are_their_definitions(mode):
    cut = MicroBatching(size=3) if MODES.index(mode) % 2 else MicroBatching(token_budget=20)
    batch = make_batch(MODES.index(mode))
    terms = PolicyTerms(temperature=1.3, entropy_coef=0.3, kl_coef=0.7, nll_coef=0.2)
    update = UpdateActor(
        forward=Forward(ACTOR),
        loss_fn=partial(losses.ppo_clip, clip_low=LOW, clip_high=HIGH, dual_clip=DUAL),
        loop=make_loop(mode, cut),
        optimizer=STILL,
        terms=terms,
        old_log_probs="engine",
    )
    _, report = update(init_state(ACTOR_PARAMS, STILL), batch)
    out = compute_outputs(
        ACTOR_PARAMS,
        batch,
        forward=Forward(ACTOR),
        micro_batching=MicroBatching(ROWS),
        outputs=("log_probs", "entropy"),
        temperature=terms.temperature,
    )
    expected: dict[str, tuple[float, float]] = {}  # sums and counts
    add = partial(add_to, expected)
    for rows in SPLIT:
        sums = dict.fromkeys(("pg_loss", "entropy_loss", "kl_loss", "nll_loss"), 0.0)
        positive = sum(int(batch.response_mask[i].sum()) for i in rows if batch.outcomes[i] > 0)
        for row, column in ((i, t) for i in rows for t in batch.response_mask[i].nonzero().flatten().tolist()):
            new, entropy = out.log_probs[row, column].item(), out.entropy[row, column].item()
            found = policy_terms(batch, terms, row, column, new, entropy)
            for name in ("pg_loss", "entropy_loss", "kl_loss"):
                sums[name] += weight_of(batch, rows, row, mode) * found[name]
            if batch.outcomes[row] > 0:
                sums["nll_loss"] -= terms.nll_coef * new / positive
            for name in ("entropy", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"):
                add(f"actor/{name}", found[name])
        for name, x in sums.items():
            add(f"actor/{name}", x)
    expected = {name: (EPOCHS * x, EPOCHS * n) for name, (x, n) in expected.items()}
    first = batches.rows(batch, list(SPLIT[0]))
    gap = rollout_gap(out.log_probs[: len(SPLIT[0])], first.rollout_log_probs, first.response_mask)
    check(report, expected, gap, "actor")


@pytest.mark.parametrize("source", ["pass", "auto", "engine", "update"])
def test_the_gap_to_the_engine_is_reported_where_no_pass_before_the_update_does(source):
    batch = make_batch(3)
    loop = Loop(mini_batch_size=ROWS, micro_batching=MicroBatching(size=3))
    parts = {"forward": Forward(ACTOR), "loss_fn": losses.ppo_clip, "loop": loop, "optimizer": STILL}
    _, report = UpdateActor(**parts, old_log_probs=source)(init_state(ACTOR_PARAMS, STILL), batch)
    old = compute_outputs(ACTOR_PARAMS, batch, forward=Forward(ACTOR), micro_batching=MicroBatching(ROWS)).log_probs
    gap = rollout_gap(old, batch.rollout_log_probs, batch.response_mask) if source in ("engine", "update") else {}
    assert {name for name in report if not name.startswith("actor/")} == gap.keys()
    for name, metric in gap.items():
        for one, other in zip(report[name], metric, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9, equal_nan=True, msg=name)


def test_the_critics_metrics_are_their_definitions():
    for mode in ("token-mean", "seq-mean-token-mean"):
        batch = make_batch(MODES.index(mode))
        forward = Forward(CRITIC)
        cut = MicroBatching(size=3)
        values = compute_values(CRITIC_PARAMS, batch, forward=forward, micro_batching=cut)
        batch = attrs.evolve(batch, values=(values + 0.5 * batch.advantages).where(batch.response_mask, torch.nan))
        update = UpdateCritic(
            forward=forward,
            loop=make_loop(mode, cut),
            optimizer=STILL,
            loss_fn=partial(losses.value_loss, clip=MARGIN),
        )
        _, report = update(init_state(CRITIC_PARAMS, STILL), batch)
        check(report, value_metrics(batch, values, mode), {}, "critic")


@pytest.mark.parametrize("mode", MODES)
def test_the_metrics_of_a_critic_without_a_model_are_their_definitions(mode):
    """A critic that reads hidden states, over the mini-batches and epochs of the others, at the clock's rates."""
    batch, g = make_batch(MODES.index(mode)), torch.Generator().manual_seed(0)
    hidden = torch.randn(*batch.response_mask.shape, 3, generator=g, dtype=torch.float64)
    params = {name: x.double() + 0.3 for name, x in init_hidden(Key(0), 3, width=4).items()}
    values = hidden_values(params, hidden, batch.response_mask)
    batch = attrs.evolve(batch, hidden=hidden, values=values + 0.5 * batch.advantages)
    loss_fn = partial(losses.value_loss, clip=MARGIN)
    update = UpdateHidden(loop=make_loop(mode, MicroBatching(size=3)), optimizer=STILL, loss_fn=loss_fn)
    _, report = update(init_state(params, STILL), batch)
    check(report, value_metrics(batch, values, mode), {}, "critic")


def test_a_critic_without_a_model_keeps_the_clock():
    """Its schedule falls from update to update of a step, in mini-batches that are not all full."""
    batch, rate = make_batch(0), schedule("linear", 0.1, total_steps=8, warmup_steps=2)
    params = {name: x.double() for name, x in init_hidden(Key(0), 3, width=4).items()}
    batch = attrs.evolve(batch, hidden=torch.ones(*batch.response_mask.shape, 3), values=batch.returns)
    loop = attrs.evolve(make_loop("token-mean", MicroBatching(size=3)), timeline=Timeline(2, 8))
    optimizer, reports = sgd(rate), []
    state = replace(init_state(params, optimizer), clock=Clock())
    for step in range(2):
        state = replace(state, clock=at_step(state.clock, step, 2))
        state, report = UpdateHidden(loop=loop, optimizer=optimizer)(state, batch)
        reports.append(report["critic/lr"].total.item())
    assert reports == pytest.approx([sum(rate(n) for n in range(4)), sum(rate(n) for n in range(4, 8))])
    assert state.step == 8


def value_metrics(batch: Experience, values: torch.Tensor, mode: str) -> dict[str, tuple[float, float]]:
    expected: dict[str, tuple[float, float]] = {}
    add = partial(add_to, expected)
    for rows in SPLIT:
        total = 0.0
        for row, column in ((i, t) for i in rows for t in batch.response_mask[i].nonzero().flatten().tolist()):
            v, old, goal = (x[row, column].item() for x in (values, batch.values, batch.returns))
            near = min(max(v, old - MARGIN), old + MARGIN)
            total += weight_of(batch, rows, row, mode) * max((v - goal) ** 2, (near - goal) ** 2) / 2
            add("critic/vpred_mean", v)
            add("critic/vf_clipfrac", (near - goal) ** 2 > (v - goal) ** 2)
        add("critic/vf_loss", total)
    return {name: (EPOCHS * x, EPOCHS * n) for name, (x, n) in expected.items()}


def add_to(expected: dict[str, tuple[float, float]], name: str, x: float) -> None:
    total, count = expected.get(name, (0.0, 0.0))
    expected[name] = total + x, count + 1


def check(report, expected, others, role) -> None:
    of_updates = {f"{role}/{name}" for name in ("grad_norm", "lr", "skipped")}
    assert report.keys() == expected.keys() | others.keys() | of_updates
    for name in of_updates:
        assert report[name].count == EPOCHS * len(SPLIT)
    for name, (total, count) in expected.items():
        assert report[name].count.item() == count, name
        assert report[name].total.item() == pytest.approx(total, rel=1e-6, abs=1e-9), name
    for name, metric in others.items():
        for one, other in zip(report[name], metric, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9, equal_nan=True, msg=name)


@given(st.integers(0, 99), st.integers(1, 4))
def test_the_gap_to_the_engine_is_its_definition(seed, rows):
    batch, g = tiny.experience(seed, rows), torch.Generator().manual_seed(seed)
    mask = batch.response_mask
    ours = batch.old_log_probs
    engines = (ours + 0.3 * torch.randn(mask.shape, generator=g, dtype=torch.float64)).clamp(max=0.0)
    engines = torch.where(torch.rand(mask.shape, generator=g) < 0.3, ours, engines)
    report = rollout_gap(ours.where(mask, 3.0), engines.where(mask, torch.nan), mask)
    tokens = [(ours[i, t].item(), engines[i, t].item()) for i, t in mask.nonzero().tolist()]
    apart = [abs(math.exp(x) - math.exp(y)) for x, y in tokens]
    ratios = [math.exp(x - y) for x, y in tokens]
    means = {"probs_diff_mean": apart, "ratio_mean": ratios, "equal": [x == y for x, y in tokens]}
    for name, numbers in means.items():
        found = report[f"training/rollout_{name}"]
        assert (found.total.item(), found.count.item()) == (pytest.approx(sum(numbers)), len(tokens)), name
    for name, numbers in {"probs_diff_max": apart, "ratio_max": ratios}.items():
        assert report[f"training/rollout_{name}"].value.item() == pytest.approx(max(numbers, default=-math.inf)), name
    assert {name for name in report if name.startswith("training/")} == {
        *(f"training/rollout_{name}" for name in (*means, "probs_diff_max", "ratio_max"))
    }
    of_losses = losses.off_policy_metrics(ours, engines, mask)
    assert {name for name in report if not name.startswith("training/")} == of_losses.keys()
    for name, metric in of_losses.items():
        for one, other in zip(report[name], metric, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)


@given(st.integers(0, 999), st.integers(1, 3), st.sampled_from([2, 4, 6]))
def test_loads_are_said_by_layer_by_rank_and_at_their_worst(seed, layers, count):
    """Each layer's fullest expert over its mean, and for every number of ranks the fullest rank over its mean."""
    g = torch.Generator().manual_seed(seed)
    loads = torch.randint(0, 9, (layers, count), generator=g).double()
    loads[:, 0] += 1
    routers = [SimpleNamespace(layer=3 * number) for number in range(layers)]
    given_report = {"actor/expert_load": metrics.Sum(loads), "own": metrics.mean(2.0)}
    report, kept = experts.split_loads(given_report, "actor", routers)
    numbers, each = metrics.report(report), loads.tolist()
    assert kept is loads
    expected = {f"actor/expert_load/{3 * i}": max(row) / (sum(row) / count) for i, row in enumerate(each)}
    expected["actor/expert_load/max"] = max(expected.values())
    for ranks in [n for n in range(2, count + 1) if count % n == 0]:
        width = count // ranks
        own = [sum(sum(row[r * width : (r + 1) * width]) for row in each) for r in range(ranks)]
        expected[f"actor/expert_load/of_{ranks}_ranks"] = max(own) / (sum(own) / ranks)
    assert numbers == pytest.approx(expected | {"own": 2.0})
    assert experts.split_loads({"own": metrics.mean(2.0)}, "actor", routers)[1] is None


@given(st.integers(0, 999))
def test_choices_that_differ_are_counted_by_token_and_by_choice(seed):
    """In any order; the last token of a row, which the engine did not run, and padding do not count."""
    g = torch.Generator().manual_seed(seed)
    attended = tiny.experience(seed, 3).attention_mask
    engine, own = (
        torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(attended.numel() * 2)]).view(
            *attended.shape, 2, 2
        )
        for _ in range(2)
    )
    tokens, choices = [], []
    for row, places in enumerate(attended):
        for place in places.nonzero().flatten().tolist()[:-1]:
            both = zip(engine[row, place].tolist(), own[row, place].tolist(), strict=True)
            found = [set(x) != set(y) for x, y in both]
            tokens.append(any(found))
            choices += found
    report = experts.rerouted(engine, own, attended)
    for name, numbers in (("tokens", tokens), ("choices", choices)):
        found = report[f"training/rerouted/{name}"]
        assert (found.total.item(), found.count.item()) == (sum(numbers), len(numbers)), name


def test_what_sharing_saves_is_the_tokens_and_the_work_of_common_prefixes():
    """Two micro-batches, in each of which rows share what they have in common with each other alone."""
    batch = batches.rows(tiny.experience(0, 6), [0, 0, 0, 1, 1, 2])
    masks = masks_and_tokens(batch)
    parts = [[0, 1, 3], [2, 4, 5]]
    lengths, heads = masks.lengths, int(masks.response.sum())
    depths = [d for part in parts for d in batches.rows(masks, part).depths]
    assert sum(depths) == lengths[0]  # the rows 0 and 1 are equal, and no others of a micro-batch
    whole = flops.train_flops(ACTOR, lengths, head_tokens=heads)
    shared = flops.train_flops(ACTOR, lengths, head_tokens=heads, shared=depths)
    report = saved_work(ACTOR, masks, parts, "actor")
    found = {name: (x.total.item(), x.count.item()) for name, x in report.items()}
    assert found == {
        "perf/shared_tokens/actor": (lengths[0], sum(lengths)),
        "perf/shared_flops/actor": (pytest.approx(whole - shared), pytest.approx(whole)),
    }
    assert 0 < whole - shared < whole
