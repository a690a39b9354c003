"""What `fppo plan` does, once its arguments are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from fppo.plan.case import Case
from fppo.plan.hardware import hardware_of
from fppo.plan.plan import plan
from fppo.plan.presets import config_of
from fppo.plan.remedies import remedies
from fppo.plan.text import report, summary
from fppo.plan.values import GIB, plain
from fppo.runtime.mesh import Sharding
from fppo.settings.plan import PlanSettings


def run(given: PlanSettings) -> int:
    """Prints the plan and writes what was asked for; 1 if it does not fit."""
    transformers_logging.set_verbosity_error()
    found = plan(case_of(given))
    helping = remedies(found) if given.tries and not found.fits else None
    text = json.dumps(plain(summary(found, helping)), indent=1)
    if given.json == "-":
        print(text)
    else:
        print(report(found, helping, width=min(shutil.get_terminal_size((100, 24)).columns, 100)))
        if given.json is not None:
            Path(given.json).parent.mkdir(parents=True, exist_ok=True)
            Path(given.json).write_text(text + "\n", encoding="utf-8")
    return 0 if found.fits else 1


def case_of(given: PlanSettings) -> Case:
    """The case that the settings name. Raises ValueError for a model or a GPU that is not known."""
    hardware = hardware_of(
        given.gpu,
        memory=None if given.memory is None else given.memory * GIB,
        flops=given.flops,
        bandwidth=given.bandwidth,
        node_bandwidth=given.node_bandwidth,
        network_bandwidth=given.network_bandwidth,
        per_node=given.per_node,
    )
    name, config = config_of(given.model)
    narrow = given.compute_dtype == "bfloat16" or (given.compute_dtype == "auto" and hardware.on_gpu)
    mesh = given.mesh
    return Case(
        name=name,
        config=config,
        hardware=hardware,
        mesh=given.sizes,
        sharding=Sharding(mesh.stage, getattr(torch, mesh.reduce_dtype), mesh.prefetch),
        tokens=given.tokens,
        length=given.length or min(4096, given.tokens),
        response=given.response,
        micro_batches=given.micro_batches,
        critic=given.critic,
        reference=given.reference,
        reward_model=None if given.reward_model is None else config_of(given.reward_model, "reward-model")[1],
        compute_dtype=torch.bfloat16 if narrow else None,
        checkpoint_layers=given.checkpoint_layers,
        log_probs=given.log_probs,
        offload=given.offload,
        full=given.full,
    )
