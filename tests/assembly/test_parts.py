"""The small functions of assembly by themselves: what each takes of its sections, and where bounds lie."""

from __future__ import annotations

import attrs
import pytest
import torch

from fppo import models, tree
from fppo.assembly import adapters, engines, learning, machine, parts, supervised
from fppo.assembly.rows import DemonstrationSet, check_ids
from fppo.data.privileged import TRUTH_SIGNS
from fppo.key import Key
from fppo.models import flops
from fppo.quickstart import small_model
from fppo.runtime.mesh import Mesh, Sharding
from fppo.settings.learning import ActorSettings, CriticSettings, ValueHeadSettings
from fppo.settings.model import LoraSettings, ModelSettings
from fppo.settings.placement import MeshSettings, PlacementSettings, RoleSettings
from fppo.settings.rollout import RolloutSettings, VllmSettings
from fppo.settings.train import DataSettings
from fppo.steps.confidence import init_confidence
from fppo.steps.hidden import init_hidden
from fppo_kernels import table as tables
from fppo_kernels.collectives import Axis
from tests import tiny_run

LORA = LoraSettings(rank=3, alpha=6.0, scaling="rslora", targets=("q_proj", "v_proj"))


@pytest.mark.parametrize(("privileged", "signs"), [(0, 0), (5, TRUTH_SIGNS)])
def test_a_critic_that_is_no_model_has_members_outputs_and_signs_by_its_section(tmp_path, privileged, signs):
    tiny_run.write_task(tmp_path)
    section, key = tiny_run.settings(tmp_path).model, Key(3)
    head = ValueHeadSettings(name="hl_gauss", keywords={"low": -1.0, "high": 1.0, "bins": 21})
    of = CriticSettings(ensemble=3, privileged=privileged, loss=head)
    shape = {"members": 3, "outputs": 21, "signs": signs}
    expected = {"confidence": init_confidence(key, **shape), "hidden": init_hidden(key, 16, **shape)}
    for reads, params in expected.items():
        found = adapters.reader_params(section, attrs.evolve(of, reads=reads), key)
        assert tree.digest(found) == tree.digest(params)


def test_shards_are_cut_as_the_mesh_says():
    section = MeshSettings(stage=2, reduce_dtype="bfloat16", prefetch=False)
    assert parts.sharding_of(section) == Sharding(stage=2, reduce_dtype=torch.bfloat16, prefetch=False)
    assert parts.sharding_of(MeshSettings()) == Sharding(stage=3, reduce_dtype=torch.float32, prefetch=True)


@pytest.mark.parametrize(
    ("common", "own", "expected"),
    [
        ("none", None, "none"),
        ("moments", None, "moments"),
        ("all", False, "none"),
        ("none", True, "all"),
        ("all", "moments", "moments"),
        ("moments", "none", "none"),
    ],
)
def test_a_role_is_on_the_host_as_its_own_setting_says_or_as_the_common_one(common, own, expected):
    assert parts.offload_of(common, own) == expected


def test_a_role_has_the_axes_of_its_pool():
    pools = {"p": {"ranks": 4, "tensor": 2, "pipeline": 2, "virtual_stages": 2}}
    placement = PlacementSettings(pools=pools, roles=RoleSettings(critic="p"))
    common, own = MeshSettings(shard=8), Mesh({"shard": Axis(8)})
    assert parts.axes_at(placement, "actor", common) is common
    assert parts.axes_at(placement, "critic", common).tensor == 2
    assert parts.mesh_at(placement, "actor", own) == ("", own)
    words, mesh = parts.mesh_at(placement, "critic", own)
    assert words == "placement.pools.p: "
    assert (mesh["tensor"].size, mesh["pipeline"].size, mesh["shard"].size, mesh.virtual_stages) == (2, 2, 1, 2)


@pytest.mark.parametrize(("gpus", "kind"), [(1.0, "cuda"), (0.0, "cpu")])
def test_the_device_is_a_gpu_where_the_ranks_of_pools_have_theirs(monkeypatch, gpus, kind):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    placement = PlacementSettings(pools={"p": {"ranks": 1, "gpus": gpus}}, roles=RoleSettings(critic="p"))
    assert parts.device_of("auto", placement).type == kind
    assert parts.device_of("auto", PlacementSettings()).type == "cuda"
    assert parts.device_of("cpu", PlacementSettings()).type == "cpu"


