"""Scorers of a run's settings in this process."""

from __future__ import annotations

import contextlib

import torch
from transformers import PreTrainedTokenizerBase

from fppo.assembly import rewards
from fppo.assembly.inputs import Inputs
from fppo.fleet import LOCAL_GROUP, Here
from fppo.runtime.mesh import LOCAL
from fppo.settings.train import TrainSettings

HERE = Here(LOCAL, torch.device("cpu"))


def judge_of(
    settings: TrainSettings, tokenizer: PreTrainedTokenizerBase
) -> contextlib.AbstractContextManager[rewards.Weighted]:
    """The settings' judge."""
    return rewards.judge_of(HERE, Inputs(settings=settings, own_tokenizer=tokenizer))


def reward_model_of(settings: TrainSettings, tokenizer: PreTrainedTokenizerBase) -> rewards.Weighted:
    """The settings' reward model."""
    return rewards.reward_model_on(LOCAL_GROUP, HERE, Inputs(settings=settings, own_tokenizer=tokenizer))
