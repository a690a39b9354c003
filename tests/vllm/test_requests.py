"""Requests as they come on vLLM: rows are those of the embedded engine, whatever comes when, and whatever dies."""

import os
import signal
import warnings

import pytest
import torch

from fppo.key import Key
from fppo.rollout.engine import Sampling
from fppo.rollout.generated import opened
from fppo.rollout.requests import Request
from tests.rollout.talks import same, talks, told, with_samplings
from tests.rollout.test_embedded import engine_of
from tests.vllm.conftest import process_of
from tests.vllm.families import make

PLAIN = Sampling(max_tokens=6, stop_token_ids=(5, 9, 20, 33, 40))
CUT = Sampling(temperature=0.7, top_k=9, top_p=0.8, min_p=0.05, max_tokens=5, stop_token_ids=(5, 9, 20))


def rows_of(*samplings):
    return with_samplings(talks(8, 3, size=61, sampling=PLAIN, samples=2), *(samplings or (PLAIN,)))


def delay(row, turn):
    return (5 * row + turn) % 4


@pytest.mark.parametrize("host", ["local", "process"])
def test_rows_are_those_of_the_embedded_engine(host, lent):
    """Each with a sampling of its own, and with newer weights from a step on."""
    model, params = make("qwen2", seed=2)
    newer = {name: x * 1.1 for name, x in params.items()}

    def meanwhile(requests, step):
        if step == 6:
            requests.update(newer, 7)

    cases = [
        (rows_of(), None),
        (rows_of(PLAIN, CUT, Sampling(greedy=True, max_tokens=3)), None),
        (rows_of(), meanwhile),
    ]
    with lent(options={"host": host}) as (inner, _):
        pairs = [
            [
                told(engine, params, rows, delay=delay, version=4, meanwhile=change)[0]
                for engine in (inner, engine_of(model))
            ]
            for rows, change in cases
        ]
    for (found, expected), (_, change) in zip(pairs, cases, strict=True):
        if change is None:
            same(found, expected, atol=1e-5)
        versions = {version for own in found.values() for turn in own.versions for version in turn}
        assert versions == ({4} if change is None else {4, 7})


def test_a_process_that_dies_is_replaced_and_rows_go_on(lent):
    model, params = make("qwen2", seed=2)
    killed = []
    with lent(options={"host": "process"}) as (inner, _), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def meanwhile(requests, step):
            if step == 4:
                killed.append(process_of(inner))
                os.kill(killed[0], signal.SIGKILL)

        found, _ = told(inner, params, rows_of(), delay=delay, meanwhile=meanwhile)
        assert process_of(inner) != killed[0]
    expected, _ = told(engine_of(model), params, rows_of(), delay=delay)
    same(found, expected, atol=1e-5)
    assert any("a new one goes on" in str(x.message) for x in caught)


def test_requests_are_cancelled_and_gone_on_after(lent):
    _, params = make("qwen2", seed=2)
    prompt, long = tuple(range(3, 61)), Sampling(max_tokens=20)
    with lent() as (inner, _), opened(inner, params) as requests:
        with pytest.raises(
            ValueError, match=r"'a' has 58 tokens; .* reach 158, but vLLM was started for max_model_len"
        ):
            requests.add([Request(name="a", ids=prompt, sampling=Sampling(max_tokens=100), key=Key(0))])
        requests.add([Request(name="a", ids=prompt, sampling=long, key=Key(0), keep=True)])
        for _ in range(4):
            requests.step()
        requests.cancel(["a"])
        (first,) = requests.step().finished
        assert first.end == "cancelled"
        assert len(first.tokens) in (3, 4)
        requests.add([Request(name="b", ids=(7, 8), sampling=Sampling(max_tokens=2), key=Key(0), after="a")])
        ended = []
        while requests.counts.open:
            ended += requests.step().finished
        assert [x.name for x in ended] == ["b"]
        assert torch.isfinite(ended[0].log_probs).all()
        requests.release(["a"])
        assert requests.counts == (0, 0, 0)
