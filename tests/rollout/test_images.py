"""The embedded engine on prompts with images: its log-probs are those of the pass that trains on its rollout."""

import pytest
import torch

from fppo import models
from fppo.batch import Column, Prompts
from fppo.key import Key
from fppo.rollout.check import check_engine
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.runtime.mesh import Mesh
from fppo.runtime.simulate import simulate
from fppo.steps import Forward, MicroBatching, compute_log_probs
from fppo_kernels.table import Kernels
from tests.models.vision import CONFIGS, make, prompt


def prompts_of(name: str, counts: tuple[int | str, ...], *, even: bool = False) -> Prompts:
    """Prompts with so many images, `even` with one more without any that is as long as the first."""
    generator = torch.Generator().manual_seed(5)
    every = [prompt(name, count, generator, 3 + i) for i, count in enumerate(counts)]
    every += [prompt(name, 0, generator, len(every[0][0]) - 2)] if even else []
    width = max(len(tokens) for tokens, _ in every)
    names = Column([""] * len(every))
    return Prompts(
        tokens=torch.tensor([[0] * (width - len(tokens)) + tokens for tokens, _ in every]),
        attention_mask=torch.tensor([[i >= width - len(tokens) for i in range(width)] for tokens, _ in every]),
        row_ids=torch.arange(len(every)),
        ids=names,
        ground_truth=names,
        source=names,
        extras=names,
        inputs=Column(x for _, x in every),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "idefics3", "llava"])
def test_log_probs_are_those_of_the_pass(name):
    """Of prompts with images, and with videos where the model takes them."""
    _, model, params = make(name)
    prompts = prompts_of(name, (1, 0, 2, 1) if model.vision.video is None else ("i", "", "vi", "v"))
    sampling = Sampling(max_tokens=7, n=3, stop_token_ids=tuple(range(20, 32)))
    whole = EmbeddedEngine(model=model, kernels=Kernels.named(), pad_token_id=0)
    rollout = whole.generate(params, Ask(prompts, sampling, Key(3)))
    assert len(set(rollout.response_mask.sum(1).tolist())) > 2  # rows leave at different times
    expected = compute_log_probs(params, rollout, forward=Forward(model), micro_batching=MicroBatching(size=5))
    assert (rollout.rollout_log_probs - expected).abs().max() < 1e-10
    pieces = EmbeddedEngine(model=model, kernels=Kernels.named(), pad_token_id=0, max_rows=3, prefill_tokens=30)
    again = pieces.generate(params, Ask(prompts, sampling, Key(3)))
    assert torch.equal(again.tokens, rollout.tokens)
    assert (again.rollout_log_probs - rollout.rollout_log_probs).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_rows_of_one_length_have_positions_of_their_own(name):
    """Images take fewer positions than tokens, so that rows without padding are at different positions too."""
    _, model, params = make(name)
    prompts = prompts_of(name, (2,), even=True)
    assert bool(prompts.attention_mask.all())
    engine = EmbeddedEngine(model=model, kernels=Kernels.named(), pad_token_id=0)
    rollout = engine.generate(params, Ask(prompts, Sampling(max_tokens=3), Key(3)))
    expected = compute_log_probs(params, rollout, forward=Forward(model), micro_batching=MicroBatching(size=1))
    assert (rollout.rollout_log_probs - expected).abs().max() < 1e-10


@pytest.mark.parametrize(("name", "axis"), [("qwen2_5_vl", "tensor"), ("idefics3", "tensor"), ("qwen3_vl", "shard")])
def test_ranks_that_cut_the_model_answer_as_one(name, axis):
    _, model, params = make(name)
    ask = Ask(prompts_of(name, (1, 0, 2)), Sampling(max_tokens=4, n=2), Key(3))

    def run(mesh):
        placed = models.place(model, mesh)
        engine = EmbeddedEngine(model=placed, kernels=Kernels.named(), pad_token_id=0, mesh=mesh)
        return engine.generate(models.own_params(placed, params, mesh), ask)

    expected = run(Mesh.local())
    for rollout in simulate({axis: 2}, run):
        assert torch.equal(rollout.tokens, expected.tokens)
        assert (rollout.rollout_log_probs - expected.rollout_log_probs).abs().max() < 1e-10


@pytest.mark.parametrize("name", CONFIGS)
def test_what_decodes_as_transformers_computes_is_accepted(name):
    check_engine(models.build(CONFIGS[name]))


def test_positions_that_forget_the_image_are_refused(monkeypatch):
    monkeypatch.setattr("fppo.rollout.prefill.shift_of", lambda model, inputs: 0)
    with pytest.raises(ValueError, match="model type 'qwen2_vl': the log-probs of the embedded engine"):
        check_engine(models.build(CONFIGS["qwen2_vl"]))
