"""The weights of a server's checkpoints and snapshots: which are held, and what samples from them after a restart."""

from __future__ import annotations

import json
from types import SimpleNamespace

import attrs
import pytest
import torch

from fppo import models, tree
from fppo.models import lora, lora_files
from fppo.runtime import checkpoint
from fppo.serve.tinker import runs, stores
from fppo.serve.tinker.checkpoints import CheckpointMeta
from fppo.serve.tinker.decode import LoadVerb
from fppo.serve.tinker.futures import Refusal
from fppo.serve.tinker.losses import Loss
from fppo.serve.tinker.runs import Adapters
from fppo.serve.tinker.sessions import Sampler
from fppo.serve.tinker.snapshots import SnapshotInfo
from fppo.serve.tinker.stores import WeightStores
from tests.serve.tinker.made import base, data

RUN = "0123456789ab:train:1"
META = CheckpointMeta(
    run=RUN,
    kind="sampler_weights",
    name="a",
    owner="me",
    base="tiny",
    adapters=Adapters(2),
    optimizer="adamw",
    number=1,
    created=0.0,
    data="data-1",
)


class Registry:
    """The sampling sessions that are begun, with whether the next server knows them by itself."""

    def __init__(self):
        self.samplers = []

    def add_sampler(self, sampler, *, keep=True):
        self.samplers.append((sampler, keep))


@pytest.fixture
def held(tmp_path, monkeypatch):
    """Stores that hold the weights of two checkpoints; what is read is noted."""
    read, checkpoints = [], SimpleNamespace(data=lambda meta: tmp_path / f"{meta.name}{meta.number}")
    monkeypatch.setattr(stores, "read_params", lambda path: read.append(path.parent.name) or {})
    made = WeightStores(checkpoints, tmp_path, {}, Registry(), lambda: 0.0, most=2)
    monkeypatch.setattr(made, "_model_of", lambda base, adapters: (base, adapters))
    return made, read


def test_weights_are_held_by_their_last_use_and_by_the_request_that_saved_them(held):
    made, read = held
    for name, number in [("a", 1), ("b", 1), ("a", 1), ("c", 1), ("a", 1), ("b", 1), ("b", 2), ("b", 1)]:
        found = made.sampled(attrs.evolve(META, name=name, number=number))
        assert (found.name, found.base) == (f"tinker://{RUN}/sampler_weights/{name}#{number}", "tiny")
        assert found.model == ("tiny", Adapters(2))
    assert read == ["a1", "b1", "c1", "b1", "b2"]


def test_fixed_snapshots_are_samplers_after_a_restart_and_those_in_flight_are_none_of_their_own(held, monkeypatch):
    made, _ = held
    shared = {"run": RUN, "owner": "me", "base": "tiny", "adapters": Adapters(2), "version": 3, "created": 0.0}
    infos = [
        SnapshotInfo(name="0123456789ab:sample:1", inflight=False, **shared),
        SnapshotInfo(name=f"{RUN}:inflight", inflight=True, **shared),
    ]
    monkeypatch.setattr(made.snapshots, "restore", lambda: infos)
    made.restore()
    sampler = Sampler(name="0123456789ab:sample:1", owner="me", base="tiny", weights="snapshot", run=RUN)
    assert made._registry.samplers == [(sampler, False)]


@pytest.mark.parametrize(("rank", "unembed"), [(0, True), (2, True), (2, False)])
def test_files_for_other_programs_have_the_trained_weights(tmp_path, rank, unembed):
    """All weights, those with an adapter that PEFT's files cannot hold merged, or an adapter in such files."""
    run, written = runs.create_run(base(torch.float32), Adapters(rank, unembed=unembed)), []
    run, _ = runs.forward_backward(run, data(99, 3), Loss("cross_entropy"))
    run, _ = runs.optim_step(run, runs.StepParams(learning_rate=0.1))
    bases = {"tiny": SimpleNamespace(base=run.base, write_tokenizer=written.append)}
    WeightStores(None, tmp_path / "s", bases, Registry(), lambda: 0.0)._export(run, tmp_path)
    place = tmp_path / "files"
    assert written == [place]
    if rank and not unembed:
        found = lora_files.load(run.model, place, like=run.state.params)
        assert tree.digest(found) == tree.digest(run.state.params)
        assert json.loads((place / "adapter_config.json").read_text())["base_model_name_or_path"] == "tiny"
        return
    expected = lora.merged(run.model, run.state.params) if rank else run.state.params
    assert tree.digest(models.load(place)[1]) == tree.digest(expected)
    assert tree.digest(expected) != tree.digest(run.base.params)


def test_a_saved_state_is_read_as_that_of_a_run_of_its_own_kind(held):
    """Which another optimizer, or another rank, may have."""
    made, _ = held
    run = runs.create_run(base(torch.float32), Adapters(2))
    assert made._template(run, META) is run
    for changes in ({"optimizer": "muon"}, {"adapters": Adapters(3)}):
        meta = attrs.evolve(META, **changes)
        template = made._template(run, meta)
        assert (template.optimizer, template.adapters) == (meta.optimizer, meta.adapters)


def test_weights_to_sample_from_are_gone_on_with_by_a_fresh_optimizer(held, monkeypatch):
    made, _ = held
    run, _ = runs.forward_backward(runs.create_run(base(torch.float32), Adapters(2)), data(1, 2), Loss("cross_entropy"))
    run, _ = runs.optim_step(run, runs.StepParams())
    run, _ = runs.forward_backward(run, data(2, 2), Loss("cross_entropy"))
    other = {name: x + 1 for name, x in run.state.params.items()}
    monkeypatch.setattr(stores, "read_params", lambda path: other)
    made._checkpoints.find = lambda path, owner: META
    found = made.load(run, SimpleNamespace(owner="me"), LoadVerb(path=META.path, optimizer=False))
    assert run.state.opt.count.item() == 1
    assert (found.state.opt.count.item(), found.grads) == (0, None)
    assert tree.digest(found.state.params) == tree.digest(other)
    with pytest.raises(Refusal, match="has no optimizer state"):
        made.load(run, SimpleNamespace(owner="me"), LoadVerb(path=META.path, optimizer=True))


def test_a_training_checkpoint_is_sampled_by_the_weights_it_holds(tmp_path):
    run, _ = runs.forward_backward(runs.create_run(base(torch.float32), Adapters(2)), data(1, 2), Loss("cross_entropy"))
    run, _ = runs.optim_step(run, runs.StepParams(learning_rate=0.1))
    meta = attrs.evolve(META, kind="weights", number=3)
    checkpoint.begin_save(run.state, tmp_path / "state", 3).wait()
    checkpoints = SimpleNamespace(data=lambda meta: tmp_path)
    made = WeightStores(checkpoints, tmp_path, {"tiny": SimpleNamespace(base=run.base)}, Registry(), lambda: 0.0)
    assert tree.digest(made.sampled(meta).params) == tree.digest(run.state.params)
    with pytest.raises(Refusal, match="the server has no model 'other' now; it has tiny"):
        made.sampled(attrs.evolve(meta, base="other", number=4))
