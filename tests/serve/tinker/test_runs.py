"""Runs are values: their verbs equal a plain script, add over requests, and leave everything else as it was."""

import itertools
import math
from functools import partial

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import tree
from fppo.batch import RowInputs
from fppo.grad import value_and_grad
from fppo.key import Key
from fppo.models import bases, lora
from fppo.models.adapted import Lora
from fppo.runtime.mesh import LOCAL
from fppo.serve.tinker.data import Datum, rows_of
from fppo.serve.tinker.graphs import custom_loss
from fppo.serve.tinker.losses import LOSSES, Loss
from fppo.serve.tinker.runs import (
    OPTIMIZERS,
    Adapters,
    StepParams,
    TrainingRun,
    create_run,
    forward,
    forward_backward,
    optim_step,
    sampling_params,
    targets_of,
    with_weights,
)
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.muon import muon
from fppo.steps.optimizers import adamw
from fppo.steps.outputs import Forward
from fppo.steps.schedules import schedule
from fppo.steps.targets import forward_targets
from fppo.steps.train_state import init_state, optimizer_step
from tests import tiny
from tests.models import families
from tests.serve.tinker.made import base, data

STEP = StepParams(learning_rate=0.01, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.5)
RANKS = st.sampled_from([0, 2])
# a budget mixes up the order of rows
MICRO = st.sampled_from([MicroBatching(size=1), MicroBatching(size=4), MicroBatching(token_budget=9)])
close = partial(torch.testing.assert_close, rtol=0.0, atol=1e-10)


def begun(dtype=torch.float64, rank: int = 2, **given) -> TrainingRun:
    """A run after a step, so that both factors of its adapters are in use."""
    run = create_run(base(dtype, **given), Adapters(rank))
    run, _ = forward_backward(run, data(99, 3), Loss("cross_entropy"))
    return optim_step(run, STEP)[0]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_loop_is_a_plain_script_to_the_bit(rank):
    """With one thread and micro-batch: adapters, gradients of a sum of two requests, and AdamW."""
    mine = base(torch.float32)
    run = create_run(mine, Adapters(rank, seed=3))
    model, params = mine.model, mine.params
    if rank:
        spec = Lora(rank, 32.0, targets_of(model, Adapters(rank)))
        model, params = lora.adapt(model, params, spec, key=Key(3))
    numbers = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 0.5}
    optimizer = adamw(lambda step: 0.01, **numbers)
    state = init_state(params, optimizer)
    for step in range(3):
        parts = [(data(10 * step, 4), Loss("ppo")), (data(10 * step + 1, 3), Loss("cross_entropy"))]
        total = None
        for part, loss in parts:
            run, outputs = forward_backward(run, part, loss)
            rows, columns = rows_of(part, loss, vocabulary=tiny.VOCAB, limit=None, device=torch.device("cpu"))

            def objective(params, rows=rows, columns=columns, loss=loss, model=model):
                log_probs = forward_targets(params, rows, forward=Forward(model)).flatten(1)
                return loss.per_token(log_probs, columns, rows.real.flatten(1)).sum()

            value, grads = value_and_grad(objective)(state.params)
            assert outputs.metrics["loss:sum"] == value.item()
            total = grads if total is None else {name: total[name] + g for name, g in grads.items()}
        run, _ = optim_step(run, STEP)
        state, _ = optimizer_step(state, total, optimizer=optimizer, fixed=model.untrained_params)
    assert tree.digest(run.state) == tree.digest(state)
    assert run.grads is None


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
@given(seed=st.integers(0, 2**20), cuts=st.lists(st.integers(1, 5), max_size=3), micro=MICRO, rank=RANKS)
@settings(max_examples=3)
def test_sums_do_not_depend_on_how_data_are_cut_into_requests(name, seed, cuts, micro, rank):
    run, part = begun(rank=rank), data(seed, 6)
    whole, outputs = forward_backward(run, part, Loss(name))
    edges = sorted({0, 6, *cuts})
    other = attrs.evolve(run, base=attrs.evolve(run.base, micro_batching=micro))
    total, values = 0.0, []
    for a, b in itertools.pairwise(edges):
        other, piece = forward_backward(other, part[a:b], Loss(name))
        total += piece.metrics["loss:sum"]
        values += piece.per_datum
    close(other.grads, whole.grads)
    assert total == pytest.approx(outputs.metrics["loss:sum"], abs=1e-10)
    close(values, list(outputs.per_datum), atol=1e-6)  # they are float32


