"""Coroutines under way together, each within its own time limit."""

import asyncio

import pytest

from fppo.workers import calls
from fppo.workers.calls import CoroutineCalls, Mode
from fppo.workers.sample import Sample

LIMIT = 1.0


async def does(sample):
    match sample.prompt:
        case "value":
            await asyncio.sleep(0)
        case "hangs":
            await asyncio.sleep(600)
        case "swallows its end":
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                await asyncio.sleep(0)
        case "raises at its end":
            try:
                await asyncio.sleep(600)
            finally:
                raise ValueError("cleaning up")
        case "cancels a part of itself":
            part = asyncio.ensure_future(asyncio.sleep(600))
            part.cancel()
            await part
        case "times out by itself":
            await asyncio.wait_for(asyncio.sleep(600), 0.0)
        case "exits":
            raise SystemExit(3)
    return 1.0


def outcomes_of(prompts, *, concurrency=64, limit=LIMIT, batch_limit=600.0):
    """The outcomes by number, and the seconds that each call took from its beginning."""
    found, took = {}, {}

    async def timed(sample):
        began = asyncio.get_running_loop().time()
        try:
            return await does(sample)
        finally:
            took[sample.extras["number"]] = asyncio.get_running_loop().time() - began

    async def run():
        calls = CoroutineCalls(timed, Mode("sample", True, limit, batch_limit, concurrency), found.__setitem__)
        for number, prompt in enumerate(prompts):
            calls.add(number, Sample(prompt, "", None, "", {"number": number}, (), (), "stop"))
        await calls.done()

    asyncio.run(run())
    return [found[number] for number in range(len(prompts))], took


@pytest.mark.parametrize("concurrency", [1, 64])
def test_each_call_ends_as_it_does_alone(concurrency):
    expected = {
        "value": ("value", ""),
        "hangs": ("timeout", f"no result within {LIMIT:g} s"),
        "swallows its end": ("timeout", f"no result within {LIMIT:g} s"),
        "raises at its end": ("timeout", f"no result within {LIMIT:g} s"),
        "cancels a part of itself": ("error", "CancelledError"),
        "times out by itself": ("error", "TimeoutError"),
        "exits": ("error", "SystemExit"),
    }
    prompts = [*expected] * (1 if concurrency == 1 else 2)
    found, took = outcomes_of(prompts, concurrency=concurrency)
    for number, (prompt, outcome) in enumerate(zip(prompts, found, strict=True)):
        kind, text = expected[prompt]
        assert (outcome.kind, outcome.text.startswith(text)) == (kind, True), (prompt, outcome)
        assert kind != "timeout" or took[number] > LIMIT / 2, (prompt, took[number])


def test_only_calls_that_ran_past_their_limit_use_patience_up():
    prompts = ["times out by itself"] * 8 + ["hangs"] * 3 + ["value"]
    found, _ = outcomes_of(prompts, concurrency=1, batch_limit=LIMIT)
    assert [x.kind for x in found] == ["error"] * 8 + ["timeout"] * 3 + ["timeout"]
    assert [x.text.split()[0] for x in found[8:]] == ["no", "no", "not", "not"]  # two are lost, and the rest not called


def test_calls_that_are_open_end_when_all_are_cancelled():
    ended = []

    async def waits(sample):
        try:
            await asyncio.sleep(0 if sample.prompt == "value" else 600)
        finally:
            ended.append(sample.prompt)
        return 1.0

    async def run():
        found = {}
        calls = CoroutineCalls(waits, Mode("sample", True, 600.0, 600.0, 2), found.__setitem__)
        for number, prompt in enumerate(["value", "first", "second", "never begun"]):
            calls.add(number, Sample(prompt, "", None, "", {}, (), (), "stop"))
        for _ in range(10):
            await asyncio.sleep(0)
        await calls.cancel()
        return found

    found = asyncio.run(run())
    assert sorted(ended) == ["first", "second", "value"]
    assert {number: outcome.kind for number, outcome in found.items()} == {0: "value"}


def test_an_error_of_who_hears_of_outcomes_ends_the_wait_at_once():
    """An earlier call that hangs is not waited for."""

    def heard(number, outcome):
        raise BrokenPipeError("nobody hears")

    async def run():
        calls = CoroutineCalls(does, Mode("sample", True, 600.0, 600.0, 2), heard)
        for number, prompt in enumerate(["hangs", "value"]):
            calls.add(number, Sample(prompt, "", None, "", {}, (), (), "stop"))
        with pytest.raises(BrokenPipeError):
            await asyncio.wait_for(calls.done(), 60.0)
        await calls.cancel()

    asyncio.run(run())


def test_a_call_with_a_shorter_limit_is_looked_after_before_one_that_has_longer(monkeypatch):
    """The timer waits for the longer one's end, 400 seconds off, until the shorter one comes."""
    monkeypatch.setattr(calls, "_LOOK", 1000.0)
    outcomes: dict[int, str] = {}

    async def main():
        end = asyncio.Event()

        async def waits(sample):
            await end.wait()
            return 1.0

        mode = Mode("sample", True, 400.0, 600.0, 2)
        open_calls = CoroutineCalls(waits, mode, lambda number, outcome: outcomes.update({number: outcome.kind}))
        open_calls.add(0, Sample("", "", None, "", {}, (), (), "stop"))
        await asyncio.sleep(0)
        open_calls._patience.time_limit = 0.01
        open_calls.add(1, Sample("", "", None, "", {}, (), (), "stop"))
        for _ in range(3000):
            if outcomes:
                break
            await asyncio.sleep(0.01)
        end.set()
        await open_calls.done()

    asyncio.run(main())
    assert list(outcomes.items()) == [(1, "timeout"), (0, "value")]
