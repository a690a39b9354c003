"""Every optimizer: its textbook's numbers, and what all keep: resume, donation, purity, skipping, layout."""

from functools import cache, partial

import attrs
import pytest
import torch

from fppo import losses, metrics, models, tree
from fppo.models.lora import linear_weights
from fppo.models.routing import RouterSeam
from fppo.runtime import fsdp
from fppo.runtime.mesh import Mesh, Sharding
from fppo.runtime.offload import Lane
from fppo.runtime.simulate import simulate
from fppo.steps.actor import UpdateActor
from fppo.steps.adamw_8bit import adamw_8bit
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.muon import COEFFICIENTS, is_hidden_matrix, muon, orthogonalized
from fppo.steps.optimizers import adamw, from_function, kept_on_host, lion, sgd
from fppo.steps.train_state import init_state, optimizer_step, whole_shapes
from tests import tiny
from tests.models import families, hybrids

MODEL, PARAMS = tiny.model_and_params()


def rate(step):
    return 0.01 / (step + 1)


def heavy_ball(params, grads, state, step):
    """A plain function, that changes no argument."""
    sums = {name: 0.9 * x + grads[name] for name, x in state["sums"].items()}
    moved = {name: p - rate(step) * sums[name] for name, p in params.items()}
    return moved, {"sums": sums, "count": state["count"] + 1}


def zeros(params):
    return {"sums": tree.map(torch.zeros_like, params), "count": torch.zeros(())}


OWN = from_function(zeros, heavy_ball)
OPTIMIZERS = {
    "adamw": adamw(rate),
    "sgd": sgd(rate, weight_decay=0.1),
    "sgd with momentum": sgd(rate, momentum=0.9, nesterov=True),
    "lion": lion(rate),
    "muon": muon(rate),
    "adamw_8bit": adamw_8bit(rate, block_size=4),
    "own": OWN,
}
every = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def step_of(optimizer, state, donate=False):
    return UpdateActor(
        forward=Forward(MODEL),
        loss_fn=losses.ppo_clip,
        loop=Loop(mini_batch_size=2, micro_batching=MicroBatching(size=1)),
        optimizer=optimizer,
    )(state, tiny.experience(state.step, 4), donate=donate)[0]


@pytest.mark.slow
@every
def test_training_resumes_donates_and_is_pure(optimizer, tmp_path):
    state, step = init_state(PARAMS, optimizer), partial(step_of, optimizer)
    tiny.check_training(step, state, tmp_path)


@every
@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
@pytest.mark.parametrize("donate", [False, True])
def test_a_gradient_that_is_not_finite_changes_no_bit(optimizer, garbage, donate):
    params = {name: x.float() for name, x in PARAMS.items()}
    grads = {name: 0.1 * x.flip(0) for name, x in params.items()}
    state, _ = optimizer_step(init_state(params, optimizer), grads, optimizer=optimizer)
    before, kept = tree.digest((state.params, state.opt)), tree.copy(state)
    broken = tree.copy(grads)
    next(iter(broken.values())).view(-1)[3] = garbage
    after, report = optimizer_step(state, broken, optimizer=optimizer, donate=donate)
    assert tree.digest((after.params, after.opt)) == before
    assert (metrics.report(report)["skipped"], after.step) == (1.0, 2)
    assert all(x.numel() == 0 for x in (*state.params.values(), *broken.values())) is donate
    kept = tree.replace(kept, step=after.step)
    one, two = (optimizer_step(s, grads, optimizer=optimizer)[0] for s in (after, kept))
    assert tree.digest((one.params, one.opt)) == tree.digest((two.params, two.opt))


def whole(state, mesh):
    """The state's tensors, gathered where they are cut."""
    shapes, leaves = whole_shapes(state, MODEL.shapes), dict(tree.leaves_with_paths(state))
    cut = fsdp.gather({path: leaves[path] for path in shapes}, shapes, mesh)
    return {path: x for path, x in (leaves | cut).items() if isinstance(x, torch.Tensor)}


