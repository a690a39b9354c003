"""The settings of responses of several turns."""

from __future__ import annotations

import attrs

from fppo.settings.fields import MOST_SECONDS, MOST_TOKENS, MOST_WORKERS, above, at_least, at_most, setting


@attrs.frozen(kw_only=True)
class TurnsSettings:
    """What answers the policy's turns. A turn ends where a response does: at the model's ends, or rollout.stop."""

    respond: str | None = setting(None)
    """calculator, or module:function of the conversation so far, or module:game; None: a response is one turn."""
    max_turns: int = setting(8, at_least(1), at_most(MOST_TOKENS))
    """Turns of a response at most."""
    turn_tokens: int | None = setting(None, at_least(1), at_most(MOST_TOKENS))
    """The longest turn, in tokens; one that is cut ends the response. None: only rollout.max_tokens bounds it, with all
    that it is told."""
    failure: str = setting("error")
    """What the policy is told where respond raises or takes too long; empty: the response ends there."""
    time_limit: float = setting(10.0, above(0), at_most(MOST_SECONDS))
    """Seconds that a call may take."""
    workers: int = setting(1, at_least(1), at_most(MOST_WORKERS))
    """Processes that calls run in, on each rank; the calculator needs none."""
