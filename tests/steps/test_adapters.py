"""Updates of adapters: on every layout those of one process, of the adapter alone, on a base that stays as it is."""

from functools import cache, partial

import attrs
import pytest
import torch

from fppo import losses, metrics, models, tree
from fppo.key import Key
from fppo.models import flops, lora, lora_files
from fppo.models.adapted import Lora
from fppo.models.place import place_beside
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.runtime import checkpoint, fsdp
from fppo.runtime.mesh import LOCAL, Mesh, Sharding
from fppo.runtime.simulate import simulate
from fppo.steps.actor import UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward, compute_log_probs, compute_values
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.train_state import init_state
from fppo_kernels.table import Kernels
from tests import tiny
from tests.models import families
from tests.rollout.test_embedded import make_prompts

SPEC = Lora(rank=3, alpha=6.0)
TWO = MicroBatching(size=2)
OPTIMIZER = adamw(lambda step: 0.01, eps=1.0, max_grad_norm=0.5)
# axes, stage of the sharding (None: whole parameters), layers recomputed; head, family, targets beside all-linear
LAYOUTS = [
    ({"shard": 3}, 3, False, "lm", "llama", ()),
    ({"shard": 2}, 2, False, "value", "llama", ()),
    ({"shard": 3}, 1, True, "value", "llama", ()),
    ({"sequence": 2}, None, True, "value", "llama", ()),
    ({"context": 2}, None, False, "lm", "llama", ()),
    ({"replicate": 2, "shard": 2, "sequence": 2}, 3, False, "value", "llama", ()),
    ({"tensor": 4}, None, False, "lm", "llama", ("embed_tokens", "lm_head")),  # two key heads
    ({"tensor": 2, "pipeline": 2}, None, False, "lm", "qwen2", ("embed_tokens",)),  # which is the head, too
    ({"pipeline": 2, "shard": 2}, 3, True, "lm", "qwen2", ("embed_tokens",)),
    ({"tensor": 2}, None, False, "lm", "gpt_oss", ()),  # experts stored [in, out]
    ({"expert": 2, "tensor": 2, "shard": 2}, 1, False, "lm", "qwen3_moe", ()),
    ({"expert": 2}, 3, False, "value", "qwen3_moe", ()),
    ({"tensor": 2, "pipeline": 2, "shard": 2}, 3, False, "value", "llama", ()),
]


def noisy(params, seed=4):
    g = torch.Generator().manual_seed(seed)
    return {n: x + 0.1 * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x) for n, x in params.items()}


@cache
def plain(head, name):
    """A model without an adapter, which ranks share."""
    return tiny.model_and_params(head) if name is None else families.make(name, head=head)


def adapt(model, params, targets, mesh=LOCAL):
    spec = attrs.evolve(SPEC, targets=("all-linear", *targets))
    return lora.adapt(model, params, lora=spec, key=Key(3), dtype=torch.float64, mesh=mesh)


@cache
def whole_adapter(head, name, targets):
    """The parameters of an adapter in one process."""
    return adapt(*plain(head, name), targets)[1]


def adapted(head="lm", mesh=LOCAL, *, again=False, name=None, targets=()):
    """An adapted model with parameters, none of which is 0: on a mesh that cuts, this rank's."""
    model, params = plain(head, name)
    placed = models.place(attrs.evolve(model, checkpoint_layers=again), mesh)
    on_rank, own = adapt(placed, models.own_params(placed, params, mesh), targets, mesh=mesh)
    whole = whole_adapter(head, name, targets)
    assert tree.digest(own) == tree.digest(models.own_params(on_rank, whole, mesh))
    return on_rank, models.own_params(on_rank, noisy(whole), mesh)


def update(head, mesh, *, donate=False, **settings):
    model, params = adapted(head, mesh, **settings)
    fn = partial(UpdateActor, loss_fn=losses.ppo_clip) if head == "lm" else UpdateCritic
    batch = tiny.experience(7, 7)
    state, report = fn(
        forward=Forward(model, mesh=mesh),
        loop=Loop(mini_batch_size=4, micro_batching=TWO, epochs=2),
        optimizer=OPTIMIZER,
    )(init_state(params, OPTIMIZER), tree.replace(batch, tokens=batch.tokens % 8), donate=donate)
    return model, params, state, report


