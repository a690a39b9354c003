"""From settings to the groups that roles run on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fppo.assembly.parts import sharding_of
from fppo.fleet import Group, at_once, cluster
from fppo.settings.placement import places_of, pools_of
from fppo.settings.train import TrainSettings


@contextlib.contextmanager
def groups_of(settings: TrainSettings) -> Iterator[dict[str, Group]]:
    """The group of each role that is not in this process, started, for as long as the context lasts.

    Raises ValueError if there is no such cluster, GroupDied if it has no room for a pool within `placement.patience`.
    """
    placement = settings.placement
    places, pools = places_of(placement), pools_of(placement)
    if not places:
        yield {}
        return
    sharding, patience = sharding_of(settings), placement.patience
    with contextlib.ExitStack() as opened:
        there, groups = opened.enter_context(cluster(placement.cluster)), dict[str, Group]()
        for name in sorted(set(places.values())):
            pool = pools[name]
            ranks = there.ranks(pool.ranks, gpus=pool.gpus, sizes=pool.sizes, sharding=sharding, patience=patience)
            groups[name] = Group(name, ranks, patience=patience)
            opened.callback(groups[name].close)
        at_once({name: group.start for name, group in groups.items()})
        yield {role: groups[name] for role, name in places.items()}
