"""The settings of mixtures of experts."""

from __future__ import annotations

import attrs

from fppo.settings.fields import at_least, setting


@attrs.frozen(kw_only=True)
class ExpertSettings:
    """How the routers of a mixture of experts are trained; the loads of experts are reported anyway."""

    bias_rate: float = setting(0.0, at_least(0))
    """How far an update moves the routers' biases towards equal loads (DeepSeek-V3 and the like); 0: they stay."""
    balance_coef: float = setting(0.0, at_least(0))
    """The factor of a loss that is least where the loads of experts are equal; it needs algorithm.router_replay."""
    z_coef: float = setting(0.0, at_least(0))
    """The factor of the squared logsumexp of the routers' logits, which keeps them small."""
