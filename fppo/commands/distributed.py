"""Where commands run: in this process, alone or as one rank, or in processes that are started here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch

from fppo import devices
from fppo._errors import no_exit
from fppo.assembly.parts import device_of, sharding_of
from fppo.commands.actions import ALONE, CommandRank
from fppo.pipeline.ahead import check_devices, check_interrupts
from fppo.runtime import launch
from fppo.runtime.launch import Place
from fppo.settings import checks, files
from fppo.settings.placement import places_of
from fppo.settings.train import TrainSettings


def placed(
    command: Callable[[TrainSettings, CommandRank], int],
    settings: TrainSettings,
    arguments: Sequence[str],
    nproc: int | None = None,
    max_restarts: int = 0,
    *,
    trains: bool = True,
) -> Callable[[], int]:
    """Place a command: return this process's part in it, a function that returns the exit status. The part is the
    command, alone or as one of the ranks that torchrun started, or to start ranks and wait for them.

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
        if ":" in settings.device:
            torch.accelerator.set_device_index(device_of(*named))  # for calls that name no GPU, such as kernel launches
        return partial(no_exit()(command), settings, ALONE)
    device = device_of(*named)
    ahead = settings.rollout.ahead if trains else 0
    check_devices(ahead, world, device)
    if trains and settings.rollout.interrupt:
        check_interrupts(ahead, world)
    if device.index is not None:
        raise ValueError(f"device = {settings.device!r}: {world} processes train on a GPU each; give {device.type}")
    if not place.started:
        count = torch.get_device_module(device).device_count()
        if devices.is_accelerator(device) and world > count:
            raise ValueError(f"{world} processes need as many GPUs, and this machine has {count}")
        return partial(launch.start, arguments, world, max_restarts=max_restarts)
    if devices.is_accelerator(device):
        device = torch.device(device.type, place.local_rank)
        torch.accelerator.set_device_index(device)
    cut = {"sharding": sharding_of(mesh), "virtual_stages": mesh.virtual_stages}
    joined = launch.joined(sizes, place, device, timeout=mesh.timeout, **cut, twin=ahead > 0)
    ring = partial(attrs.evolve, ring=mesh.ring)

    def on_rank() -> int:
        with joined as (own, watch, sampling), no_exit():  # inside the watch over ranks, so that others are notified
            return command(settings, CommandRank(ring(own), device, watch, sampling and ring(sampling)))

    return on_rank
