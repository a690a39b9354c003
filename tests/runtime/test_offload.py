"""What is on the host between uses: the same bits as without, in the memory that was promised."""

import gc
import math
import weakref
from functools import partial

import attrs
import pytest
import torch
from transformers import Glm4MoeConfig

from fppo import laws, losses, metrics, models, tree
from fppo.grad import value_and_grad
from fppo.key import Key
from fppo.runtime import fsdp, offload
from fppo.runtime.mesh import Mesh, Sharding
from fppo.runtime.offload import Lane, OnHost
from fppo.runtime.simulate import simulate
from fppo.steps import optimizers
from fppo.steps.actor import PolicyTerms, UpdateActor
from fppo.steps.adamw_8bit import adamw_8bit
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward, compute_log_probs, compute_values, forward_micro_batch
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.muon import muon
from fppo.steps.scores import compute_reward_scores
from fppo.steps.train_state import init_state, optimizer_step
from fppo_kernels import adamw
from fppo_kernels.collectives import Axis
from fppo_kernels.table import Kernels
from tests import tiny

KERNELS = Kernels.named()
CPU = torch.device("cpu")
LAYERS = 4


def rate(step):
    return 0.01 / (1 + step)


def by_buckets(lane, bucket_bytes=128 << 20, kernel=adamw.adamw_):
    """AdamW for moments on the host."""
    return optimizers.adamw(rate, kernel=offload.offloaded_adamw(kernel, lane, bucket_bytes=bucket_bytes))


OPTIMIZER = optimizers.adamw(rate)


def size_of(values):
    return sum(x.numel() * x.element_size() for _, x in tree.leaves_with_paths(values) if isinstance(x, torch.Tensor))


class Watched(Lane):
    """A lane to the CPU that knows how many bytes of what it fetched are alive, and what was begun and awaited when.

    If `late`, it copies nothing before somebody waits, as a stream may; until then there is garbage.
    """

    def __init__(self, late=False):
        super().__init__(CPU)
        self.late, self.pending, self.events, self.peak = late, [], [], 0
        self.fetched, self.stored = [], []
        self.sudden = 0  # fetches that were waited for at once

    def _copy(self, direction, sources, targets):
        self.events.append(("fetch", "store")[direction])
        (self.fetched, self.stored)[direction].extend(
            weakref.ref(x.untyped_storage()) for x in (targets, sources)[direction]
        )
        self.peak = max(self.peak, size_alive(self.fetched))
        copies = list(zip(targets, sources, strict=True))
        for x in targets:
            x.fill_(torch.nan if x.is_floating_point() else 113)

        def run():
            while copies:
                x, y = copies.pop()
                x.copy_(y)

        begun = len(self.events)

        def finish():
            self.sudden += len(self.events) == begun and not direction
            self.events.append("wait")
            run()
            if run in self.pending:
                self.pending.remove(run)
            return tuple(targets)

        if direction:
            self.pending.append(run)
        if not self.late:
            run()
        return finish

    def settle(self):
        while self.pending:
            self.pending.pop()()


def alive(refs):
    gc.collect()
    return size_alive(refs)


def size_alive(refs):
    return sum({id(x): x.nbytes() for ref in refs if (x := ref()) is not None}.values())


# AdamW by buckets


def random_state(sizes, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)

    def draw():
        return {str(i): torch.randn(size, generator=g, dtype=torch.float64).to(dtype) for i, size in enumerate(sizes)}

    state, grads = init_state(draw(), OPTIMIZER), draw()
    mu, nu = draw(), tree.map(torch.square, draw())
    return tree.replace(state, opt=tree.replace(state.opt, mu=mu, nu=nu, count=torch.tensor(3.0))), grads


