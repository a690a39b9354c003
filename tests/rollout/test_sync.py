"""Whole tensors come out of any layout in buckets, and every kind of damage on the way is named."""

import functools
import math

import pytest
import torch

from fppo import models
from fppo.rollout import sync
from fppo.rollout.sync import Bucket, CopyOrigin, SyncError, compare, digest, renamed, reshard
from fppo.runtime import digests, fsdp
from fppo.runtime.layout import Layout
from fppo.runtime.mesh import Mesh, Sharding
from fppo.runtime.simulate import simulate
from fppo.tree import Away
from tests.models.families import make


def params_of(*sizes):
    generator = torch.Generator().manual_seed(0)
    params = {f"layers.{i}.weight": torch.randn(size, 3, generator=generator) for i, size in enumerate(sizes)}
    return params, {name: x.shape for name, x in params.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (5, 3), (2, 3, 4)])
@pytest.mark.parametrize("how", ["bytes", "sums"])
def test_digests_see_bytes_shape_and_dtype(dtype, shape, how):
    digest = functools.partial(sync.digest, method=how)
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 5).to(dtype)
    assert digest(x) == digest(x.clone())
    assert digest(x) != digest(x[None])
    if x.numel():
        shifted = torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].view(shape)  # its memory starts elsewhere
        assert digest(shifted) == digest(x)
        assert digest(x.reshape(-1)) == digest(x.reshape(-1).flip(0).flip(0))
        assert digest(torch.stack([x, x.roll(1)], -1)[..., 0]) == digest(x)  # every other element of its memory
    if x.numel() > 1:
        assert digest(x) != digest(x.reshape(-1).roll(1).view(shape)) or len(x.unique()) == 1
    if dtype.is_floating_point and x.numel():
        assert digest(x) != digest(-x)
        assert digest(x) != digest(x.to(torch.float16))


