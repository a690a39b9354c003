"""The pace of this machine's CPU: how much longer the stages of a run take here than the formulas say.

A miniature of the run is measured: the same widths, kernels, dtypes and threads, with fewer layers, a vocabulary
smaller in proportion, and fewer tokens. The quotient of its measured and its planned seconds is a pace.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from transformers import PreTrainedConfig

from fppo import models, tree
from fppo.batch import Column, Prompts
from fppo.key import Key
from fppo.models import flops
from fppo.models.model import Model, Params
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.steps.forward import Forward
from fppo.steps.train_state import init_state
from fppo.studies.plan import passes
from fppo.studies.plan.case import Case, Pace, PlannedSampling, with_layers
from fppo.studies.plan.estimate import seconds_of
from fppo.studies.plan.passes import Built
from fppo.studies.plan.plan import phases_of
from fppo.studies.plan.rollout import rollout_of
from fppo.studies.plan.track import Phase
from fppo_kernels.table import Kernels

_WORK = 1e11  # FLOPs of a measured update, about a second on a few cores, and of measured decoding
_PART = 4  # a miniature has a fourth of the layers, and at least two
_TOKENS, _DECODED = 2048, 16  # the most tokens of its pass, and of its responses
_REPEATS, _ENOUGH = 3, 1.0  # the fastest of so many calls, unless these seconds are over
Clock = Callable[[], float]  # seconds
Fastest = Callable[[Callable[[], Any]], float]  # seconds of a call


def paced(case: Case, kernels: Kernels, *, clock: Clock = time.perf_counter) -> Case:
    """The case with this machine's pace: its CPU's times over the formulas', measured with `kernels` in a few seconds.

    Raises whatever the model raises if it does not run with fewer layers and a smaller vocabulary.
    """
    mini, built = _miniature(case), Built()
    model = built.model(mini, "actor")
    params = models.init_params(model, Key(0), mini.dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // case.world))  # as ranks of one machine share its cores
    try:
        fastest = partial(_fastest, clock)
        pace = _of_stages(mini, model, params, kernels, built, fastest)
        if case.sampling is not None and case.sampling.engine == "embedded":
            pace = attrs.evolve(pace, decode=_of_decoding(mini, model, params, kernels, built, fastest))
    finally:
        torch.set_num_threads(threads)
    return attrs.evolve(case, pace=pace)


def _miniature(case: Case) -> Case:
    """A case of one process, one pass and the actor alone, whose update has about `_WORK` FLOPs."""
    layers = case.config.num_hidden_layers
    few = min(layers, max(2, math.ceil(layers / _PART)))
    config = _with_vocabulary(with_layers(case.config, few), few / layers)
    own = attrs.evolve(case, config=config, mesh={}, virtual_stages=1, critic=False, reference=False, roles={})
    own = attrs.evolve(own, reward_model=None, teacher=None, only=None, offload="none", together=1.0, budget=None)
    own = attrs.evolve(own, lora=None, critic_lora=None, lora_base=None)
    each = 3 * flops.forward_flops(passes.model_of(own, "actor"), [1], head_tokens=1)
    tokens = int(max(2, min(case.tokens, _TOKENS, _WORK / each)))
    length = min(case.length, tokens)
    own = attrs.evolve(own, length=length, tokens=tokens // length * length, forward_together=1.0, forward_tokens=None)
    return attrs.evolve(own, micro_batches=1, full=True)


def _with_vocabulary(config: PreTrainedConfig, part: float) -> PreTrainedConfig:
    """The config with a fraction `part` of the vocabulary, and without special tokens, which may lie outside of it."""
    config = copy.deepcopy(config)
    changes = {"vocab_size": max(64, math.ceil(config.vocab_size * part))}
    changes |= {f"{name}_token_id": None for name in ("pad", "bos", "eos")}
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def _of_stages(case: Case, model: Model, params: Params, kernels: Kernels, built: Built, fastest: Fastest) -> Pace:
    """Measure the pace of passes with and without gradients, and of the optimizer."""
    forward, batch = Forward(model, kernels=kernels, share_prompts=False), passes.rows_of(case, case.rows)
    words = torch.arange(batch.tokens.numel()).view_as(batch.tokens) % model.config.vocab_size
    batch, optimizer = tree.replace(batch, tokens=words), passes.optimizer_of(case)
    state = init_state(params, optimizer)
    run = {name: passes.stage_of(case, name, batch, forward=forward) for name in ("log-probs", "update actor")}
    whole = fastest(lambda: run["update actor"](tree.copy(state)))
    copied = fastest(lambda: tree.copy(state))
    stepped = fastest(lambda: optimizer.update(params, params, state.opt, 0, mesh=forward.mesh, donate=False)) - copied
    planned = {name: phases_of(case, name, built) for name in run}
    update = [_planned(planned["update actor"], case, gradients) for gradients in (True, False)]
    return Pace(
        forward=fastest(lambda: run["log-probs"](state)) / _planned(planned["log-probs"], case, None),
        update=max(whole - copied - stepped, 0.1 * whole) / update[0],
        optimizer=max(stepped, 0.01 * whole) / update[1],
    )


def _planned(phases: Sequence[Phase], case: Case, in_passes: bool | None) -> float:
    """Planned seconds of phases: if `in_passes` is True, of forward and backward passes; if False, of all others; if
    None, of every phase."""
    chosen = [x for x in phases if in_passes is None or x.name.startswith(("forward", "backward")) is in_passes]
    return seconds_of(chosen, case).total


def _of_decoding(case: Case, model: Model, params: Params, kernels: Kernels, built: Built, fastest: Fastest) -> float:
    """Measure the pace of the embedded engine's decoding steps, with up to as many rows as the case decodes
    together."""
    sampling = case.sampling or PlannedSampling()
    each = 2.0 * (sum(flops.layer_weights(model)) + flops.head_weights(model))
    rows = int(max(1, min(sampling.sequences or case.rows, sampling.max_rows, _WORK / each / 2)))
    steps = int(max(2, min(_DECODED, case.response_tokens, _WORK / each / rows)))
    prompt = max(1, min(case.length - case.response_tokens, 32))
    engine = EmbeddedEngine(model=model, kernels=kernels, pad_token_id=0)
    number, blank = torch.arange(rows), Column([None] * rows)
    whole = torch.ones(rows, prompt, dtype=torch.int64)
    asked = Prompts(
        tokens=whole,
        attention_mask=whole.bool(),
        row_ids=number,
        ids=blank,
        ground_truth=blank,
        source=blank,
        extras=blank,
    )

    def generate(tokens: int) -> Any:
        return engine.generate(params, Ask(prompts=asked, sampling=Sampling(max_tokens=tokens), key=Key(0)))

    first, all_of_them = (fastest(lambda count=count: generate(count)) for count in (1, 1 + steps))
    longer = attrs.evolve(case, length=prompt + steps, response=steps / (prompt + steps))
    alone = attrs.evolve(sampling, sequences=rows, n=1, max_rows=rows, pool=None)
    planned = rollout_of(attrs.evolve(longer, tokens=longer.length, sampling=alone), {}, built)
    assert planned is not None
    return max(all_of_them - first, 0.05 * all_of_them) / planned.decode


def _fastest(clock: Clock, call: Callable[[], Any]) -> float:
    """Seconds of the fastest of a few calls, after one that is not measured."""
    call()
    began, seconds = clock(), list[float]()
    while len(seconds) < _REPEATS and (not seconds or clock() - began < _ENOUGH):
        start = clock()
        call()
        seconds.append(clock() - start)
    return min(seconds)