SIZES = [(70, 100), (3,), (0, 5), (1,), (4096,), (1025,), (40, 60), (7, 3), (30, 40)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw_", "reference_"])
@pytest.mark.parametrize("late", [False, True])
def test_adamw_by_buckets_keeps_the_laws_of_adamw(name, late):
    laws.check_adamw(offload.offloaded_adamw(getattr(adamw, name), Watched(late), bucket_bytes=600))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", [adamw.adamw_, adamw.reference_])
@pytest.mark.parametrize("bucket_bytes", [1, 40_000, 1 << 30])
@pytest.mark.parametrize("late", [False, True])
def test_a_step_by_buckets_has_the_bits_of_a_whole_one_and_three_buckets_at_most(dtype, kernel, bucket_bytes, late):
    lane = Watched(late)
    state, grads = random_state(SIZES, dtype)
    expected, _ = optimizer_step(state, grads, optimizer=optimizers.adamw(rate, kernel=kernel))
    got, _ = optimizer_step(state, grads, optimizer=by_buckets(lane, bucket_bytes, kernel))
    assert tree.digest(got) == tree.digest(expected)
    smallest = 2 * offload.GRAIN * dtype.itemsize
    assert 0 < lane.peak <= 3 * max(bucket_bytes, smallest)
    assert alive(lane.fetched) == 0
    moments = size_of((state.opt.mu, state.opt.nu))
    if bucket_bytes < moments:
        assert lane.events.count("fetch") >= moments // max(bucket_bytes, smallest)
        assert lane.events[:4] == ["fetch", "wait", "fetch", "store"]  # the next is fetched before this one is used


def test_parameters_that_are_not_contiguous_are_not_cut():
    params = [torch.randn(60, 50, dtype=torch.float64).t(), torch.randn(2000, dtype=torch.float64)]
    columns = [[x.clone() for x in params] for _ in range(4)]
    assert not columns[0][0].is_contiguous()
    columns[3] = [x.square() for x in columns[3]]
    ours = [[x.clone() for x in column] for column in columns]
    adamw.adamw_(*columns, [torch.tensor(1.0), torch.tensor(1.0)], lr=0.1)
    steps = [torch.tensor(1.0), torch.tensor(1.0)]
    offload.offloaded_adamw(adamw.adamw_, Watched(), bucket_bytes=10_000)(*ours, steps, lr=0.1)
    assert tree.digest(ours) == tree.digest(columns)
    assert steps == [2.0, 2.0]


# updates


def cases(dtype, **changes):
    """An update of the actor and one of the critic, each as a function of its optimizer, and their states."""
    loop = Loop(mini_batch_size=4, micro_batching=MicroBatching(size=2), epochs=2)
    for head, update, keywords in (
        ("lm", UpdateActor, {"loss_fn": losses.ppo_clip, "terms": PolicyTerms(entropy_coef=0.01, kl_coef=0.1)}),
        ("value", UpdateCritic, {}),
    ):
        model, params = tiny.model_and_params(head, dtype=dtype)
        forward = Forward(attrs.evolve(model, **changes))
        make = partial(update, forward=forward, loop=loop, **keywords)
        yield lambda optimizer, make=make: partial(make(optimizer=optimizer), key=Key(5)), init_state(params, OPTIMIZER)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("checkpoint_layers", "late", "donate"), [(False, True, True), (True, True, False), ("selective", False, False)]
)
def test_an_update_of_a_state_on_the_host_has_the_bits_of_a_plain_one(dtype, checkpoint_layers, late, donate):
    batch = tiny.experience(3, 7, dtype=dtype)
    for make, state in cases(dtype, checkpoint_layers=checkpoint_layers):
        expected, wanted = make(OPTIMIZER)(state, batch)
        lane = Watched(late)
        home = offload.to_host(state)
        before, memory = tree.digest(home), [x.data_ptr() for x in (*home.params.values(), *home.opt.nu.values())]
        update = make(by_buckets(lane, 9000))
        spilling = offload.HostActivations(update, lane, minimum_bytes=500, window_bytes=3000)
        after, report = offload.Offloaded(spilling, lane)(home, batch, donate=donate)
        assert tree.digest(after) == tree.digest(expected)
        assert metrics.report(report) == metrics.report(wanted)
        assert alive(lane.fetched) == 0
        assert any(lane.stored)
        if donate:
            assert all(x.numel() == 0 for x in home.params.values())
            assert [x.data_ptr() for x in (*after.params.values(), *after.opt.nu.values())] == memory
        else:
            assert tree.digest(home) == before


