"""A pass that is recorded and run again on other rows is the pass over these rows."""

import threading
from functools import partial
from itertools import count

import attrs
import pytest
import torch

from fppo import losses, tree
from fppo.runtime.graphs import as_graphs
from fppo.steps import recorded
from fppo.steps.actor import PolicyTerms, UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward, compute_log_probs, compute_outputs, compute_values
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import sgd
from fppo.steps.packed import Masks, masks_of
from fppo.steps.recorded import Recorder
from fppo.steps.train_state import init_state
from fppo_kernels.attention.eager import masked_attention
from fppo_kernels.table import Kernels
from tests import tiny
from tests.models.families import make
from tests.rollout.test_stepping import Operations
from tests.steps.test_invariance import POLICY_LOSSES

TERMS = PolicyTerms(temperature=0.8, entropy_coef=0.1, kl_coef=0.1, nll_coef=0.1)
OPTIMIZER = sgd(lambda step: 0.1)
LOOP = Loop(mini_batch_size=5, micro_batching=MicroBatching(size=3))


def by_ends(query, key, value, *, lengths, scale, **_):
    """Attention that knows the rows by where they end, on the device."""
    place = torch.arange(len(query), device=query.device)
    row = torch.searchsorted(lengths.cu_seqlens[1:].long(), place, right=True)
    mask = (row[:, None] == row) & (place[:, None] >= place)
    heads = (x.transpose(0, 1) for x in (query, key, value))
    return masked_attention(*heads, mask, scale=scale).transpose(0, 1)


class Log:
    """Records passes by their operations, after a first call as they are, and counts what was done."""

    def __init__(self):
        self.plain = self.recorded = self.again = self.made = 0

    def __call__(self):
        self.made += 1

        def record(run):
            calls, operations, results = count(), Operations(), []

            def replayed():
                call = next(calls)
                if call == 0:
                    self.plain += 1
                    return run()
                if call == 1:
                    self.recorded += 1
                    with operations:
                        results.append(run())
                else:
                    self.again += 1
                    with torch.no_grad():
                        operations.again()
                return results[0]

            return replayed

        return record


def forwards(head="lm", most_tokens=1000, **changes):
    """A forward; a recorder of its passes; the parameters; and what the recorder did."""
    model, params = tiny.model_and_params(head)
    kernels = attrs.evolve(Kernels.named(), attention=by_ends)
    log, plain = Log(), Forward(attrs.evolve(model, **changes), kernels=kernels)
    return plain, Recorder(log, most_tokens), params, log


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, x in got.items():
        torch.testing.assert_close(x, expected[name], rtol=1e-10, atol=1e-12)


def assert_same_update(make, batches, forward, record, params):
    updates = [make(forward=forward, record=x) for x in (record, None)]
    for batch in batches:
        done = [update(init_state(params, OPTIMIZER), batch) for update in updates]
        assert_same(*(state.params for state, _ in done))
        assert_same(*({f"{name}/{i}": x for name, m in said.items() for i, x in enumerate(m)} for _, said in done))


@pytest.mark.slow
def test_updates_by_recorded_passes_are_the_updates():
    """Rows of other lengths, widths and numbers at every pass, some in passes too long; marks and metrics too."""
    forward, record, params, log = forwards(most_tokens=24)
    run = partial(UpdateActor, loss_fn=POLICY_LOSSES["clip_cov"], terms=TERMS, loop=LOOP, optimizer=OPTIMIZER)
    shapes = [(0, 10, 5, 6), (1, 8, 3, 4), (2, 11, 4, 9)]
    batches = [tiny.experience(seed, rows, prompt=p, response=t) for seed, rows, p, t in shapes]
    assert_same_update(run, batches, forward, record, params)
    assert log.plain == log.recorded == log.made == 1  # all passes, of all sizes here, are one
    assert log.again > 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_graphs_give_the_same():
    device = torch.device("cuda")
    forward, record, params, _ = forwards()
    record = Recorder(partial(as_graphs, device, tidy=True), 24)
    run = partial(UpdateActor, loss_fn=losses.ppo_clip, terms=TERMS, loop=LOOP, optimizer=OPTIMIZER)
    params, *batches = tree.map(lambda x: x.to(device), [params, *(tiny.experience(seed, 9) for seed in range(3))])
    assert_same_update(run, batches, forward, record, params)
    first, again = (
        run(forward=forward, record=record)(init_state(params, OPTIMIZER), batches[0])[0].params for _ in range(2)
    )
    assert all(torch.equal(x, again[name]) for name, x in first.items())


def test_a_critics_updates_too():
    forward, record, params, log = forwards("value")
    run = partial(UpdateCritic, loop=LOOP, optimizer=OPTIMIZER)
    batches = [tiny.experience(seed, 7, prompt=20, response=30) for seed in range(2)]
    assert_same_update(run, batches, forward, record, params)
    assert log.recorded > 1  # rows of the same widths, of more tokens and of fewer


@pytest.mark.slow
def test_passes_without_gradients_are_recorded_apart():
    forward, record, params, log = forwards()
    other = {name: 2 * x for name, x in params.items()}
    micro = MicroBatching(size=2)
    for seed in range(2):
        rows = tiny.experience(seed, 5)
        for weights in (params, other):  # as a reference's, in the same places
            for temperature in (1.0, 0.5):
                run = partial(compute_log_probs, weights, rows, micro_batching=micro, temperature=temperature)
                assert_same({"": run(forward=forward, record=record)}, {"": run(forward=forward)})
        run = partial(compute_outputs, params, rows, micro_batching=micro, outputs=("entropy", "hidden", "log_probs"))
        got, expected = (run(forward=forward, record=x) for x in (record, None))
        there = ("entropy", "hidden", "log_probs")
        assert_same(*({name: getattr(x, name) for name in there} for x in (got, expected)))
    assert log.recorded == 3
    model, params = tiny.model_and_params("value")
    run = partial(compute_values, params, rows, forward=attrs.evolve(forward, model=model), micro_batching=micro)
    values = [run(record=x) for x in (None, record)]
    assert_same({"": values[1]}, {"": values[0]})


