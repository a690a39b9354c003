"""Passes and updates of rows that share their prompts give the numbers of rows that have their own, in float64."""

import types
from functools import cache, partial

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import batch as batches
from fppo import losses, metrics, models, tree
from fppo.grad import value_and_grad
from fppo.key import Key
from fppo.models import flops, lora
from fppo.models.adapted import Lora
from fppo.runtime.mesh import Axis, Mesh
from fppo.runtime.simulate import simulate
from fppo.steps import packed
from fppo.steps.actor import PolicyTerms, UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import compute_outputs, forward_micro_batch
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.outputs import Forward
from fppo.steps.packed import indexed, masks_of
from fppo.steps.scores import compute_reward_scores
from fppo.steps.shared import SortedRows
from fppo.steps.train_state import init_state
from fppo_kernels import table
from fppo_kernels.table import Kernels
from tests import tiny
from tests.models import hybrids
from tests.models.families import CONFIGS, EXPERTS, make
from tests.models.vision import make as make_vision
from tests.models.vision import rows as image_rows

OPTIMIZER = adamw(lambda step: 0.1, betas=(0.0, 0.9), eps=1.0, max_grad_norm=1.0)
OUTPUTS = {"lm": ("log_probs", "entropy", "sum_squared_probs", "hidden"), "value": ("values", "outputs")}
EXPERT_OUTPUTS = ("routed", "loads", "router_sums")


def alike(seed, rows, *, each=3):
    """Rows of which so many have one prompt, in any order; some have one response too, or begin as another one does."""
    batch, g = tiny.experience(seed, rows), torch.Generator().manual_seed(seed)
    width = batch.tokens.shape[1] - batch.response_mask.shape[1]
    first = (torch.arange(rows) // each * each)[torch.randperm(rows, generator=g)]
    tokens, mask = batch.tokens.clone(), batch.attention_mask.clone()
    tokens[:, :width], mask[:, :width] = batch.tokens[first, :width], batch.attention_mask[first, :width]
    same = torch.rand(rows, generator=g) < 0.2
    tokens[same], mask[same] = tokens[first[same]], mask[first[same]]
    response = batch.response_mask & mask[:, width:]
    return batches.extend(type(batch), batch, tokens=tokens, attention_mask=mask, response_mask=response)


def forwards(model, **more):
    return Forward(model, share_prompts=True, **more), Forward(model, share_prompts=False, **more)


def close(found, expected, what, tolerance=1e-10):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}")


def weighted(out):
    """A loss that weighs every number of a tree of outputs differently."""
    leaves = [x.double() for _, x in tree.leaves_with_paths(out) if x.requires_grad]
    return sum((x * torch.arange(x.numel()).view(x.shape).double().sin()).sum() for x in leaves)


def outputs_of(params, batch, forward, names):
    def loss(params):
        out = forward_micro_batch(params, batch, forward=forward, outputs=names, temperature=0.7)
        found = {name: getattr(out, name) for name in names}
        return weighted(found), found

    (value, found), grads = value_and_grad(loss, has_aux=True)(params)
    return value, tree.map(torch.detach, found), grads


def check_same(one, other):
    for what, found, expected in zip(("loss", "outputs", "gradient"), one, other, strict=True):
        for (path, a), (_, b) in zip(tree.leaves_with_paths(found), tree.leaves_with_paths(expected), strict=True):
            close(a, b, f"{what}{path}")


def shares_tokens(batch, forward):
    masks = masks_of(batch, forward)
    found = indexed(batch, masks, forward).indices
    return found.shared is not None and len(found.real.index) < int(batch.attention_mask.sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CONFIGS, *EXPERTS])
def test_every_family_gives_outputs_and_gradients_of_rows_apart(name):
    model, params = make(name)
    batch = alike(4, 9)
    shared, apart = forwards(model)
    assert shares_tokens(batch, shared)
    assert not shares_tokens(batch, apart)
    names = OUTPUTS["lm"] + (EXPERT_OUTPUTS if model.routers else ())
    check_same(outputs_of(params, batch, shared, names), outputs_of(params, batch, apart, names))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "cpp"])