@pytest.mark.slow
@given(seed=st.integers(0, 2**20), rank=RANKS)
@settings(max_examples=5)
def test_k_targets_are_k_data_with_one(seed, rank):
    run, part = begun(rank=rank), data(seed, 3, width=3)
    narrow = data(seed + 1, 2)  # of one target for each token, in the same request
    together, outputs = forward_backward(run, [*part, *narrow], Loss("cross_entropy"))
    alone, total = run, 0.0
    for k in range(3):
        single = [Datum(d.tokens, d.targets[:, k], {"weights": d.inputs["weights"][:, k]}) for d in part]
        alone, piece = forward_backward(alone, single, Loss("cross_entropy"))
        total += piece.metrics["loss:sum"]
        for mine, theirs in zip(outputs.per_datum, piece.per_datum, strict=False):
            close(mine["logprobs"][:, k], theirs["logprobs"], atol=1e-6)
    alone, piece = forward_backward(alone, narrow, Loss("cross_entropy"))
    assert outputs.per_datum[-1]["logprobs"].shape == narrow[-1].targets.shape
    close(together.grads, alone.grads)
    assert outputs.metrics["loss:sum"] == pytest.approx(total + piece.metrics["loss:sum"], abs=1e-10)


def test_results_are_in_the_data_s_order_whatever_the_micro_batches():
    run = begun()
    part = [each for seed, length in enumerate((8, 7, 6, 3, 2, 1)) for each in data(seed, 1, length=length)]
    mixed = attrs.evolve(run, base=attrs.evolve(run.base, micro_batching=MicroBatching(token_budget=9)))
    results = [forward(each, part, Loss("cross_entropy")).per_datum for each in (run, mixed)]
    close(list(results[0]), list(results[1]), atol=1e-6)
    assert [len(each["logprobs"]) for each in results[1]] == [8, 7, 6, 3, 2, 1]


def test_log_probs_are_returned_of_every_target_with_and_without_a_gradient():
    run, part = begun(), data(5, 4)
    silent = [attrs.evolve(d, inputs={"weights": torch.zeros(len(d.tokens))}) for d in part]
    with_gradient = forward_backward(run, part, Loss("cross_entropy"))[1]
    for other in (forward(run, part, Loss("cross_entropy")), forward(run, silent, Loss("cross_entropy"))):
        for mine, theirs in zip(other.per_datum, with_gradient.per_datum, strict=True):
            close(mine["logprobs"], theirs["logprobs"], atol=1e-6)
            assert (mine["logprobs"] < 0).all()
    elementwise = sum(each["elementwise_loss"].sum().item() for each in with_gradient.per_datum)
    assert elementwise == pytest.approx(with_gradient.metrics["loss:sum"], abs=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_verbs_change_nothing_but_what_they_return(optimizer):
    mine = base(torch.float32)
    before = tree.digest(mine.params)
    one, two = (create_run(mine, Adapters(rank, seed), optimizer) for rank, seed in ((2, 1), (0, 0)))

    def onward(run, seed):
        run, _ = forward_backward(run, data(seed, 3), Loss("importance_sampling"))
        return optim_step(run, STEP)[0]

    alone = [onward(onward(run, 1), 2).state for run in (one, two)]
    kept = [tree.digest(run.state) for run in (one, two)]
    half, _ = forward_backward(one, data(1, 3), Loss("cross_entropy"))
    summed = tree.digest(half.grads)
    forward_backward(half, data(2, 3), Loss("cross_entropy"))
    forward(half, data(2, 3), Loss("cross_entropy"))
    assert tree.digest(half.grads) == summed
    a, b = onward(one, 1), onward(two, 1)  # in turn
    a, b = onward(a, 2), onward(b, 2)
    assert [tree.digest(a.state), tree.digest(b.state)] == [tree.digest(state) for state in alone]
    assert [tree.digest(run.state) for run in (one, two)] == kept
    assert tree.digest(mine.params) == before
    assert all(a.model.frozen.params[name] is x for name, x in mine.params.items())  # the base is held once
    assert sampling_params(a) == (a.model, a.state.params)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_an_optimizer_has_the_numbers_of_its_step(name, clip):
    """After three steps, in which momenta and second moments differ by their own decay."""
    numbers = StepParams(learning_rate=0.03, beta1=0.6, beta2=0.8, eps=1e-3, weight_decay=0.1, grad_clip_norm=clip)
    shared = {"betas": (0.6, 0.8), "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": clip or None}
    made = {"adamw": adamw, "muon": partial(muon, momentum=0.6)}[name](schedule("constant", 0.03), **shared)
    noise = torch.Generator().manual_seed(3)
    params = {"layers.0.weight": torch.randn(4, 3, generator=noise), "bias": torch.randn(3, generator=noise)}
    runs = []
    for optimizer in (made, OPTIMIZERS[name](numbers, base())):
        now, state = params, optimizer.init(params)
        for step in range(3):
            grads = {key: Key(step).uniform(torch.arange(x.numel()), 1).float().view(x.shape) for key, x in now.items()}
            now, state, _ = optimizer.update(now, grads, state, step, mesh=LOCAL)
        runs.append(now)
    close(*runs, atol=1e-6)


def test_adapters_add_nothing_at_first_and_are_those_of_their_seed():
    mine = base()
    part = data(1, 3)
    runs = [create_run(mine, Adapters(4, seed)) for seed in (0, 0, 1)]
    plain = forward(create_run(mine, Adapters(0)), part, Loss("cross_entropy"))
    close(list(forward(runs[0], part, Loss("cross_entropy")).per_datum), list(plain.per_datum), atol=1e-6)
    digests = [tree.digest(run.state.params) for run in runs]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]
    assert runs[0].model.frozen.lora.scale == 32.0 / 4
    assert {x.dtype for x in runs[0].state.params.values()} == {torch.float64}


