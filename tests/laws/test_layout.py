"""Our updates keep the layout law, and it catches the mistakes it is there for."""

import functools
import hashlib
from functools import partial
from pathlib import Path

import attrs
import pytest
import torch

from fppo import laws, losses, steps, tree
from fppo.laws import layout
from fppo.losses import loss_weights
from fppo.runtime import mesh as meshes
from fppo.runtime.layout import Layout
from fppo.runtime.mesh import Mesh
from fppo.steps import loop, optimizers, packed
from fppo.steps import stages as staging
from fppo.steps.actor import SelectiveLoss, UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.ranks import shares
from fppo_kernels import collectives, context
from tests.laws.test_updates import popart

OTHERS = ("gspo", "sapo", "gpg", "cispo", "gmpo", "dppo_tv", "dppo_kl", "dro", "opsm", "topr")


def seed_of(*rooms):
    """A number that changes with the code of these rooms, and with nothing else."""
    files = sorted(path for room in rooms for path in Path(room.__file__).parent.glob("*.py"))
    return int.from_bytes(hashlib.sha256(b"".join(path.read_bytes() for path in files)).digest()[:4])


SEED = seed_of(steps, laws)  # other layouts are tried when the code has changed


@pytest.fixture(autouse=True, scope="module")
def built_once():
    """Every check has the same models, which no update changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_models", functools.cache(layout._models))
        yield


@pytest.fixture
def few(monkeypatch):
    """Without the smallest examples, with which most ranks have no rows: the actor and the critic are held to those."""
    monkeypatch.setattr(layout, "SIZES", layout.SIZES[2:])


@pytest.mark.slow
def test_the_actor_keeps_the_law():
    """The other losses are held to the law in the other modes."""
    laws.check_layout(losses.ppo_clip, modes=("token-mean", "seq-mean-token-sum-norm"), each=1, seed=SEED)


@pytest.mark.slow
def test_the_critic_keeps_the_law():
    laws.check_layout_fn(
        UpdateCritic, head="value", modes=("token-mean", "seq-mean-token-mean"), each=1, max_ranks=4, seed=SEED
    )


@pytest.mark.slow
def test_critics_of_other_kinds_keep_the_law(few):
    bins = partial(UpdateCritic, loss_fn=partial(losses.hl_gauss, low=-2.0, high=2.0))
    laws.check_layout_fn(bins, head="value", outputs=5, modes=("token-mean",), each=1, max_ranks=2)
    laws.check_layout_fn(popart, head="value", modes=("token-mean",), each=1, max_ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_the_other_losses_keep_the_law(number, few):
    loss_fn = getattr(losses, OTHERS[number])
    laws.check_layout(loss_fn, modes=(losses.MODES[number % len(losses.MODES)],), each=1, max_ranks=2)


def above_the_mean_probability(log_probs, old_log_probs, advantages, mask, *, noise):
    """A selection that depends on the current log-probs of the whole mini-batch, without near ties."""
    mean = log_probs.where(mask, 0.0).sum() / mask.sum().clamp(min=1)
    return mask & (noise > mean.exp())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "max_ranks"), [("clip_cov", 4), ("kl_cov", 2)])
def test_the_losses_that_select_tokens_keep_the_law(name, max_ranks, few):
    loss_fn = SelectiveLoss(getattr(losses, name), above_the_mean_probability)
    laws.check_layout(loss_fn, modes=("token-mean",), each=1, max_ranks=max_ranks)


# axes of 16 ranks, whose update, the stage of the sharding, layers recomputed, stages on each rank
LARGE = [
    ({"replicate": 4, "shard": 4}, "value", 2, "selective", 1),
    ({"expert": 2, "context": 2, "tensor": 2, "pipeline": 2}, "lm", 3, True, 2),
    ({"replicate": 4, "expert": 2, "pipeline": 2}, "value", 1, False, 2),
    ({"tensor": 4, "pipeline": 4}, "lm", 2, True, 1),
    ({"replicate": 2, "expert": 2, "sequence": 2, "tensor": 2}, "value", 3, False, 1),
]


@pytest.mark.slow
def test_the_large_meshes_keep_the_law():
    """Some meshes once, most ranks with nothing to do."""
    updates = {"lm": partial(UpdateActor, loss_fn=losses.ppo_clip), "value": UpdateCritic}
    runs = {head: layout._runner(update, head) for head, update in updates.items()}
    example = layout._example(("token-mean",), 2, 2, 1)
    for wide, head, *settings in LARGE:
        axes = dict.fromkeys(layout.AXES, 1) | wide
        assert axes in layout.meshes(16)
        drawn = layout._draw(axes, *settings, example, torch.Generator().manual_seed(0))
        number = layout._number(axes, 0)
        expected = layout._one_process(runs[head], example, number, drawn.layers)
        for outcome in runs[head](example, drawn, number):
            assert layout._outcomes_differ(expected, outcome, 1e-10) is None, f"{head} {drawn}"


@pytest.mark.slow
def test_every_mesh_and_stage_takes_its_turn():
    """All of them, if so many are asked for, in an order that the seed gives."""
    orders = []
    for seed in (0, 1):
        seen = []

        def make(*, forward, seen=seen, **_):
            mesh = forward.mesh
            if all(axis.rank == 0 for axis in mesh.axes.values()):
                sizes = (*(mesh[name].size for name in layout.AXES), len(forward.model.spans))
                seen.append((sizes, mesh.sharding and mesh.sharding.stage, forward.model.checkpoint_layers))
            return lambda state, batch: (state, {})

        laws.check_layout_fn(make, modes=("token-mean",), each=None, max_ranks=2, seed=seed)
        orders.append(seen)
    assert orders[0] != orders[1]
    interleaved = [axes for axes in layout.meshes(2) if axes["pipeline"] == 2]
    for seen in orders:
        assert len({sizes for sizes, *_ in seen}) == len(layout.meshes(2)) + len(interleaved) + 1
        kinds = {(s, a) for s in (1, 2, 3, None) for a in (True, False)}
        assert {(stage, bool(again)) for _, stage, again in seen} == kinds
        assert {again for *_, again in seen} == {False, True, "selective"}


def averaged(grads, mesh):
    ranks = mesh["replicate"].size * mesh["shard"].size
    return tree.map(lambda x: x / ranks, meshes.gradient_sum(grads, mesh))


def without(name, grads, mesh):
    return meshes.gradient_sum(grads, Mesh({k: v for k, v in mesh.axes.items() if k != name}, mesh.sharding))


def without_layout(grads, mesh):
    return meshes.gradient_sum(grads, attrs.evolve(mesh, layout=None))


def copies_apart(name, grads, stages, axis):
    return {}


def sharded_twice(grads, mesh):
    return (
        meshes.gradient_sum(grads, attrs.evolve(mesh, sharding=None))
        if mesh["shard"].size == 1
        else tree.map(lambda x: x * mesh["shard"].size if mesh.sharded else x, meshes.gradient_sum(grads, mesh))
    )


def dense_twice(grads, mesh):
    summed, cuts = meshes.gradient_sum(grads, mesh), {} if mesh.layout is None else mesh.layout.cuts
    dense = {name: x for name, x in summed.items() if mesh.sharded and name not in cuts}
    return summed | meshes.gradient_sum(dense, Mesh({"expert": mesh["expert"]}))


def first_expert_rank_owns(self, name, *, sharded=False, owns=Layout.owns):
    return owns(self, name)


def every_rank_counts(x, axis):
    """The gradient of the sum of the ranks' losses, which are one loss."""
    return collectives.all_gather(x, axis)


