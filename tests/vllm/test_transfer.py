"""Weights by vLLM's own transfer engine, up to the calls that need GPUs: NCCL's order of things over a TCP store."""

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here")

from fppo.rollout import sync
from fppo.rollout.sync import SyncError
from fppo.rollout.vllm.options import VllmOptions, check_options
from fppo.rollout.vllm.transfer import free_address, metadata, transfer_info
from fppo.runtime.mesh import LOCAL
from fppo.runtime.parts import dtypes_of
from tests.vllm import store_transfer
from tests.vllm.conftest import start
from tests.vllm.families import make
from tests.vllm.test_weights import gap


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """One whose workers, too, know the plugin, as they would one that is installed."""
    directory = tmp_path_factory.mktemp("plugin")
    info = directory / "fppo_test_store-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fppo-test-store\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nstore = tests.vllm.store_transfer:register\n")
    store_transfer.register_trainer()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        options = {
            "host": "process",
            "restarts": 0,
            "extra": {"weight_transfer_config": {"backend": store_transfer.NAME}},
        }
        started, _ = start(options=options, bucket_bytes=1 << 15, transfer=info_of)
    with started:
        yield started


def info_of(options, bucket_bytes):
    address, port = free_address(options)
    return store_transfer.StoreInfo(
        rank=0,
        master_address=address,
        master_port=port,
        world_size=1 + options.tensor_parallel,
        packed_buffer_size_bytes=bucket_bytes,
    )


def test_what_it_brings_is_confirmed_by_every_worker(engine, monkeypatch):
    model, _ = make("qwen2")
    for version in range(2):
        _, params = make("qwen2", seed=version)
        done = engine.sync(params, version=version)
        assert (done.version, done.tensors) == (version, len(params))
        assert gap(engine, model, params) < 1e-5
    broadcast, wrong = engine._transfer._engine.model_update_group.broadcast, params["model.norm.weight"]
    monkeypatch.setattr(
        engine._transfer._engine.model_update_group,
        "broadcast",
        lambda x, src: broadcast(x + 1e-6 if x.shape == wrong.shape and torch.equal(x, wrong) else x, src),
    )
    with pytest.raises(SyncError, match=r"changed on the way: model.norm.weight$"):
        engine.sync(params, version=2)
    assert engine.version is None
    monkeypatch.undo()
    engine.sync(params, version=2)
    assert gap(engine, model, params) < 1e-5


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_what_is_announced_is_what_comes(name):
    model, params = make(name)
    rename = sync.dtensor_weight_loader(model.config.model_type)
    for only in (list(params), list(params)[3:7]):
        buckets = sync.reshard(params, model.shapes, bucket_bytes=1 << 14, dtype=torch.bfloat16, only=only)
        sent = [(new, x.dtype, tuple(x.shape)) for b in sync.renamed(buckets, rename) for new, x in b.tensors.items()]
        assert metadata(dtypes_of(params, LOCAL), model.shapes, only, rename, torch.bfloat16) == sent


@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_without_a_gpu_it_says_so(transport):
    with pytest.raises(ValueError, match=rf"transport = '{transport}' is between GPUs, .* give auto"):
        transfer_info(VllmOptions(host="process", transport=transport), 1 << 20)
    with pytest.raises(ValueError, match="one process needs none"):
        check_options(VllmOptions(transport=transport))


@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_with_a_gpu_it_is_what_vllm_takes(transport, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    info = transfer_info(VllmOptions(host="process", transport=transport, tensor_parallel=2), 1 << 20)
    assert (info.backend, info.is_sender, info.packed, info.packed_buffer_size_bytes) == (
        transport,
        True,
        True,
        1 << 20,
    )
    if transport == "nccl":
        assert (info.master_address, info.world_size) == ("127.0.0.1", 3)
        assert info.master_port > 0