OTHERS = [optimizers.sgd(rate, momentum=0.9), optimizers.lion(rate), muon(rate), adamw_8bit(rate, block_size=4)]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [OPTIMIZER, *OTHERS])
@pytest.mark.parametrize(("late", "donate"), [(True, True), (False, False)])
def test_any_optimizers_state_can_be_on_the_host(optimizer, late, donate):
    batch, lane = tiny.experience(3, 7, dtype=torch.float32), Watched(late)
    away = optimizers.kept_on_host(optimizer, lane)
    for make, state in cases(torch.float32):
        expected, wanted = make(optimizer)(init_state(state.params, optimizer), batch)
        home = offload.to_host(init_state(state.params, away))
        before = tree.digest(home)
        after, report = offload.Offloaded(make(away), lane)(home, batch, donate=donate)
        assert tree.digest(after) == tree.digest(expected)
        assert metrics.report(report) == metrics.report(wanted)
        assert alive(lane.fetched) == 0
        assert all(x.numel() == 0 for x in home.params.values()) if donate else tree.digest(home) == before


@pytest.mark.parametrize("donate", [False, True])
def test_nothing_of_the_old_state_is_kept(donate):
    batch = tiny.experience(3, 4)
    make, state = next(cases(torch.float64))
    lane = Watched()
    home = offload.to_host(state)
    refs = [weakref.ref(x.untyped_storage()) for _, x in tree.leaves_with_paths(home.opt)]
    step = offload.Offloaded(make(OPTIMIZER), lane)
    after, _ = step(home, batch, donate=donate)
    del home
    assert alive(refs) <= (size_of(after.opt) if donate else 0)
    after, _ = step(after, batch, donate=True)
    params = [weakref.ref(x.untyped_storage()) for x in after.params.values()]
    del after
    assert alive(params) == alive(lane.fetched) == 0


# passes without gradients


def deep(head="lm", dtype=torch.float64, **changes):
    model = models.build(tiny.config(num_hidden_layers=LAYERS), head=head, **changes)
    return model, tree.map(lambda x: x.to(dtype), models.init_params(model, Key(0)))


PASSES = (("lm", compute_log_probs), ("value", compute_values), ("value", compute_reward_scores))