@pytest.mark.parametrize("lora", [LoraSettings(), LORA, attrs.evolve(LORA, critic_rank=0)])
def test_a_critic_has_the_shapes_of_its_own_config_whether_it_is_adapted_or_not(tmp_path, lora):
    small, large = (small_model(15, width=width, layers=1) for width in (16, 32))
    for name, model in (("small", small), ("large", large)):
        model.config.save_pretrained(tmp_path / name)
    section = ModelSettings(path=str(tmp_path / "small"), compute_dtype="float32", lora=lora)
    elsewhere = attrs.evolve(section, critic_path=str(tmp_path / "large"))
    assert parts.bare_model(elsewhere).shapes == small.shapes
    for own, like in ((section, small), (elsewhere, large)):
        assert parts.bare_model(own, CriticSettings()).shapes == models.build(like.config, "value").shapes


def kernel_one(*args, **kwargs):
    """A kernel of a test's own."""


def kernel_two(*args, **kwargs):
    """Another one."""


def test_every_kernel_of_ones_own_is_in_the_table():
    """Beside those that are built in, for one operation or several."""
    names = {f"model.{op}": "auto" for op in tables.DEFAULTS}
    assert parts.kernel_table(names) == tables.BUILTIN
    own = {"model.attention": "kernel_one", "model.decode_attention": "kernel_two", "model.log_probs": "kernel_one"}
    own = {setting: f"{__name__}:{name}" for setting, name in own.items()}
    table = parts.kernel_table(names | own)
    assert {op: {*found} - {*tables.BUILTIN[op]} for op, found in table.items()} == {
        op: {own[f"model.{op}"]} if f"model.{op}" in own else set() for op in tables.BUILTIN
    }
    assert {setting: table[setting[6:]][name].fn.__name__ for setting, name in own.items()} == {
        setting: name.partition(":")[2] for setting, name in own.items()
    }
    assert all(table[op][name] is kernel for op, each in tables.BUILTIN.items() for name, kernel in each.items())


def test_a_kernel_that_is_unknown_or_cannot_run_here_is_named_by_its_setting():
    with pytest.raises(ValueError, match=r"^model.linear = 'ccp': no kernel linear/ccp; there are .*cpp"):
        parts.kernels_of({"model.linear": "ccp"})
    for name, kernel in tables.BUILTIN["attention"].items():
        if kernel.refuse() is not None:
            with pytest.raises(ValueError, match=rf"^model.attention = '{name}': .*cannot run here: .*there are"):
                parts.kernels_of({"model.attention": name})


@pytest.mark.parametrize(
    ("policy", "critic", "changes", "expected"),
    [
        ("bfloat16", None, {}, torch.bfloat16),
        ("bfloat16", "float16", {}, torch.float32),
        ("bfloat16", "bfloat16", {}, torch.bfloat16),
        ("bfloat16", "float16", {"critic_path": "other"}, torch.bfloat16),
        ("float32", None, {}, torch.float32),
    ],
)
def test_a_base_is_as_wide_as_the_passes_over_it(policy, critic, changes, expected):
    section = ModelSettings(path="m", compute_dtype=policy, lora=LORA, **changes)
    assert parts.base_dtype(section, CriticSettings(compute_dtype=critic)) == expected


def test_a_mesh_has_no_more_stages_than_the_model_has_layers():
    config = small_model(15, width=16, layers=4).config
    parts.check_mesh(config, "", Mesh({"pipeline": Axis(4)}))
    parts.check_mesh(config, "", Mesh({"pipeline": Axis(2)}, virtual_stages=2))
    with pytest.raises(ValueError, match=r"^pool: mesh\.pipeline = 5: the model has 4 layers"):
        parts.check_mesh(config, "pool: ", Mesh({"pipeline": Axis(5)}))
    with pytest.raises(ValueError, match=r"and mesh\.virtual_stages = 3 make 6 stages"):
        parts.check_mesh(config, "", Mesh({"pipeline": Axis(2)}, virtual_stages=3))


