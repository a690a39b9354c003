"""Reward functions of every kind and fault; it imports next to nothing, since worker processes import it."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time

from fppo.rewards import batch_reward, inline_reward, weighted_sum
from fppo.workers.sample import Sample, StepRewards


def length(sample: Sample) -> float:
    return float(len(sample.response))


def scaled(sample: Sample, factor: float = 1.0) -> float:
    return factor * len(sample.response)


def process(sample: Sample) -> dict[str, float]:
    return {"score": 1.0, "pid": float(os.getpid()), "torch": float("torch" in sys.modules)}


class OwnEnd(BaseException):
    """No error of Python's."""


def by_response(sample: Sample) -> float:
    """Does what the response says."""
    match sample.response:
        case "raise":
            raise KeyError("no such thing")
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(7)
        case "interrupt":
            raise KeyboardInterrupt
        case "base":
            raise OwnEnd("mine")
        case "close":
            os.closerange(3, 256)
        case "loop":
            while True:
                pass
        case "regex":  # one call in C that holds the interpreter for ever
            return float(re.match(r"(a+)+b", "a" * 60) is not None)
        case "sleep":
            time.sleep(60)
    return 1.0


def spawns(sample: Sample) -> float:
    """Starts a process of its own, tells its number through a file, and hangs."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(sample.extras["file"], "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(60)
    return 1.0


@inline_reward
def inline(sample: Sample) -> float:
    return by_response(sample) + os.getpid()


async def as_coroutine(sample: Sample) -> float:
    return by_response(sample)


@inline_reward
async def inline_coroutine(sample: Sample) -> float:
    return by_response(sample)


@batch_reward
def batch_lengths(samples: list[Sample]) -> list[float]:
    return [by_response(s) * len(s.response) + 100 * len(samples) for s in samples]


@batch_reward
def batch_scaled(samples: list[Sample], *, factor: float = 1.0) -> list[float]:
    return [factor * len(s.response) for s in samples]


@batch_reward
def too_few(samples: list[Sample]) -> list[float]:
    return [1.0] * (len(samples) - 1)


@batch_reward
async def async_batch(samples: list[Sample]) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(s.response)) for s in samples]


async def coroutine(sample: Sample) -> dict[str, float]:
    if sample.response == "wait":
        await asyncio.sleep(60)
    await asyncio.sleep(1.0)
    return {"score": by_response(sample), "length": float(len(sample.response))}


async def quick(sample: Sample) -> dict[str, float]:
    return {"score": float("b" in sample.response), "length": float(len(sample.response))}


def marked(sample: Sample) -> float:
    """The mark that the prompt came with, and a half where the response was cut."""
    return sample.extras["mark"] + (0.5 if sample.finish == "length" else 0.0)


def notes(sample: Sample) -> float:
    """Leaves a file that says it was called."""
    open(os.path.join(sample.extras["directory"], sample.response), "w").close()
    return 1.0


def naps(sample: Sample) -> float:
    """Sleeps for as long as the response says."""
    time.sleep(float(sample.response))
    return float(sample.response)


naps.reward_prepare = lambda: time.sleep(2.0)  # type: ignore[attr-defined]


def numbered(sample: Sample) -> float:
    """How often it was called; the first call waits for the file "go"."""
    path = os.path.join(sample.extras["directory"], "calls")
    with open(path, "a") as file:
        file.write("x")
    calls = os.path.getsize(path)
    while calls == 1 and not os.path.exists(os.path.join(sample.extras["directory"], "go")):
        time.sleep(0.01)
    return float(calls)


def by_token(sample: Sample) -> dict:
    """A reward of the parity of each token, but at the digit 5; its half weight is a name."""
    return {"score": [None if token == 5 else float(token % 2) for token in sample.response_tokens], "half": 0.5}


def at_the_end(sample: Sample) -> list[float]:
    """The parity of the last token, as a reward of tokens."""
    return [0.0] * (len(sample.response_tokens) - 1) + [at_once(sample)]


def at_once(sample: Sample) -> float:
    """The parity of the last token."""
    return float(sample.response_tokens[-1] % 2)


def by_character(sample: Sample) -> StepRewards:
    """A step of each character, for the even digits."""
    size = len(sample.response)
    return StepRewards([float(x in "02468") for x in sample.response], ends=range(1, size + 1))


def bad_result(sample: Sample):
    return sample.ground_truth


def uneven_names(sample: Sample) -> dict[str, float]:
    return {"score": 1.0, sample.response: 2.0}


def refuses(sample: Sample) -> float:
    raise LookupError("the key is not set")


def refuses_half(sample: Sample) -> float:
    """Fails where the prompt begins with "1+"."""
    if "1+" in sample.prompt:
        raise LookupError("the key is not set")
    return 1.0


def nan_reward(sample: Sample) -> float:
    return float("nan")


def no_reward(sample: Sample) -> None:
    return None


summed = weighted_sum({"length": length, "one": by_response}, {"length": 0.5})
constant = 3


class Judge:
    """A class, which is no function; its instances are."""

    def __call__(self, sample: Sample) -> float:
        return 2.0


judge = Judge()


ESCAPE = "\x1b]0;gone\x07\x1b[2J"  # a terminal's commands


def loud(sample: Sample) -> float:
    raise ValueError(f"{ESCAPE}\r{'x' * 5_000_000}\u202e")


def escaping(sample: Sample) -> dict[str, float]:
    return {"score": 0.5, f"[red]{ESCAPE}": 1.0}


def hundreds(sample: Sample) -> dict[str, float]:
    return {"score": 1.0, **{f"n{i}": 1.0 for i in range(5000)}}
