"""The work of `fppo plan`, after its arguments are read."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

import attrs
import torch
from transformers.utils import logging as transformers_logging

from fppo import devices
from fppo._errors import printable
from fppo.assembly.inputs import Inputs
from fppo.assembly.parts import device_of
from fppo.commands import output
from fppo.data import PromptSet
from fppo.models.flops import PEAKS
from fppo.settings import placement
from fppo.settings.placement import places_of
from fppo.settings.plan import HERE, PlanSettings, pools_of_run
from fppo.settings.train import TrainSettings
from fppo.studies.plan import text
from fppo.studies.plan.case import GIB, Case
from fppo.studies.plan.columns import column_calls
from fppo.studies.plan.needs import flags_of
from fppo.studies.plan.plan import plan, plan_engines
from fppo.studies.plan.run import budgeted, case_of, engines_of, part_of
from fppo.studies.plan.search import remedies, search
from fppo.workers.imports import import_modules

Shown = tuple[list[text.Section], dict[str, Any], bool]  # text, numbers, and whether it fits


def run(of: TrainSettings, options: PlanSettings) -> int:
    """Print the plan of a run, of each of its pools if it has any, or the result of a search, and write JSON. Returns
    the exit status: 1 if nothing fits, else 0."""
    with output.shown(options.json) as show:
        return _run(of, options, show)


def _run(of: TrainSettings, options: PlanSettings, show: output.Show) -> int:
    transformers_logging.set_verbosity_error()
    import_modules(of.model.import_, of.module_dirs)
    if options.gpu == HERE:
        options = planned_on(options, device_of(of.device, of.placement))
        of = _as_read(of)
    if places_of(of.placement):
        sections, numbers, fits = planned_pools(of, options)
    elif options.search is not None:
        sequences = of.actor.mini_batch(of.rollout.batch_size, of.rollout.n)
        found = search(budgeted(of, options), options.search, sequences)
        sections, numbers, fits = text.of_search(found), text.numbers_of_search(found), bool(found.best)
    else:
        sections, numbers, fits = _planned(of, options, case_of(of, options))
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    show(text.rendered(sections, width), text.plain(numbers))
    return 0 if fits else 1


def planned_on(options: PlanSettings, device: torch.device) -> PlanSettings:
    """The options to plan for a device of this machine. Accelerators other than CUDA's run what a CPU runs, in memory
    of their own; they have its rates in the plan, since theirs are not known."""
    if device.type not in ("cpu", "cuda"):
        memory = torch.accelerator.get_memory_info(device)[1] / GIB
        return attrs.evolve(options, gpu="cpu", memory=options.memory or memory)
    name = "cpu" if device.type == "cpu" else devices.title(device)
    known = next((kind for kind in PEAKS if kind in name), name)
    return attrs.evolve(options, gpu="a100-80" if known == "A100" else known.lower())


def with_prompts(of: TrainSettings, prompts: PromptSet) -> TrainSettings:
    """The settings with `data.max_prompt_tokens` reduced to the longest of these prompts."""
    longest = min(max(map(len, prompts.tokens)), of.data.max_prompt_tokens)
    return attrs.evolve(of, data=attrs.evolve(of.data, max_prompt_tokens=longest))


def _as_read(of: TrainSettings) -> TrainSettings:
    """The settings with `data.max_prompt_tokens` reduced to the run's longest prompt, if its prompts are in local
    files. If these cannot be read, print a line on it and return the settings unchanged."""
    if not of.data.path or not all(map(os.path.isfile, of.data.path)):
        return of
    try:
        return with_prompts(of, Inputs(settings=of).prompts)
    except (ValueError, OSError) as error:
        asked = f"prompts are planned as long as data.max_prompt_tokens = {of.data.max_prompt_tokens}"
        print(f"{asked}, since they cannot be read: {printable(str(error), 300)}", file=sys.stderr)
        return of


def _planned(of: TrainSettings, options: PlanSettings, case: Case, pool: str | None = None) -> Shown:
    """Plan a case, with changes that would make it fit if it does not; `pool` names the pool that the case is for."""
    estimate, helping = plan(case), None
    if options.tries and not estimate.fits:
        helping = [attrs.evolve(x, pool=pool, flags=flags_of(of, x)) for x in remedies(estimate)]
    return text.of_plan(estimate, helping), text.numbers_of_plan(estimate, helping), estimate.fits


def planned_pools(of: TrainSettings, options: PlanSettings) -> Shown:
    """Plan each pool of a run; the result fits if every pool does."""
    pools, calls = pools_of_run(of), column_calls(of, case_of(of, options))
    engines = any(models == ["rollout"] for _, models in pools.values())
    sections, numbers, fits = [], {}, True
    for name, (mesh, models) in pools.items():
        columns = max((sum(call.there.values()) for call in calls.get(name, ())), default=0)
        if models == ["rollout"]:
            planned = plan_engines(engines_of(of, options, name, columns))
            shown = text.of_engines(planned), text.plain(planned), planned.fits
        else:
            case = part_of(case_of(attrs.evolve(of, mesh=mesh), attrs.evolve(options, gpus=None)), models)
            case = attrs.evolve(case, sampling=None if engines else case.sampling, columns=float(columns))
            shown = _planned(of, options, case, None if name == placement.HERE else name)
        sections += [[f"pool {name}: {', '.join(models)}"], *shown[0], *text.of_columns(calls.get(name, []))]
        numbers[name] = {**shown[1], **({"columns": calls[name]} if name in calls else {})}
        fits = fits and shown[2]
    return sections, numbers, fits