@pytest.mark.parametrize(("head", "compute"), PASSES, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize(("dtype", "late"), [(torch.float32, False), (torch.float64, True)])
def test_passes_by_layer_have_the_bits_of_plain_ones_and_two_layers_at_most(head, compute, dtype, late):
    model, params = deep(head, dtype)
    batch = tiny.experience(2, 5, dtype=dtype)
    given = {"forward": Forward(model), "micro_batching": MicroBatching(size=2)}
    expected = compute(params, batch, **given)
    lane = Watched(late)
    assert torch.equal(offload.by_layer(compute, lane)(params, batch, **given), expected)
    layer = size_of({name: x for name, x in params.items() if name.startswith("model.layers.0.")})
    root = size_of(params) - LAYERS * layer
    assert lane.peak == root + 2 * layer
    assert lane.events[:4] == ["fetch", "fetch", "wait", "fetch"]  # what is outside; then one ahead
    assert lane.events.count("fetch") == 3 * (1 + LAYERS)
    whole = Watched(late)
    assert torch.equal(compute(offload.to_device(params, whole), batch, **given), expected)
    assert whole.peak == size_of(params)
    assert alive(lane.fetched) == alive(whole.fetched) == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_on_the_host_are_fetched_and_gathered(stage):
    model, params = deep()
    batch = tiny.experience(2, 5)

    def run(mesh, lane):
        mesh = attrs.evolve(mesh, sharding=Sharding(stage=stage))
        given = {"forward": Forward(model, mesh=mesh), "micro_batching": MicroBatching(size=2)}
        own = fsdp.shard(params, mesh)
        return compute_log_probs(own if lane is None else OnHost(own, lane), batch, **given)

    (plain, _) = simulate({"shard": 2}, run, [None, None])
    assert all(torch.equal(x, plain) for x in simulate({"shard": 2}, run, [Watched(), Watched(late=True)]))


def test_parameters_on_the_host_take_no_gradient():
    model, params = deep()
    with pytest.raises(ValueError, match="fetch them whole"):
        forward_micro_batch(OnHost(params, Watched()), tiny.experience(2, 3), forward=Forward(model))


# activations


def gradients(model, params, batch, mesh=None, loss_fn=None):
    def loss(params, batch):
        out = forward_micro_batch(params, batch, forward=Forward(model, mesh=mesh or Mesh.local()))
        return out.log_probs.square().sum()

    wrap = loss_fn or (lambda fn: fn)
    return wrap(value_and_grad(loss))(params, batch)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint_layers", [False, True, "selective"])
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("late", "window"), [(False, 0), (True, 0), (True, 4000), (False, 1 << 30)])
def test_gradients_from_activations_on_the_host_have_the_bits_of_plain_ones(
    checkpoint_layers, compute_dtype, late, window
):
    model, params = deep(dtype=torch.float32, checkpoint_layers=checkpoint_layers, compute_dtype=compute_dtype)
    batch = tiny.experience(1, 6, dtype=torch.float32)
    lane = Watched(late)
    expected = gradients(model, params, batch)
    on_host = partial(offload.HostActivations, lane=lane, minimum_bytes=400, window_bytes=window)
    assert tree.digest(gradients(model, params, batch, loss_fn=on_host)) == tree.digest(expected)
    assert alive(lane.fetched) == alive(lane.stored) == 0
    if checkpoint_layers is True:
        assert LAYERS <= lane.events.count("store") <= LAYERS + 8  # the layers' inputs, and what is outside layers
    elif checkpoint_layers:  # and the output of attention, with what it keeps of rows of several lengths
        assert 2 * LAYERS <= lane.events.count("store") <= 8 * LAYERS + 8
    else:
        assert lane.events.count("store") > 8 * LAYERS
    if window == 1 << 30:
        assert "fetch" not in lane.events  # all of it was still there


