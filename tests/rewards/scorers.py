"""Scorers of a run's settings in this process."""

from __future__ import annotations

import contextlib

import torch
from transformers import PreTrainedTokenizerBase

from fppo.assembly import rewards
from fppo.assembly.parts import forward_micro_batching_of
from fppo.fleet import Here
from fppo.key import Key
from fppo.runtime.mesh import LOCAL
from fppo.settings.modules import kernels_named
from fppo.settings.train import TrainSettings

HERE = Here(LOCAL, torch.device("cpu"))


def judge_of(
    settings: TrainSettings, tokenizer: PreTrainedTokenizerBase
) -> contextlib.AbstractContextManager[rewards.Weighted]:
    """The settings' judge."""
    how = {"names": kernels_named(settings), "axes": settings.mesh, "key": Key(settings.seed).fold("judge")}
    return rewards.judge_of(HERE, settings.reward.judge, settings.model, tokenizer, **how)


def reward_model_of(settings: TrainSettings, tokenizer: PreTrainedTokenizerBase) -> rewards.Weighted:
    """The settings' reward model."""
    chat = settings.reward.model.chat
    return rewards.reward_model_of(
        HERE,
        settings.reward.model,
        settings.model,
        tokenizer,
        names=kernels_named(settings),
        axes=settings.mesh,
        chat=settings.data.chat if chat is None else chat,
        micro_batching=forward_micro_batching_of(settings.model, settings.actor),
    )
