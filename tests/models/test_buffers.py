"""What checkpoints keep in buffers, as the biases of routers, is a part of the parameters that no gradient moves."""

import attrs
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fppo import losses, models, tree
from fppo.models import run
from fppo.models.model import _fill, compute_constants
from fppo.runtime import fsdp
from fppo.runtime.mesh import Sharding
from fppo.runtime.simulate import simulate
from fppo.steps.actor import UpdateActor
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.train_state import init_state
from tests import tiny
from tests.models.families import EXPERTS, make, plain

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
TOKENS = torch.tensor([[5, 7, 3, 9]])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_a_model_with_router_biases_is_transformers_model(name, tmp_path):
    model, params = make(name, dtype=torch.float32)
    assert model.buffers == {BIAS} == {router.bias for router in model.routers}
    assert BIAS not in model.constants
    models.check_model(model)
    models.save(model, params, tmp_path / "m")
    assert torch.equal(load_file(tmp_path / "m" / "model.safetensors")[BIAS], params[BIAS])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="eager")
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, plain(model, params)(TOKENS).logits, rtol=0, atol=0)
    _, loaded = models.load(tmp_path / "m")
    assert tree.digest(loaded) == tree.digest(params)
    _, half = models.load(tmp_path / "m", dtype=torch.bfloat16)
    assert torch.equal(half[BIAS], params[BIAS])
    assert half["lm_head.weight"].dtype == torch.bfloat16
    parts = simulate(
        {"shard": 2}, lambda mesh: models.load(tmp_path / "m", mesh=attrs.evolve(mesh, sharding=Sharding()))[1][BIAS]
    )
    assert torch.equal(torch.cat(parts), params[BIAS])


def test_the_probe_at_load_sees_the_bias(monkeypatch):
    own = run._bound
    monkeypatch.setattr(run, "_bound", lambda model, name, x: own(model, name, x) * (name != BIAS))
    with pytest.raises(ValueError, match="model type 'glm4_moe': the logits of packed rows"):
        models.check_model(models.build(EXPERTS["glm4_moe"]))


def test_a_bias_keeps_float32_in_a_pass_and_takes_no_gradient_and_no_step():
    model, params = make("glm4_moe", dtype=torch.float32)
    seen = []
    gate = model.skeleton.get_submodule(BIAS.removeprefix(model.prefix).rpartition(".")[0])
    handle = gate.register_forward_pre_hook(lambda module, _: seen.append(module.e_score_correction_bias.dtype))
    batch = tiny.experience(3, 5, dtype=torch.float32)
    optimizer = adamw(lambda step: 0.1, weight_decay=0.5)
    loop = Loop(mini_batch_size=5, micro_batching=MicroBatching(size=2), epochs=2)
    half = attrs.evolve(model, compute_dtype=torch.bfloat16)
    state, _ = UpdateActor(forward=Forward(half), loss_fn=losses.ppo_clip, loop=loop, optimizer=optimizer)(
        init_state(params, optimizer), batch
    )
    handle.remove()
    assert set(seen) == {torch.float32}
    assert torch.equal(state.params[BIAS], params[BIAS])
    assert state.opt.mu[BIAS].abs().sum() == 0
    assert not torch.equal(state.params["lm_head.weight"], params["lm_head.weight"])
    assert not torch.equal(state.params["model.layers.1.mlp.gate.weight"], params["model.layers.1.mlp.gate.weight"])


@pytest.mark.parametrize("stage", [1, 3])
def test_sharded_biases_are_whole_ones(stage):
    model, params = make("glm4_moe")
    batch, cut = tiny.experience(3, 5), MicroBatching(size=2)
    expected = compute_log_probs(params, batch, forward=Forward(model), micro_batching=cut)

    def on_rank(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding(stage=stage))
        own = fsdp.shard(params, mesh)
        return compute_log_probs(own, batch, forward=Forward(model, mesh=mesh), micro_batching=cut)

    for found in simulate({"shard": 2}, on_rank):
        assert torch.equal(found, expected)


class OfTheWhole(torch.nn.Module):
    """A model that computes a layer's buffer as a whole, not for the layer alone."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Module()
        self.layer.register_buffer("slopes", torch.empty(2, device="meta"), persistent=False)

    def _init_weights(self, module):
        if module is self:
            self.layer.slopes.copy_(torch.tensor([3.0, 5.0]))


def test_a_buffer_that_the_whole_model_computes_for_its_layers_is_its_own():
    base = OfTheWhole()
    assert _fill(base, base.layer, ["slopes"])["slopes"].tolist() == [3.0, 5.0]
    assert base.layer.slopes.is_meta
    base._init_weights = lambda module: None
    with pytest.raises(ValueError, match=r"Module does not say how to compute its buffers \['slopes'\]"):
        _fill(base, base.layer, ["slopes"])


def test_integers_that_checkpoints_keep_are_refused_by_name():
    base = plain(*make("qwen2")).model
    base.layers[1].register_buffer("steps", torch.tensor([3]))
    with pytest.raises(ValueError, match=r"'qwen2' keeps integers in buffers: \['layers.1.steps'\]; fppo cannot run"):
        compute_constants(base)


def test_constants_are_copied_to_each_device_once():
    model, _ = make("glm4_moe")
    one, other = (model.constants_on(torch.device(*place)) for place in (("meta",), ("meta", 0)))
    assert one.keys() == other.keys() == model.constants.keys()
    assert all(x.is_meta for x in (*one.values(), *other.values()))
    assert model.constants_on(torch.device("meta")) is one is not other
