"""Rows with images: packed, padded, in any order and split, they are what transformers computes of them one by one."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fppo import batch as batches
from fppo import metrics, models
from fppo.batch import Column
from fppo.key import Key
from fppo.models import lora
from fppo.models.adapted import Lora
from fppo.models.precision import KeepDouble
from fppo.models.spans import layer_spans, staged
from fppo.models.vision_pass import place_images
from fppo.models.vision_probe import composite_inputs
from fppo.runtime.mesh import Axis, Mesh, Sharding
from fppo.runtime.simulate import simulate
from fppo.steps import Forward, Loop, MicroBatching, adamw, schedule, sgd
from fppo.steps.forward import forward_micro_batch
from fppo.steps.supervised import UpdateSupervised
from fppo.steps.train_state import init_state
from fppo_kernels.attention.sdpa import sdpa
from fppo_kernels.padding import make_lengths
from tests.models.test_lora import noisy, projections
from tests.models.vision import CONFIGS, make, rows

FAMILIES = list(CONFIGS)
NONE: dict[str, Tensor] = {}


def own_rows(record):
    """Each row's tokens alone, how many of them are the response's, and its images."""
    for tokens, real, mask, inputs in zip(
        record.tokens, record.attention_mask, record.response_mask, record.inputs, strict=True
    ):
        yield tokens[real], int(mask.sum()), inputs


def theirs(module, record, head=None):
    """transformers' log-probs of each row's response, or the `head`'s values, row by row."""
    columns = []
    for tokens, length, inputs in own_rows(record):
        beside = NONE if inputs is None else composite_inputs(module, tokens, inputs)
        run = module if head is None else module.base_model
        with KeepDouble():
            out = run(input_ids=tokens[None], use_cache=False, **beside)
        if head is not None:
            columns.append(F.linear(out.last_hidden_state[0, -length - 1 : -1], *head)[:, 0])
            continue
        logits = out.logits[0, -length - 1 : -1]
        columns.append(logits.log_softmax(-1).gather(1, tokens[-length:, None])[:, 0])
    return columns


def weighted(columns):
    return sum((x * torch.linspace(1, 2, len(x), dtype=x.dtype)).sum() for x in columns)


def ours(forward, params, record, groups, output="log_probs"):
    columns = {}
    for group in groups:
        part = batches.rows(record, group)
        out = getattr(forward_micro_batch(params, part, forward=forward, outputs=(output,)), output)
        columns |= {i: x[mask] for i, x, mask in zip(group, out, part.response_mask, strict=True)}
    return [columns[i] for i in range(len(record.tokens))]


def check(forward, params, record, groups, expected, gradients, output="log_probs"):
    leaves = {name: x.clone().requires_grad_() for name, x in params.items()}
    columns = ours(forward, leaves, record, groups, output)
    for x, y in zip(columns, expected, strict=True):
        assert (x - y).abs().max() < 1e-10
    grads = torch.autograd.grad(weighted(columns), list(leaves.values()), allow_unused=True)
    scale = max(x.abs().max() for x in gradients.values())
    for name, grad in zip(leaves, grads, strict=True):
        assert (gradients[name] - (0 if grad is None else grad)).abs().max() < 1e-10 * scale, name


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_and_gradients_are_transformers(name):
    module, model, params = make(name)
    record = rows(name)
    expected = theirs(module, record)
    weighted(expected).backward()
    gradients = {path: torch.zeros_like(x) if x.grad is None else x.grad for path, x in module.named_parameters()}
    assert any(x.any() for path, x in gradients.items() if path in model.vision_params)
    forward, every = Forward(model), [0, 1, 2, 3]
    cases = [
        (forward, [every]),
        (forward, [[3, 2], [1, 0]]),
        (attrs.evolve(forward, remove_padding=False), [every]),
        (Forward(attrs.evolve(model, checkpoint_layers=True)), [every]),
    ]
    for run, groups in cases:
        check(run, params, record, groups, expected, gradients)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "qwen3_vl" else pytest.mark.slow) for n in FAMILIES])
def test_an_adapter_is_merged_weights_and_learns_by_their_projections(name):
    _, model, params = make(name)
    record = rows(name)
    for trains in (True, False):
        whole = attrs.evolve(model, vision=attrs.evolve(model.vision, trains=trains))
        lora.check_adapted(whole, Lora(2, 4.0))
        adapted, fresh = lora.adapt(whole, params, Lora(2, 4.0), key=Key(0), dtype=torch.float64)
        adapter = noisy(fresh)
        assert any(path.rpartition(".")[0] in model.vision_params for path in adapter) == trains
        merged = {path: x.requires_grad_() for path, x in lora.merged(adapted, adapter).items()}
        expected = ours(Forward(whole), merged, record, [[0, 1, 2, 3]])
        grads = torch.autograd.grad(weighted(expected), list(merged.values()), allow_unused=True)
        full = {
            path: torch.zeros_like(x) if g is None else g for (path, x), g in zip(merged.items(), grads, strict=True)
        }
        check(Forward(adapted), adapter, record, [[3, 2], [1, 0]], expected, projections(adapted, adapter, full))


@pytest.mark.parametrize("name", ["qwen3_vl", "idefics3"])
def test_a_critic_sees_images_too(name):
    module, model, params = make(name, "value")
    head = params["score.weight"].clone().requires_grad_(), params["score.bias"].clone().requires_grad_()
    record = rows(name, (1, 2))
    expected = theirs(module, record, head)
    weighted(expected).backward()
    gradients = {path: torch.zeros_like(x) if x.grad is None else x.grad for path, x in module.named_parameters()}
    gradients |= {"score.weight": head[0].grad, "score.bias": head[1].grad}
    check(Forward(model), params, record, [[1, 0]], expected, gradients, "values")