@pytest.mark.parametrize("head", ["lm", "value"])
@settings(max_examples=8)
@given(rows=st.integers(1, 8), each=st.integers(1, 4), seed=st.integers(0, 10_000))
def test_any_rows_give_outputs_and_gradients_of_rows_apart(head, kernel, rows, each, seed):
    if (reason := table.available("attention")[kernel]) is not None:
        pytest.skip(reason)
    model, params = tiny.model_and_params(head)
    batch = alike(seed, rows, each=each)
    own = [
        outputs_of(params, batch, x, OUTPUTS[head]) for x in forwards(model, kernels=Kernels.named(attention=kernel))
    ]
    check_same(*own)


@pytest.mark.parametrize("how", [True, "selective"])
def test_layers_are_recomputed(how):
    batch, (model, params) = alike(3, 7), tiny.model_and_params("lm")
    again = models.build(tiny.config(), checkpoint_layers=how)
    own = [outputs_of(params, batch, x, OUTPUTS["lm"]) for x in (forwards(again)[0], forwards(model)[1])]
    check_same(*own)


def test_an_adapter_learns_as_from_rows_apart():
    batch, (model, params) = alike(5, 7), tiny.model_and_params("lm")
    adapted, adapter = lora.adapt(model, params, Lora(2, 4.0), key=Key(0), dtype=torch.float64)
    adapter = {name: x + 0.1 * torch.randn(x.shape, generator=Key(1).generator()) for name, x in adapter.items()}
    check_same(*(outputs_of(adapter, batch, x, OUTPUTS["lm"]) for x in forwards(adapted)))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "llava", "smolvlm"])
def test_images_are_those_of_rows_apart(name):
    _, model, params = make_vision(name)
    record = batches.repeat(image_rows(name, (0, 2, 1), sampled=True), 3, interleave=False)
    tokens, width = record.tokens.clone(), record.tokens.shape[1] - record.response_mask.shape[1]
    tokens[3:, width] = 5  # other responses
    record = tree.replace(record, tokens=tokens)
    shared, apart = forwards(model)
    assert shares_tokens(record, shared)
    check_same(*(outputs_of(params, record, x, ("log_probs", "entropy")) for x in (shared, apart)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_of_rows_with_images_are_those_of_rows_apart(ranks):
    _, model, params = make_vision("qwen2_vl")
    record = batches.repeat(image_rows("qwen2_vl", (0, 2, 1), sampled=True), 2, interleave=False)
    _, expected, grads = outputs_of(params, record, Forward(model, share_prompts=False), ("log_probs",))

    def run(mesh):
        return outputs_of(params, record, Forward(model, mesh=mesh, share_prompts=True), ("log_probs",))

    found = simulate({"sequence": ranks}, run)
    for _, outputs, _ in found:
        close(outputs["log_probs"], expected["log_probs"], "log-probs")
    for name, grad in grads.items():
        close(sum(own[name] for *_, own in found), grad, f"gradient of {name}")


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{}, {"replicate": 3}, {"shard": 2}, {"sequence": 4}, {"tensor": 2}, {"pipeline": 2}])
def test_passes_without_gradients_keep_the_order_of_rows(axes):
    batch = alike(11, 10, each=4)
    built = {head: tiny.model_and_params(head) for head in ("lm", "value")}

    def run(mesh, cut, share):
        found = {}
        for head, (model, params) in built.items():
            own = models.place(model, mesh)
            forward = Forward(own, mesh=mesh, share_prompts=share)
            params = models.own_params(own, params, mesh)
            out = compute_outputs(params, batch, forward=forward, micro_batching=cut, outputs=OUTPUTS[head])
            found[head] = {name: getattr(out, name) for name in OUTPUTS[head]}
            if head == "value" and "pipeline" not in axes:
                found["scores"] = compute_reward_scores(params, batch, forward=forward, micro_batching=cut)
        return found

    (expected,) = simulate({}, partial(run, cut=MicroBatching(size=10), share=False))
    for cut in (MicroBatching(size=3), MicroBatching(token_budget=25)):
        for found in simulate(axes, partial(run, cut=cut, share=True)):
            wanted = {what: expected[what] for what in found}
            for (path, a), (_, b) in zip(tree.leaves_with_paths(found), tree.leaves_with_paths(wanted), strict=True):
                close(a, b, path, 1e-6 if "scores" in path else 1e-10)


