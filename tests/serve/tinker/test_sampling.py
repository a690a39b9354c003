"""Adapters in the engine of their base: given to it when they are sampled from, and let go of by their last use."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from functools import cache
from typing import ClassVar

import attrs
import pytest
import tinker
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types

from fppo.rollout.requests import FinishedRequest, QueueFull
from fppo.serve.loop import ServerStopped
from fppo.serve.tinker.decode import TinkerBounds
from fppo.serve.tinker.futures import FailedRequest, Payload
from fppo.serve.tinker.runs import Adapters, create_run
from fppo.serve.tinker.samples import sample_request, sample_work
from fppo.serve.tinker.sampling import SamplerEngines
from fppo.serve.tinker.snapshots import SampledWeights
from tests.serve.tinker.served import KEY, base, served
from tests.serve.tinker.test_client import train
from tests.serve.world import until


class Noting:
    """An engine's loop that notes what it gets, and refuses an adapter called "odd"."""

    def __init__(self):
        self.held, self.asked, self.cancelled, self.closed = {}, {}, [], False

    def put(self, name, adapter, version=0):
        result = Future()
        if name == "odd":
            result.set_exception(ValueError("it cannot run beside others"))
        else:
            self.held[name] = version
            result.set_result(None)
        return result

    def drop(self, name):
        del self.held[name]
        result = Future()
        result.set_result(None)
        return result

    def submit(self, request, receive, *, along):
        assert not along
        self.asked[request.name] = (request, receive)

    def cancel(self, name):
        self.cancelled.append(name)


@cache
def adapted():
    return create_run(base().base, Adapters(rank=2, seed=0))


def weights_of(name, version):
    run = adapted()
    return SampledWeights(name=name, base="tiny", model=run.model, params=run.state.params, version=version)


def work_of(name, count, *, record=False):
    body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}, "sampling_params": {"max_tokens": 2}}
    body |= {"num_samples": count, "record_stability_info": record}
    return sample_work(sample_request(json.dumps(body).encode()), name, rules=base().rules, bounds=TinkerBounds())


def finished(name):
    one = torch.zeros(1)
    how = {"log_probs": one, "sampling_log_probs": one, "versions": one.int(), "end": "stop", "fed": 0}
    return FinishedRequest(name=name, tokens=torch.tensor([int(name.rpartition(":")[2]) + 3]), **how)


STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "newer", "end", "leave", "forget"]), st.sampled_from("abcd")), max_size=12
)
USED = [(step, name) for name in "abac" for step in ("ask", "end")]  # the first is used again before a third comes


@settings(max_examples=20)
@given(STEPS)
def test_adapters_are_held_by_their_last_use_while_somebody_draws_by_them(steps):
    async def play():
        loop, recorded = Noting(), []
        engines = SamplerEngines({"tiny": loop}, {}, max_adapters=2)  # pyright: ignore[reportArgumentType]
        versions, held, busy = dict.fromkeys("abcd", 0), {}, []
        for number, (step, name) in enumerate([*USED, *steps]):
            if step in ("ask", "newer"):
                versions[name] += step == "newer"
                own, record = f"s:{number}", bool(number % 2)
                work = work_of(own, 2, record=record)
                task = asyncio.create_task(
                    engines.sample(
                        own, work, weights_of(name, versions[name]), owner="me", record=lambda *x: recorded.append(x)
                    )
                )
                await until(lambda own=own: f"{own}:1" in loop.asked)
                held.pop(name, None)
                held[name] = versions[name]
                idle = [each for each in held if each != name and each not in {of for of, *_ in busy}]
                for each in idle[: max(0, len(held) - 2)]:
                    del held[each]
                busy.append((name, own, task, record))
                requests = [loop.asked[f"{own}:{row}"][0] for row in range(2)]
                assert [(each.adapter, each.owner, each.row) for each in requests] == [(name, "me", 0), (name, "me", 1)]
            elif step == "end" and busy:
                _, own, task, record = busy.pop(0)
                before = len(recorded)
                for row in (1, 0):  # in whatever order they end
                    loop.asked[f"{own}:{row}"][1](finished(f"{own}:{row}"))
                assert isinstance(await task, Payload)
                assert len(recorded) == before + record
                if record:
                    assert [x.tokens.tolist() for x in recorded[-1][1]] == [[3], [4]]
            elif step == "leave" and busy:
                _, own, task, _ = busy.pop()
                before = len(loop.cancelled)
                engines.cancel(own)
                assert await task == FailedRequest("the request was cancelled")
                assert sorted(loop.cancelled[before:]) == [f"{own}:0", f"{own}:1"]
            elif step == "forget":
                await engines.forget([name])
                if name not in {of for of, *_ in busy}:
                    held.pop(name, None)
            assert loop.held == held
        for _, own, *_ in busy:
            engines.cancel(own)
        await asyncio.gather(*(task for _, _, task, _ in busy))

    asyncio.run(play())


class OwnLoop(Noting):
    """The loop of an engine that is opened for some weights."""

    opened: ClassVar[list[OwnLoop]] = []

    def __init__(self, engine, params, *, version):
        super().__init__()
        self.engine, self.params, self.version, self.updates, self.started = engine, params, version, [], False
        OwnLoop.opened.append(self)

    def start(self):
        self.started = True
        return self

    def update(self, params, version):
        self.updates.append((params, version))

    def stop(self):
        self.closed = True


OWN = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "newer", "end", "forget"]), st.sampled_from(["a", "b", "c", "odd"])),
    max_size=12,
)