@pytest.mark.parametrize(
    ("kinds", "parts"),
    [
        ((True, False, False), {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ((False, True, False), {"gate_proj", "up_proj", "down_proj"}),
        ((False, False, True), {"embed_tokens"}),  # tied
        ((True, True, False), {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_adapters_are_on_the_chosen_kinds_of_weights(kinds, parts):
    run = create_run(base(), Adapters(2, 0, *kinds))
    assert {name.split(".")[-3] for name in run.state.params} == parts


def test_saved_weights_go_on_to_the_same_bits_with_their_optimizer_and_afresh_without():
    run = begun(torch.float32)
    onward = lambda run: optim_step(forward_backward(run, data(7, 3), Loss("cross_entropy"))[0], STEP)[0]  # noqa: E731
    fresh = create_run(run.base, Adapters(2, seed=5))
    fresh, _ = forward_backward(fresh, data(8, 2), Loss("cross_entropy"))
    resumed = with_weights(fresh, run.state, optimizer=True)
    assert resumed.grads is None
    assert tree.digest(onward(resumed).state) == tree.digest(onward(run).state)
    bare = with_weights(fresh, run.state, optimizer=False)
    assert tree.digest(bare.state.params) == tree.digest(run.state.params)
    assert bare.state.opt.count.item() == 0
    assert tree.digest(onward(bare).state.params) != tree.digest(onward(run).state.params)


def test_weights_of_another_run_are_refused():
    run = begun()
    with pytest.raises(ValueError, match=r"lora_A is \[3, .*\] in them, \[2, .*\] in this one"):
        with_weights(run, create_run(run.base, Adapters(3)).state, optimizer=True)
    with pytest.raises(ValueError, match="not 'muon'"):
        with_weights(create_run(run.base, Adapters(2), "muon"), run.state, optimizer=True)


def test_steps_need_gradients_and_skip_those_that_are_not_finite():
    run = begun()
    with pytest.raises(ValueError, match="without gradients"):
        optim_step(run, STEP)
    run, _ = forward_backward(run, data(1, 2), Loss("cross_entropy"))
    spoiled = attrs.evolve(run, grads={name: x * math.inf for name, x in run.grads.items()})
    after, metrics = optim_step(spoiled, STEP)
    assert metrics["skipped"] == 1.0
    assert tree.digest(after.state.params) == tree.digest(run.state.params)


def ok(**changes) -> Datum:
    values = {"weights": torch.ones(3), "advantages": torch.ones(3), "logprobs": -torch.ones(3)}
    return attrs.evolve(Datum(torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4]), values), **changes)


@pytest.mark.parametrize(
    ("loss", "part", "says"),
    [
        ("ppo", [], "without data"),
        ("ppo", [ok(), ok(tokens=torch.tensor([1, 2]))], r"datum 1: target_tokens are \[3\]: give \[2\]"),
        ("ppo", [ok(tokens=torch.zeros(0, dtype=torch.int64))], "give one or more"),
        ("ppo", [ok(tokens=torch.tensor([1, 2, 99]))], "tokens hold 99: give int64, 0 to 22"),
        ("ppo", [ok(targets=torch.tensor([1, 22, 23]))], "targets hold 23: give int64, 0 to 22"),
        ("ppo", [ok(targets=torch.tensor([1, -2, 9]))], "targets hold -2"),
        ("ppo", [ok(targets=torch.ones(3))], "targets hold torch.float32"),
        ("ppo", [ok(inputs={"advantages": torch.ones(3)})], "datum 0 has no logprobs"),
        ("cross_entropy", [ok(inputs={"weights": torch.ones(2)})], r"weights is \[2\]"),
        ("cross_entropy", [ok(inputs={"weights": torch.ones(3), "wieghts": torch.ones(3)})], "mean 'weights'"),
        (
            "cross_entropy",
            [ok(), ok(inputs={"weights": torch.tensor([1, math.nan, 1])})],
            "datum 1 has weights",
        ),
        ("ppo", [ok(inputs=ok().inputs | {"logprobs": torch.tensor([0, 0, -math.inf])})], "after its token 2"),
        ("ppo", [ok(), ok(inputs=ok().inputs | {"clip_low_threshold": torch.ones(3)})], "in all or in none"),
        ("ppo", [ok(inputs=ok().inputs | {"clip_low_threshold": -torch.ones(3)})], "below 0"),
        ("gspo", [ok(inputs=ok().inputs | {"sequence_ratio_mask": torch.tensor([0.0, 1, 1])})], "outside its sequence"),
        ("stable_reinforce", [ok()], "provenance"),
        ("stable_reinforce", [ok(inputs=ok().inputs | {"sampled": torch.tensor([0.0, 1, 1])})], "outside its sampled"),
        ("gspo", [ok(targets=torch.ones(3, 2, dtype=torch.int64))], "one target for each token"),
        ("ppo", [ok(tokens=torch.arange(12), targets=torch.arange(12))], "at most 8"),
    ],
)
def test_data_that_no_pass_takes_are_refused_by_name(loss, part, says):
    with pytest.raises(ValueError, match=says):
        forward_backward(create_run(base(limit=8), Adapters(1)), part, Loss(loss))


def test_log_probs_that_do_not_count_may_be_missing():
    part = ok(
        inputs=ok().inputs | {"logprobs": torch.tensor([math.nan, -1, -1]), "advantages": torch.tensor([0.0, 1, 1])}
    )
    run, outputs = forward_backward(begun(), [part], Loss("ppo"))
    assert math.isfinite(outputs.metrics["loss:sum"])
    assert all(x.isfinite().all() for x in run.grads.values())


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: Adapters(-1), "rank=-1"),
        (lambda: Adapters(2, 0, attention=False, mlp=False, unembed=False), "nothing would be trained"),
        (lambda: create_run(base(), Adapters(2), "dimuon"), "not published"),
        (lambda: create_run(base(), Adapters(2), "adam"), "there are adamw, muon"),
        (lambda: StepParams(learning_rate=math.nan), "learning_rate=nan"),
        (lambda: StepParams(beta2=1.0), "beta2=1.0"),
        (lambda: StepParams(eps=0.0), "eps=0"),
    ],
)
def test_wrong_numbers_and_names_are_refused(made, says):
    with pytest.raises(ValueError, match=says):
        made()


def test_a_quantised_base_takes_adapters_alone():
    model, params = tiny.model_and_params(dtype=torch.float32)
    model, params = bases.quantise(model, params, "int8")
    mine = base(model=model, params=params)
    with pytest.raises(ValueError, match="quantised"):
        create_run(mine, Adapters(0))
    run, _ = forward_backward(create_run(mine, Adapters(2)), data(1, 2), Loss("cross_entropy"))
    assert {x.dtype for x in run.grads.values()} == {torch.float32}


def test_a_base_in_16_bits_is_trained_in_32():
    model, params = tiny.model_and_params(dtype=torch.bfloat16)
    for rank in (0, 2):
        run = create_run(base(model=attrs.evolve(model, compute_dtype=torch.bfloat16), params=params), Adapters(rank))
        run, outputs = forward_backward(run, data(1, 2), Loss("cross_entropy"))
        assert {x.dtype for x in (*run.grads.values(), *run.state.params.values())} == {torch.float32}
        assert outputs.per_datum[0]["logprobs"].dtype == torch.float32


def node(op, name, *args):
    return {"op": op, "name": name.rpartition(".")[2], "target": name, "args": list(args), "kwargs": {}}


WEIGHED = {"tuple": [{"ref": "sum"}, {"dict": {f"custom/x:{how}": {"ref": "sum"} for how in ("sum", "mean")}}]}
CUSTOM = custom_loss(
    "weighed",
    [("logprobs", 1), ("weights", 1)],
    [
        *(node("placeholder", name) for name in ("logprobs", "weights")),
        node("call_function", "operator.mul", {"ref": "logprobs"}, {"ref": "weights"}),
        node("call_method", "sum", {"ref": "mul"}),
        node("output", "output", WEIGHED),
    ],
)


@pytest.mark.parametrize("micro", [MicroBatching(size=6), MicroBatching(size=1), MicroBatching(token_budget=9)])
def test_a_custom_loss_and_its_metrics_are_over_all_data_whatever_the_micro_batches(micro):
    run, part = begun(), data(4, 6)
    run = attrs.evolve(run, base=attrs.evolve(run.base, micro_batching=micro))
    opposite, plain = forward_backward(run, part, Loss("cross_entropy"))
    found, outputs = forward_backward(run, part, Loss("custom", {}, CUSTOM))
    total = sum((x["logprobs"] * d.inputs["weights"]).sum().item() for x, d in zip(plain.per_datum, part, strict=True))
    assert outputs.metrics == pytest.approx(
        {"loss:sum": total, "custom/x:sum": total, "custom/x:mean": total / 6}, abs=1e-5
    )
    close(found.grads, {name: -x for name, x in opposite.grads.items()})
    close([x["logprobs"] for x in outputs.per_datum], [x["logprobs"] for x in plain.per_datum], atol=1e-6)


def test_state_in_buffers_stays_as_it_is_where_all_weights_are_trained():
    """Biases of routers are such: they have no gradient, and weight decay would move them."""
    model, params = families.make("glm4_moe")
    run = create_run(base(model=model, params=params), Adapters(0))
    run, _ = forward_backward(run, data(3, 2), Loss("cross_entropy"))
    run, _ = optim_step(run, STEP)
    assert model.buffers
    assert {name for name, x in run.state.params.items() if torch.equal(x, params[name])} == model.buffers


@pytest.mark.parametrize("name", [name for name, rule in LOSSES.items() if not rule.flat])
def test_data_of_several_widths_in_one_request_are_those_of_requests_apart(name):
    """Tokens that fill a narrow datum up to the widest have no loss, in whatever loss."""
    run, parts = begun(), (data(1, 2, width=3), data(2, 2), data(3, 2, width=2))
    together, outputs = forward_backward(run, [x for part in parts for x in part], Loss(name))
    apart, total = run, 0.0
    for part in parts:
        apart, piece = forward_backward(apart, part, Loss(name))
        total += piece.metrics["loss:sum"]
    assert outputs.metrics["loss:sum"] == pytest.approx(total, abs=1e-10)
    close(together.grads, apart.grads)


def test_images_of_a_base_that_takes_none_are_refused():
    seeing = RowInputs({}, torch.arange(1), torch.zeros(1, 1, 1, 3, dtype=torch.uint8))
    first, second = data(0, 2)
    with pytest.raises(ValueError, match="datum 1 has images, and base 'tiny' takes none"):
        forward_backward(
            create_run(base(), Adapters(2)), [first, attrs.evolve(second, images=seeing)], Loss("cross_entropy")
        )