@cache
def built(name):
    """A policy and a critic, which ranks share."""
    return {"lm": make(name), "value": make(name, head="value")}


def updates(mesh, batch, share, *, name="qwen2", budget=30):
    loop = Loop(mini_batch_size=8, micro_batching=MicroBatching(token_budget=budget), epochs=2)
    done = {}
    for head, (model, params) in built(name).items():
        own = models.place(model, mesh)
        state = init_state(models.own_params(own, params, mesh), OPTIMIZER)
        how = {"forward": Forward(own, mesh=mesh, share_prompts=share), "loop": loop, "optimizer": OPTIMIZER}
        if head == "lm":
            routers = {"router_z_coef": 0.05} if own.routers else {}
            terms = PolicyTerms(entropy_coef=0.01, kl_coef=0.1, **routers)
            state, report = UpdateActor(loss_fn=losses.ppo_clip, terms=terms, **how)(state, batch, key=Key(3))
        else:
            state, report = UpdateCritic(**how)(state, batch, key=Key(3))
        done[head] = models.whole_params(own, state.params, mesh), metrics.report(report)
    return done


SIXTEEN = alike(7, 16, each=4)


@cache
def apart(name):
    """The updates of rows that have their own prompts, in one process."""
    return simulate({}, partial(updates, batch=SIXTEEN, share=False, name=name))[0]


