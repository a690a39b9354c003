"""A policy to be served, as settings name it: its engine, its texts, and how it is sampled."""

from __future__ import annotations

from typing import cast

import attrs
import torch
from transformers import PreTrainedTokenizerBase

from fppo.assembly.adapters import load_policy, policy_model
from fppo.assembly.functions import check_own_kernels
from fppo.assembly.inputs import Inputs
from fppo.assembly.machine import resolved
from fppo.assembly.texts import chat_options
from fppo.data import check_tokenizer, vocabulary_size
from fppo.key import Key
from fppo.models.model import Model, Params
from fppo.pipeline.checks import Usage
from fppo.rollout.check import check_engine
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Sampling
from fppo.rollout.exact_probe import probe_exact
from fppo.runtime.mesh import LOCAL
from fppo.serve.texts import Texts, texts_of
from fppo.settings.modules import kernels_named
from fppo.settings.train import TrainSettings
from fppo.workers.imports import import_modules


@attrs.frozen(kw_only=True)
class ServedPolicy:
    """A policy that can be served."""

    model: Model
    params: Params | None  # None: those of a checkpoint are to be loaded
    engine: EmbeddedEngine
    tokenizer: PreTrainedTokenizerBase
    texts: Texts
    sampling: Sampling
    device: torch.device


def served_policy(settings: TrainSettings, *, begins: bool) -> ServedPolicy:
    """The policy of the settings: with its initial parameters if `begins`, else without any.

    With a tokenizer that has no chat template, it answers only completions. Raises ValueError for a model that the
    embedded engine cannot run, and if anything that the settings name does not exist.
    """
    import_modules(settings.model.import_, settings.module_dirs)
    settings, _ = resolved(settings, None)
    inputs = Inputs(settings=settings, pads=False)
    device, tokenizer, sampling = inputs.device, inputs.tokenizer, inputs.sampling
    own = cast(str | None, tokenizer.pad_token or tokenizer.eos_token)  # either will do: padding is masked
    begun = settings.model, settings.critic, Key(settings.seed), LOCAL, device
    model, params = load_policy(*begun) if begins else (policy_model(*begun), None)
    check_engine(model)
    names, kernels, rollout = kernels_named(settings), inputs.kernels, settings.rollout
    if settings.check:
        use = {"dtype": model.compute_dtype or torch.float32, "device": device, "models": lambda: [model]}
        check_own_kernels(names, kernels, Usage(group=1, temperature=settings.rollout.temperature, **use))
    engine = EmbeddedEngine(
        model=model,
        kernels=kernels,
        pad_token_id=check_tokenizer(tokenizer, pad_token=settings.data.pad_token or own).pad_token_id,
        cache_bytes=rollout.cache_bytes,
        halve_on_oom=rollout.cache_gb == "auto",
        exact=rollout.exact,
        draft_tokens=rollout.draft_tokens,
    )
    if settings.rollout.exact:
        probe_exact(model, kernels, device)
    texts = texts_of(
        tokenizer,
        vocabulary=vocabulary_size(inputs.config),
        chat=tokenizer.chat_template is not None,
        options=chat_options(settings.data),
    )
    return ServedPolicy(
        model=model,
        params=params,
        engine=engine,
        tokenizer=tokenizer,
        texts=texts,
        sampling=sampling,
        device=device,
    )
