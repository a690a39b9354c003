"""Our schedules keep their laws, with the bubbles of the literature, and the laws see what is wrong with others."""

import pytest

from fppo import laws
from fppo.runtime.schedule import Action, Schedule, all_forward, one_f_one_b


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_bubbles_and_results_kept_are_those_of_the_literature(ranks):
    """Narayanan et al. (2021, arXiv:2104.04473), section 2.2, and the bounds of Megatron-LM's schedules."""
    for chunks in (1, 2, 3, 4) if ranks > 1 else (1,):
        counts = {1, 2, ranks + 1, 8 * ranks} if chunks == 1 else {ranks, 3 * ranks, 8 * ranks}
        for micros in counts:
            time, bubble, kept = laws.check_schedule(one_f_one_b(ranks, micros, chunks))
            assert bubble == pytest.approx((ranks - 1) / (chunks * micros + ranks - 1), abs=1e-12)
            assert time == 3 * (chunks * micros + ranks - 1)
            after = range(ranks - 1, -1, -1)  # ranks after each
            bounds = [n + 1 if chunks == 1 else 2 * n + (chunks - 1) * ranks + 1 for n in after]
            assert list(kept) == [min(bound, chunks * micros) for bound in bounds]
            laws.check_schedule(all_forward(ranks, micros + 1, chunks))


@pytest.mark.parametrize("backward", [0.5, 1.0, 3.0])
def test_a_backward_pass_takes_the_time_that_is_given(backward):
    """A rank works on 6 micro-batches, and waits for as long as the 2 other ranks take for one."""
    time, bubble, _ = laws.check_schedule(one_f_one_b(3, 6), backward=backward)
    assert time == pytest.approx((1 + backward) * (6 + 2))
    assert bubble == pytest.approx(2 / 8)


def test_interleaving_passes_forward_alone_without_a_bubble_for_each_stage():
    time, bubble, kept = laws.check_schedule(all_forward(4, 8, 2))
    assert (time, kept) == (2 * 8 + 3, (0,) * 4)
    assert bubble == pytest.approx(3 / 19)


def test_interleaving_needs_as_many_micro_batches_as_ranks():
    with pytest.raises(ValueError, match="2 stages on each of 4 ranks take a multiple of 4 micro-batches, not 6"):
        one_f_one_b(4, 6, 2)


def changed(schedule, rank, change):
    actions = list(schedule.actions)
    actions[rank] = tuple(change(list(actions[rank])))
    return Schedule(tuple(actions))


def moved(actions, place, to):
    actions.insert(to, actions.pop(place))
    return actions


PLAIN, MIXED, PASSES = one_f_one_b(2, 3), one_f_one_b(2, 4, 2), all_forward(6, 2).actions
MISTAKES = {
    "another's stage": (changed(PLAIN, 0, lambda x: [*x, Action("forward", 1, 0)]), "stages", "rank 0 runs stage 1"),
    "an earlier rank's stage": (
        changed(PLAIN, 1, lambda x: [*x, Action("forward", 0, 0)]),
        "stages",
        "rank 1 runs stage 0, which is rank 0's",
    ),
    "no stages": (Schedule(((), ())), "stages", "it has 0 stages"),
    "uneven stages": (
        Schedule((PASSES[0] + PASSES[4], PASSES[1] + PASSES[5], *PASSES[2:4])),
        "stages",
        "it has 6 stages, which is no multiple of its 4 ranks",
    ),
    "too few stages": (Schedule((*one_f_one_b(2, 1).actions, ())), "stages", "no multiple of its 3 ranks"),
    "no action": (changed(PLAIN, 0, lambda x: [*x, Action("both", 0, 0)]), "stages", "which is no action"),
    "left out": (
        changed(PLAIN, 1, lambda x: x[:-1]),
        "once",
        "backward pass of micro-batch 2 through stage 1 runs never",
    ),
    "not sent": (
        changed(PLAIN, 0, lambda x: x[1:]),
        "once",
        "forward pass of micro-batch 0 through stage 0 runs never",
    ),
    "twice": (changed(MIXED, 0, lambda x: [*x, x[0]]), "once", "runs 2 times"),
    "backward first": (changed(PLAIN, 1, lambda x: moved(x, 1, 0)), "order", "backward before forward"),
    "deadlock": (
        changed(PLAIN, 0, lambda x: moved(x, 2, 1)),
        "deadlock",
        "rank 0 at backward of micro-batch 0 through stage 0",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake):
    schedule, law, words = MISTAKES[mistake]
    if mistake == "deadlock":  # the last rank waits for a second micro-batch before it gives the first one back
        schedule = changed(schedule, 1, lambda x: moved(x, 2, 1))
    with pytest.raises(laws.LawViolation, match=words) as caught:
        laws.check_schedule(schedule)
    assert caught.value.law == law