@pytest.mark.parametrize("how", ["bytes", "sums"])
def test_digests_see_one_bit_anywhere(how):
    digest = functools.partial(sync.digest, method=how)
    x = torch.randn(3 * digests.BLOCK // 2, generator=torch.Generator().manual_seed(0))
    seen = {digest(x)}
    for place in (0, 1, digests.BLOCK - 1, digests.BLOCK, len(x) - 1):
        for bit in (0, 17, 31):
            words = x.clone().view(torch.int32)
            words[place] ^= torch.tensor(1 << bit).int() if bit < 31 else torch.tensor(-(1 << 31)).int()
            seen.add(digest(words.view(torch.float32)))
    assert len(seen) == 16
    signs = x.clone()
    signs[:2] = -signs[:2]
    swapped = x.clone()
    swapped[[3, digests.BLOCK + 3]] = x[[digests.BLOCK + 3, 3]]
    assert len({*seen, digest(signs), digest(swapped)}) == 18


@pytest.mark.parametrize("count", [0, 1, digests.BLOCK, digests.BLOCK + 1, 4 * digests.BLOCK, 5 * digests.BLOCK + 5])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_digests_are_the_same_on_every_device(count, dtype, monkeypatch):
    monkeypatch.setattr(digests, "SLAB", 2)
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    words = torch.randint(low, high, (count,), dtype=dtype, generator=torch.Generator().manual_seed(2))
    sums = digests.block_sums(words)  # block by block
    assert len(sums) == -(-count // digests.BLOCK)
    assert torch.equal(sums, torch.cat(digests._slabs(words, digests.weights(words.device))))


def test_sums_are_taken_where_a_tensor_is_not_on_the_host():
    host, elsewhere = torch.zeros(1), torch.zeros(1, device="meta")
    assert sync.digest_method([host, host]) == "bytes"
    assert sync.digest_method([host, elsewhere]) == "sums"
    assert digest(host) == digest(host, "bytes") != digest(host, "sums")


@pytest.mark.parametrize("bucket_bytes", [1, 40, 100, 1 << 20])
def test_buckets_hold_all_in_order_and_are_no_larger_than_asked(bucket_bytes):
    params, shapes = params_of(4, 1, 2, 9, 1, 1, 1)
    buckets = list(reshard(params, shapes, bucket_bytes=bucket_bytes))
    assert [name for bucket in buckets for name in bucket.tensors] == list(params)
    for bucket in buckets:
        size = sum(x.nbytes for x in bucket.tensors.values())
        assert size <= bucket_bytes or len(bucket.tensors) == 1
        for name, x in bucket.tensors.items():
            assert x.data_ptr() == params[name].data_ptr()
            assert bucket.digests[name] == digest(params[name])
    half = list(reshard(params, shapes, bucket_bytes=bucket_bytes, dtype=torch.bfloat16, only=list(params)[2:4]))
    tensors = {name: x for bucket in half for name, x in bucket.tensors.items()}
    assert list(tensors) == list(params)[2:4]
    assert all(torch.equal(x, params[name].bfloat16()) for name, x in tensors.items())
    counts = {"counts": torch.arange(300)}
    (whole,) = reshard(counts, {"counts": counts["counts"].shape}, bucket_bytes=bucket_bytes, dtype=torch.bfloat16)
    assert torch.equal(whole.tensors["counts"], counts["counts"])


@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_are_gathered_bucket_by_bucket(ranks):
    params, shapes = params_of(4, 1, 2, 9, 1)
    whole = {name: digest(x) for name, x in params.items()}

    def run(mesh: Mesh):
        mesh = Mesh(mesh.axes, Sharding())
        buckets = list(reshard(fsdp.shard(params, mesh), shapes, mesh, bucket_bytes=3 * 60))
        sizes = [sum(x.nbytes for x in bucket.tensors.values()) for bucket in buckets]
        return sizes, {name: d for bucket in buckets for name, d in bucket.digests.items()}

    for sizes, sent in simulate({"shard": ranks}, run):
        assert sent == whole
        assert sizes == [60, 24, 108, 12]


def on_stages(params, mesh):
    """What a rank of a pipeline and a shard axis holds: the first on the first stage and the last, others by turns."""
    shapes, pipeline = {name: x.shape for name, x in params.items()}, mesh["pipeline"]
    stages = {name: (i % pipeline.size,) if i else (0, pipeline.size - 1) for i, name in enumerate(params)}
    layout = Layout(shapes, {}, frozenset(), 0, 1, stages, pipeline.rank, pipeline.size)
    return fsdp.shard({name: params[name] for name in layout.held}, mesh), layout


@pytest.mark.parametrize("axes", [{"pipeline": 2}, {"pipeline": 3, "shard": 2}], ids=str)
def test_all_stages_send_the_same_buckets_in_one_order(axes):
    params, _ = params_of(4, 1, 2, 9, 1)
    params["layers.2.weight"] = params["layers.2.weight"].double()
    later = params | {"layers.3.weight": params["layers.3.weight"] + 1}
    sent = list(reshard(params, {name: x.shape for name, x in params.items()}, bucket_bytes=60, dtype=torch.bfloat16))

    def run(mesh):
        mesh = Mesh(mesh.axes, Sharding())
        own, layout = on_stages(params, mesh)
        settings = {"bucket_bytes": 3 * 60, "dtype": torch.bfloat16, "layout": layout}
        for bucket, expected in zip(reshard(own, layout.shapes, mesh, **settings), sent, strict=True):
            assert list(bucket.tensors) == list(expected.tensors)
            assert bucket.digests == expected.digests == {name: digest(x) for name, x in bucket.tensors.items()}
        everything, last = sync.changed(own, {}, mesh, names=params)
        some, _ = sync.changed(on_stages(later, mesh)[0], last, mesh, names=params)
        return everything, some

    assert simulate(axes, run) == [(set(params), {"layers.3.weight"})] * math.prod(axes.values())


@pytest.mark.parametrize("axes", [{"expert": 4}, {"shard": 2, "expert": 2}], ids=str)
def test_experts_and_what_both_axes_share_are_sent_whole(axes):
    model, params = make("qwen3_moe", dtype=torch.float32)
    whole = {name: digest(x) for name, x in params.items()}
    moved = params | {"model.norm.weight": params["model.norm.weight"].clone()}
    moved["model.norm.weight"][-1] += 1  # on one rank alone

    def run(mesh):
        mesh = Mesh(mesh.axes, Sharding())
        placed = models.place(model, mesh)
        own, later = (models.own_params(placed, x, mesh) for x in (params, moved))
        buckets = list(reshard(own, placed.shapes, mesh, bucket_bytes=3000, layout=placed.layout))
        _, last = sync.changed(own, {}, mesh)
        return {name: d for bucket in buckets for name, d in bucket.digests.items()}, sync.changed(later, last, mesh)[0]

    assert all(found == (whole, {"model.norm.weight"}) for found in simulate(axes, run))


def test_what_changed_is_agreed_by_all_ranks():
    params, _ = params_of(4, 2, 9, 3)
    later = {name: x.clone() for name, x in params.items()}
    later["layers.0.weight"][3] += 1  # the last row, so the first rank's shard is as it was
    later["layers.3.weight"][0] += 1

    def run(mesh: Mesh):
        mesh = Mesh(mesh.axes, Sharding())
        everything, last = sync.changed(fsdp.shard(params, mesh), {}, mesh)
        nothing, _ = sync.changed(fsdp.shard(params, mesh), last, mesh)
        some, _ = sync.changed(fsdp.shard(later, mesh), last, mesh)
        frozen, _ = sync.changed(fsdp.shard(later, mesh), last, mesh, frozen=["layers.3.weight"])
        unknown, _ = sync.changed(fsdp.shard(later, mesh), {}, mesh, frozen=["layers.3.weight"])
        return everything, nothing, some, frozen, unknown

    for actual in simulate({"shard": 2}, run):
        both = {"layers.0.weight", "layers.3.weight"}
        assert actual == (set(params), set(), both, {"layers.0.weight"}, set(params))


def test_renames_and_parts():
    model, params = make("qwen3_moe", dtype=torch.float32)
    rename = sync.dtensor_weight_loader("qwen3_moe")
    buckets = list(renamed(reshard(params, model.shapes, bucket_bytes=1 << 12), rename))
    tensors = {name: x for bucket in buckets for name, x in bucket.tensors.items()}
    digests = {name: x for bucket in buckets for name, x in bucket.digests.items()}
    stacked = params["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(tensors["model.layers.1.mlp.experts.3.up_proj.weight"], stacked[3].chunk(2)[1])
    assert torch.equal(tensors["model.norm.weight"], params["model.norm.weight"])
    assert all(digest(x) == digests[name] for name, x in tensors.items())
    assert [name for new in sync.targets(model.shapes, rename).values() for name in new] == list(tensors)
    mine = {"mine": lambda name, x: [(f"engine.{name}", x)], **sync.RENAMES}
    first = next(renamed(reshard(params, model.shapes, bucket_bytes=1), sync.dtensor_weight_loader("mine", mine)))
    assert list(first.tensors) == [f"engine.{next(iter(params))}"]
    assert sync.dtensor_weight_loader("qwen2") is sync.hf_weight_loader
    one = [Bucket({"a": stacked, "b": stacked}, {"a": "", "b": ""}, "bytes")]
    two = [Bucket({name: stacked}, {name: ""}, "bytes") for name in "ab"]
    for buckets in (one, two):
        with pytest.raises(SyncError, match="two parameters are renamed to same, one of them b"):
            list(renamed(buckets, lambda _, x: [("same", x)]))


def test_what_went_wrong_is_named():
    sent = {"a": "1", "b": "2", "c": "3"}
    compare(sent, dict(sent))
    with pytest.raises(SyncError, match="missing: b; unknown: x; changed on the way: c"):
        compare(sent, {"a": "1", "x": "2", "c": "4"})
    sync.compare_names("abc", "cab")
    with pytest.raises(SyncError, match="missing: a; unknown: x, y"):
        sync.compare_names("abc", "bcxy")


class Elsewhere(Away):
    """A handle of a tensor in another process."""


def test_a_copy_is_of_the_same_tensors_of_one_version():
    """A tensor may be written into, so another version of it is none; one that stands elsewhere never changes."""
    params = {"a": torch.ones(2), "b": torch.ones(3)}
    handles = {"a": Elsewhere(), "b": Elsewhere()}
    for own, fixed in ((params, False), (handles, True)):
        origin = CopyOrigin.of(own, 4)
        assert origin.matches(dict(own), 4)
        assert origin.matches(own, 5) is fixed
        assert not origin.matches({"a": own["a"]}, 4)
        assert not origin.matches({**own, "c": own["a"]}, 4)
        assert not origin.matches({"a": own["b"], "b": own["a"]}, 4)
    assert not CopyOrigin.of(params, 4).matches({name: x.clone() for name, x in params.items()}, 4)
    assert not CopyOrigin.of(params, 4).matches({**params, "b": handles["b"]}, 4)
