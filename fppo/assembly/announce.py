"""Lines on what is loaded, for whoever waits for it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fppo._errors import printable
from fppo.assembly.adapters import shape_of
from fppo.assembly.functions import optimizer_of
from fppo.assembly.inputs import Inputs
from fppo.assembly.texts import chat_options
from fppo.data import DemonstrationSet, PromptSet
from fppo.models import lora_files
from fppo.models.bases import base_kind
from fppo.models.model import Model
from fppo.rollout.turns.observations import forgets_thinking
from fppo.settings.learning import OptimizerSettings
from fppo.settings.model import ModelSettings
from fppo.settings.placement import PlacementSettings, places_of, pools_of, threads_of
from fppo.settings.train import DataSettings
from fppo.steps.outputs import Forward
from fppo_kernels.table import Kernels

_WIDTH = 80
SHARD = "mesh.shard"  # filled in by a command, so it is no user's choice


def input_lines(
    inputs: Inputs,
    differing: Mapping[str, Any],
    chosen: Sequence[str] = (),
    old_log_probs: Sequence[str] = (),
    idle: Sequence[str] = (),
    thinking: str = "keep",
    *,
    rows: DataSettings | None = None,
) -> list[str]:
    """Lines on what a run has inputs: device, kernels and why they were `chosen`, pools, prompts, ends of a response,
    settings that differ from their defaults on this machine, the source of old log-probs, and settings without effect
    (`idle`). For responses in turns `rows` are the settings of their chats, and `thinking` says what becomes of earlier
    thoughts."""
    model, texts = inputs.settings.model, inputs.sampling.stop_texts
    ends = [repr(inputs.tokenizer.decode([token])) for token in inputs.sampling.stop_token_ids]
    ends += [] if texts is None else [repr(text.decode()) for text in texts.texts]
    prompts = _prompts(inputs.prompts)
    if inputs.held_out is not None:
        prompts += f"; held out: {_prompts(inputs.held_out)}"
    return [
        _line("device", f"{inputs.device}, {model.compute_dtype}"),
        _line("kernels", f"attention {model.attention}, log-probs {model.log_probs}"),
        *(_line("auto", text) for text in chosen),
        *([_line("pools", text)] if (text := _pools(inputs.settings.placement)) else []),
        _line("prompts", prompts),
        _line("ends", " ".join(dict.fromkeys(ends))),
        *([] if rows is None else _thoughts(rows, inputs.tokenizer, thinking)),
        *_export(model),
        _line("settings", ", ".join(f"{name}={_short(value)}" for name, value in differing.items() if name != SHARD)),
        *(_line("auto", text) for text in old_log_probs),
        *(_line("note", text) for text in idle),
    ]


def clock_lines(said: Sequence[str]) -> list[str]:
    """Lines on results whose last bits depend on timing; `said` are the texts of `settings.clock.said_of_clock`."""
    return [_line("bits", text) for text in said]


def supervised_lines(
    device: torch.device,
    model: ModelSettings,
    sets: Mapping[str, DemonstrationSet | None],
    steps: int,
    size: int,
    chosen: Sequence[str],
) -> list[str]:
    """Device, kernels, demonstrations and steps of a supervised run."""
    counts = {name: x for name, x in sets.items() if x is not None}
    words = [
        f"{name} {len(x):,}{f' ({x.num_dropped:,} too long, dropped)' * bool(x.num_dropped)}"
        for name, x in counts.items()
    ]
    imitated = sum(sum(row.mask) for x in list(counts.values())[:1] for row in x.rows)
    return [
        _line("device", f"{device}, {model.compute_dtype}"),
        _line("kernels", f"attention {model.attention}, log-probs {model.log_probs}"),
        *(_line("auto", text) for text in chosen),
        _line("rows", f"{', '.join(words)}; {imitated:,} tokens to imitate"),
        _line("steps", f"{steps:,} of {size:,} sequences"),
        *_export(model),
    ]


def _export(model: ModelSettings) -> list[str]:
    """Line on an adapter that is exported as whole weights."""
    text = lora_files.obstacle(shape_of(model)) if model.lora.used else None
    return [] if text is None else [_line("export", f"whole weights, with the adapter merged in: {text}")]


def _thoughts(rows: DataSettings, tokenizer: PreTrainedTokenizerBase, thinking: str) -> list[str]:
    """Line on earlier thoughts: if the chat template leaves them out, or if each turn is a row of its own (drop)."""
    if not rows.chat:
        return []
    roles = forgets_thinking(tokenizer, roles=("tool",), options=chat_options(rows))
    before = " or ".join(f"a {role}'s" for role in roles)
    left_out = f"the chat template leaves out thoughts before {before} message"
    if thinking == "drop":
        left_out = left_out if roles else "the chat template leaves out no earlier thoughts"
        return [_line("turns", f"{left_out}; each turn is a row, whose prompt is as the template has it")]
    return [_line("turns", f"{left_out}; the policy goes on reading its own")] if roles else []


def _pools(placement: PlacementSettings) -> str:
    """The roles of each pool, with its numbers of ranks and threads."""
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


def model_lines(model: Model, path: str, others: Sequence[str]) -> list[str]:
    """Lines on the policy's family and size, its adapter and base, and the models beside it."""
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


def optimizer_lines(role: str, section: OptimizerSettings, model: Model | None) -> list[str]:
    """Which parameters of a role's model go to which optimizer, where not all go to the same one."""
    says = optimizer_of(section, 1, setting=f"{role}.optimizer").says
    if model is None or says is None:
        return []
    trained = [name for name in model.extents if name not in model.untrained_params]
    shapes = {name: torch.empty(model.whole_shapes[name], device="meta") for name in trained}
    return [_line("optimizer", f"{role}: {says(shapes)}")]


def sharing_lines(
    section: ModelSettings, n: int, hindrances: Sequence[tuple[str, Any, str]], model: Model, kernels: Kernels
) -> list[str]:
    """Line on why `n` responses to a prompt do not share its computation: the first of the settings' `hindrances`
    (path, value, reason), or one of the model's."""
    if n == 1 or section.share_prompts != "auto":
        return []
    of_settings = [f"{path} = {value!r} {why}" for path, value, why in hindrances]
    of_settings += ["model.graphs records passes over rows that share nothing"] * (section.graphs is True)
    whole = model.unplaced or model
    why = next(iter(of_settings), None) or Forward(whole, kernels, share_prompts=False).sharing_hindrance()
    return [] if why is None else [_line("prompts", f"computed anew for each response: {why}")]


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
