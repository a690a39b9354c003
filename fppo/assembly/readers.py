"""Critics that are no models: they read what the policy's own pass finds."""

from __future__ import annotations

from fppo import models
from fppo.assembly.parts import bare_model, value_head_of
from fppo.key import Key
from fppo.models.model import Params
from fppo.settings.train import TrainSettings
from fppo.steps.confidence import init_confidence
from fppo.steps.hidden import init_hidden


def reader_params(settings: TrainSettings, key: Key) -> Params:
    """The parameters of one before its first update."""
    members, outputs = settings.critic.ensemble, value_head_of(settings).outputs
    if settings.critic.reads == "confidence":
        return init_confidence(key, outputs=outputs, members=members)
    return init_hidden(key, models.hidden_width(bare_model(settings)), outputs=outputs, members=members)