def test_a_value_that_is_no_tensor_is_recorded_with_its_pass():
    forward, record, params, log = forwards()
    batch = tiny.experience(0, 4)
    placed = recorded.ready(params, forward, record)

    def scaled(params, columns, indices):
        return columns[0].tokens * columns[1]

    factors = [2, 2, 2, 3, 3, 3, 2]
    for factor in factors:
        tokens = record(scaled, "scaled", placed, (batch, factor), masks_of(batch), forward)
        assert int(tokens.max()) == factor * int(batch.tokens.max())
    assert (log.recorded, log.again) == (2, 3)


def test_what_is_kept_is_bounded(monkeypatch):
    """Of a model that would not know the positions of rows longer than any here."""
    monkeypatch.setattr(recorded, "KEPT", 2)
    forward, record, _, log = forwards()
    model, params = make("gpt2")
    forward = attrs.evolve(forward, model=model)
    for number, temperature in enumerate((1.0, 0.9, 0.8, 0.7, 1.0)):
        size = 2 if number < 2 else 12  # then results of another size
        rows, micro = tiny.experience(0, 5 if number < 2 else size), MicroBatching(size=size)
        run = partial(compute_log_probs, params, rows, micro_batching=micro, temperature=temperature)
        assert_same({"": run(forward=forward, record=record)}, {"": run(forward=forward)})
        assert len(record._passes) <= 2
        assert len(record._results_of) == 1
    assert log.made == 3


def test_what_fails_when_it_is_recorded_runs_as_it_is():
    forward, record, params, _ = forwards()

    def failing():
        def record(run):
            calls = count()

            def replayed():
                if next(calls):
                    raise RuntimeError("operation not permitted when stream is capturing")
                return run()

            return replayed

        return record

    record = Recorder(failing, 1000)
    run = partial(UpdateActor, loss_fn=losses.ppo_clip, loop=LOOP, optimizer=OPTIMIZER)
    with pytest.warns(UserWarning, match="operation by operation, as recording it failed: operation not permitted"):
        assert_same_update(run, [tiny.experience(0, 10)], forward, record, params)


@pytest.mark.parametrize("which", ["many tokens", "layers computed again", "padded rows", "no prompt", "a thread"])
def test_what_cannot_be_recorded_is_left_as_it_is(which):
    forward, record, params, log = forwards(
        most_tokens=3 if which == "many tokens" else 1000, checkpoint_layers=which == "layers computed again"
    )
    if which == "padded rows":
        forward = attrs.evolve(forward, remove_padding=False)
    rows = tiny.experience(0, 5)
    if which == "no prompt":
        rows = tree.replace(rows, tokens=rows.tokens[:, 5:], attention_mask=rows.attention_mask[:, 5:])
    run = partial(compute_log_probs, params, rows, micro_batching=MicroBatching(size=2))
    results = []
    if which == "a thread":
        thread = threading.Thread(target=lambda: results.append(run(forward=forward, record=record)))
        thread.start()
        thread.join()
    else:
        results.append(run(forward=forward, record=record))
    assert torch.equal(results[0], run(forward=forward))
    assert log.made == 0
    assert which != "a thread" or not record._params_of


def test_a_kernel_that_plans_on_the_host_is_refused():
    forward, record, params, _ = forwards()
    forward = attrs.evolve(forward, kernels=Kernels.named())
    run = partial(compute_log_probs, params, tiny.experience(0, 4), micro_batching=MicroBatching(size=2))
    with pytest.raises(ValueError, match="reads them on the host: give attention/varlen"):
        run(forward=forward, record=record)


def test_equal_objectives_are_one():
    """A stage that is made anew in each step records its passes once."""
    forward, _, _, _ = forwards()
    make = partial(UpdateActor, forward=forward, loop=LOOP, optimizer=OPTIMIZER)
    first, again = (make(loss_fn=POLICY_LOSSES["clip_cov"], terms=PolicyTerms(kl_coef=0.1)) for _ in range(2))
    assert first.objective() == again.objective()
    for other in ({"terms": PolicyTerms(kl_coef=0.2)}, {"loss_fn": losses.gspo}, {"old_log_probs": "update"}):
        assert first.objective() != attrs.evolve(first, **other).objective()


def test_sizes_are_few_and_have_room():
    """For a row and a token more, and not for many more."""
    seen = set()
    for rows in range(1, 40):
        sizes = recorded.sizes_of(masks := masks_of(tiny.experience(rows, rows, prompt=90, response=700)))
        real, counted = int(masks.attention.sum()), int(masks.response.sum())
        assert real < sizes.tokens <= max(64, real + real // 8 + 64)
        assert counted <= sizes.responses <= sizes.tokens
        assert rows < sizes.rows
        assert (sizes.rows - rows) * (sizes.prompt + sizes.response) >= sizes.tokens - real
        seen.add(sizes)
    assert len(seen) < 30
    whole = Masks(torch.ones(8, 8, dtype=torch.bool), torch.ones(8, 7, dtype=torch.bool))
    assert recorded.sizes_of(whole).tokens == 128