def four_updates(mesh, name, stage=3):
    """The state after two mini-batches, twice, whole."""
    mesh, optimizer = attrs.evolve(mesh, sharding=Sharding(stage=stage)), OPTIMIZERS[name]
    state, _ = UpdateActor(
        forward=Forward(MODEL, mesh=mesh),
        loss_fn=losses.ppo_clip,
        loop=Loop(mini_batch_size=3, micro_batching=MicroBatching(size=2), epochs=2),
        optimizer=optimizer,
    )(init_state(fsdp.shard(PARAMS, mesh), optimizer), tiny.experience(5, 6))
    return whole(state, mesh)


@cache
def alone(name):
    """The numbers of one process."""
    return four_updates(Mesh.local(), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("axes", "stage"), [({"shard": 2}, 3), ({"shard": 3}, 1), ({"replicate": 2, "shard": 2}, 2), ({"sequence": 2}, 3)]
)
def test_a_mesh_changes_no_number(name, axes, stage):
    expected, ranks = alone(name), simulate(axes, partial(four_updates, name=name, stage=stage))
    assert len({str(tree.digest(leaves)) for leaves in ranks}) == 1
    assert ranks[0].keys() == expected.keys()
    for path, x in expected.items():
        torch.testing.assert_close(ranks[0][path], x, rtol=1e-10, atol=1e-10, msg=lambda m, path=path: f"{path}: {m}")


def test_a_state_that_could_be_cut_or_not_is_refused_where_parameters_are_cut():
    odd = from_function(lambda params: {"sums": torch.ones(3)}, lambda p, g, state, step: (p, state))
    assert set(whole_shapes(init_state(PARAMS, odd), MODEL.shapes)) == {f".params[{name!r}]" for name in PARAMS}

    def run(mesh):
        shards = fsdp.shard(PARAMS, attrs.evolve(mesh, sharding=Sharding()))
        return whole_shapes(init_state(shards, odd), MODEL.shapes)

    with pytest.raises(ValueError, match=r"\.opt\['sums'\] of shape \(3,\) is neither a number nor"):
        simulate({"shard": 2}, run)


# each one's numbers


def some(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.layers.0.up": (7, 5), "model.layers.0.down": (4, 9), "model.layers.0.norm": (5,), "embed": (8, 3)}
    return {name: torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for name, x in shapes.items()}


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.8, True)])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_sgd_is_torchs(momentum, nesterov, clip):
    ours = sgd(rate, momentum=momentum, nesterov=nesterov, max_grad_norm=clip)
    state = init_state(some(0), ours)
    theirs = {name: x.clone().requires_grad_() for name, x in state.params.items()}
    torchs = torch.optim.SGD(theirs.values(), lr=1.0, momentum=momentum, nesterov=nesterov)
    for step in range(4):
        grads = some(step + 1)
        for name, x in theirs.items():
            x.grad = grads[name].clone()
        torch.nn.utils.clip_grad_norm_(theirs.values(), torch.inf if clip is None else clip)
        torchs.param_groups[0]["lr"] = rate(step)
        torchs.step()
        state, _ = optimizer_step(state, grads, optimizer=ours, donate=True)
    close = 1e-12 if clip is None else 1e-6  # the scale of the clipping is float32
    for name, x in theirs.items():
        torch.testing.assert_close(state.params[name], x.detach(), rtol=close, atol=close)


def test_sgds_weight_decay_is_decoupled():
    ours = sgd(rate, momentum=0.9, weight_decay=0.3, max_grad_norm=None)
    state = init_state(some(0), ours)
    params, sums = some(0), tree.map(torch.zeros_like, some(0))
    for step in range(3):
        grads = some(step + 1)
        sums = {name: 0.9 * x + grads[name] for name, x in sums.items()}
        params = {name: (1 - rate(step) * 0.3) * x - rate(step) * sums[name] for name, x in params.items()}
        state, _ = optimizer_step(state, grads, optimizer=ours)
    for name, x in params.items():
        torch.testing.assert_close(state.params[name], x, rtol=1e-12, atol=1e-12)


def sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.6), (0.0, 0.0)])
def test_lion_is_its_papers(betas, clip):
    """Algorithm 2 of arXiv:2302.06675; a gradient of exactly 0, without a momentum, moves nothing."""
    ours, (first, second) = lion(rate, betas=betas, weight_decay=0.3, max_grad_norm=clip), betas
    state = init_state(some(0), ours)
    params, sums = some(0), tree.map(torch.zeros_like, some(0))
    for step in range(4):
        grads = some(step + 1)
        grads["embed"][3] = 0.0
        state, _ = optimizer_step(state, grads, optimizer=ours)
        norm = torch.cat([g.flatten() for g in grads.values()]).norm()
        for name, g in grads.items():
            g = g if clip is None else g * clip / norm
            update = first * sums[name] + (1 - first) * g
            params[name] = params[name] - rate(step) * (sign(update) + 0.3 * params[name])
            sums[name] = second * sums[name] + (1 - second) * g
    for name, x in params.items():
        torch.testing.assert_close(state.params[name], x, rtol=1e-12, atol=1e-12)
        close = 1e-12 if clip is None else 1e-5  # the scale of the clipping is float32
        torch.testing.assert_close(state.opt.momentum[name], sums[name], rtol=close, atol=close)


@pytest.mark.parametrize("donate", [False, True])
def test_ones_own_function_may_keep_what_it_was_called_with(donate):
    """Its state after an update is the parameters and gradients before it, without a copy."""

    def fn(params, grads, state, step):
        return {name: p - grads[name] for name, p in params.items()}, {"before": params, "grads": grads}

    optimizer = from_function(lambda params: {"before": tree.copy(params), "grads": tree.copy(params)}, fn)
    params, grads = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.25, 0.5])}
    after, _ = optimizer_step(init_state(params, optimizer), grads, optimizer=optimizer, donate=donate)
    assert after.params["w"].tolist() == [0.75, 1.5]
    assert after.opt["before"]["w"].tolist() == [1.0, 2.0]
    assert after.opt["grads"]["w"].tolist() == [0.25, 0.5]


def test_ones_own_function_gets_clipped_gradients():
    state = init_state(some(0), from_function(zeros, heavy_ball, max_grad_norm=0.5))
    grads = some(1)
    norm = torch.cat([g.flatten() for g in grads.values()]).norm()
    after, report = optimizer_step(state, grads, optimizer=from_function(zeros, heavy_ball, max_grad_norm=0.5))
    for name, g in grads.items():
        torch.testing.assert_close(after.opt["sums"][name], g * 0.5 / norm, rtol=1e-5, atol=1e-7)
    assert after.opt["count"] == 1
    assert metrics.report(report)["grad_norm"] == pytest.approx(norm.item())


def by_hand(x):
    """Newton-Schulz on singular values alone, which is what it does to a matrix, by its factors."""
    a, b, c = COEFFICIENTS
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return u @ s.diag() @ v


