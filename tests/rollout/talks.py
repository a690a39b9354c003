"""Conversations as requests: rows of several turns whose observations come after some steps, in any order."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import attrs
import torch

from fppo.key import Key
from fppo.rollout.engine import Sampling
from fppo.rollout.generated import opened
from fppo.rollout.requests import Request


class Talk(NamedTuple):
    """A row: its prompt, the observation after each turn but the last, and how each turn is drawn."""

    row: int
    prompt: tuple[int, ...]
    observations: tuple[tuple[int, ...], ...]
    samplings: tuple[Sampling, ...]
    inputs: object = None


class Told(NamedTuple):
    """What came of a row: all tokens behind its prompt, and those drawn with log-probs, versions and ends by turn."""

    ids: list[int]
    tokens: list[list[int]]
    log_probs: list[torch.Tensor]
    versions: list[list[int]]
    ends: list[str]


def talks(count=6, turns=3, *, seed=0, sampling=None, longest=5, size=31, samples=1):
    """Rows of random prompts and observations; `samples` of them have the same ones."""
    g = torch.Generator().manual_seed(seed)
    sampling = sampling or Sampling(max_tokens=5, stop_token_ids=(5, 9, 20))

    def ids(low, high):
        length = int(torch.randint(low, high + 1, (), generator=g))
        return tuple(torch.randint(3, size, (length,), generator=g).tolist())

    found = []
    for row in range(0, count, samples):
        prompt, seen = ids(1, 7), tuple(ids(0, longest) for _ in range(turns - 1))
        found += [Talk(row + j, prompt, seen, (sampling,) * turns) for j in range(samples)]
    return found


def told(engine, params, rows, *, key=3, delay=lambda row, turn: 0, order=None, version=0, meanwhile=None, **changes):
    """The rows as an engine answers them; an observation comes `delay(row, turn)` steps after its turn. Returns what
    came of each row, and the tokens that went through the model."""
    with opened(engine, params, version=version, **changes) as requests:
        made = [_request(row, 0, key) for row in rows]
        requests.add(made if order is None else [made[i] for i in order])
        found = {row.row: Told([], [], [], [], []) for row in rows}
        by_row, away, fed, step = {row.row: row for row in rows}, Counter(), 0, 0
        while requests.counts.open or away:
            for row in sorted(away):
                away[row] -= 1
                if away[row] < 0:
                    del away[row]
                    turn = len(found[row].tokens)
                    found[row].ids.extend(by_row[row].observations[turn - 1])
                    requests.add([_request(by_row[row], turn, key)])
                    requests.release([f"{row}.{turn - 1}"])
            result = requests.step()
            streamed = Counter(result.drawn.names)
            step += 1
            if meanwhile is not None:
                meanwhile(requests, step)
            for finished in result.finished:
                row = int(finished.name.partition(".")[0])
                own = found[row]
                fed += finished.fed
                assert finished.end == "cancelled" or streamed[finished.name]
                own.ids.extend(finished.tokens.tolist())
                own.tokens.append(finished.tokens.tolist())
                own.log_probs.append(finished.log_probs)
                own.versions.append(finished.versions.tolist())
                own.ends.append(finished.end)
                if len(own.tokens) < len(by_row[row].samplings):
                    away[row] = delay(row, len(own.tokens))
        assert requests.counts == (0, 0, 0)
    return found, fed


def _request(talk, turn, key):
    last = turn == len(talk.samplings) - 1
    return Request(
        name=f"{talk.row}.{turn}",
        ids=talk.observations[turn - 1] if turn else talk.prompt,
        sampling=talk.samplings[turn],
        key=Key(key).fold("turn", turn) if turn else Key(key),
        row=talk.row,
        after=f"{talk.row}.{turn - 1}" if turn else None,
        keep=not last,
        inputs=None if turn else talk.inputs,
    )


def same(a, b, *, atol=1e-12):
    """Whether two answers have the same tokens and ends, and log-probs that differ by at most so much."""
    assert a.keys() == b.keys()
    for row in a:
        assert a[row].ids == b[row].ids, row
        assert a[row].tokens == b[row].tokens, row
        assert a[row].ends == b[row].ends, row
        for x, y in zip(a[row].log_probs, b[row].log_probs, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=atol)


def with_samplings(rows, *samplings):
    """The rows, whose turns are drawn as each of these in turn."""
    each = [samplings[i % len(samplings)] for i in range(len(rows))]
    return [row._replace(samplings=(each[i],) * len(row.samplings)) for i, row in enumerate(rows)]


def only_generate(engine):
    """The engine without requests as they come."""
    return _OnlyGenerate(engine)


@attrs.frozen
class _OnlyGenerate:
    engine: object

    def generate(self, params, ask):
        return self.engine.generate(params, ask)