def test_parameters_stay_where_they_are():
    for dtype in (None, torch.bfloat16):
        model, params = deep(dtype=torch.float32, compute_dtype=dtype)
        sizes = {x.numel() for x in params.values()}
        batch = tiny.experience(1, 3, dtype=torch.float32)
        stored = []

        class Sizes(Watched):
            def _copy(self, direction, sources, targets, stored=stored):
                stored.extend(len(x) for x in sources if direction)
                return super()._copy(direction, sources, targets)

        on_host = partial(offload.HostActivations, lane=Sizes(), minimum_bytes=1, window_bytes=0)
        gradients(model, params, batch, loss_fn=on_host)
        width = 4 if dtype is None else 2
        tokens = int(batch.attention_mask.sum())
        assert stored
        assert not any(size % (width * tokens) and size // width in sizes for size in stored)


def test_the_device_holds_a_window_of_activations_and_fetches_ahead():
    model, params = deep(dtype=torch.float32)
    batch = tiny.experience(1, 8, dtype=torch.float32)
    window, held = 30_000, []

    def loss(params, batch, lane):
        out = forward_micro_batch(params, batch, forward=Forward(model))
        held.append(alive(lane.stored))
        return out.log_probs.square().sum()

    lanes = Watched(), Watched()
    for lane, size in zip(lanes, (window, 1 << 30), strict=True):
        fn = offload.HostActivations(value_and_grad(loss), lane, minimum_bytes=400, window_bytes=size)
        fn(params, batch, lane)
    lane, (few, all_) = lanes[0], held
    largest = 4 * int(batch.attention_mask.sum()) * model.config.intermediate_size
    assert all_ > 5 * window
    assert few <= window + largest  # an output of the pass
    assert lane.peak <= window + 2 * largest  # what the operation at work has been given
    count = lane.events.count("fetch")
    assert 50 < count <= 1.1 * lane.events.count("store")
    assert lane.sudden <= 0.2 * count


def test_what_is_saved_twice_is_stored_once_unless_it_changed():
    lane = Watched()

    def fn(x, changed):
        a = x * 2
        out = (a.t()[5:].sin().sum() + a.sin() + a.view(-1).cos().view_as(a) + a[:3].exp().sum()).sum()
        factor = torch.full_like(x, 3).detach()
        out = out + (x * factor).sum()
        factor = changed(factor)
        return out + (x * factor).sum()

    x = torch.randn(10, 10, requires_grad=True)
    expected = torch.autograd.grad(fn(x, lambda factor: factor + 1), x)
    # without copies autograd would refuse this
    wrapped = offload.HostActivations(
        lambda x: torch.autograd.grad(fn(x, lambda factor: factor.add_(1)), x), lane, minimum_bytes=8, window_bytes=0
    )
    assert torch.equal(wrapped(x)[0], expected[0])
    # a, the result of exp, and the factor, twice
    assert lane.events.count("store") == 4


def test_a_small_output_that_is_kept_does_not_keep_itself():
    x = torch.randn(10, 10, requires_grad=True)
    out = offload.HostActivations(lambda x: x.softmax(-1), Watched())(x)
    ref = weakref.ref(out.untyped_storage())
    del out
    assert alive([ref]) == 0


def test_a_graph_may_outlive_the_call_and_be_used_twice():
    x = torch.randn(20, 20, requires_grad=True)
    lane = Watched(late=True)
    out = offload.HostActivations(lambda x: (x * 2).exp().sin().sum(), lane, minimum_bytes=8)(x)
    assert alive(lane.fetched) == alive(lane.stored) == 0
    expected = torch.autograd.grad((x * 2).exp().sin().sum(), x)[0]
    for again in (True, False):
        assert torch.equal(torch.autograd.grad(out, x, retain_graph=again)[0], expected)
    del out
    assert alive(lane.fetched) == 0


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint_layers", [False, True, "selective"])
def test_saved_tensors_of_sharded_layers_go_to_the_host_too(checkpoint_layers):
    """Those of stage 3 have hooks of their own inside these."""
    model, params = deep(dtype=torch.float32, checkpoint_layers=checkpoint_layers)
    batch = tiny.experience(1, 12, dtype=torch.float32)

    def run(stage, mesh, lane):
        mesh = attrs.evolve(mesh, sharding=Sharding(stage=stage))
        on_host = lane and partial(offload.HostActivations, lane=lane, minimum_bytes=400, window_bytes=4000)
        update = UpdateActor(
            forward=Forward(model, mesh=mesh),
            loss_fn=losses.gpg,
            loop=Loop(mini_batch_size=12, micro_batching=MicroBatching(size=3)),
            optimizer=OPTIMIZER,
        )
        state = init_state(fsdp.shard(params, mesh), OPTIMIZER)
        state, _ = (on_host(update) if on_host else update)(state, batch)
        return tree.digest(state)

    counts = set()
    for stage in (1, 2, 3):
        lanes = [Watched(), Watched(late=True)]
        plain = simulate({"shard": 2}, partial(run, stage), [None, None])
        assert simulate({"shard": 2}, partial(run, stage), lanes) == plain
        counts.add(tuple(lane.events.count("store") for lane in lanes))
        assert alive([ref for lane in lanes for ref in (*lane.fetched, *lane.stored)]) == 0
    (of_ranks,) = counts  # what is gathered is not stored
    assert min(of_ranks) > (LAYERS if checkpoint_layers else 8 * LAYERS)


# the axes that cut a model or its rows

AXES = [
    ({"tensor": 2}, {}, True),
    ({"context": 2}, {"ring": True}, "selective"),
    ({"sequence": 2}, {}, "selective"),
    ({"expert": 2}, {"sharding": Sharding(stage=3)}, False),
    ({"pipeline": 2}, {}, True),
    pytest.param({"expert": 2, "shard": 2}, {"sharding": Sharding(stage=3)}, True, marks=pytest.mark.slow),
    pytest.param({"pipeline": 2, "tensor": 2}, {}, False, marks=pytest.mark.slow),
]


def mixture():
    """A dense layer and one of experts, with tied embeddings and biases of routers, which are state."""
    config = Glm4MoeConfig(
        **tiny.config(head_dim=4).to_dict(),
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        first_k_dense_replace=1,
    )
    model = models.build(config)
    return model, tree.map(lambda x: x.float() if x.is_floating_point() else x, models.init_params(model, Key(0)))


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "settings", "checkpoint_layers"), AXES)
def test_on_every_axis_what_is_on_the_host_changes_no_bit(axes, settings, checkpoint_layers):
    whole, params = mixture()
    batch = tiny.experience(3, 6, dtype=torch.float32)
    prepared = models.prepare(whole, Mesh({name: Axis(size) for name, size in axes.items()}))
    prepared = prepared.like(attrs.evolve(whole, checkpoint_layers=checkpoint_layers))
    cut = MicroBatching(size=2)

    def run(what, mesh, lane):
        """Log-probs, and then the state and the metrics after an update."""
        mesh = attrs.evolve(mesh, **settings)
        model = prepared.on(mesh)
        forward, own = Forward(model, mesh=mesh), models.own_params(model, params, mesh)
        optimizer = OPTIMIZER if what == "nothing" else by_buckets(lane, 3000)
        update = UpdateActor(
            forward=forward,
            loss_fn=losses.ppo_clip,
            loop=Loop(mini_batch_size=6, micro_batching=cut, balance_rate=0.1),
            optimizer=optimizer,
        )
        state = init_state(own, optimizer)
        if what == "moments":
            state = tree.replace(state, opt=offload.to_host(state.opt))
        elif what == "all":
            own = OnHost(own, lane)
            state = offload.to_host(state)
            update = offload.HostActivations(update, lane, minimum_bytes=200, window_bytes=3000)
            update = offload.Offloaded(update, lane)
        log_probs = compute_log_probs(own, batch, forward=forward, micro_batching=cut)
        after, report = update(state, batch, donate=what == "all")
        return tree.digest(log_probs), tree.digest(after), metrics.report(report)

    ranks = math.prod(axes.values())
    plain = simulate(axes, partial(run, "nothing"), [None] * ranks)
    for what in ("moments", "all"):
        lanes = [Watched(late=rank % 2 == 0) for rank in range(ranks)]
        assert simulate(axes, partial(run, what), lanes) == plain, what
        assert all(lane.events.count("fetch") > 1 for lane in lanes)
        assert alive([ref for lane in lanes for ref in lane.fetched]) == 0


