"""A sequence axis changes no number: outputs, gradients and updates are those of one process, to 1e-10 in float64."""

from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from fppo import batch as batches
from fppo import losses, metrics, models, tree
from fppo.grad import value_and_grad
from fppo.key import Key
from fppo.runtime.mesh import Mesh, gradient_sum
from fppo.runtime.simulate import simulate
from fppo.steps.actor import PolicyTerms, UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward, compute_log_probs, compute_outputs, forward_micro_batch
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.scores import compute_reward_scores
from fppo.steps.train_state import init_state
from tests import tiny

OPTIMIZER = adamw(schedule("constant", 1e-2), eps=1e-2, max_grad_norm=0.5)
LLAMA = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_key_value_heads",
    "max_position_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
LM_OUTPUTS = ("log_probs", "entropy", "sum_squared_probs")


@cache
def model_and_params(family: str, head: str, heads: int):
    """Tiny models with 2 key heads: fewer than the ranks of the larger meshes."""
    if family == "qwen2":
        config = tiny.config(num_attention_heads=heads)
    else:
        settings = {k: v for k, v in tiny.config().to_dict().items() if k in LLAMA}
        config = LlamaConfig(**{**settings, "num_attention_heads": heads, "tie_word_embeddings": False})
    model = models.build(config, head=head)
    noise = Key(0).fold("noise").generator()
    params = models.init_params(model, Key(0))
    return model, {k: p.double() + 0.1 * torch.randn(p.shape, generator=noise).double() for k, p in params.items()}


def close(found, expected, what, tolerance=1e-10):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}")


def loss_of(model, batch, params, mesh):
    """A loss that weighs every output of every token differently, its outputs, and the rank's share of its gradient."""
    names = ("values",) if model.head == "value" else LM_OUTPUTS
    weights = torch.arange(batch.response_mask.numel()).view(batch.response_mask.shape).double().sin()

    def loss(params):
        out = forward_micro_batch(params, batch, forward=Forward(model, mesh=mesh), outputs=names, temperature=0.7)
        found = {name: getattr(out, name) for name in names}
        return sum((weights * (i + 1) * x).sum() for i, x in enumerate(found.values())), found

    (value, found), grads = value_and_grad(loss, has_aux=True)(params)
    return value, tree.map(torch.detach, found), grads


PAIRS = [  # each family, head and number of ranks with each of the others
    *(("qwen2", "lm", 2), ("llama", "value", 2), ("qwen2", "value", 4)),
    *(("llama", "lm", 4), ("qwen2", "lm", 8), ("llama", "value", 8)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "head", "ranks"), PAIRS)