@settings(max_examples=20)
@given(OWN)
def test_weights_that_do_not_run_beside_others_have_engines_by_their_last_use(steps):
    """Whole weights, and adapters that are refused; at most two are open, as far as nobody draws by them."""
    opened = []

    async def play():
        base_loop, versions, held, busy = Noting(), dict.fromkeys(("a", "b", "c", "odd"), 0), {}, []
        inner = base().engine
        engines = SamplerEngines({"tiny": base_loop}, {"tiny": inner}, max_engines=2)  # pyright: ignore[reportArgumentType]
        params = {}
        for number, (step, name) in enumerate(steps):
            if step in ("ask", "newer"):
                versions[name] += step == "newer"
                weights = weights_of(name, versions[name])
                if name != "odd":
                    weights = attrs.evolve(weights, model=base().base.model, params={"x": versions[name]})
                own = f"s:{number}"
                task = asyncio.create_task(
                    engines.sample(own, work_of(own, 1), weights, owner="me", record=lambda *x: None)
                )
                await until(lambda own=own: any(f"{own}:0" in loop.asked for loop in [base_loop, *opened]))
                (loop,) = [each for each in [base_loop, *opened] if f"{own}:0" in each.asked]
                assert loop is not base_loop
                assert loop.asked[f"{own}:0"][0].adapter is None
                assert loop.started
                assert loop.engine == attrs.evolve(inner, model=weights.model)
                if name in held:
                    assert loop is held[name]
                    if params[name] != versions[name]:
                        assert loop.updates[-1] == (weights.params, versions[name])
                else:
                    assert loop is opened[-1]
                    assert (loop.params, loop.version) == (weights.params, versions[name])
                    assert loop.updates == []
                assert loop.version == versions[name]
                params[name] = versions[name]
                held.pop(name, None)
                held[name] = loop
                idle = [each for each in held if each != name and each not in {of for of, *_ in busy}]
                for each in idle[: max(0, len(held) - 2)]:
                    assert held.pop(each).closed
                busy.append((name, own, task, loop))
            elif step == "end" and busy:
                _, own, task, loop = busy.pop(0)
                loop.asked[f"{own}:0"][1](finished(f"{own}:0"))
                assert isinstance(await task, Payload)
            elif step == "forget":
                await engines.forget([name])
                if name in held and name not in {of for of, *_ in busy}:
                    assert held.pop(name).closed
            assert not any(loop.closed for loop in held.values())
        for _, own, *_ in busy:
            engines.cancel(own)
        await asyncio.gather(*(task for _, _, task, _ in busy))
        engines.close()
        assert all(loop.closed for loop in opened)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fppo.serve.tinker.sampling.EngineLoop", OwnLoop)
        patch.setattr(OwnLoop, "opened", opened)
        asyncio.run(play())


@pytest.mark.slow
def test_a_session_that_ends_leaves_nothing_of_its_samplers(tmp_path):
    """Ends of samples, adapters in a base's engine, and engines of whole models go with it; another's stay."""
    with served(tmp_path) as host:
        samplers, sessions = {}, []
        for number in range(2):
            service = tinker.ServiceClient(base_url=host.url, api_key=KEY)
            for rank in (2, 0):
                trainer = service.create_lora_training_client("tiny", rank=rank, seed=0).result()
                train(trainer, [0])
                sampler = trainer.save_weights_and_get_sampling_client().result()
                sampler.sample(types.ModelInput.from_ints([3]), 1, types.SamplingParams(max_tokens=1)).result()
                samplers[number, rank] = sampler._sampling_session_id
            sessions.append(service)
        engines, ends = host.service._engines, host.service.completions._ended
        assert {*engines._bases["tiny"].adapters} == {samplers[0, 2], samplers[1, 2]}
        assert {*engines._own} == {samplers[0, 0], samplers[1, 0]}
        assert {target[0] for target in ends} == {*samplers.values()}
        sessions[0].close("success").result()
        assert {*engines._bases["tiny"].adapters} == {samplers[1, 2]}
        assert {*engines._own} == {samplers[1, 0]}
        assert {target[0] for target in ends} == {samplers[1, 2], samplers[1, 0]}
        sessions[1].close("success").result()


def test_a_base_is_sampled_from_by_its_own_engine():
    async def play():
        loops = {"tiny": Noting(), "second": Noting()}
        engines = SamplerEngines(loops, {})  # pyright: ignore[reportArgumentType]
        for name, loop in loops.items():
            task = asyncio.create_task(engines.sample(name, work_of(name, 1), name, owner="me", record=print))
            await until(lambda name=name, loop=loop: f"{name}:0" in loop.asked)
            request, receive = loop.asked[f"{name}:0"]
            assert request.adapter is None
            receive(finished(f"{name}:0"))
            assert isinstance(await task, Payload)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("event", "category", "error"),
    [
        (ValueError("too long"), "user", "too long"),
        (QueueFull("9 wait"), "server", "9 wait; try again later"),
        (ServerStopped("the server is stopping"), "server", "the server is stopping"),
        (RuntimeError("secret"), "server", "the engine failed: RuntimeError"),
    ],
)
def test_what_goes_wrong_in_an_engine_is_said_by_whose_fault_it_is(event, category, error):
    async def play():
        loop = Noting()
        engines = SamplerEngines({"tiny": loop}, {})  # pyright: ignore[reportArgumentType]
        task = asyncio.create_task(engines.sample("s", work_of("s", 2), "tiny", owner="me", record=lambda *_: None))
        await until(lambda: "s:1" in loop.asked)
        for row in (0, 1):
            loop.asked[f"s:{row}"][1](event)
        assert await task == FailedRequest(error, category)
        assert sorted(loop.cancelled) == ["s:0", "s:1"]

    asyncio.run(asyncio.wait_for(play(), 10))