def test_a_pass_that_never_goes_back_leaves_nothing_behind():
    model, params = deep(dtype=torch.float32)
    batch = tiny.experience(1, 6, dtype=torch.float32)
    made = []

    def run(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding(stage=3))
        shards = {name: x.requires_grad_() for name, x in fsdp.shard(params, mesh).items()}

        def attention(*args, **keywords):
            out = KERNELS.attention(*args, **keywords)
            made.append(weakref.ref(out.untyped_storage()))
            return out

        kernels = attrs.evolve(KERNELS, attention=attention)
        forward_micro_batch(shards, batch, forward=Forward(model, kernels=kernels, mesh=mesh))

    simulate({"shard": 2}, run)
    assert made
    assert alive(made) == 0


def test_trees_travel_there_and_back():
    state = init_state(tiny.model_and_params()[1], OPTIMIZER)
    for late in (False, True):
        there = offload.to_device(state, Watched(late))
        assert tree.digest(there) == tree.digest(offload.to_host(there)) == tree.digest(state)
        assert there.params["model.norm.weight"].data_ptr() != state.params["model.norm.weight"].data_ptr()


class Stream:
    """A stream that does at once what it is given, but says so only when somebody has waited."""

    def __init__(self, device=None):
        self.events = []

    def __enter__(self):
        """Be the current stream."""

    def __exit__(self, *error):
        """Be it no longer."""

    def wait_stream(self, other):
        self.events += other.events

    def wait_event(self, event):
        event.waited = True

    def record_event(self):
        self.events.append(Event())
        return self.events[-1]

    def synchronize(self):
        for event in self.events:
            event.waited = True


