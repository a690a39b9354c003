"""Checkpoint names of vLLM's modules, and the parameters to send for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs

from fppo.rollout import sync


@attrs.frozen
class Names:
    """vLLM's names of parameters.

    modules: the checkpoint names of each module's contents; several if it is fused.
    places: the name in vLLM of each name that is sent.
    targets: the names under which each of the trainer's parameters is sent.
    """

    modules: Mapping[str, Sequence[str]]
    places: Mapping[str, str]
    targets: Mapping[str, Sequence[str]]

    def with_fused(self, changed: Collection[str]) -> list[str]:
        """The parameters to send if `changed` ones changed: these, and the parameters that vLLM fuses with them."""
        if not changed:
            return []
        together = {name: module for module, own in self.modules.items() for name in own}
        # parameters without a name in vLLM (None) may be fused
        modules = {None, *(together.get(new) for name in changed for new in self._places_of(name))}
        return [name for name in self.targets if any(together.get(new) in modules for new in self._places_of(name))]

    def check(self, names: Collection[str]) -> None:
        """Raise SyncError unless the parameters of these names completely fill vLLM's modules. If other parameters are
        left out, modules that get none do not count."""
        sent = {new for name in names for new in self._places_of(name)}
        modules = [set(own) for own in self.modules.values()]
        if len(names) < len(self.targets):
            modules = [own for own in modules if own & sent]
        sync.compare_names(set().union(*modules), {name for name in sent if ".experts." not in name})

    def _places_of(self, name: str) -> list[str]:
        return [self.places.get(new, new) for new in self.targets[name]]
