"""torch.func goes through passes, objectives and updates, and gives what fppo's own passes give."""

from functools import partial

import attrs
import pytest
import torch
from torch.func import grad, jvp, vjp, vmap
from transformers import MixtralConfig

from fppo import losses, models, tree
from fppo.grad import value_and_grad
from fppo.key import Key
from fppo.models import lora
from fppo.models.adapted import Lora
from fppo.steps import (
    Forward,
    Loop,
    MicroBatching,
    PolicyTerms,
    TrainState,
    UpdateActor,
    adamw,
    forward_micro_batch,
    init_state,
    sgd,
)
from fppo_kernels import table
from fppo_kernels.table import Kernels
from tests import tiny

MODEL, PARAMS = tiny.model_and_params()
BATCH = tiny.experience(0, 4)
COLUMNS = ("tokens", "attention_mask", "response_mask", "old_log_probs", "ref_log_probs", "advantages")
COLUMNS += ("rollout_log_probs",)
TERMS = PolicyTerms(temperature=0.9, entropy_coef=0.01, kl_coef=0.1)
SMOOTH = attrs.evolve(TERMS, kl_coef=0.0)  # parts of the KL term are constants to the gradient, not to differences
WEIGHTS = losses.loss_weights(BATCH.response_mask, "token-mean", totals=losses.count_totals(BATCH.response_mask))
KERNELS = {
    "default": {},
    "eager": {"attention": "eager", "log_probs": "reference"},
}
if table.available("glu")["cpp"] is None:
    KERNELS["cpp"] = dict.fromkeys(("attention", "log_probs", "rms_norm", "rotary", "glu"), "cpp")


def updates(forward, **changes):
    loop = Loop(mini_batch_size=2, micro_batching=MicroBatching(size=1))
    plain = UpdateActor(
        forward=forward, loss_fn=losses.ppo_clip, loop=loop, optimizer=adamw(lambda step: 1e-2), terms=TERMS
    )
    return attrs.evolve(plain, **changes)


def loss(params, rows=BATCH, weights=WEIGHTS, *, forward, terms=TERMS):
    objective = updates(forward, terms=terms).objective()
    out = forward_micro_batch(
        params, rows, forward=forward, outputs=objective.outputs, temperature=objective.temperature
    )
    return objective.loss(out, rows, weights)[0]


def direction(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(x.shape, generator=draw, dtype=x.dtype) for name, x in PARAMS.items()}


def moved(params, along, step):
    return {name: x + step * along[name] for name, x in params.items()}


def dot(a, b):
    return sum((a[name] * b[name]).sum() for name in a)


@pytest.fixture(scope="module", params=[*KERNELS, "padded"])
def forward(request):
    kernels = Kernels.named(**KERNELS.get(request.param, {}))
    return Forward(MODEL, kernels, remove_padding=request.param != "padded")


def test_an_objective_has_the_derivatives_of_plain_passes(forward):
    fn, along = partial(loss, forward=forward), direction()
    value, expected = value_and_grad(fn)(PARAMS)
    torch.testing.assert_close(grad(fn)(PARAMS), expected)
    torch.testing.assert_close(vjp(fn, PARAMS)[1](torch.ones_like(value))[0], expected)
    torch.testing.assert_close(jvp(fn, (PARAMS,), (along,))[1], dot(expected, along))