def outcome(head, mesh, **settings):
    model, _, state, report = update(head, mesh, **settings)
    whole = {what: models.whole_params(model, x, mesh) for what, x in (("params", state.params), ("mu", state.opt.mu))}
    return dict(tree.leaves_with_paths(whole)), metrics.report(report), lora.frozen_of(model).digest


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=() if n in (0, 6, 7) else pytest.mark.slow) for n in range(len(LAYOUTS))]
)
def test_every_layout_makes_the_update_of_one_process(number, monkeypatch):
    axes, stage, again, head, name, targets = LAYOUTS[number]
    expected, numbers, digest = outcome(head, LOCAL, name=name, targets=targets)
    wasted = []
    back = fsdp._Gathered.backward

    def counted(ctx, *grads):
        wasted.extend(
            g for g, wanted in zip(grads, ctx.needs_input_grad[4:], strict=True) if g is not None and not wanted
        )
        return back(ctx, *grads)

    monkeypatch.setattr(fsdp._Gathered, "backward", staticmethod(counted))

    def run(mesh):
        mesh = attrs.evolve(mesh, sharding=None if stage is None else Sharding(stage=stage))
        return outcome(head, mesh, again=again, name=name, targets=targets)

    for got, report, own_digest in simulate(axes, run):
        assert got.keys() == expected.keys()
        for path, x in expected.items():
            torch.testing.assert_close(got[path], x, rtol=1e-10, atol=1e-12)
        prefix = "actor" if head == "lm" else "critic"
        assert report[f"{prefix}/grad_norm"] == pytest.approx(numbers[f"{prefix}/grad_norm"], rel=1e-10)
        assert own_digest == digest
    assert not wasted  # whole gradients of frozen weights, which nobody takes


@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_donated_update_changes_no_bit_and_nothing_of_the_base(head):
    model, params, kept, _ = update(head, LOCAL)
    base = tree.digest(dict(lora.frozen_of(model).params))
    moments = kept.opt.mu
    assert moments.keys() == kept.params.keys() == model.shapes.keys()
    assert all(name.endswith((".lora_A", ".lora_B")) or name.startswith("score.") for name in moments)
    donated_model, old, donated, _ = update(head, LOCAL, donate=True)
    assert tree.digest(donated) == tree.digest(kept)
    assert tree.digest(dict(lora.frozen_of(donated_model).params)) == base
    assert all(x.numel() == 0 for x in old.values())
    assert all(x.numel() for x in params.values())
    assert any(not torch.equal(kept.params[name], params[name]) for name in params)


def test_micro_batches_and_padding_change_nothing():
    model, params = adapted(name="qwen3_moe")
    batch = tiny.experience(7, 7)
    results = []
    for size, packed in ((1, True), (7, True), (3, False)):
        state, _ = UpdateActor(
            forward=Forward(model, remove_padding=packed),
            loss_fn=losses.ppo_clip,
            loop=Loop(mini_batch_size=7, micro_batching=MicroBatching(size=size)),
            optimizer=OPTIMIZER,
        )(init_state(params, OPTIMIZER), batch)
        results.append(state.params)
    for other in results[1:]:
        for name, x in results[0].items():
            torch.testing.assert_close(other[name], x, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_reference_actor_and_critic_stand_on_one_base():
    model, params = tiny.model_and_params()
    actor, adapter = lora.adapt(model, params, SPEC, key=Key(0), dtype=torch.float64)
    batch, forward = tiny.experience(3, 5), Forward(actor)
    plain = compute_log_probs(params, batch, forward=Forward(model), micro_batching=TWO)
    reference = attrs.evolve(forward, model=lora.base_of(actor))
    assert torch.equal(compute_log_probs({}, batch, forward=reference, micro_batching=TWO), plain)
    moved = compute_log_probs(noisy(adapter), batch, forward=forward, micro_batching=TWO)
    assert (moved - plain).abs().max() > 1e-3
    assert torch.equal(compute_log_probs({}, batch, forward=reference, micro_batching=TWO), plain)

    def on_ranks(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding(stage=1))
        placed = models.place(model, mesh)
        on_rank, _ = lora.adapt(placed, models.own_params(placed, params, mesh), SPEC, key=Key(0), mesh=mesh)
        own = Forward(lora.base_of(on_rank), mesh=mesh)
        return compute_log_probs({}, batch, forward=own, micro_batching=TWO)

    for log_probs in simulate({"shard": 2, "pipeline": 2}, on_ranks):
        torch.testing.assert_close(log_probs, plain, rtol=1e-12, atol=1e-12)
    critic, value_params = tiny.model_and_params("value")
    shared = {name: params.get(name, x) for name, x in value_params.items()}
    critic, values = lora.adapt(critic, shared, SPEC, key=Key(1), dtype=torch.float64)
    assert lora.same_base(actor, critic)
    assert compute_values(values, batch, forward=Forward(critic), micro_batching=TWO).isfinite().all()


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("gpt2", {"shard": 3}),
        ("phi3", {"tensor": 2, "shard": 2}),
        ("qwen3_moe", {"pipeline": 2, "shard": 2, "expert": 2}),
        pytest.param("gpt_oss", {"tensor": 2, "shard": 3}, marks=pytest.mark.slow),
    ],
)
def test_each_rank_merges_stores_and_reads_its_part(name, axes, tmp_path):
    model, adapter = adapted(name=name)
    whole, (path, kept) = lora.merged(model, adapter), (tmp_path / "peft", tmp_path / "kept")

    def on_ranks(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding())
        own, shards = adapted(name=name, mesh=mesh)
        lora_files.save(own, shards, path, base="base", mesh=mesh)
        assert tree.digest(lora_files.load(own, path, like=shards, mesh=mesh)) == tree.digest(shards)
        shapes = {f"[{each!r}]": extent for each, extent in own.extents.items()}
        checkpoint.begin_save(shards, kept, 1, mesh=mesh, shapes=shapes).wait()
        return models.whole_params(own.plain, lora.merged(own, shards, mesh=mesh), mesh)

    for got in simulate(axes, on_ranks):
        assert got.keys() == whole.keys()
        for each, x in whole.items():
            torch.testing.assert_close(got[each], x, rtol=1e-12, atol=1e-12)
    assert tree.digest(lora_files.load(model, path, like=adapter)) == tree.digest(adapter)
    assert tree.digest(checkpoint.load(adapter, kept, 1)) == tree.digest(adapter)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_embedded_engine_samples_by_the_adapter(name, dtype):
    """Merged in float32, as factors in 16 bits, where sums with the base would lose small changes."""
    model, params = families.make(name, dtype=torch.float32, compute_dtype=dtype)
    model, adapter = lora.adapt(model, params, SPEC, key=Key(3))
    adapter = noisy(adapter)
    engine = EmbeddedEngine(model=model, kernels=Kernels.named(), pad_token_id=0)
    ask = Ask(make_prompts((3, 1, 4)), Sampling(max_tokens=6, n=2), Key(5))
    rollout = engine.generate(adapter, ask)
    log_probs = compute_log_probs(adapter, rollout, forward=Forward(model), micro_batching=TWO)
    base = compute_log_probs({}, rollout, forward=Forward(lora.base_of(model)), micro_batching=TWO)
    gap = (log_probs - rollout.rollout_log_probs).abs().max()
    moved = (log_probs - base).abs().max()
    assert gap < (1e-4 if dtype is None else 0.1)
    assert moved > 10 * gap

    def on_ranks(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding(stage=3) if mesh["shard"].size > 1 else None)
        plain, own = families.make(name, dtype=torch.float32, compute_dtype=dtype)
        placed = models.place(plain, mesh)
        on_rank, _ = lora.adapt(placed, models.own_params(placed, own, mesh), SPEC, key=Key(3), mesh=mesh)
        engine = EmbeddedEngine(model=on_rank, kernels=Kernels.named(), pad_token_id=0, mesh=mesh)
        return engine.generate(models.own_params(on_rank, adapter, mesh), ask)

    if name != "qwen3_moe":
        for got in simulate({"shard": 3} if name == "gpt2" else {"tensor": 2, "pipeline": 2}, on_ranks):
            if dtype is None:
                assert torch.equal(got.tokens, rollout.tokens)
            log_probs = compute_log_probs(adapter, got, forward=Forward(model), micro_batching=TWO)
            assert (log_probs - got.rollout_log_probs).abs().max() < (1e-4 if dtype is None else 0.1)


