"""An engine on other ranks is asked what it would be asked here."""

import attrs
import torch

from fppo.key import Key
from fppo.rollout import Ask, Sampling
from fppo.rollout.pool import PlacedEngine


class Group:
    def call(self, fn, *args, label):
        return fn(*args)


def test_all_that_is_asked_arrives_but_who_listens():
    asked = []
    limits = torch.tensor([1, 2])
    ask = Ask("prompts", Sampling(max_tokens=3), Key(1), version=5, limits=limits, on_finished=print, offset=7)
    PlacedEngine(Group(), lambda params, ask: asked.append(ask)).generate({}, ask)
    arrived = [getattr(asked[0], field.name) for field in attrs.fields(Ask)]
    assert arrived == [getattr(attrs.evolve(ask, on_finished=None), field.name) for field in attrs.fields(Ask)]
