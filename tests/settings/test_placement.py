"""Placements that cannot be are named, with what to do, before any work."""

import pytest

from fppo.settings import files
from fppo.settings.placement import AXES, places_of, pools_of, threads_of
from tests import tiny_run

APART = {"a": {"ranks": 2}, "c": {"ranks": 1}}
ROLES = {"placement__pools": APART, "placement__roles__actor": "a", "placement__roles__critic": "c"}


ENGINES = {
    "placement__pools": APART | {"e": {"ranks": 2}},
    "placement__roles__rollout": "e",
    "placement__engines__rows": 8,
}


def pool(**values):
    return {"placement__pools": {"a": values, "c": {"ranks": 1}}}


def test_roles_are_here_or_in_pools_with_meshes_of_their_own(tmp_path):
    assert places_of(tiny_run.settings(tmp_path).placement) == {}
    pools = {"a": {"ranks": 4, "sequence": 2, "gpus": 1}, "c": {"ranks": 1, "gpus": 0.5}}
    asked = ROLES | {"placement__pools": pools, "placement__cluster": "local"}
    placement = tiny_run.settings(tmp_path, **asked).placement
    assert places_of(placement) == {"actor": "a", "reference": "a", "critic": "c"}
    sizes = pools_of(placement)["a"].axes
    assert {name: size for name, size in sizes.items() if size > 1} == {"shard": 2, "sequence": 2}
    assert list(sizes) == list(AXES)
    settings = tiny_run.settings(tmp_path, **asked)
    files.save(settings, tmp_path / "written.toml")
    assert files.load(tmp_path / "written.toml") == settings
    vllm = tiny_run.settings(tmp_path, **(ROLES | ENGINES), rollout__engine="vllm")
    assert places_of(vllm.placement) == {"actor": "a", "reference": "a", "critic": "c", "rollout": "e"}