def test_the_derivatives_of_an_objective_are_those_of_differences(forward):
    fn, along = partial(loss, forward=forward, terms=SMOOTH), direction()
    tangent = jvp(fn, (PARAMS,), (along,))[1]
    step = 1e-5
    ends = [fn(moved(PARAMS, along, sign * step)) for sign in (1, -1)]
    torch.testing.assert_close(tangent, (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-7)
    product = jvp(grad(fn), (PARAMS,), (along,))[1]
    ends = [value_and_grad(fn)(moved(PARAMS, along, sign * step))[1] for sign in (1, -1)]
    differences = {name: (x - ends[1][name]) / (2 * step) for name, x in ends[0].items()}
    torch.testing.assert_close(product, differences, rtol=1e-5, atol=1e-6)
    reverse = grad(lambda params: dot(grad(fn)(params), along))(PARAMS)
    torch.testing.assert_close(reverse, product)


def test_a_map_over_rows_gives_the_gradient_of_each(forward):
    """Rows of different lengths, with holes in their masks, and one without a token."""

    def one(params, columns, weights):
        rows = tree.replace(BATCH, **{name: x[None] for name, x in columns.items()})
        return loss(params, rows, weights[None], forward=forward)

    columns = {name: getattr(BATCH, name) for name in COLUMNS}
    mapped = vmap(grad(one), in_dims=(None, 0, 0))(PARAMS, columns, WEIGHTS)
    for row in range(len(BATCH.row_ids)):
        alone = value_and_grad(one)(PARAMS, {name: x[row] for name, x in columns.items()}, WEIGHTS[row])[1]
        torch.testing.assert_close({name: x[row] for name, x in mapped.items()}, alone)
    whole = value_and_grad(partial(loss, forward=forward))(PARAMS)[1]
    torch.testing.assert_close({name: x.sum(0) for name, x in mapped.items()}, whole)


def test_a_map_over_parameters_gives_the_gradient_at_each(forward):
    several = [PARAMS, moved(PARAMS, direction(), 0.1)]
    stacked = {name: torch.stack([x[name] for x in several]) for name in PARAMS}
    mapped = vmap(grad(partial(loss, forward=forward)))(stacked)
    for number, params in enumerate(several):
        alone = value_and_grad(partial(loss, forward=forward))(params)[1]
        torch.testing.assert_close({name: x[number] for name, x in mapped.items()}, alone)


@pytest.mark.parametrize("optimizer", [adamw(lambda step: 1e-2), sgd(lambda step: 1e-2, momentum=0.9, nesterov=True)])
@pytest.mark.parametrize("stacks", [True, False])
def test_whole_updates_are_mapped_over_clips(optimizer, stacks):
    """Two updates, of several micro-batches each, from parameters that the map has, or that it shares."""
    plain = updates(Forward(MODEL), optimizer=optimizer)

    def updated(params, opt, clip):
        stage = attrs.evolve(
            plain, loss_fn=partial(losses.ppo_clip, clip_low=clip, clip_high=clip, dual_clip=None), terms=PolicyTerms()
        )
        state, report = stage(TrainState(params=params, opt=opt, step=0), BATCH)
        return state.params, state.opt, report["actor/pg_clipfrac"].total

    clips, state = torch.tensor([0.01, 0.3]), init_state(PARAMS, optimizer)
    start = state.params, state.opt
    if stacks:
        stacked = tree.map(lambda x: torch.stack([x, x]), start)
        mapped = vmap(updated)(*stacked, clips)
    else:
        mapped = vmap(updated, in_dims=(None, None, 0))(*start, clips)
    for number, clip in enumerate(clips):
        alone = tree.tensors(updated(*tree.copy(start), clip))
        torch.testing.assert_close([x[number] for x in tree.tensors(mapped)], alone)
    assert not torch.equal(mapped[2][0], mapped[2][1])
    torch.testing.assert_close(start[0], PARAMS, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("optimizer", [adamw(lambda step: 1e-2, eps=1e-3), sgd(lambda step: 1e-1, max_grad_norm=None)])
def test_the_derivative_of_an_update_is_that_of_differences(optimizer):
    """The loss after two updates by the parameters before: through gradients, the norm that clips, and the moments."""
    plain, along = updates(Forward(MODEL), optimizer=optimizer, terms=SMOOTH), direction()

    def after(params):
        return loss(plain(init_state(params, optimizer), BATCH)[0].params, forward=plain.forward, terms=SMOOTH)

    step = 1e-5
    ends = [after(moved(PARAMS, along, sign * step)) for sign in (1, -1)]
    found = dot(grad(after)(PARAMS), along)
    torch.testing.assert_close(
        found, (ends[0] - ends[1]) / (2 * step), rtol=2e-3, atol=1e-7
    )  # the norm is rounded to float32


def check_all(fn, params):
    """All transforms of a loss of parameters, against plain passes."""
    expected, along = value_and_grad(fn)(params)[1], {name: torch.ones_like(x) for name, x in params.items()}
    torch.testing.assert_close(grad(fn)(params), expected)
    torch.testing.assert_close(jvp(fn, (params,), (along,))[1], dot(expected, along))
    twice = {name: torch.stack([x, x]) for name, x in params.items()}
    torch.testing.assert_close({name: x[1] for name, x in vmap(grad(fn))(twice).items()}, expected)
    ends = [value_and_grad(fn)(moved(params, along, sign * 1e-5))[1] for sign in (1, -1)]
    differences = {name: (x - ends[1][name]) / 2e-5 for name, x in ends[0].items()}
    torch.testing.assert_close(jvp(grad(fn), (params,), (along,))[1], differences, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("base", ["plain", "int8"])
def test_all_transforms_of_an_adapter(base):
    if base != "plain":
        pytest.importorskip("bitsandbytes")
    start = (MODEL, PARAMS) if base == "plain" else models.quantise(MODEL, PARAMS, "int8")
    model, params = lora.adapt(*start, Lora(rank=2, alpha=4.0), key=Key(0), dtype=torch.float64)
    check_all(partial(loss, forward=Forward(model), terms=SMOOTH), {name: x + 0.1 for name, x in params.items()})


@pytest.mark.slow
def test_all_transforms_of_values_and_hidden_states():
    critic, params = tiny.model_and_params("value")
    for model, start, output in ((critic, params, "values"), (MODEL, PARAMS, "hidden")):

        def squares(params, model=model, output=output):
            out = forward_micro_batch(params, BATCH, forward=Forward(model), outputs=(output,))
            return getattr(out, output).square().mean()

        check_all(squares, start)


def test_of_experts_one_reverse_pass_is_taken():
    model = models.build(
        MixtralConfig(
            vocab_size=tiny.VOCAB,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    )
    fn = partial(loss, forward=Forward(model))
    params = models.init_params(model, Key(0), torch.float64)
    torch.testing.assert_close(grad(fn)(params), value_and_grad(fn)(params)[1])
    with pytest.raises(ValueError, match="'mixtral' sends tokens to experts"):
        jvp(fn, (params,), (params,))


def test_masks_that_a_map_is_over_are_refused_where_they_are_read():
    """A whole update packs its rows: it needs their masks."""
    plain = updates(Forward(MODEL))

    def updated(mask):
        return plain(init_state(PARAMS, plain.optimizer), tree.replace(BATCH, response_mask=mask))[0].params

    with pytest.raises(ValueError, match="vmap maps over it: leave it out of vmap's in_dims"):
        vmap(updated)(torch.stack([BATCH.response_mask] * 2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"checkpoint_layers": True}, "checkpoint_layers=False"),
        ({"compile_layers": True}, "compile_layers=False"),
    ],
)
def test_what_no_transform_goes_through_is_refused_by_name(change, words):
    with pytest.raises(ValueError, match=words):
        grad(partial(loss, forward=Forward(attrs.evolve(MODEL, **change))))(PARAMS)
