"""The optimizer against torch's own: AdamW with clip_grad_norm_, over several steps."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import laws, metrics, tree
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state, optimizer_step

SHAPES = {"embed": (7, 5), "norm": (5,), "scale": (), "deep": (2, 3, 4)}


def _params(seed, dtype, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
        for name, shape in SHAPES.items()
    }


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    clip=st.sampled_from([None, 0.3, 1.0, 1e6]),
    decay=st.sampled_from([0.0, 0.1]),
    kind=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
)
def test_steps_equal_torchs_adamw_after_clip_grad_norm(seed, dtype, clip, decay, kind):
    rate = schedule(kind, 0.1, total_steps=8, warmup_steps=2)
    ours = adamw(rate, betas=(0.8, 0.95), eps=1e-6, weight_decay=decay, max_grad_norm=clip)
    state = init_state(_params(seed, dtype), ours)
    theirs = {name: x.clone().requires_grad_() for name, x in state.params.items()}
    torchs = torch.optim.AdamW(theirs.values(), betas=(0.8, 0.95), eps=1e-6, weight_decay=decay)
    for step in range(5):
        grads = _params(seed + step + 1, dtype, scale=10.0 ** (step % 3 - 1))
        for name, x in theirs.items():
            x.grad = grads[name].clone()
        state, report = optimizer_step(state, grads, optimizer=ours, donate=step % 2 == 1)
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), torch.inf if clip is None else clip)
        torchs.param_groups[0]["lr"] = rate(step)
        torchs.step()
        numbers = metrics.report(report)
        assert numbers["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
        assert numbers["lr"] == pytest.approx(rate(step))
        assert numbers["skipped"] == 0
    # the scale of the clipping is float32: that is what torch's fused kernel takes
    close = {"atol": 1e-6, "rtol": 1e-6} if clip is not None or dtype == torch.float32 else {"atol": 0, "rtol": 1e-12}
    for name, x in theirs.items():
        moments = torchs.state[x]
        torch.testing.assert_close(state.params[name], x.detach(), **close)
        torch.testing.assert_close(state.opt.mu[name], moments["exp_avg"], **close)
        torch.testing.assert_close(state.opt.nu[name], moments["exp_avg_sq"], **close)
    assert (state.step, state.opt.count.item()) == (5, 5)


def test_donation_changes_no_bit_and_empties_the_old_state_and_gradients():
    optimizer = adamw(schedule("constant", 0.1))
    grads = _params(1, torch.float32)

    def step(state, donate):
        return optimizer_step(state, tree.copy(grads), optimizer=optimizer, donate=donate)

    laws.check_donation(step, init_state(_params(0, torch.float32), optimizer))
    kept, _ = step(init_state(_params(0, torch.float32), optimizer), donate=False)
    given = tree.copy(grads)
    state = init_state(_params(0, torch.float32), optimizer)
    donated, _ = optimizer_step(state, given, optimizer=optimizer, donate=True)
    assert tree.digest(kept) == tree.digest(donated)
    assert all(x.numel() == 0 for x in given.values())


def test_a_donated_step_writes_where_the_old_state_was():
    optimizer = adamw(schedule("constant", 0.1))
    state = init_state(_params(0, torch.float32), optimizer)
    before = {path: x.data_ptr() for path, x in tree.leaves_with_paths((state.params, state.opt.mu, state.opt.nu))}
    after, _ = optimizer_step(state, _params(1, torch.float32), optimizer=optimizer, donate=True)
    found = {path: x.data_ptr() for path, x in tree.leaves_with_paths((after.params, after.opt.mu, after.opt.nu))}
    assert found == before


@pytest.mark.slow
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf"), 3e38])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("donate", [False, True])
def test_a_norm_that_is_not_finite_skips_the_update_and_the_next_one_goes_on(garbage, clip, donate):
    optimizer = adamw(schedule("constant", 0.1), max_grad_norm=clip)
    state, _ = optimizer_step(
        init_state(_params(0, torch.float32), optimizer), _params(1, torch.float32), optimizer=optimizer
    )
    broken = _params(2, torch.float32)
    broken["embed"][0] = garbage  # the square of 3e38 overflows
    expected = tree.digest((state.params, state.opt))
    kept = tree.copy(state)
    after, report = optimizer_step(state, broken, optimizer=optimizer, donate=donate)
    assert tree.digest((after.params, after.opt)) == expected
    assert metrics.report(report)["skipped"] == 1
    assert after.step == 2
    grads = _params(3, torch.float32)
    one, _ = optimizer_step(after, grads, optimizer=optimizer)
    two, _ = optimizer_step(kept, grads, optimizer=optimizer)
    assert tree.digest((one.params, one.opt)) == tree.digest((two.params, two.opt))


def test_the_rate_is_that_of_the_states_step():
    rates = [0.3, 0.2, 0.1]
    optimizer = adamw(rates.__getitem__, weight_decay=0.0, eps=1e-12, max_grad_norm=None)
    state = init_state({"w": torch.zeros(1, dtype=torch.float64)}, optimizer)
    places = [0.0]
    for _ in rates:
        state, _ = optimizer_step(state, {"w": torch.ones(1, dtype=torch.float64)}, optimizer=optimizer)
        places.append(state.params["w"].item())
    moves = [a - b for a, b in itertools.pairwise(places)]
    assert moves == pytest.approx(rates)  # with equal gradients AdamW moves by its rate