def test_ranks_of_a_machine_share_its_cores(tmp_path):
    pools = {"a": {"ranks": 2}, "c": {"ranks": 1}, "e": {"ranks": 3, "threads": 3}}
    asked = ROLES | ENGINES | {"placement__pools": pools}

    def threads(cores, cluster="processes"):
        return threads_of(tiny_run.settings(tmp_path, **asked, placement__cluster=cluster).placement, cores)

    assert threads(16) == {"a": 2, "c": 2, "e": 3}  # three ranks share what nine threads leave
    assert threads(8, "local") == {"a": 1, "c": 1, "e": 3}
    assert threads(16, "10.0.0.1:6379") == {"a": 16, "c": 16, "e": 3}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"placement__roles__rollout": "a", "rollout__engine": "vllm"},
            "samples by the embedded engine; give embedded",
        ),
        ({"placement__roles__rollout": "here"}, "placement.roles.rollout = 'here': it is where the actor is"),
        ({"placement__roles__rollout": "c"}, "rollout = 'c': critic is there; engines have a pool of their own"),
        ({"placement__roles__rollout": "g"}, "placement.roles.rollout = 'g': there is no such pool"),
        ({"placement__engines__rows": 8}, "placement.engines.rows = 8: nothing reads it here: it is for engines in a"),
        (
            ENGINES | {"placement__pools": APART | {"e": {"ranks": 2, "shard": 2}}},
            "pools.e.shard = 2: each rank is an engine of its own",
        ),
        (
            ENGINES | {"placement__pools": APART | {"e": {"ranks": 2, "threads": 0}}},
            "pools.e.threads = 0: must be 1 or more",
        ),
        (
            ENGINES | {"data__eval_path": [], "rollout__from": "saved"},
            "placement.roles.rollout = 'e': nobody asks an engine where rollout.from has it all",
        ),
        (
            ENGINES | {"rollout__engine": "vllm", "rollout__vllm__host": "ray"},
            "rollout.vllm.host = 'ray': an engine in a",
        ),
        (
            ENGINES
            | {"placement__pools": APART | {"e": {"ranks": 2, "gpus": 1}}, "placement__cluster": "local"}
            | {"rollout__engine": "vllm", "rollout__vllm__host": "process", "rollout__vllm__tensor_parallel": 2},
            "pools.e.gpus = 1: an engine cuts its model over rollout.vllm.tensor_parallel = 2; give as many",
        ),
        (
            {"placement__roles__critic": "d"},
            "placement.roles.critic = 'd': there is no such pool.*there are a, c, here",
        ),
        ({"placement__roles__actor": "here"}, "placement.pools.a = .*no role is in it"),
        (
            pool(ranks=0),
            "pools.a.ranks = 0: must be 1 or more",
        ),
        (
            pool(ranks=True),
            "pools.a.ranks = True: must be a whole number",
        ),
        (pool(), "placement.pools.a.ranks = None: is not set"),
        ({"placement__pools": {"a": 2, "c": {"ranks": 1}}}, "placement.pools.a = 2: must be a table"),
        (
            pool(ranks=1, gpu=1),
            "pools.a.gpu = 1: there is no such set",
        ),
        (pool(ranks=3, shard=2), r"multiply to its 3 ranks"),
        (pool(ranks=1, gpus=1), "pools.c.gpus = 0: device = 'auto', and a rank without a GPU works on its CPU"),
        (pool(ranks=1, gpus=1) | {"device": "cpu"}, "pools.a.gpus = 1: device = 'cpu', and its ranks work on GPUs;"),
        (pool(ranks=1, gpus=2) | {"placement__cluster": "local"}, "pools.a.gpus = 2: a rank works on one GPU; give 1"),
        (pool(ranks=1, gpus=-1), "pools.a.gpus = -1.0: must be 0 or more"),
        (
            pool(ranks=2, gpus=0.5) | {"placement__cluster": "local"},
            "pools.a.gpus = 0.5: two ranks of one mesh cannot share a GPU",
        ),
        ({"device": "cuda"}, "pools.a.gpus = 0: device = 'cuda', and a rank without a GPU works on its CPU"),
        (
            {"placement__cluster": "10.0.0.1"},
            "placement.cluster = '10.0.0.1': it is processes, local, or the HOST:PORT",
        ),
        ({"placement__cluster": "auto"}, "placement.cluster = 'auto': it is processes, local, or the HOST:PORT"),
        ({"placement__restarts": -1}, "placement.restarts = -1.*must be 0 or more"),
        ({"placement__roles__reward": "c"}, "placement.roles.reward = 'c': the run has no reward model"),
        (pool(ranks=2, context=2, sequence=2), r"pools.a: its axes \(.*\) do not multiply to its 2 ranks"),
        (
            pool(ranks=2, stages=2),
            "pools.a.stages = 2: there is no such setting; did you mean placement.pools.a.virtual",
        ),
        (
            pool(ranks=2, pipeline=2) | {"model__compile_layers": True},
            "pools.a: mesh.pipeline = 2: torch.compile has",
        ),
        (pool(ranks=1, ring=True), "pools.a: mesh.ring = True: nothing reads it here: it is for mesh.context > 1"),
        (pool(ranks=2, ring=1), "pools.a.ring = 1: must be true or false"),
        (pool(ranks=2, virtual_stages=2), "pools.a: mesh.virtual_stages = 2: its stages are those of a pipeline rank"),
        (pool(ranks=2, expert=2) | {"model__compile_layers": True}, "pools.a: mesh.expert = 2: its layers exchange"),
        (
            {"placement__pools": {"a": {"ranks": 1}, "c": {"ranks": 8}}},
            "placement.pools.c: critic.mini_batch_size = 4: some ranks would have nothing to do",
        ),
        (
            pool(ranks=8),
            "pools.a: actor.mini_batch_size = 4: some ranks",
        ),
        ({"placement__pools": APART | {"here": {"ranks": 1}}}, "here is the controller's process"),
        ({"placement__pools": APART | {"spare": {"ranks": 1}}}, "placement.pools.spare = .*no role is in it"),
        ({"placement__roles__reference": "here"}, "placement.roles.reference = 'here': it is where the actor is"),
        ({"placement__patience": 0}, "placement.patience = 0.*must be greater than 0"),
        ({"mesh__shard": 2}, "mesh = .*each pool has axes of its own"),
        ({"rollout__engine": "vllm"}, "rollout.engine = 'vllm': an actor in a pool samples by the embedded engine"),
        ({"algorithm__advantage": "grpo", "rollout__n": 2}, "placement.roles.critic = 'c': the run has no critic"),
        (
            {"algorithm__kl__coef": 0.0, "placement__roles__reference": "c"},
            "placement.roles.reference = 'c': the run has no reference",
        ),
        (
            {"placement__pools": {}, "placement__roles__actor": "here", "placement__roles__critic": "here"}
            | {"placement__cluster": "local"},
            "placement.cluster = 'local': nothing reads it here",
        ),
        (
            {"placement__pools": {"a": {"ranks": 2, "tensor": 2}, "c": {"ranks": 1}}, "model__remove_padding": False},
            "placement.pools.a: mesh.tensor = 2: a tensor axis cuts packed rows",
        ),
    ],
)
def test_what_cannot_be_is_named(tmp_path, changes, text):
    with pytest.raises(files.SettingsError, match=text):
        tiny_run.settings(tmp_path, **(ROLES | changes))


def test_all_that_is_wrong_is_said_at_once_and_of_each_pool_what_is_its_own(tmp_path):
    wrong = {"a": {"ranks": 8}, "c": {"ranks": 6, "gpus": "3"}, "spare": {"ranks": 0}}
    with pytest.raises(files.SettingsError) as caught:
        tiny_run.settings(tmp_path, **(ROLES | {"placement__pools": wrong, "placement__roles__reference": "x"}))
    named = [text.partition(" = ")[0] for text in caught.value.problems]
    assert named == [
        "placement.pools.c.gpus",
        "placement.pools.spare.ranks",
        "placement.roles.reference",
        "placement.pools.spare",
    ]
    with pytest.raises(files.SettingsError) as caught:
        tiny_run.settings(tmp_path, **(ROLES | {"placement__pools": {"a": {"ranks": 8}, "c": {"ranks": 6}}}))
    named = [text.partition(" = ")[0] for text in caught.value.problems]
    assert named == [
        "placement.pools.a: actor.mini_batch_size",
        "placement.pools.c: critic.mini_batch_size",
    ]
