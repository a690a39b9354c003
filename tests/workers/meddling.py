"""Rewards that meddle with the process they find themselves in; they import next to nothing."""

from __future__ import annotations

import os

from fppo.rewards import batch_reward


def _descriptors():
    return [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]


def _write(descriptor, data):
    try:
        os.set_blocking(descriptor, False)
        os.write(descriptor, data)
    except OSError:
        pass


def meddles(sample) -> float:
    match sample.response:
        case "length":  # of a message that never comes
            [_write(descriptor, (5).to_bytes(4, "big")) for descriptor in _descriptors()]
        case "noise":
            [_write(descriptor, bytes(range(256)) * 40) for descriptor in _descriptors()]
        case "close":
            os.closerange(3, max(_descriptors()) + 1)
        case "fork":
            os.fork()
        case "replace":
            [os.dup2(os.open(os.devnull, os.O_RDWR), descriptor) for descriptor in _descriptors()]
    return 1.0


@batch_reward
def forks_at_once(batch) -> list[float]:
    os.fork()
    return [2.0] * len(batch)
