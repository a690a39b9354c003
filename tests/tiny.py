"""Tiny models and batches for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen2Config

from fppo import batch as batches
from fppo import laws, models, tree
from fppo.batch import Column, Experience
from fppo.key import Key
from fppo.models.model import HeadKind
from fppo.runtime import checkpoint
from fppo.steps.train_state import TrainState

VOCAB = 23


def config(**changes) -> Qwen2Config:
    """Two layers, 16 wide."""
    settings = dict(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return Qwen2Config(**{**settings, **changes})


def model_and_params(head: HeadKind = "lm", *, seed: int = 0, dtype: torch.dtype = torch.float64, layers: int = 2):
    """A model with weights large enough that its outputs differ from uniform."""
    model = models.build(config(num_hidden_layers=layers), head=head)
    params = models.init_params(model, Key(seed))
    noise = Key(seed).fold("noise").generator()
    return model, {
        name: (p.double() + 0.1 * torch.randn(p.shape, generator=noise, dtype=torch.float64)).to(dtype)
        for name, p in params.items()
    }


def experience(seed: int, rows: int, *, prompt: int = 5, response: int = 6, dtype=torch.float64) -> Experience:
    """Random rows: ragged prompts and responses, holes in the response mask, rows without any masked-in token."""
    g = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, prompt + 1, (rows,), generator=g)
    responses = torch.randint(1, response + 1, (rows,), generator=g)
    column = torch.arange(prompt + response)
    attention = (column >= prompt - prompts[:, None]) & (column < prompt + responses[:, None])
    kept = torch.rand(rows, response, generator=g) < 0.85
    kept[torch.rand(rows, generator=g) < 0.1] = False
    mask = attention[:, prompt:] & kept

    def noise(scale: float) -> torch.Tensor:
        return (scale * torch.randn(rows, response, generator=g, dtype=torch.float64)).to(dtype).where(mask, 0.0)

    old = noise(0.3) - 3.0
    return Experience(
        tokens=torch.randint(2, VOCAB, attention.shape, generator=g).where(attention, 0),
        attention_mask=attention,
        response_mask=mask,
        rollout_log_probs=old + noise(0.1),
        sampling_log_probs=old,
        row_ids=torch.arange(rows),
        groups=torch.arange(rows) // 2,
        versions=torch.zeros(rows, dtype=torch.int64),
        finish=Column(["stop"] * rows),
        ids=Column([str(i) for i in range(rows)]),
        ground_truth=Column([None] * rows),
        source=Column(["test"] * rows),
        extras=Column([{}] * rows),
        scores=torch.rand(rows, generator=g),
        named_scores={},
        old_log_probs=old.where(mask, 0.0),
        ref_log_probs=(old + noise(0.2)).where(mask, 0.0),
        values=noise(1.0),
        token_rewards=noise(1.0),
        advantages=noise(1.0),
        returns=noise(1.0),
    )


def widened(batch: Experience, left: int, right: int) -> Experience:
    """The batch with `left` more padding columns before the prompts and `right` after the responses, of garbage."""

    def pad(x: torch.Tensor, name: str) -> torch.Tensor:
        if x.ndim != 2:
            return x
        before = left if name in ("tokens", "attention_mask") else 0
        fill = False if x.dtype == torch.bool else (7 if x.dtype == torch.int64 else float("nan"))
        return torch.cat([x.new_full((len(x), before), fill), x, x.new_full((len(x), right), fill)], 1)

    fields = {name: pad(x, name) for name, x in batches.columns(batch).items() if isinstance(x, torch.Tensor)}
    return batches.extend(Experience, batch, **fields)


def assert_same_columns(one, other) -> None:
    """The columns that two records share are equal, bit for bit."""
    left, right = batches.columns(one), batches.columns(other)
    for name in left.keys() & right.keys():
        assert tree.digest(left[name]) == tree.digest(right[name]), name


def check_training(step: Callable[..., TrainState], state: TrainState, directory: Path) -> None:
    """Puts steps from a state through the laws of training: they resume, donate, and change nothing."""
    laws.check_resume(
        step,
        state,
        save=lambda state: checkpoint.begin_save(state, directory, state.step).wait(),
        load=lambda path: checkpoint.load(state, directory, int(path.name[5:])),
        steps=2,
    )
    laws.check_donation(step, state)
    laws.check_purity(step, state)