class Event:
    waited = False

    def query(self):
        return self.waited


@pytest.mark.slow
@pytest.mark.parametrize("donate", [False, True])
def test_streams_are_waited_for_and_then_hold_nothing(donate, monkeypatch):
    current = Stream()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current)
    lane = Lane(CPU)
    lane._streams = Stream(), Stream()
    batch = tiny.experience(3, 7)
    for make, state in cases(torch.float64):
        expected, _ = make(OPTIMIZER)(state, batch)
        update = make(by_buckets(lane, 9000))
        spilling = offload.HostActivations(update, lane, minimum_bytes=500, window_bytes=3000)
        home = offload.to_host(state)
        after, _ = offload.Offloaded(spilling, lane)(home, batch, donate=donate)
        assert tree.digest(after) == tree.digest(expected)
        assert len(lane._streams[0].events) > 50
        assert not lane._under_way
        assert all(event.waited for stream in lane._streams for event in stream.events)


def test_what_another_thread_begins_to_copy_is_kept_until_it_is_done():
    """A stand-in for an event, in whose query the other thread is at work."""
    lane = Lane(CPU)

    class Event:
        def query(self):
            lane._under_way[1] = (Event(), (torch.ones(1),))
            return True

    lane._under_way[0] = (Event(), (torch.zeros(1),))
    lane._release()
    assert list(lane._under_way) == [1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_bits_are_those_without_and_the_peak_is_what_was_promised():
    lane = Lane(torch.device("cuda"))
    config = tiny.config(hidden_size=512, intermediate_size=2048, num_hidden_layers=8, vocab_size=4096)
    model = models.build(config, compute_dtype=torch.bfloat16)
    state = init_state(models.init_params(model, Key(0)), OPTIMIZER)
    batch = tree.map(lambda x: x.cuda(), tiny.experience(1, 64, dtype=torch.float32))
    bucket = 8 << 20
    loop = Loop(mini_batch_size=32, micro_batching=MicroBatching(size=8))

    def peak(step, state):
        state = step(state, batch, donate=True)[0]  # so that all workspaces are there
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        after, _ = step(state, batch, donate=True)
        return torch.cuda.max_memory_allocated() - before, tree.digest(after)

    update = UpdateActor(forward=Forward(model), loss_fn=losses.ppo_clip, loop=loop, optimizer=OPTIMIZER)
    plain, expected = peak(update, tree.map(lambda x: x.cuda(), state))
    _, again = peak(update, tree.map(lambda x: x.cuda(), state))  # its kernels may add up in any order
    update = attrs.evolve(update, optimizer=by_buckets(lane, bucket))
    spilling = offload.HostActivations(update, lane, minimum_bytes=1 << 10, window_bytes=1 << 20)
    for step in (update, spilling):
        got, digest = peak(offload.Offloaded(step, lane), offload.to_host(state))
        assert digest == expected or again != expected
        # before, the plain one held parameters and both moments
        assert got <= plain + size_of(state.params) + 3 * bucket
