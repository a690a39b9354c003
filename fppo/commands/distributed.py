"""Run commands on several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch

from fppo._errors import no_exit
from fppo.assembly.parts import device_of, sharding_of
from fppo.commands.actions import ALONE, CommandRank
from fppo.pipeline.ahead import check_devices, check_interrupts
from fppo.runtime import launch
from fppo.runtime.launch import Place
from fppo.settings import checks, files
from fppo.settings.placement import places_of
from fppo.settings.train import TrainSettings


def run(
    command: Callable[[TrainSettings, CommandRank], int],
    settings: TrainSettings,
    arguments: Sequence[str],
    nproc: int | None = None,
    max_restarts: int = 0,
    *,
    trains: bool = True,
) -> int:
    """Run `command` on the processes that torchrun started, or on processes started here, and return the exit status.

    `nproc` processes (None: as many as the settings' mesh needs) are started with `arguments`. The settings passed to
    `command` name every axis. Commands that do not train sample nothing ahead.
    Raises SettingsError if the mesh does not fit the number of processes.
    """
    place, mesh, named = Place.of_environment(), settings.mesh, (settings.device, settings.placement)
    world = place.world
    if not place.started:
        world = nproc or mesh.least_ranks
    if world > 1 and places_of(settings.placement):
        raise ValueError(f"placement: pools start their own processes, and the controller is one, not {world}")
    if wrong := checks.mesh_problems(settings, world):
        raise files.SettingsError(wrong)
    sizes = mesh.sizes(mesh.shard or world // mesh.others)
    settings = attrs.evolve(settings, mesh=attrs.evolve(mesh, shard=sizes["shard"]))
    if place.attempt and settings.resume == "never":
        settings = attrs.evolve(settings, resume="auto")  # checkpoints in output_dir are from earlier attempts
    if world == 1:
        if settings.device.startswith("cuda:"):
            torch.cuda.set_device(device_of(*named))  # for calls that name no GPU, such as kernel launches
        with no_exit():
            return command(settings, ALONE)
    device = device_of(*named)
    ahead = settings.rollout.ahead if trains else 0
    check_devices(ahead, world, device)
    if trains and settings.rollout.interrupt:
        check_interrupts(ahead, world)
    if device.type == "cuda" and device.index is not None:
        raise ValueError(f"device = {settings.device!r}: {world} processes train on a GPU each; give cuda")
    if not place.started:
        if device.type == "cuda" and world > torch.cuda.device_count():
            raise ValueError(f"{world} processes need as many GPUs, and this machine has {torch.cuda.device_count()}")
        return launch.start(arguments, world, max_restarts=max_restarts)
    if device.type == "cuda":
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    with launch.joined(
        sizes,
        place,
        device,
        timeout=mesh.timeout,
        sharding=sharding_of(mesh),
        virtual_stages=mesh.virtual_stages,
        twin=ahead > 0,
    ) as joined:
        own, watch, sampling = joined
        ring = partial(attrs.evolve, ring=mesh.ring)
        with no_exit():  # inside the watch over ranks, so that the others are notified
            return command(settings, CommandRank(ring(own), device, watch, sampling and ring(sampling)))
