"""Environments of ours that worker processes import by name; so nothing here is slow to import."""

import asyncio
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


class Slow(Count):
    """Answers after `delays[seed % len(delays)]` turns of the event loop, so in another order than the calls came."""

    def __init__(self, *, delays=(0,)):
        super().__init__()
        self.delays = delays

    async def reset(self, row, seed):
        return super().reset(row, seed)

    async def step(self, state, reply):
        for _ in range(self.delays[(7 * state[0] + len(reply.ids) + len(state)) % len(self.delays)]):
            await asyncio.sleep(0)
        return super().step(state, reply)


class Held:
    """The first row's turn is answered once the other rows are done with theirs."""

    def __init__(self):
        self.left, self.others = 3, asyncio.Event()

    async def reset(self, row, seed):
        return Begin((row["number"], 0))

    async def step(self, state, reply):
        row, turn = state
        if row == 0 and turn == 0:
            await self.others.wait()
        done = turn == 3
        if row and done:
            self.left -= 1
            if not self.left:
                self.others.set()
        return Step((row, turn + 1), [{"role": "user", "content": "1"}], 1.0, done)


class Flaky:
    """Fails its first call."""

    def __init__(self):
        self.calls = 0

    def reset(self, row, seed):
        return Begin(())

    def step(self, state, reply):
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("try again")
        return Step((), reward=1.0, done=True)
