"""From settings to the groups that roles run on."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import attrs
import torch

from fppo.assembly.parts import device_of, sharding_of
from fppo.fleet import AnyGroup, Group, RankSpec, at_once, cluster
from fppo.settings.placement import Pool, places_of, pools_of, threads_of
from fppo.settings.reward import RewardSettings
from fppo.settings.train import TrainSettings


@attrs.frozen
class RolePlaces:
    """Where roles are that are not in this process, and the groups of one rank each that are engines."""

    roles: Mapping[str, AnyGroup] = attrs.field(factory=dict)
    engines: Sequence[Group] = ()


def home_of(
    places: Collection[str], device: torch.device, reward: RewardSettings, *, critic_model: bool, teacher: bool = False
) -> torch.device:
    """Where this process has batches, with roles elsewhere in `places`: on the device that models work on, or, if all
    are elsewhere, on the host."""
    roles = {"actor": True, "critic": critic_model, "reward": reward.model.path, "teacher": teacher}
    here = reward.judge.path or any(used and role not in places for role, used in roles.items())
    return device if here else torch.device("cpu")


@contextlib.contextmanager
def groups_of(settings: TrainSettings) -> Iterator[RolePlaces]:
    """All groups, started, for as long as the context lasts.

    Raises ValueError if there is no such cluster, or too few GPUs on this machine, GroupDied if it has no room for a
    pool within `placement.patience`.
    """
    placement = settings.placement
    places, pools = places_of(placement), pools_of(placement)
    if not places:
        yield RolePlaces()
        return
    sharding, patience = sharding_of(settings.mesh), placement.patience
    device = device_of(settings.device, placement)
    home = home_of(places, device, settings.reward, **settings.models_beside)
    threads = threads_of(placement, torch.get_num_threads())
    with contextlib.ExitStack() as opened:
        there = opened.enter_context(cluster(placement.cluster))

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
            opened.callback((made := Group(name, ranks, patience=patience, device=home)).close)
            return made

        engines = places.pop("rollout", None)
        groups = {name: group(name, pools[name], name) for name in sorted(set(places.values()))}
        own: list[Group] = []
        if engines is not None:
            one = attrs.evolve(pools[engines], ranks=1)
            own = [group(f"{engines} {i}", one, engines) for i in range(pools[engines].ranks)]
        at_once({group.name: group.start for group in (*groups.values(), *own)})
        yield RolePlaces({role: groups[name] for role, name in places.items()}, own)
