"""Tools that worker processes import by name; so nothing here is slow to import."""


def adder(conversation):
    """One more digit wherever the policy stops at a sign."""
    return [{"role": "tool", "content": "=1"}] if conversation[-1]["end"] in "+=" else None