def test_an_update_needs_no_gradients_of_frozen_weights():
    """Six FLOPs of each weight and token in full training, four of a frozen one."""
    model, params = tiny.model_and_params()
    own, adapter = lora.adapt(model, params, SPEC, key=Key(0))
    plain, trained = flops.train_flops(model, [8]), flops.train_flops(own, [8])
    numbers = sum(x.numel() for x in adapter.values())
    layers, head = sum(flops.layer_weights(model)), flops.head_weights(model)
    assert plain - trained == pytest.approx(8 * (2 * (layers + head) - 6 * numbers))


def test_biases_of_routers_in_a_frozen_base_are_refused():
    model, params = families.make("glm4_moe")
    model, adapter = lora.adapt(model, params, SPEC, key=Key(0), dtype=torch.float64)
    with pytest.raises(ValueError, match="frozen base of an adapter: leave out balance_rate"):
        UpdateActor(
            forward=Forward(model, mesh=Mesh.local()),
            loss_fn=losses.ppo_clip,
            loop=Loop(mini_batch_size=7, micro_batching=TWO, balance_rate=0.1),
            optimizer=OPTIMIZER,
        )(init_state(adapter, OPTIMIZER), tiny.experience(7, 7))


def test_a_critic_on_the_policys_base_has_its_layers_where_that_has_them():
    """A vocabulary head is work that a value head is not: alone they would be cut otherwise."""
    config = tiny.config(num_hidden_layers=4, vocab_size=211)
    policy, critic = models.build(config), models.build(config, "value")
    stages: list = []

    def on_ranks(mesh):
        placed = models.place(policy, mesh)
        params = models.own_params(placed, models.init_params(policy, Key(0)), mesh)
        adapted, _ = lora.adapt(placed, params, SPEC, key=Key(0), mesh=mesh)
        beside = place_beside(critic, adapted, mesh)
        stages.append((placed.spans[0].layers, models.place(critic, mesh).spans[0].layers))
        assert [span.layers for span in beside.spans] == [span.layers for span in placed.spans]
        assert {name for name in beside.shapes if not name.startswith("score.")} <= params.keys()

    simulate({"pipeline": 2}, on_ranks)
    assert any(own != alone for own, alone in stages)
