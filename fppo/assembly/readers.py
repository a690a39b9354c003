"""Critics that are no models: they read what the policy's own pass finds."""

from __future__ import annotations

from functools import partial

from transformers import PreTrainedTokenizerBase

from fppo import data, models
from fppo.assembly.functions import value_head_of
from fppo.assembly.parts import bare_model
from fppo.data.privileged import TRUTH_SIGNS
from fppo.key import Key
from fppo.models.model import Params
from fppo.pipeline.passes import TruthSigns
from fppo.settings.learning import CriticSettings
from fppo.settings.model import ModelSettings
from fppo.steps.confidence import init_confidence
from fppo.steps.hidden import init_hidden


def reader_params(section: ModelSettings, critic: CriticSettings, key: Key) -> Params:
    """The parameters of one before its first update."""
    outputs = value_head_of(critic.loss).outputs
    shape = {"members": critic.ensemble, "outputs": outputs, "signs": TRUTH_SIGNS if critic.privileged else 0}
    if critic.reads == "confidence":
        return init_confidence(key, **shape)
    return init_hidden(key, models.hidden_width(bare_model(section)), **shape)


def truth_signs_of(critic: CriticSettings, tokenizer: PreTrainedTokenizerBase) -> TruthSigns | None:
    """The function from rows to signs of the truth, for a privileged critic; None for another one, or for a model."""
    limit = critic.privileged
    if not limit or critic.reads == "tokens":
        return None
    return partial(data.truth_signs, encode=partial(tokenizer.encode, add_special_tokens=False), limit=limit)
