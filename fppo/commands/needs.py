"""The planned needs of a run that is about to start or has ended, on the machine at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any

import attrs

from fppo.assembly.inputs import Inputs
from fppo.assembly.machine import resolved
from fppo.commands.plan import planned_on, planned_pools
from fppo.runs import memory
from fppo.settings.placement import places_of
from fppo.settings.plan import PlanSettings
from fppo.settings.train import TrainSettings
from fppo.studies.plan import text as plans
from fppo.studies.plan.case import GIB, KNOWN
from fppo.studies.plan.needs import RunNeeds, needs_of

GAP = 0.15  # the part of the plan beyond which memory is said to be off
ALLOCATED = "perf/max_memory_allocated_gb"
STAGES = MappingProxyType(  # of a plan, as runs call them
    {"rollout": "gen", "reward model": "reward", "teacher": "teacher", "log-probs": "old_log_prob", "reference": "ref"}
    | {"values": "values", "update critic": "update_critic", "update actor": "update_actor"}
)
NO_FIT = "it does not fit in memory; fppo plan says what would make it fit"
_NAMED = 4  # changes that would make a run fit, of those that were found
_LEAST = 300.0  # seconds of steps from which a run reports how far off its plan was: planning takes time, too


def planned_needs(
    settings: TrainSettings, options: PlanSettings, chosen: TrainSettings, inputs: Inputs
) -> tuple[RunNeeds | None, list[str], bool]:
    """Plan the needs of a run; returns the needs, lines of text, and whether the run fits. Needs are None for a run
    with pools, whose plans the lines show, and for a run that cannot be planned, for which the lines give the reason.

    Prompts are as long as those of the `inputs`, if no environment gives others. A plan for this machine's CPU takes
    the settings `chosen` for it, and the pace that is measured here.
    """
    if options.gpu not in (*KNOWN, "cpu"):
        return None, [f"needs     not planned: {options.gpu} is no GPU that fppo plan knows; give --gpu"], True
    try:
        if places_of(settings.placement):
            sections, _, fits = planned_pools(settings, attrs.evolve(options, gpus=None))
            return None, [*plans.rendered(sections, 100).split("\n"), *([] if fits else ["", NO_FIT])], fits
        lengths = () if settings.rollout.environment.used else tuple(map(len, inputs.prompts.tokens))
        here = options.gpu == inputs.device.type == "cpu"
        kernels = inputs.kernels if here else None
        needs = needs_of(chosen if here else settings, options, lengths=lengths, kernels=kernels)
    except ValueError as error:
        return None, [f"it cannot be planned: {error}"], False
    return needs, [], needs.fits


def no_fit(needs: RunNeeds) -> str:
    """Words on a run that does not fit, with changes of settings with which it would."""
    found = "".join(f"\n  {words}" for words in needs.helping[:_NAMED])
    return f"{NO_FIT}, at what cost; it would with one of these:{found}" if found else NO_FIT


def lines_at_end(
    settings: TrainSettings, inputs: Inputs, records: Sequence[Mapping[str, Any]], ranks: int
) -> list[str]:
    """Lines that compare a run with its plan: for a long one the time of a step with the median in `records`, the
    metrics of its steps, and the memory with the run's peak; for one with `log.memory_steps` the memory of its stages.
    Empty for a run that is neither, or that cannot be planned."""
    seconds = [x["timing_s/step"] for x in records if "timing_s/step" in x]
    stages = memory.peaks(memory.read(Path(settings.output_dir), settings.log.memory_steps))
    long = sum(seconds) >= _LEAST
    if not (long or stages):
        return []
    chosen, _ = resolved(settings, inputs.device)
    options = planned_on(PlanSettings(gpus=ranks, tries=False), inputs.device)
    needs, _, _ = planned_needs(settings, options, chosen, inputs)
    if needs is None:
        return []
    peaks = [GIB * x[ALLOCATED] for x in records[-1:] if ALLOCATED in x] or list(stages.values())
    lines = memory_lines(needs.tensors, {name: stages[each] for name, each in STAGES.items() if each in stages}, peaks)
    if not long:
        return lines
    took, sampled = median(seconds), [x["response_length/mean"] for x in records if "response_length/mean" in x]
    lengths = f"; responses had {fmean(sampled):,.0f} tokens of the {needs.response:,} planned" if sampled else ""
    return [f"planned {duration(needs.step)} a step, took {duration(took)} ({took / needs.step:.2f}){lengths}", *lines]


def memory_lines(planned: Mapping[str, float], stages: Mapping[str, float], peaks: Sequence[float]) -> list[str]:
    """A table of planned bytes of tensors by stage beside those of the run, `stages` where they were looked at, and of
    its largest peak; with a line if that is off by more than `GAP`. Empty without peaks."""
    if not peaks or not planned:
        return []
    most, peak = max(planned.values()), max(peaks)
    rows = {name: (size, stages.get(name)) for name, size in planned.items()} if stages else {}
    lines = plans.rendered([[plans.of_peaks(rows | {"largest": (most, peak)})]], 100).split("\n")
    if abs(peak / most - 1) <= GAP:
        return lines
    way = "more" if peak > most else "less"
    return [
        *lines,
        f"the run took {abs(peak / most - 1):.0%} {way} memory than planned; docs/guides/memory.md says why",
    ]


def duration(seconds: float) -> str:
    """Seconds in the unit that fits: 0.25 s, 12 min, 3.4 h or 5.2 days."""
    for size, unit in ((86_400 * 2, "days"), (3600, "h"), (120, "min")):
        if seconds >= size:
            return f"{seconds / {'days': 86_400, 'h': 3600, 'min': 60}[unit]:,.2g} {unit}"
    return f"{seconds:,.2g} s"
