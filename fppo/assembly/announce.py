"""Lines on what is loaded, for whoever waits for it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fppo._errors import printable
from fppo.assembly.inputs import Inputs
from fppo.assembly.machine import resolved
from fppo.assembly.texts import chat_options
from fppo.data import PromptSet
from fppo.models.bases import base_kind
from fppo.models.model import Model
from fppo.rollout.turns.observations import forgets_thinking
from fppo.settings import files
from fppo.settings.placement import PlacementSettings, places_of, pools_of, threads_of
from fppo.settings.resolve import old_log_probs_source, passes_besides, sharing_hindrances
from fppo.settings.train import TrainSettings
from fppo.steps.outputs import Forward
from fppo_kernels.table import Kernels

_WIDTH = 80


def input_lines(settings: TrainSettings, inputs: Inputs, chosen: Sequence[str] = ()) -> list[str]:
    """Device, kernels and what is to be said of their choice, pools, prompts, what ends a response, and the settings
    that differ from their defaults here."""
    ends = [repr(inputs.tokenizer.decode([token])) for token in inputs.sampling.stop_token_ids]
    texts = inputs.sampling.stop_texts
    ends += [] if texts is None else [repr(text.decode()) for text in texts.texts]
    prompts, model = _prompts(inputs.prompts), settings.model
    differ = differing(*(files.flat(files.to_dict(x)) for x in (settings, resolved(TrainSettings(), inputs.device)[0])))
    if inputs.eval is not None:
        prompts += f"; held out: {_prompts(inputs.eval.held_out)}"
    return [
        _line("device", f"{inputs.device}, {model.compute_dtype}"),
        _line("kernels", f"attention {model.attention}, log-probs {model.log_probs}"),
        *(_line("auto", text) for text in chosen),
        *([_line("pools", text)] if (text := _pools(settings.placement)) else []),
        _line("prompts", prompts),
        _line("ends", " ".join(ends)),
        *([_line("turns", text)] if (text := _thoughts(settings, inputs)) else []),
        _line("settings", ", ".join(f"{name}={_short(value)}" for name, value in differ.items())),
        *(
            [_line("auto", f"algorithm.old_log_probs {_old_log_probs(settings)}")]
            if settings.algorithm.old_log_probs == "auto"
            else []
        ),
    ]


def _thoughts(settings: TrainSettings, inputs: Inputs) -> str:
    """Line on earlier thoughts, where the chat template leaves them out; "" where it does not."""
    if not (settings.in_turns and settings.data.chat):
        return ""
    roles = forgets_thinking(inputs.tokenizer, roles=("tool",), options=chat_options(settings.data))
    before = " or ".join(f"a {role}'s" for role in roles)
    return (
        before and f"the chat template leaves out thoughts before {before} message; the policy goes on reading its own"
    )


def _pools(placement: PlacementSettings) -> str:
    """Who is in which pool, and how many ranks and threads each has."""
    places, pools = places_of(placement), pools_of(placement)
    threads = threads_of(placement, torch.get_num_threads()) if places else {}
    texts = [
        f"{name} ({', '.join(role for role, place in places.items() if place == name)}): "
        f"{_several(pool.ranks, 'engine' if places.get('rollout') == name else 'rank')} of "
        f"{_several(threads[name], 'thread')}"
        for name, pool in pools.items()
    ]
    return "; ".join(texts)


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _old_log_probs(settings: TrainSettings) -> str:
    """The source that algorithm.old_log_probs = "auto" comes to, with the reason."""
    match old_log_probs_source(settings):
        case "update":
            return "update: a batch has one update, whose own pass gives them"
        case "auto":
            return "engine, held in every step against a pass over some of its rows"
        case _:
            return f"pass: {'; '.join(passes_besides(settings))}"


def model_lines(model: Model, path: str, *, others: Sequence[str]) -> list[str]:
    """The policy's family and size, and what is beside it."""
    count = sum(math.prod(shape) for shape in model.plain.whole_shapes.values())
    beside = f", and a {' and a '.join(others)}" if others else ""
    lines = [_line("model", f"{model.config.model_type} of {_count(count)} parameters, from {path}{beside}")]
    if (frozen := model.frozen) is not None:
        trained = sum(math.prod(model.whole_shapes[name]) for name in model.extents)
        text = f"rank {frozen.lora.rank} on {len(frozen.places)} weights: {_count(trained)} parameters are trained"
        lines.append(_line("adapter", text))
        if (kind := base_kind(model)) is not None:
            size = sum(x.nbytes for x in frozen.params.values()) / 2**20
            lines.append(_line("base", f"{len(model.forms)} weights in {kind}; {size:,.1f} MiB a rank with the others"))
    return lines


def sharing_lines(settings: TrainSettings, model: Model, kernels: Kernels) -> list[str]:
    """Why responses to a prompt do not share it in passes, where several could."""
    if settings.rollout.n == 1 or settings.model.share_prompts != "auto":
        return []
    of_settings = [f"{path} = {value!r} {why}" for path, value, why in sharing_hindrances(settings)]
    of_settings += ["model.graphs records passes over rows that share nothing"] * (settings.model.graphs is True)
    why = next(iter(of_settings), None) or Forward(model, kernels, share_prompts=False).sharing_hindrance()
    return [] if why is None else [_line("prompts", f"computed anew for each response: {why}")]


def differing(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that differ from their defaults, all by their paths."""
    return {path: value for path, value in settings.items() if path not in defaults or value != defaults[path]}


def _prompts(prompts: PromptSet) -> str:
    sources = sorted(set(prompts.sources))
    shown = ", ".join(printable(source, 40) for source in sources[:3]) + (
        f" and {len(sources) - 3} more" if len(sources) > 3 else ""
    )
    notes = [f"{prompts.num_dropped:,} too long, dropped"] if prompts.num_dropped else []
    notes += [f"{prompts.num_truncated:,} cut"] if prompts.num_truncated else []
    return f"{len(prompts):,} of {shown}" + (f" ({', '.join(notes)})" if notes else "")


def _count(number: int) -> str:
    for size, name in ((1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:,}"


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _line(label: str, text: str) -> str:
    indent = " " * 10
    text = printable(text, 20_000)
    return textwrap.fill(text, _WIDTH, initial_indent=f"{label:<10}", subsequent_indent=indent, break_long_words=False)