@pytest.mark.parametrize(
    ("engine", "saved", "held_out", "used"),
    [
        ("embedded", None, True, False),
        ("vllm", None, False, True),
        ("vllm", "x", True, True),
        ("vllm", "x", False, False),
    ],
)
def test_vllm_runs_where_something_is_sampled(engine, saved, held_out, used):
    section = RolloutSettings(
        engine=engine, from_=saved, cache_gb=0.5, exact=True, vllm=VllmSettings(bucket_mb=3, max_rows=5)
    )
    model = ModelSettings(path="m", lora=LoraSettings(send="alone"), offload="all")
    found = engines.engine_options(section, model, routed=True, held_out=held_out)
    assert (found.vllm is not None) is used
    if found.vllm is not None:
        assert (found.vllm.adapter, found.vllm.max_rows) == ("alone", 5)
    assert (found.cache_bytes, found.bucket_mb, found.routed, found.exact, found.on_host) == (
        2**29,
        3,
        True,
        True,
        True,
    )
    other = engines.engine_options(RolloutSettings(), ModelSettings(path="m"), routed=False, held_out=True)
    assert (other.routed, other.exact, other.on_host) == (False, False, False)


@pytest.mark.parametrize(
    ("dtype", "vllm", "limit"),
    [
        ("float32", None, 1e-4),
        ("float32", "bfloat16", 0.05),
        ("bfloat16", None, 0.05),
        ("bfloat16", "float32", 0.05),
        ("float32", "float32", 1e-4),
    ],
)
def test_a_gap_to_the_engine_is_as_wide_as_dtypes_explain(dtype, vllm, limit):
    section = RolloutSettings(vllm=VllmSettings(dtype=vllm), gap="stop")
    assert learning.watch_of(section, dtype) == (limit, "stop")
    assert learning.watch_of(attrs.evolve(section, gap="off"), dtype) is None
    assert learning.watch_of(attrs.evolve(section, from_="x"), dtype) is None


def test_the_work_of_a_run_is_a_rollout_and_three_passes_for_each_update():
    model = small_model(15, width=16, layers=1)
    sections = DataSettings(max_prompt_tokens=5), RolloutSettings(batch_size=8, max_tokens=3)
    forward = flops.forward_flops(model, [8], head_tokens=3)
    for epochs in (1, 2):
        found = machine.work_of(model, 7, *sections, ActorSettings(epochs=epochs))
        assert found == pytest.approx(7 * 8 * forward * (1 + 3 * epochs))


def test_tokens_that_a_model_does_not_have_are_named_by_their_rows():
    given = (((1,), (14,)), ((1,), (15, 2)), ((3,), (4,)), ((9, 17, 2), (5,)))
    rows = tuple(
        supervised.data.conversations.Imitated(prompt=prompt, response=said, mask=(True,) * len(said))
        for prompt, said in given
    )
    names = tuple(f"a:{number}" for number in range(1, 5))
    found = DemonstrationSet(rows=rows, ids=names, sources=("a",) * 4, pad_token_id=0)
    check_ids(found, 18)
    for size, wrong in ((15, {"a:2": 15, "a:4": 17}), (16, {"a:4": 17}), (17, {"a:4": 17})):
        with pytest.raises(ValueError, match="outside the model's vocabulary") as caught:
            check_ids(found, size)
        for name, token in wrong.items():
            assert f"{name}: token id {token} is outside the model's vocabulary of {size}" in str(caught.value)
        assert not any(f"{name}:" in str(caught.value) for name in set(names) - wrong.keys())


def test_a_machine_is_asked_about_every_model_that_a_run_has(tmp_path, monkeypatch):
    """Kernels must fit all of them, and each is built once."""
    seen = []
    monkeypatch.setattr(machine, "_built", lambda section, paths: seen.extend(paths.items()) or [])
    monkeypatch.setattr(machine.torch.cuda, "get_device_capability", lambda kind: (8, 0))
    paths = {"model__path": "p", "model__critic_path": "c", "model__ref_path": "r", "reward__model__path": "w"}
    whole = tiny_run.settings(tmp_path, **paths)
    machine.resolved(whole, torch.device("cuda"))
    names = {"model.path": "p", "reward.model.path": "w", "model.critic_path": "c", "model.ref_path": "r"}
    assert sorted(seen) == sorted((names | {"model.teacher_path": None}).items())
    seen.clear()
    no_kl = tiny_run.NO_KL
    taught = {"algorithm__advantage": "distill", "model__teacher_path": "t", "model__path": "p"}
    machine.resolved(tiny_run.settings(tmp_path, **taught, **no_kl), torch.device("cuda"))
    wanted = dict.fromkeys(names) | {"model.path": "p", "model.teacher_path": "t"}
    assert sorted(seen) == sorted(wanted.items())
