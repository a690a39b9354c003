"""Trees of all kinds of nodes and leaves, for properties."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from fppo import metrics
from fppo.tree import state, static

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@state
class Record:
    """With a field that may be absent, and one that is no leaf."""

    x: Any
    y: Any = None
    name: str = static(default="")


class Two(NamedTuple):
    first: Any
    second: Any


class Listed(list):
    """What is no node, for its type is not that of one."""


@st.composite
def tensors(draw):
    """Small ones of any dtype and shape, some that are transposed, and some parameters."""
    shape, dtype = draw(st.lists(st.integers(0, 3), max_size=3)), draw(st.sampled_from(DTYPES))
    size = torch.Size(shape).numel()
    x = (torch.arange(size) * 37 % 11 - draw(st.integers(0, 5))).to(dtype).reshape(shape)
    if x.is_floating_point() and draw(st.booleans()):
        return torch.nn.Parameter(x)
    return x.transpose(0, -1) if x.ndim > 1 and draw(st.booleans()) else x


PLAIN = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.booleans(), st.just(1.5), st.just(b"ab"))
LEAVES = st.one_of(tensors(), PLAIN, st.builds(Listed, st.lists(st.integers(), max_size=2)))
KEYS = st.one_of(st.text(max_size=2), st.integers())


def nodes(children):
    """One node above these."""
    several, named = st.lists(children, max_size=3), st.dictionaries(KEYS, children, max_size=3)
    return st.one_of(
        several,
        several.map(tuple),
        named,
        named.map(OrderedDict),
        named.map(lambda x: defaultdict(list, x)),
        several.map(lambda x: deque(x, maxlen=4)),
        st.builds(Two, children, children),
        st.builds(Record, x=children, y=children, name=st.text(max_size=2)),
        st.builds(metrics.mean, st.floats(0, 1), st.integers(0, 3).map(float)),
    )


TREES = st.recursive(LEAVES, nodes, max_leaves=12)