@pytest.mark.parametrize("shape", [(6, 6), (9, 4), (3, 20), (1, 5), (32, 48)])
def test_muons_polynomial_acts_on_singular_values(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)
    torch.testing.assert_close(orthogonalized(x), by_hand(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(orthogonalized(100 * x), orthogonalized(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_muons_updates_have_singular_values_near_1(dtype):
    """The published band, 1 +- 0.3 (Jordan et al., 2024), and what bfloat16 rounds away, which differs by processor;
    here of matrices whose condition is 100."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((48, 48), (64, 32), (40, 120)):
        u, _, v = torch.linalg.svd(torch.randn(rows, columns, generator=generator), full_matrices=False)
        x = u @ torch.logspace(-2, 0, min(rows, columns)).diag() @ v
        moved = orthogonalized(x.to(dtype))
        assert moved.dtype == dtype
        values = torch.linalg.svdvals(moved.double())
        assert 0.65 < values.min() < values.max() < 1.3


def test_muons_matrices_are_the_linear_layers_of_the_blocks():
    """Neither embeddings nor heads, tied or not."""
    for head in ("lm", "value"):
        model, params = tiny.model_and_params(head)
        blocks = [(f"{model.prefix}{name}", model.skeleton.get_submodule(name)) for name in model.layers]
        expected = {
            f"{block}.{name}.weight"
            for block, layer in blocks
            for name, module in layer.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        assert len(expected) == 2 * 7
        assert muon(rate).init(params).momentum.keys() == expected
    outside = ("model.embed_tokens.weight", "lm_head.weight", "transformer.wpe.weight")
    assert not any(is_hidden_matrix(name, torch.ones(3, 2)) for name in outside)
    experts = "model.layers.0.mlp.experts.down_proj"
    assert [is_hidden_matrix(experts, torch.ones(*shape)) for shape in ((3,), (3, 2), (4, 3, 2))] == [False, True, True]


MIXTURES = families.EXPERTS | {n: families.CONFIGS[n] for n in ("qwen3_moe", "olmoe", "gpt_oss")} | hybrids.HYBRIDS


@pytest.mark.parametrize("name", MIXTURES)
def test_muon_has_linear_layers_and_experts_of_mixtures_and_no_routers(name):
    """As a model's own modules tell them, not as their names do."""
    model = models.build(MIXTURES[name])
    modules = dict(model.skeleton.named_modules())
    inside = tuple(f"{path}." for path in model.layers)
    gates = [path for path, module in modules.items() if isinstance(module, RouterSeam)]
    gates += [path for path in modules if path.endswith("shared_expert_gate")]
    linear = {n for n in linear_weights(model) if n.removeprefix(model.prefix).startswith(inside)}
    linear -= {f"{model.prefix}{path}.weight" for path in gates}
    params = {n: torch.empty(shape, device="meta") for n, shape in model.shapes.items() if n not in model.buffers}
    assert {n for n, x in params.items() if is_hidden_matrix(n, x)} == linear


def test_what_is_no_matrix_between_hidden_states_goes_to_adamw():
    layer = "model.layers.0."
    none = {
        "mlp.gate.weight": (8, 4),
        "mlp.shared_expert_gate.weight": (1, 4),
        "block_sparse_moe.router.layer.weight": (8, 4),
        "mlp.experts.gate_up_proj_bias": (8, 4),
        "mixer.A_log": (8, 4),
        "mixer.conv1d.weight": (8, 1, 4),
        "self_attn.q_norm.weight": (8, 4),
        "attn.rel_pos_h": (8, 4),
        "self_attn.q_proj.weight.lora_B": (8, 1),
    }
    assert not [n for n, shape in none.items() if is_hidden_matrix(layer + n, torch.empty(shape))]
    some = {
        "self_attn.q_proj.weight.lora_B": (8, 2),
        "mlp.experts.down_proj.lora_A": (3, 2, 8),
        "mlp.gate_proj.weight": (8, 4),
    }
    assert all(is_hidden_matrix(layer + n, torch.empty(shape)) for n, shape in some.items())


@pytest.mark.parametrize("shape", [(5, 6, 6), (3, 9, 4), (4, 3, 20), (0, 3, 2)])
def test_each_matrix_of_a_stack_moves_by_itself(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)
    x *= torch.arange(len(x))[:, None, None] + 1.0  # of different sizes, and one of them 0
    x[:1] = 0.0
    expected = [orthogonalized(each) for each in x]
    assert orthogonalized(x).shape == x.shape
    for each, own in zip(orthogonalized(x), expected, strict=True):
        torch.testing.assert_close(each, own, rtol=1e-12, atol=1e-12)


def test_muon_moves_a_stack_as_its_matrices_and_on_a_mesh_as_in_one_process():
    generator = torch.Generator().manual_seed(2)
    stack, name = torch.randn(5, 4, 6, generator=generator, dtype=torch.float64), "layers.0.mlp.experts.down_proj"
    grads = torch.randn(5, 4, 6, generator=generator, dtype=torch.float64)
    own = {"max_grad_norm": None, "weight_decay": 0.1}
    each = {f"layers.{i}.w.weight": x for i, x in enumerate(stack)}
    apart, _ = optimizer_step(
        init_state(each, muon(rate, **own)), dict(zip(each, grads, strict=True)), optimizer=muon(rate, **own)
    )
    whole, _ = optimizer_step(init_state({name: stack}, muon(rate, **own)), {name: grads}, optimizer=muon(rate, **own))
    torch.testing.assert_close(whole.params[name], torch.stack([*apart.params.values()]), rtol=1e-12, atol=1e-12)

    def run(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding())
        params, part = (fsdp.shard({name: x}, mesh) for x in (stack, grads))
        state, _ = optimizer_step(init_state(params, muon(rate, **own)), part, optimizer=muon(rate, **own), mesh=mesh)
        return state.params[name]

    for ranks in (2, 3):
        moved = torch.cat(simulate({"shard": ranks}, run))
        torch.testing.assert_close(moved, whole.params[name], rtol=1e-12, atol=1e-12)


def test_muon_says_what_goes_to_which_optimizer():
    model = models.build(MIXTURES["glm4_moe"])
    params = {n: torch.empty(shape, device="meta") for n, shape in model.shapes.items() if n not in model.buffers}
    assert muon(rate).says(params) == (
        "muon: 14 matrices, 2 stacks of 4 matrices; adamw: 2 embeddings and heads, 1 gates, 5 vectors"
    )
    assert muon(rate, is_matrix=lambda name, x: False).says({"b": torch.ones(2)}) == "muon: nothing; adamw: 1 vectors"
    assert adamw(rate).says is None


def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest():
    """torch.optim.Muon (2.9 and later) is the authors' own, in bfloat16, without clipping."""
    ours = muon(rate, weight_decay=0.1, max_grad_norm=None)
    alone = adamw(rate, weight_decay=0.1, max_grad_norm=None)
    state, params = init_state(some(0, torch.float32), ours), some(0, torch.float32)
    assert [name for name, x in params.items() if is_hidden_matrix(name, x)] == list(state.opt.momentum)
    theirs = {name: params.pop(name).requires_grad_() for name in state.opt.momentum}
    torchs = torch.optim.Muon(theirs.values(), weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    rest = init_state(params, alone)
    for step in range(3):
        grads = some(step + 1, torch.float32)
        for name, x in theirs.items():
            x.grad = grads[name].clone()
        torchs.param_groups[0]["lr"] = rate(step)
        torchs.step()
        rest, _ = optimizer_step(rest, {name: grads[name] for name in params}, optimizer=alone)
        state, _ = optimizer_step(state, grads, optimizer=ours)
    for name, x in rest.params.items():
        assert torch.equal(state.params[name], x)
    for name, x in theirs.items():
        torch.testing.assert_close(state.params[name], x.detach(), rtol=1e-6, atol=1e-6)


def test_muons_step_is_the_papers_in_float64():
    """M = 0.95 M + 0.05 G; O of 0.05 G + 0.95 M; W = (1 - lr wd) W - lr 0.2 sqrt(max(m, n)) O, written out."""
    ours, momenta = muon(rate, weight_decay=0.2, max_grad_norm=None), {}
    state, params = init_state(some(0), ours), some(0)
    for step in range(3):
        grads = some(step + 1)
        for name in state.opt.momentum:
            momenta[name] = 0.95 * momenta.get(name, 0.0) + 0.05 * grads[name]
            move = by_hand(0.05 * grads[name] + 0.95 * momenta[name])
            scale = 0.2 * max(move.shape) ** 0.5
            params[name] = (1 - rate(step) * 0.2) * params[name] - rate(step) * scale * move
        state, _ = optimizer_step(state, grads, optimizer=ours, donate=True)
    for name, x in momenta.items():
        torch.testing.assert_close(state.opt.momentum[name], x, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(state.params[name], params[name], rtol=1e-10, atol=1e-10)


def test_muon_refuses_meshes_that_cut_matrices():
    def run(mesh):
        return optimizer_step(init_state(some(0), muon(rate)), some(1), optimizer=muon(rate), mesh=mesh)

    with pytest.raises(ValueError, match="muon needs whole matrices, and the tensor axis of 2 ranks cuts them"):
        simulate({"tensor": 2}, run)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_with_its_state_on_the_host_leaves_the_state_unless_it_is_given_up(name):
    whole = OPTIMIZERS[name]._replace(loss_scale=lambda state: torch.tensor(8.0))
    away = kept_on_host(whole, Lane(torch.device("cpu")))
    assert away[2:] == whole[2:]  # its loss scale, its kernel, and what it says
    state = init_state(tree.copy(PARAMS), away)
    before = tree.digest(state)
    expected, _ = optimizer_step(state, tree.copy(PARAMS), optimizer=away)
    assert tree.digest(state) == before != tree.digest(expected)
    found, _ = optimizer_step(state, tree.copy(PARAMS), optimizer=away, donate=True)
    assert tree.digest(found) == tree.digest(expected)
