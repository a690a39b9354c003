"""Environments of ours that worker processes import by name; so nothing here is slow to import."""

import time

from fppo.environments import Begin, Step


class Count:
    """The policy says digits; each is worth a tenth, and "9" ends the episode. Its prompt shows the seed's last digit.

    The state is a list that `step` changes in place, which a value that is pickled in between bears.
    """

    def __init__(self, *, prompt: str = "{}", most: int = 4):
        self.prompt, self.most = prompt, most

    def reset(self, row, seed):
        return Begin([seed], [{"role": "user", "content": self.prompt.format(seed % 10)}])

    def step(self, state, reply):
        state.append(reply.text)
        digits = [c for c in reply.text if c.isdigit()]
        done = len(state) > self.most or "9" in digits
        messages = [{"role": "user", "content": f"({len(reply.text) % 10})"}]
        info = {"turns": len(state) - 1, "cut": reply.end == ""}
        return Step(state, () if done else messages, len(digits) / 10, done, info)


class Plain:
    """The row's own prompt, plain tuples, and turns that go on with nothing in between."""

    def reset(self, row, seed):
        return ((), ())

    def step(self, state, reply):
        return (*state, reply.text), (), 1.0, len(state) >= 2


class Later(Count):
    """Coroutines."""

    async def reset(self, row, seed):
        return super().reset(row, seed)

    async def step(self, state, reply):
        return super().step(state, reply)


class Moody:
    """What the row says: fails, hangs, ends the process, or returns what is no step."""

    def reset(self, row, seed):
        if row["mood"] == "reset":
            raise RuntimeError("no")
        return Begin(row["mood"])

    def step(self, state, reply):
        match state:
            case "raise":
                raise RuntimeError("no")
            case "hang":
                time.sleep(60)
            case "wrong":
                return 3.0
            case "nan":
                return Step(state, reward=float("nan"))
            case "open":
                return Step(open(__file__))
        return Step(state, reward=1.0, done=True)


class Restless:
    """Another prompt each time, whatever the seed."""

    def __init__(self):
        self.times = 0

    def reset(self, row, seed):
        self.times += 1
        return Begin((), [{"role": "user", "content": f"1+{self.times}"}])

    def step(self, state, reply):
        return Step((), reward=1.0, done=True)
