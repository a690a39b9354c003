"""The plan of some of a run's roles: those of one pool."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import attrs

from fppo.plan.case import ROLES
from fppo.plan.plan import Plan


def of_roles(plan: Plan, roles: Collection[str]) -> Plan:
    """What of a plan is of these roles ("actor", "critic", "reference", "reward model"): their stages, and what they
    hold. The others' parameters and optimizers are elsewhere."""
    gone = tuple(f"{role}'s " for role in set(ROLES.values()) - set(roles))

    def kept(kinds: Mapping[str, float]) -> dict[str, float]:
        return {kind: size for kind, size in kinds.items() if not kind.startswith(gone)}

    counts = {**plan.parameters} | ({"reference": plan.parameters["actor"]} if "reference" in roles else {})
    return attrs.evolve(
        plan,
        parameters={role: counts[role] for role in counts if role in roles},
        rest=kept(plan.rest),
        stages=tuple(
            attrs.evolve(stage, memory=kept(stage.memory)) for stage in plan.stages if ROLES[stage.name] in roles
        ),
    )
