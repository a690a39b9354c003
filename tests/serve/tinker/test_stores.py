"""The weights of checkpoints: which are held, what is sampled and gone on with from them, and their files."""

from __future__ import annotations

import json
from types import SimpleNamespace

import attrs
import pytest
import torch

from fppo import models, tree
from fppo.models import lora, lora_files
from fppo.serve.refusal import Refusal
from fppo.serve.tinker import runs
from fppo.serve.tinker.checkpoints import CheckpointStore
from fppo.serve.tinker.decode import LoadVerb, SaveVerb
from fppo.serve.tinker.losses import Loss
from fppo.serve.tinker.runs import Adapters
from fppo.serve.tinker.sessions import Registry
from fppo.serve.tinker.stores import WeightStores
from fppo.serve.tinker.training import RunInfo
from tests.serve.tinker.made import base, data

RUN = "0123456789ab:train:1"
INFO = RunInfo(
    name=RUN,
    session="0123456789ab",
    owner="me",
    base="tiny",
    adapters=Adapters(2),
    optimizer="adamw",
    created=0.0,
)


class Held:
    """The stores of a folder, in which two adapters of rank 2 may be held in memory."""

    def __init__(self, root):
        self.written, self.base = [], base(torch.float32)
        self.checkpoints = CheckpointStore(root / "checkpoints", lambda: 0.0)
        self.registry = Registry(root / "server.log", lambda: 0.0)
        bases = {"tiny": SimpleNamespace(base=self.base, write_tokenizer=self.written.append)}
        size = sum(x.nbytes for x in self.run().state.params.values())
        own = (self.checkpoints, root / "snapshots", bases, self.registry, lambda: 0.0)
        self.stores = WeightStores(*own, max_bytes=2 * size)

    def run(self, adapters=INFO.adapters, optimizer="adamw", *, steps=0):
        made = runs.create_run(self.base, adapters, optimizer)
        for step in range(steps):
            made, _ = runs.forward_backward(made, data(step, 3), Loss("cross_entropy"))
            made, _ = runs.optim_step(made, runs.StepParams(learning_rate=0.1))
        return made

    def saved(self, run, kind, name, number=1):
        """The checkpoint of a run."""
        info = attrs.evolve(INFO, adapters=run.adapters, optimizer=run.optimizer)
        self.stores.save(run, info, SaveVerb(kind=kind, name=name, overwrite=True), number)
        return self.checkpoints.get(RUN, kind, name)

    def loaded(self, run, meta, *, optimizer):
        return self.stores.load(run, INFO, LoadVerb(path=meta.path, optimizer=optimizer))


@pytest.fixture
def held(tmp_path):
    made = Held(tmp_path)
    yield made
    made.registry.close()


def test_weights_are_held_by_their_last_use_and_by_the_request_that_saved_them(held):
    metas = {name: held.saved(held.run(), "sampler_weights", name) for name in "abc"}
    found = {}
    for name, read in [("a", True), ("b", True), ("a", False), ("c", True), ("a", False), ("b", True)]:
        weights = held.stores.sampled(metas[name])
        assert (weights.name, weights.base) == (f"{metas[name].path}#1", "tiny")
        assert (weights is not found.get(name)) == read
        found[name] = weights
    again = held.saved(held.run(steps=1), "sampler_weights", "b", 2)
    assert tree.digest(held.stores.sampled(again).params) != tree.digest(found["b"].params)


@pytest.mark.parametrize(("rank", "unembed"), [(0, True), (2, True), (2, False)])
def test_files_for_other_programs_have_the_trained_weights(held, rank, unembed):
    """All weights, those with an adapter that PEFT's files cannot hold merged, or an adapter in such files."""
    run = held.run(Adapters(rank, unembed=unembed), steps=1)
    place = held.checkpoints.data(held.saved(run, "external_weights", "x")) / "files"
    assert held.written == [place]
    if rank and not unembed:
        found = lora_files.load(run.model, place, like=run.state.params)
        assert tree.digest(found) == tree.digest(run.state.params)
        assert json.loads((place / "adapter_config.json").read_text())["base_model_name_or_path"] == "tiny"
        return
    expected = lora.merged(run.model, run.state.params) if rank else run.state.params
    assert tree.digest(models.load(place)[1]) == tree.digest(expected)
    assert tree.digest(expected) != tree.digest(run.base.params)


def test_a_saved_state_is_gone_on_with_by_its_own_optimizer_or_a_fresh_one(held):
    """Also one of another optimizer, whose state has another structure."""
    fresh = held.run()
    for optimizer in ("adamw", "muon"):
        meta = held.saved(held.run(optimizer=optimizer, steps=1), "weights", optimizer)
        found = held.loaded(fresh, meta, optimizer=False)
        assert tree.digest(found.state.params) == tree.digest(held.stores.sampled(meta).params)
        assert found.state.opt.count.item() == 0
    assert held.loaded(fresh, held.checkpoints.get(RUN, "weights", "adamw"), optimizer=True).state.opt.count.item() == 1
    with pytest.raises(ValueError, match="the saved optimizer is not 'adamw'"):
        held.loaded(fresh, meta, optimizer=True)
    with pytest.raises(ValueError, match="the weights are of another run"):
        held.loaded(fresh, held.saved(held.run(Adapters(3)), "weights", "wide"), optimizer=False)


def test_weights_to_sample_from_are_gone_on_with_by_a_fresh_optimizer(held):
    run, other = held.run(steps=1), held.run(steps=2)
    run, _ = runs.forward_backward(run, data(2, 2), Loss("cross_entropy"))
    meta = held.saved(other, "sampler_weights", "a")
    found = held.loaded(run, meta, optimizer=False)
    assert run.state.opt.count.item() == 1
    assert (found.state.opt.count.item(), found.grads) == (0, None)
    assert tree.digest(found.state.params) == tree.digest(other.state.params)
    with pytest.raises(Refusal, match="has no optimizer state"):
        held.loaded(run, meta, optimizer=True)


def test_a_training_checkpoint_is_sampled_by_the_weights_it_holds(held):
    run = held.run(steps=1)
    meta = held.saved(run, "weights", "a", 3)
    assert tree.digest(held.stores.sampled(meta).params) == tree.digest(run.state.params)
    with pytest.raises(Refusal, match="the server has no model 'other' now; it has tiny"):
        held.stores.sampled(attrs.evolve(meta, base="other", number=4))