@settings(max_examples=5)
@given(rows=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_outputs_are_whole_on_every_rank_and_gradients_are_shares(family, head, ranks, rows, seed):
    model, params = model_and_params(family, head, 8)
    batch = tiny.experience(seed, rows)
    value, outputs, grads = loss_of(model, batch, params, Mesh.local())
    found = simulate({"sequence": ranks}, partial(loss_of, model, batch, params))
    for rank, (value_, outputs_, _) in enumerate(found):
        close(value_, value, f"loss on rank {rank}")
        for name, x in outputs.items():
            close(outputs_[name], x, f"{name} on rank {rank}")
    for name, grad in grads.items():
        close(torch.stack([shares[name] for *_, shares in found]).sum(0), grad, f"gradient of {name}")


@pytest.mark.parametrize("how", [True, "selective"])
def test_activation_checkpoints_go_through_the_collectives_again(how):
    """Or, if attention is kept, past them."""
    model, params = tiny.model_and_params("lm")
    batch = tiny.experience(3, 4)
    _, _, grads = loss_of(model, batch, params, Mesh.local())
    again = models.build(tiny.config(), checkpoint_layers=how)
    found = simulate({"sequence": 2}, partial(loss_of, again, batch, params))
    for name, grad in grads.items():
        close(sum(shares[name] for *_, shares in found), grad, f"gradient of {name}")


def empty(batch):
    return batches.extend(type(batch), batch, response_mask=torch.zeros_like(batch.response_mask))


@pytest.mark.parametrize("batch", [tiny.experience(1, 1, prompt=1, response=1), empty(tiny.experience(2, 3))])
def test_ranks_without_a_response_token_take_part(batch):
    model, params = model_and_params("qwen2", "lm", 8)
    value, outputs, grads = loss_of(model, batch, params, Mesh.local())
    found = simulate({"sequence": 8}, partial(loss_of, model, batch, params))
    for value_, outputs_, _ in found:
        close(value_, value, "loss")
        close(outputs_["log_probs"], outputs["log_probs"], "log-probs")
    for name, grad in grads.items():
        close(torch.stack([shares[name] for *_, shares in found]).sum(0), grad, f"gradient of {name}")


@cache
def policy_and_critic():
    return tiny.model_and_params("lm"), tiny.model_and_params("value", seed=1)


def updates(mesh, batch, *, epochs=2, weight_mode="token-mean"):
    loop = Loop(
        mini_batch_size=len(batch.tokens),
        micro_batching=MicroBatching(token_budget=30),
        weight_mode=weight_mode,
        horizon=9 if weight_mode == "seq-mean-token-sum-norm" else None,
        epochs=epochs,
    )
    shared = {"loop": loop, "optimizer": OPTIMIZER}
    (actor, actor_params), (critic, critic_params) = policy_and_critic()
    policy = {"loss_fn": losses.ppo_clip, "terms": PolicyTerms(entropy_coef=0.01, kl_coef=0.1)}
    states = [init_state(params, OPTIMIZER) for params in (actor_params, critic_params)]
    pairs = (
        UpdateActor(forward=Forward(actor, mesh=mesh), **policy, **shared)(states[0], batch),
        UpdateCritic(forward=Forward(critic, mesh=mesh), **shared)(states[1], batch),
    )
    return [(state, metrics.report(report)) for state, report in pairs]


ROWS = tiny.experience(7, 7)


@cache
def alone(mode):
    """The updates of one process."""
    return updates(Mesh.local(), ROWS, weight_mode=mode)


# weights are the same on ranks that hold the same rows: where these are cut as well, in every mode
CUT = [*(({"shard": 2, "sequence": 2}, mode) for mode in losses.MODES), ({"sequence": 2}, losses.MODES[0])]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "mode"), [*CUT, ({"sequence": 4}, losses.MODES[1])], ids=str)
def test_updates_are_those_of_one_process(axes, mode):
    expected, found = alone(mode), simulate(axes, partial(updates, batch=ROWS, weight_mode=mode))
    assert len({str([tree.digest(state) for state, _ in rank]) for rank in found}) == 1
    for (state, numbers), (state_, numbers_) in zip(found[0], expected, strict=True):
        for (path, a), (_, b) in zip(tree.leaves_with_paths(state), tree.leaves_with_paths(state_), strict=True):
            close(a, b, path)
        assert numbers.keys() == numbers_.keys()
        for name, number in numbers.items():
            assert number == pytest.approx(numbers_[name], abs=1e-10, rel=1e-8, nan_ok=True), name


@pytest.mark.slow
def test_passes_without_gradients_are_those_of_one_process():
    lm, value = (model_and_params("qwen2", head, 8) for head in ("lm", "value"))
    batch, cut = tiny.experience(11, 6), MicroBatching(size=2)

    def run(mesh):
        policy, judge = Forward(lm[0], mesh=mesh), Forward(value[0], mesh=mesh)
        out = compute_outputs(lm[1], batch, forward=policy, micro_batching=cut, outputs=("entropy",))
        return {
            "log-probs": compute_log_probs(lm[1], batch, forward=policy, micro_batching=cut),
            "entropy": out.entropy,
            "scores": compute_reward_scores(value[1], batch, forward=judge, micro_batching=cut),
        }

    (expected,) = simulate({}, run)
    for ranks in (2, 4):
        for rank, found in enumerate(simulate({"sequence": ranks}, run)):
            for name, x in expected.items():
                close(found[name], x, f"{name} on rank {rank}", 1e-6 if name == "scores" else 1e-10)


def test_settings_that_a_sequence_axis_cannot_do_are_named():
    model, params = tiny.model_and_params("lm")
    batch = tiny.experience(1, 2)

    def run(mesh, **changes):
        return forward_micro_batch(params, batch, forward=Forward(model, mesh=mesh, **changes))

    with pytest.raises(ValueError, match="a sequence axis of 2 ranks cuts one packed row: remove padding"):
        simulate({"sequence": 2}, partial(run, remove_padding=False))
    with pytest.raises(ValueError, match="4 query heads do not divide by the 3 ranks of the sequence axis"):
        simulate({"sequence": 3}, run)


def test_a_forgotten_share_is_seen():
    """The gradient of one rank alone is not the gradient: the comparison above can fail."""
    model, params = tiny.model_and_params("lm")
    batch = tiny.experience(3, 4)
    _, _, grads = loss_of(model, batch, params, Mesh.local())
    name = "model.layers.0.mlp.up_proj.weight"

    def run(mesh):
        share = loss_of(model, batch, params, mesh)[-1]
        return share[name], gradient_sum(share, mesh)[name]

    for share, total in simulate({"sequence": 2}, run):
        assert not torch.allclose(share, grads[name], rtol=1e-3)
        close(total, grads[name], name)