AXES = [
    {},
    {"replicate": 2},
    {"shard": 2},
    {"sequence": 2},
    {"tensor": 2},
    {"pipeline": 2},
    {"expert": 2},
    {"replicate": 2, "sequence": 2},
    {"shard": 2, "tensor": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("name", ["qwen2", "glm4_moe"])
def test_updates_are_those_of_rows_apart_on_one_rank(name, axes):
    if "expert" in axes and name != "glm4_moe":
        pytest.skip("it has no experts")
    batch, expected = SIXTEEN, apart(name)
    for found in simulate(axes, partial(updates, batch=batch, share=True, name=name)):
        for head, (params, numbers) in found.items():
            wanted, others = expected[head]
            for path, x in wanted.items():
                close(params[path], x, path)
            for metric, number in others.items():
                assert numbers[metric] == pytest.approx(number, abs=1e-10, rel=1e-8, nan_ok=True), metric


def mine(query, key, value, *, lengths, scale, **settings):
    """A kernel without keys of earlier tokens."""
    return Kernels.named(attention="eager").attention(query, key, value, lengths=lengths, scale=scale, **settings)


def test_what_cannot_share_is_named_or_shares_none():
    batch, model = alike(1, 6), tiny.model_and_params("lm")[0]
    routed, _ = make("qwen3_moe")
    stateful = models.build(hybrids.HYBRIDS["qwen3_next"])
    cases = [
        (model, {"remove_padding": False}, "padded rows run as they are"),
        (model, {"kernels": attrs.evolve(Kernels.named(), attention=mine)}, "the attention kernel has no keyword"),
        (routed, {"replay": True}, "routers choose for each row"),
        (stateful, {}, "carry states"),
        (model, {"mesh": Mesh({"context": Axis(2, 0)})}, "a context axis deals the packed row in blocks"),
    ]
    for own, how, why in cases:
        with pytest.raises(
            ValueError, match=f"share_prompts=True, and .*{why}.*: give share_prompts='auto', which then"
        ):
            Forward(own, share_prompts=True, **how)
        assert masks_of(batch, Forward(own, **how)).tokens is None
    auto = Forward(model)
    assert shares_tokens(batch, auto)
    assert not shares_tokens(tiny.experience(1, 6), auto)  # nothing to save


def test_a_row_that_is_too_long_is_refused_though_each_of_its_pieces_is_not(monkeypatch):
    model, params = tiny.model_and_params("lm")
    batch = alike(1, 6)
    longest, forward = int(batch.attention_mask.sum(1).max()), Forward(model, share_prompts=True)
    monkeypatch.setattr("fppo.models.run.longest_row", lambda config: longest - 1)
    with pytest.raises(ValueError, match=f"a row of {longest} tokens"):
        forward_micro_batch(params, batch, forward=forward)
    monkeypatch.setattr("fppo.models.run.longest_row", lambda config: longest)
    forward_micro_batch(params, batch, forward=forward)


def test_rows_share_where_that_saves_a_tenth():
    model, _ = tiny.model_and_params("lm")
    batch = alike(2, 12, each=2)
    saved = masks_of(batch, Forward(model, share_prompts=True)).sorted().saved
    assert 0.1 < saved < 0.9
    for least, shares in ((saved - 0.01, True), (saved + 0.01, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed, "LEAST_SAVED", least)
            assert shares_tokens(batch, Forward(model)) == shares
            assert shares_tokens(batch, Forward(model, share_prompts=True))
    for depth, shares in ((2, False), (3, True)):  # of 26 tokens
        rows = SortedRows([0, 1], [13, 13], [0, depth])
        assert packed.saves_enough(rows, Forward(model)) == shares
        assert packed.saves_enough(rows, Forward(model, share_prompts=True))


@pytest.mark.parametrize("axes", [{}, {"replicate": 2}], ids=str)
def test_an_update_tells_what_its_passes_saved(axes):
    """Of one micro-batch on each rank, as the counts of distinct tokens have it."""
    batch = SIXTEEN
    found = simulate(axes, partial(updates, batch=batch, share=True, budget=10**6))
    assert all(rank["lm"][1] == found[0]["lm"][1] for rank in found)
    for head, role in (("lm", "actor"), ("value", "critic")):
        numbers = found[0][head][1]
        assert 0.1 < numbers[f"perf/shared_tokens/{role}"] < 0.9
        assert 0.1 < numbers[f"perf/shared_flops/{role}"] < 0.9
    assert not any("shared_" in name for _, numbers in apart("qwen2").values() for name in numbers)
    if not axes:
        loop = Loop(mini_batch_size=16, micro_batching=MicroBatching(size=16))
        model, params = make("qwen2")
        how = {"loop": loop, "optimizer": OPTIMIZER, "loss_fn": losses.ppo_clip}
        _, report = UpdateActor(forward=Forward(model), **how)(init_state(params, OPTIMIZER), batch)
        rows = masks_of(batch, Forward(model)).sorted()
        assert metrics.report(report)["perf/shared_tokens/actor"] == pytest.approx(rows.saved)
        heads = int(batch.response_mask.sum())
        work = [flops.train_flops(model, rows.lengths, head_tokens=heads, shared=x) for x in ((), rows.depths)]
        assert metrics.report(report)["perf/shared_flops/actor"] == pytest.approx(1 - work[1] / work[0])


@pytest.mark.slow
def test_mini_batches_drawn_by_prompt_save_as_much_as_one_batch():
    model, params = make("qwen2")
    forward, batch = Forward(model, share_prompts=True), tiny.experience(7, 16)
    groups = torch.randperm(16, generator=torch.Generator().manual_seed(0)) // 4
    width = batch.tokens.shape[1] - batch.response_mask.shape[1]
    tokens, mask = batch.tokens.clone(), batch.attention_mask.clone()
    tokens[:, :width], mask[:, :width] = groups[:, None] + 5, True
    batch = tree.replace(batch, tokens=tokens, attention_mask=mask, groups=groups)

    def saved(**how):
        loop = Loop(mini_batch_size=4, micro_batching=MicroBatching(size=4), epochs=2, **how)
        stage = UpdateActor(forward=forward, loop=loop, optimizer=OPTIMIZER, loss_fn=losses.ppo_clip)
        return metrics.report(stage(init_state(params, OPTIMIZER), batch, key=Key(1))[1])["perf/shared_tokens/actor"]

    whole = masks_of(batch, forward).sorted().saved
    assert saved(by_prompt=True) == pytest.approx(whole)
    assert saved() < 0.8 * whole


def test_rows_without_groups_are_not_drawn_by_prompt():
    loop = Loop(mini_batch_size=2, micro_batching=MicroBatching(size=2), by_prompt=True)
    rows = types.SimpleNamespace(row_ids=torch.arange(4))
    with pytest.raises(ValueError, match="the rows of a SimpleNamespace have no groups; leave by_prompt out"):
        loop.mini_batches(rows, None)
