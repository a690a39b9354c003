"""From settings to the groups that roles run on."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

import attrs
import torch

from fppo.assembly.parts import device_of, sharding_of
from fppo.fleet import AnyGroup, Call, Group, RankSpec, at_once, cluster
from fppo.fleet.clusters import OpenCluster
from fppo.settings.placement import MeshSettings, PlacementSettings, Pool, places_of, pools_of, threads_of
from fppo.workers.imports import import_modules


@attrs.frozen
class RolePlaces:
    """The groups of roles outside this process, and the groups of engines, of one rank each."""

    roles: Mapping[str, AnyGroup] = attrs.field(factory=dict)
    engines: Sequence[Group] = ()

    def calls(self) -> list[Call]:
        """The calls made to all groups since `calls` was last called."""
        groups = dict.fromkeys(group for group in (*self.roles.values(), *self.engines) if isinstance(group, Group))
        return [call for group in groups for call in group.calls()]


ALL_HERE = RolePlaces()


def batch_device_of(places: Collection[str], device: torch.device, models: Collection[str]) -> torch.device:
    """Where this process keeps batches: on `device` or, if all `models` are elsewhere (roles in `places`), on the
    host."""
    return device if set(models) - set(places) else torch.device("cpu")


@contextlib.contextmanager
def groups_of(
    placement: PlacementSettings,
    mesh: MeshSettings,
    device: str,
    models: Collection[str],
    *,
    modules: Sequence[str] = (),
    module_dirs: Sequence[str] = (),
    open_cluster: OpenCluster = cluster,
) -> Iterator[RolePlaces]:
    """All groups, started, for as long as the context lasts, in the cluster that `open_cluster` opens by its name. Each
    of their ranks has imported the user's `modules`, also from `module_dirs`.

    Results of their calls are on the device that the setting `device` names, or on the host if all `models` are in
    groups. Raises ValueError if there is no such cluster, or this machine has too few GPUs, and GroupDied if the
    cluster has no room for a pool within `placement.patience`.
    """
    places, pools = places_of(placement), pools_of(placement)
    if not places:
        yield ALL_HERE
        return
    sharding, patience = sharding_of(mesh), placement.patience
    home = batch_device_of(places, device_of(device, placement), models)
    threads = threads_of(placement, torch.get_num_threads())
    begin = partial(import_modules, modules, module_dirs) if modules else None
    with contextlib.ExitStack() as opened:
        there = opened.enter_context(open_cluster(placement.cluster))

        def group(name: str, pool: Pool, place: str) -> Group:
            spec = RankSpec(
                count=pool.ranks,
                gpus=pool.gpus,
                sizes=pool.axes,
                sharding=sharding,
                virtual_stages=pool.virtual_stages,
                ring=pool.ring,
                threads=threads[place],
                patience=patience,
            )
            ranks = there.ranks(spec)
            opened.callback((made := Group(name, ranks, patience=patience, device=home, begin=begin)).close)
            return made

        engines = places.pop("rollout", None)
        groups = {name: group(name, pools[name], name) for name in sorted(set(places.values()))}
        own: list[Group] = []
        if engines is not None:
            one = attrs.evolve(pools[engines], ranks=1)
            own = [group(f"{engines} {i}", one, engines) for i in range(pools[engines].ranks)]
        at_once({group.name: group.start for group in (*groups.values(), *own)})
        yield RolePlaces({role: groups[name] for role, name in places.items()}, own)
