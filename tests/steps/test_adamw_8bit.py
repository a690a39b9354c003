"""AdamW with moments in 8 bits: bounds of its codes, its definition, meshes, checkpoints, and what is refused."""

from functools import cache, partial

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import losses, models, tree
from fppo.assembly.learning import Learning
from fppo.assembly.parts import Tools
from fppo.key import Key
from fppo.models.model import Model
from fppo.runtime import checkpoint, digests
from fppo.runtime.layout import Cut, Layout
from fppo.runtime.mesh import Mesh, Sharding
from fppo.runtime.offload import Lane
from fppo.runtime.simulate import simulate
from fppo.settings.learning import OptimizerSettings
from fppo.steps.actor import UpdateActor
from fppo.steps.adamw_8bit import STEP, adamw_8bit, decoded, encoded, offsets_after
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw, from_function
from fppo.steps.train_state import check_cuts, init_state, optimizer_step, whole_shapes
from fppo_kernels.table import Kernels
from tests import tiny
from tests.models.families import make

CPU = torch.device("cpu")


def with_codes(count):
    """The numbers that have a code: 0, then up to 1, 8 for each factor of 2."""
    downs = [2.0 ** -((k + 7) // 8) * (1 + -k % 8 / 8) for k in range(count)]
    return torch.tensor([0.0, *reversed(downs)])


NUMBERS = {count: with_codes(count) for count in (127, 255)}


def rate(step):
    return 0.01 / (step + 1)


def numbers(seed, rows, columns, spread, dtype=torch.float32):
    """Numbers over `spread` decades, some of them 0, and one row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    x *= 10 ** (spread * torch.rand(rows, columns, generator=generator, dtype=torch.float64) - spread / 2)
    x[torch.rand(rows, columns, generator=generator) < 0.1] = 0.0
    x[-1] = 0.0
    return x.to(dtype)


# codes


@given(st.integers(0, 1000), st.sampled_from([1, 2, 3, 8]), st.floats(0, 12), st.sampled_from([False, True]))
def test_codes_are_off_by_half_the_distance_of_numbers_with_codes_or_with_other_offsets_by_all_of_it(
    seed, block_size, spread, wide
):
    x = numbers(seed, 4, 6 * block_size, spread, torch.float64 if wide else torch.float32)
    some = torch.randint(STEP, (block_size,), generator=torch.Generator().manual_seed(seed))
    for signed, y in ((True, x), (False, x.abs())):
        values = NUMBERS[127 if signed else 255].double()
        for offsets, part in ((STEP // 2, 0.5), (some, 1.0)):
            codes, scales = encoded(y, block_size, signed=signed, offsets=offsets)
            assert (codes.dtype, codes.shape) == (torch.uint8, y.shape)
            assert (scales.dtype, scales.shape) == (torch.float32, (4, 6))
            back = decoded(codes, scales, y.dtype, signed=signed)
            assert back.dtype == y.dtype
            scale = scales.double().repeat_interleave(block_size, 1)
            relative = (y.abs().double() / scale.where(scale > 0, 1.0)).clamp(max=1)
            place = torch.bucketize(relative, values).clamp(1, len(values) - 1)
            bound = (part * values.diff()[place - 1]).clamp(min=values[1].item()) * scale
            assert ((back - y).abs() <= bound * (1 + 1e-5) + 1e-38).all()
            assert (back * y >= 0).all()


@given(st.integers(0, 1000), st.floats(0, 40))
def test_only_0_has_the_code_of_0_among_second_moments(seed, spread):
    x = numbers(seed, 3, 16, spread).abs()
    for offsets in (STEP // 2, offsets_after(torch.tensor(float(seed)), 8)):
        back = decoded(*encoded(x, 8, signed=False, offsets=offsets), signed=False)
        assert torch.equal(back > 0, x > 0)


def test_codes_depend_on_nothing_outside_of_the_block():
    x, offsets = numbers(0, 6, 32, 6.0), offsets_after(torch.tensor(7.0), 8)
    codes, scales = encoded(x, 8, signed=True, offsets=offsets)
    for own in (slice(0, 3), slice(5, 6)):
        for part in (slice(0, 8), slice(8, 32)):
            blocks = slice(part.start // 8, part.stop // 8)
            found = encoded(x[own, part].contiguous(), 8, signed=True, offsets=offsets)
            assert torch.equal(found[0], codes[own, part])
            assert torch.equal(found[1], scales[own, blocks])


def test_rounding_is_right_on_the_mean_over_updates_and_over_places():
    offsets = torch.stack([offsets_after(torch.tensor(float(count)), 64) for count in range(1000)])
    assert 0 <= offsets.min() < offsets.max() < STEP
    for part in (offsets, offsets[:, 5], offsets[3], offsets_after(torch.tensor(1_000_000.0), 64)):
        assert part.double().mean().item() == pytest.approx(STEP / 2, rel=0.05)
    x = torch.rand(1, 64, generator=torch.Generator().manual_seed(0)) + 0.5
    back = torch.stack([decoded(*encoded(x, 64, signed=False, offsets=own), signed=False) for own in offsets[:300]])
    torch.testing.assert_close(back.mean(0), x, rtol=3e-3, atol=0)


def test_a_second_moment_follows_gradients_that_grow_as_adamws_does():
    """By less than a code's distance in each of many updates: rounded to the nearest it would stand still."""
    params = {"w": torch.ones(4, 64)}
    one, two = adamw(rate, max_grad_norm=None), adamw_8bit(rate, max_grad_norm=None)
    exact, state = init_state(tree.copy(params), one), init_state(params, two)
    generator = torch.Generator().manual_seed(0)
    for step in range(600):
        grads = torch.randn(4, 64, generator=generator)
        grads[:, 1:] *= 1e-2 if step < 200 else 5e-2
        exact, _ = optimizer_step(exact, {"w": grads.clone()}, optimizer=one, donate=True)
        state, _ = optimizer_step(state, {"w": grads}, optimizer=two, donate=True)
    found = decoded(state.opt.nu.codes["w"], state.opt.nu.scales["w"], signed=False)
    assert 0.9 < (found / exact.opt.nu["w"]).mean() < 1.1
    assert (found / exact.opt.nu["w"]).min() > 0.5


# the update


def nearest(x, size):
    """The nearest number with a code, relative to the largest of its block, one after the other."""
    back, values = torch.zeros_like(x), NUMBERS[127].double()
    for i, number in enumerate(x):
        scale = x[i // size * size : (i // size + 1) * size].abs().max().float().double()
        if scale > 0:
            back[i] = scale * number.sign() * values[(values - number.abs() / scale).abs().argmin()]
    return back


def by_offset(x, size, count):
    """The number below or above that has a code, by its place's offset."""
    back, values = torch.zeros_like(x), NUMBERS[255].double()
    for i, number in enumerate(x.tolist()):
        scale = x[i // size * size : (i // size + 1) * size].max().float().double().item()
        if number == 0:
            continue
        share = (count * 12664746 + i % size * 9560334) % 2**24 / 2**24
        high = next(k for k in range(1, 256) if k == 255 or values[k] >= number / scale)
        low, top = values[high - 1].item(), values[high].item()
        back[i] = scale * (top if (number / scale - low) / (top - low) + share >= 1 or high == 1 else low)
    return back


@pytest.mark.parametrize("clip", [None, 0.5])
def test_an_update_decodes_applies_adamws_formula_and_encodes(clip):
    ours = adamw_8bit(rate, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, block_size=4, max_grad_norm=clip)
    params = {"w": numbers(0, 3, 8, 1.0, torch.float64), "b": numbers(1, 2, 8, 1.0, torch.float64)[0]}
    state, mine = init_state(params, ours), tree.copy(params)
    mu, nu = tree.map(torch.zeros_like, params), tree.map(torch.zeros_like, params)
    for step in range(4):
        grads = {"w": numbers(step + 2, 3, 8, 2.0, torch.float64), "b": numbers(step + 9, 2, 8, 1.0, torch.float64)[0]}
        state, _ = optimizer_step(state, tree.copy(grads), optimizer=ours)
        norm = torch.cat([g.flatten() for g in grads.values()]).norm()
        for name, g in grads.items():
            g = g if clip is None or norm < clip else g / ((norm.float() + 1e-6) / clip).double()
            mu[name] = 0.8 * mu[name] + 0.2 * g
            nu[name] = 0.9 * nu[name] + 0.1 * g * g
            root = (nu[name] / (1 - 0.9 ** (step + 1))).sqrt() + 1e-6
            mine[name] = mine[name] * (1 - 0.3 * rate(step)) - rate(step) * mu[name] / (1 - 0.8 ** (step + 1)) / root
            if name == "w":
                mu[name] = torch.stack([nearest(row, 4) for row in mu[name]])
                nu[name] = torch.stack([by_offset(row, 4, step) for row in nu[name]])
    for name, x in mine.items():
        torch.testing.assert_close(state.params[name], x, rtol=1e-11, atol=1e-12)
    for moment, own, signed in ((mu, state.opt.mu, True), (nu, state.opt.nu, False)):
        found = decoded(own.codes["w"], own.scales["w"], torch.float64, signed=signed)
        torch.testing.assert_close(found, moment["w"], rtol=1e-11, atol=0)
    torch.testing.assert_close(state.opt.adamw.nu["b"], nu["b"], rtol=1e-11, atol=0)


def step_of(params, grads, made):
    return optimizer_step(init_state(params, made), tree.copy(grads), optimizer=made)[0]


def test_neither_a_cut_into_rows_nor_the_order_in_memory_changes_a_bit():
    """Rows beyond those whose moments are decoded together, too."""
    made = adamw_8bit(rate, block_size=32, max_grad_norm=None)
    params, grads = ({"w": numbers(seed, 5 << 10, 1 << 10, 1.0)} for seed in (0, 1))
    whole = step_of(params, grads, made)
    rows = {"one": slice(0, 5000), "two": slice(5000, None)}
    parts = step_of(*({n: x["w"][own].clone() for n, own in rows.items()} for x in (params, grads)), made)
    pairs = [(whole.params, parts.params)]
    for moment in ("mu", "nu"):
        a, b = getattr(whole.opt, moment), getattr(parts.opt, moment)
        pairs += [(a.codes, b.codes), (a.scales, b.scales)]
    for a, b in pairs:
        assert torch.equal(a["w"], torch.cat([b["one"], b["two"]]))
    params, grads = ({"w": numbers(seed, 6, 64, 1.0)} for seed in (0, 1))
    turned = {"w": params["w"].t().contiguous().t()}
    assert not turned["w"].is_contiguous()
    after, plain = step_of(turned, grads, made), step_of(params, grads, made)
    assert torch.equal(after.params["w"], plain.params["w"])
    assert tree.digest(after.opt) == tree.digest(plain.opt)


def test_the_state_takes_three_tenths_of_adamws_at_most_and_vectors_stay_as_they_are():
    config = tiny.config(hidden_size=128, intermediate_size=192, vocab_size=512)
    params = {name: torch.empty(shape, device="meta") for name, shape in models.build(config).shapes.items()}
    own, plain = adamw_8bit(rate).init(params), adamw(rate).init(params)
    assert sum(x.nbytes for x in tree.tensors(own)) <= 0.3 * sum(x.nbytes for x in tree.tensors(plain))
    vectors = {name for name, x in params.items() if x.dim() == 1}
    assert own.adamw.mu.keys() == vectors
    assert all(x.dtype == torch.float32 for x in own.adamw.mu.values())
    said = adamw_8bit(rate).says
    assert said is not None
    assert said(params) == f"8-bit moments in blocks of 64: 15 parameters; without blocks: {len(vectors)} vectors"


def test_blocks_of_less_than_one_number_are_refused():
    with pytest.raises(ValueError, match="block_size must be 1 or more, got 0"):
        adamw_8bit(rate, block_size=0)


# meshes


OPTIMIZER = adamw_8bit(rate, block_size=2, eps=1e-3)
AXES = [
    {"shard": 3},
    {"tensor": 2, "shard": 2},
    {"shard": 2, "expert": 2},
    {"pipeline": 2, "tensor": 2},
]


def updated(mesh: Mesh, stage: int = 3):
    """The state of a mixture of experts after two updates, the mesh, and the whole shapes of its leaves."""
    model, params = make("qwen3_moe")
    mesh = attrs.evolve(mesh, sharding=Sharding(stage=stage))
    model = models.place(model, mesh)
    state, _ = UpdateActor(
        forward=Forward(model, mesh=mesh),
        loss_fn=losses.ppo_clip,
        loop=Loop(mini_batch_size=3, micro_batching=MicroBatching(size=2)),
        optimizer=OPTIMIZER,
    )(init_state(models.own_params(model, params, mesh), OPTIMIZER), tiny.experience(5, 6))
    mesh = attrs.evolve(mesh, layout=model.state_layout)
    return state, mesh, whole_shapes(state, model.extents), model


@cache
def alone():
    return updated(Mesh.local())[0]


def values_of(state):
    """All numbers of a state, with moments decoded."""
    opt = state.opt
    moments = {
        what: {n: decoded(x, own.scales[n], torch.float64, signed=signed) for n, x in own.codes.items()}
        for what, own, signed in (("mu", opt.mu, True), ("nu", opt.nu, False))
    }
    return dict(tree.leaves_with_paths((state.params, opt.adamw, moments)))


@pytest.mark.slow
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_any_mesh_makes_the_steps_of_one_process_and_any_other_reads_its_checkpoint(axes, tmp_path):
    def save(mesh, stage):
        state, mesh, shapes, _ = updated(mesh, stage)
        checkpoint.begin_save(state, tmp_path, stage, mesh=mesh, shapes=shapes).wait()
        return digests.digest(state, "sums", device=CPU, mesh=mesh, shapes=shapes)

    def load(mesh, stage):
        state, mesh, shapes, _ = updated(mesh)
        empty = tree.map(torch.zeros_like, state)
        state = checkpoint.load(empty, tmp_path, stage, mesh=mesh, shapes=shapes)
        return digests.digest(state, "sums", device=CPU, mesh=mesh, shapes=shapes)

    for stage in (1, 3) if axes == AXES[0] else (3,):
        written = simulate(axes, partial(save, stage=stage))
        read = checkpoint.load(tree.map(torch.zeros_like, alone()), tmp_path, stage)
        for path, x in values_of(alone()).items():
            torch.testing.assert_close(values_of(read)[path], x, rtol=1e-9, atol=1e-10, msg=path)
        for again in ({}, AXES[(AXES.index(axes) + 1) % len(AXES)]):
            ranks = simulate(again, partial(load, stage=stage))
            assert {str(sorted(x.items())) for x in ranks} == {str(sorted(written[0].items()))}


def test_a_cut_inside_of_a_block_is_an_error_that_names_parameter_axis_and_size():
    wrong = r"model\.down of shape \(4, 24\): blocks of 8 do not fit axis 1, which the tensor axis cuts into 2 parts"
    layout = Layout(
        {"model.down": torch.Size((4, 24)), "up": torch.Size((24, 8))},
        {"model.down": Cut(1, 2, (24,)), "up": Cut(0, 2, (24,))},
        frozenset(),
        0,
        2,
    )
    own = adamw_8bit(rate, block_size=8)
    with pytest.raises(ValueError, match=wrong):
        check_cuts(own, layout)
    params = {name: torch.ones(shape) for name, shape in layout.shapes.items()}
    with pytest.raises(ValueError, match=wrong):
        optimizer_step(init_state(params, own), tree.copy(params), optimizer=own, mesh=Mesh(layout=layout), donate=True)
    for size in (4, 6, 32):
        check_cuts(adamw_8bit(rate, block_size=size), layout)
    model = models.build(tiny.config())
    placed: Model = attrs.evolve(model, layout=attrs.evolve(layout, whole=layout.whole))
    settings = OptimizerSettings(name="adamw_8bit", keywords={"block_size": 8})
    loop = Loop(mini_batch_size=1, micro_batching=MicroBatching(size=1))
    learning = Learning("actor", settings, 1, loop, offload="none", offload_activations=False)
    with pytest.raises(ValueError, match=rf"actor\.optimizer\.name = 'adamw_8bit': {wrong}"):
        learning.optimizer_on(Tools(Kernels.named(), Lane(CPU)), placed)


def test_runs_of_a_cut_that_end_inside_of_a_block_are_refused_though_parts_fit():
    """Two runs of 6 numbers make a part of 12, and blocks of 4 would hold numbers of both."""
    layout = Layout({"w": torch.Size((2, 24))}, {"w": Cut(1, 2, (12, 12))}, frozenset(), 0, 2)
    with pytest.raises(ValueError, match=r"w of shape .* blocks of 4 do not fit axis 1"):
        check_cuts(adamw_8bit(rate, block_size=4), layout)
    check_cuts(adamw_8bit(rate, block_size=3), layout)


def blockwise(block_size):
    """An optimizer of one's own: steps by the largest gradient of each block along rows."""

    def blocks(x):
        return x.unflatten(0, (-1, block_size)).abs().amax(1)

    def step(params, grads, state, number):
        largest = {name: torch.maximum(state["largest"][name], blocks(g)) for name, g in grads.items()}
        wide = {name: x.repeat_interleave(block_size, 0) for name, x in largest.items()}
        return {name: p - 0.1 * grads[name] / wide[name] for name, p in params.items()}, {"largest": largest}

    return from_function(lambda params: {"largest": {n: blocks(0 * p) for n, p in params.items()}}, step)


def test_ones_own_blockwise_state_is_cut_as_its_parameters_are(tmp_path):
    whole = {"w": torch.randn(12, 3, generator=Key(0).generator())}
    layout = Layout({"w": torch.Size((12, 3))}, {"w": Cut(0, 2, (4, 8))}, frozenset(), 0, 1)
    own = blockwise(2)

    def run(mesh):
        axis = mesh["tensor"]
        mine = attrs.evolve(layout, rank=axis.rank, ranks=axis.size, cuts=layout.cuts if axis.size > 1 else {})
        check_cuts(own, mine)
        params = {"w": mine.take("w", whole["w"])}
        grads = {"w": params["w"] + 1.0}
        mesh = attrs.evolve(mesh, layout=mine)
        state, _ = optimizer_step(init_state(params, own), grads, optimizer=own, mesh=mesh)
        shapes = whole_shapes(state, {"w": mine.extent("w")})
        checkpoint.begin_save(state, tmp_path, axis.size, mesh=mesh, shapes=shapes).wait()
        return state

    alone, _ = run(Mesh.local()), simulate({"tensor": 2}, run)
    assert tree.digest(checkpoint.load(tree.map(torch.zeros_like, alone), tmp_path, 2)) == tree.digest(alone)
    with pytest.raises(ValueError, match=r"no part of the state of whole ones: .*largest"):
        check_cuts(from_function(lambda p: {"largest": {"w": p["w"][:: 1 + (len(p["w"]) > 8)]}}, own.update), layout)