@pytest.mark.parametrize("name", ["qwen3_vl", "llava"])
def test_rows_of_a_prompt_share_its_images_and_may_sample_what_stands_for_one(name, monkeypatch):
    _, model, params = make(name)
    record = rows(name, (0, 2, 1), sampled=True)
    seen = []
    features = "fppo.models.vision_pass.image_features"
    plain = __import__("fppo.models.vision_pass", fromlist=["image_features"]).image_features
    monkeypatch.setattr(features, lambda s, x: seen.append(len(x["pixel_values"])) or plain(s, x))
    with torch.no_grad():
        alone = ours(Forward(model), params, record, [[0], [1], [2]])
        once = seen[0] + seen[1]
        several = batches.repeat(record, 3, interleave=False)
        together = ours(Forward(model), params, several, [list(range(9))])
    assert seen[2] == once
    for i, x in enumerate(together):
        assert (x - alone[i % 3]).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["qwen2_vl"])
def test_a_frozen_vision_tower_stays_as_it_is(name):
    _, model, params = make(name)
    assert model.vision is not None
    record, loop = rows(name, (1, 0)), Loop(mini_batch_size=2, micro_batching=MicroBatching(size=1))
    optimizer = adamw(schedule("constant", 1e-2), betas=(0.0, 0.9), weight_decay=0.5, max_grad_norm=None)
    results, norms, squares = {}, {}, {}
    for trains in (True, False):
        forward = Forward(attrs.evolve(model, vision=attrs.evolve(model.vision, trains=trains)))
        state, report = UpdateSupervised(forward=forward, loop=loop, optimizer=optimizer)(
            init_state(params, optimizer), record
        )
        results[trains] = {path for path, x in state.params.items() if torch.equal(x, params[path])}
        norms[trains] = metrics.report(report)["supervised/grad_norm"]
        squares[trains] = {path: float(x.double().square().sum()) for path, x in state.opt.mu.items()}
    assert results[False] == model.vision_params
    assert not results[True]
    rest = sum(x for path, x in squares[True].items() if path not in model.vision_params)
    assert norms[True] == pytest.approx(math.sqrt(sum(squares[True].values())), rel=1e-6)
    assert norms[False] == pytest.approx(math.sqrt(rest), rel=1e-6)  # no part of the tower's is in it


def test_rows_that_do_not_fit_the_model_are_refused():
    name = "qwen2_vl"
    _, model, params = make(name)
    record = rows(name, (1, 2))
    shifted = [attrs.evolve(x, places=x.places + 1) for x in record.inputs]
    fewer = [attrs.evolve(x, places=x.places[:-1]) for x in record.inputs]
    for inputs, text in (
        (shifted, "positions without their placeholder token 60"),
        (fewer, "placeholder tokens for images"),
    ):
        with pytest.raises(ValueError, match=text):
            forward_micro_batch(params, attrs.evolve(record, inputs=Column(inputs)), forward=Forward(model))


AXES = [
    *(("qwen3_vl", axis) for axis in ("replicate", "sequence", "context", "tensor")),
    *(("qwen2_5_vl", axis) for axis in ("shard", "sequence x tensor")),
    ("qwen2_vl", "tensor"),
    *(("idefics3", axis) for axis in ("tensor", "pipeline")),
    ("llava", "shard x tensor x sequence"),
    *(("qwen3_vl_moe", axis) for axis in ("expert", "pipeline", "expert x tensor x pipeline")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes"), AXES)
def test_ranks_that_share_the_rows_give_the_update_of_one(axes, name):
    """One of two ranks that divide the rows has some without images."""
    _, model, params = make(name)
    axes = axes.split(" x ")
    record, loop = rows(name, (2, 0, 0)), Loop(mini_batch_size=3, micro_batching=MicroBatching(size=1))
    optimizer = sgd(schedule("constant", 1e-2))

    def run(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding() if "shard" in axes else None)
        placed = models.place(model, mesh)
        own = models.own_params(placed, params, mesh)
        forward = Forward(placed, mesh=mesh)
        state, _ = UpdateSupervised(forward=forward, loop=loop, optimizer=optimizer)(init_state(own, optimizer), record)
        return models.whole_params(placed, state.params, mesh)

    expected = run(Mesh.local())
    assert any(not torch.equal(expected[path], params[path]) for path in model.vision_params)
    for found in simulate(dict.fromkeys(axes, 2), run):
        assert all((found[path] - x).abs().max() < 1e-10 for path, x in expected.items())


def test_a_first_stage_has_the_layers_after_which_images_are_added():
    """And one more, as a stage hands on what its last layer gives."""
    _, model, _ = make("qwen3_vl_moe")
    assert [list(layers) for layers in layer_spans(model, 2)] == [[0, 1, 2], [3, 4]]
    _, model, params = make("qwen3_vl")
    with pytest.raises(ValueError, match="3 layers, and 2 pipeline stages take at least one each, the first 3"):
        layer_spans(model, 2)
    stage = staged(model, Axis(2, 0, None), cuts=[range(2), range(2, 3)])
    record = rows("qwen3_vl", (1,))
    positions = torch.arange(len(record.tokens[0]))
    images, positions = place_images(stage, record.inputs, record.tokens[0], positions, [len(positions)])
    attend = models.packed_attention(sdpa, make_lengths([len(record.tokens[0])]))
    with pytest.raises(ValueError, match="first stage of the pipeline has 2 layers, and images are added after 2"):
        models.hidden_states(stage, params, record.tokens[0], positions, attend=attend, received=images)