def rows_as_one(lengths, ranks, deal=context.deal, **keywords):
    """Tokens see the keys of the rows before theirs."""
    return deal([sum(lengths)], ranks, **keywords)


def own_norm(grads, mesh):
    return torch.nn.utils.get_total_norm(grads)


def own_rounds(counts, mesh, device):
    return [max(count, 1) for count in counts]


def own_totals(mask, mode, *, totals, horizon):
    return loss_weights(mask, mode, totals=losses.count_totals(mask), horizon=horizon)


def all_rows(model, lengths, mesh, alike=None):
    return [list(range(len(lengths)))] * meshes.ranks_on(mesh, meshes.DATA_AXES)


def none_for_the_last(model, lengths, mesh, alike=None):
    shared = shares(model, lengths, mesh, alike)
    return [*shared[:-1], []] if len(shared) > 1 else shared


MISTAKES = {
    "mean": ("replicate", loop, "gradient_sum", averaged),
    "replicate": ("replicate", loop, "gradient_sum", partial(without, "replicate")),
    "sequence": ("sequence", loop, "gradient_sum", partial(without, "sequence")),
    "context": ("context", loop, "gradient_sum", partial(without, "context")),
    "summed losses": ("context", packed, "gather_sequence", every_rank_counts),
    "other rows": ("context", packed, "deal", rows_as_one),
    "tensor": ("tensor", loop, "gradient_sum", without_layout),
    "expert": ("expert", loop, "gradient_sum", without_layout),
    "dense twice": ("expert", loop, "gradient_sum", dense_twice),
    "dense once": ("expert", Layout, "owns", first_expert_rank_owns),
    "copies": ("pipeline", meshes, "_sum_copies", copies_apart),
    "loads of stages": ("pipeline", loop, "with_router_terms", lambda report, prefix, others, axis: report),
    "metrics of stages": ("pipeline", staging, "_metrics_of_last", lambda report, axis, device: report),
    "shard": ("shard", loop, "gradient_sum", sharded_twice),
    "totals": ("replicate", losses, "loss_weights", own_totals),
    "metrics": ("replicate", loop, "data_metrics", lambda x, mesh: x),
    "rounds": ("shard", loop, "rounds", own_rounds),
    "all rows": ("replicate", loop, "shares", all_rows),
    "norm": ("shard", optimizers, "global_norm", own_norm),
    "norm of stages": ("pipeline", optimizers, "global_norm", own_norm),
    "lost rows": ("replicate", loop, "shares", none_for_the_last),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_broken_update_is_caught(mistake, monkeypatch, few):
    axis, module, name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(module, name, wrong)
    monkeypatch.setattr(layout, "meshes", lambda max_ranks: [dict.fromkeys(layout.AXES, 1) | {axis: 2}])
    with pytest.raises(laws.LawViolation) as caught:
        laws.check_layout(losses.gpg, modes=("token-mean",), each=2)
    assert caught.value.law == "layout"
    assert "on a mesh of replicate" in str(caught.value)
    assert "(seed 0)" in str(caught.value)


def local_mean(log_probs, old, advantages, mask):
    loss, metrics = losses.ppo_clip(log_probs, old, advantages, mask)
    return loss / mask.sum().clamp(min=1), metrics


@pytest.mark.slow
def test_a_loss_with_a_local_mean_is_caught(few):
    with pytest.raises(laws.LawViolation, match=r"sharding stage \d|whole parameters") as caught:
        laws.check_layout(local_mean, modes=("token-mean",), max_ranks=2)
    assert caught.value.law == "layout"


@pytest.mark.slow
def test_an_update_that_rolls_dice_is_caught():
    dice = torch.Generator().manual_seed(0)

    def make(**settings):
        def update(state, batch):
            scale = 1 + torch.rand((), generator=dice, dtype=torch.float64)
            scaled = tree.replace(batch, advantages=batch.advantages * scale)
            return UpdateActor(loss_fn=losses.gpg, **settings)(state, scaled)

        return update

    with pytest.raises(laws.LawViolation, match='It also breaks: "same bits"'):
        laws.check_layout_fn(make, modes=("token-mean",), max_ranks=4)
