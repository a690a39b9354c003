"""Sessions, samplers, losses and recorded samples of a server, and of the next one, against dictionaries by hand."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb

from fppo.rollout.requests import FinishedRequest
from fppo.rollout.scores import DrawnScores, TopTokens
from fppo.serve.refusal import Refusal
from fppo.serve.tinker.decode import TinkerBounds
from fppo.serve.tinker.futures import Completions, FailedRequest, Payload
from fppo.serve.tinker.records import SampleRecords
from fppo.serve.tinker.sessions import ClientSession, Registry, Sampler, StoredLoss, owner_of
from tests.serve.tinker.test_futures import Clock
from tests.serve.tinker.test_sampling import work_of

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["begin", "sampler", "forgotten", "loss", "join", "join", "finish", "finish", "look", "wait", "restart"]
        ),
        st.sampled_from("ab"),
        st.sampled_from(["me", "me", "you"]),
        st.integers(0, 9),
    ),
    min_size=10,
    max_size=25,
)
BEGUN = [("begin", "a", "me", 0), ("begin", "b", "me", 1), ("sampler", "a", "me", 1)]


@settings(max_examples=20)
@given(STEPS)
def test_a_registry_holds_what_came_and_the_next_server_what_is_to_be_kept(tmp_path_factory, steps):
    clock, path = Clock(), tmp_path_factory.mktemp("registry") / "server.log"
    registry = Registry(path, clock)
    sessions, samplers, kept, losses, joined, seen = {}, {}, {}, {}, {}, {}
    for step, name, owner, number in [*BEGUN, *steps]:
        own = sessions.get(name)
        if step == "begin" and own is None:
            more = {"tags": ("t",), "metadata": {"x": "y"}, "display_name": f"{number}"}
            sessions[name] = ClientSession(name=name, owner=owner, created=clock.now, **more)
            registry.add_session(sessions[name])
        elif step in ("sampler", "forgotten"):
            sampler = Sampler(name=f"{name}:sample:{number}", owner=owner, base="tiny", weights="base", run="r")
            registry.add_sampler(sampler, keep=step == "sampler")
            samplers[sampler.name] = sampler
            kept |= {sampler.name: sampler} if step == "sampler" else {}
        elif step == "loss":
            loss = StoredLoss(name=f"{name}:loss:{number}", session=name, owner=owner, body="{}")
            registry.add_loss(loss)
            losses[loss.name] = loss
        elif step == "join" and samplers:
            sampler = samplers[sorted(samplers)[number % len(samplers)]]
            joined[sampler.name] = joined.get(sampler.name, 0) + 1
            assert registry.join(sampler) == joined[sampler.name]
        elif step == "finish" and own is not None and own.owner == owner:
            first = own.finished is None
            assert registry.finish(name, owner, f"r{number}") == first
            if first:
                sessions[name] = ClientSession(
                    **{field: getattr(own, field) for field in ("name", "owner", "created", "tags", "metadata")},
                    display_name=own.display_name,
                    finished=f"r{number}",
                )
        elif step == "look" and own is not None and own.owner == owner and own.finished is None:
            assert registry.session(name, owner) == own
            seen[name] = clock.now
        elif step == "wait":
            clock.now += number
            silent = registry.silent(5.0)
            for each in sessions:
                seen.setdefault(each, clock.now)
            expected = [x for x in sessions.values() if x.finished is None and clock.now - seen[x.name] > 5]
            assert silent == expected
        elif step == "restart":
            registry.close()
            registry, seen, samplers = Registry(path, clock), {}, dict(kept)
        for each in ("me", "you"):
            mine = [x for x in sessions.values() if x.owner == each]
            assert registry.sessions(each) == sorted(mine, key=lambda x: (-x.created, x.name))
            for key, sampler in samplers.items():
                check(partial(registry.sampler, key, each), sampler, sampler.owner == each, 404)
            for key in "ab":
                session = sessions.get(key)
                check(
                    partial(registry.any_session, key, each),
                    session,
                    session is not None and session.owner == each,
                    404,
                )
                assert registry.has_finished(key) == (session is None or session.finished is not None)
                if session is not None and session.owner == each and session.finished is not None:
                    check(partial(registry.session, key, each), None, False, 410)
        for key in "ab":
            inside = {x for x in samplers if x.startswith(f"{key}:")}
            assert {x.name for x in registry.samplers_of(key)} == inside
            assert all(registry.has_sampler(x) for x in inside)
            assert not registry.has_sampler(key)
        assert {key: registry.loss(key) for key in losses} == losses
        assert registry.loss("nothing") is None
    registry.close()


def check(find, expected, may, status):
    if may:
        assert find() == expected
        return
    with pytest.raises(Refusal) as raised:
        find()
    assert raised.value.status == status


def test_owners_are_told_apart_and_no_key_is_written():
    assert len({owner_of(key) for key in ("a", "b", "a ")}) == 3
    assert "secret" not in owner_of("secret")
    assert owner_of("a") == owner_of("a")


ENDS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "look", "drop"]), st.sampled_from("ab"), st.integers(0, 1), st.booleans()),
    max_size=25,
)


@settings(max_examples=60)
@given(ENDS)
def test_ends_are_told_behind_a_cursor_and_once_passed_are_gone(steps):
    async def play():
        ends, held, cursor, count = Completions(100, max_held=3), {}, 100, 0
        cursors = {}
        for step, session, clone, failed in steps:
            target = session, clone
            if step == "add":
                count += 1
                ends.add(target, f"r{count}", FailedRequest("no") if failed else Payload(b"x" * count))
                held.setdefault(target, []).append((100 + count, f"r{count}", None if failed else count))
                del held[target][:-3]
            elif step == "look":
                cursor = cursors.get(target, 100)
                found, after = await ends.after(target, cursor, 0.0)
                expected = [each for each in held.get(target, []) if each[0] > cursor]
                assert [tuple(each) for each in found] == expected
                assert after == (expected[-1][0] if expected else cursor)
                again, _ = await ends.after(target, cursor, 0.0)
                assert again == found  # a client may ask once more
                cursors[target] = after if failed else cursor
                held[target] = expected
            else:
                ends.drop(session)
                held = {key: each for key, each in held.items() if key[0] != session}

    asyncio.run(play())


def drawn(name, count, *, scored=False):
    numbers = -torch.arange(1.0, count + 1)
    scores = DrawnScores(numbers * 2, TopTokens(torch.zeros(count, 1).long(), torch.zeros(count, 1)))
    return FinishedRequest(
        name=name,
        tokens=torch.arange(count) + 3,
        log_probs=numbers,
        sampling_log_probs=numbers,
        versions=torch.zeros(count, dtype=torch.int32),
        end="stop",
        fed=0,
        drawn_scores=scores if scored else None,
    )


def resolved(records, name, count):
    """The log-probs that a pass gets of a sample and the prompt before it; None if it is not recorded."""
    tokens = np.array([4, *range(3, 3 + count)])
    targets = pb.Tensor(dtype=pb.DTYPE_INT64, shape=[count + 1], dense=tokens.tobytes())
    datum = pb.Datum(loss_fn_inputs={"target_tokens": targets})
    datum.loss_fn_input_spans.add(prompt_tokens={"sequence_id": name, "offset": 1, "length": 1})
    datum.loss_fn_input_spans.add(sampled_tokens={"sequence_id": name, "offset": 0, "length": count})
    message = pb.ForwardBackwardRequest(data=[datum])
    try:
        records.resolve(message, "s", TinkerBounds())
    except Refusal:
        return None
    return np.frombuffer(message.data[0].loss_fn_inputs["logprobs"].dense, np.float32)[1:].tolist()


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=8))
def test_the_newest_samples_are_recorded_up_to_so_many_tokens(samples):
    beside = 128  # what a record counts as beside its tokens
    records, held = SampleRecords(max_tokens=3 * beside + 12), {}
    for number, (count, scored) in enumerate(samples):
        work = work_of("s:1", 1)
        records.add(work, [drawn(f"s:1:{number}", count, scored=scored)])
        held[f"s:1:{number}"] = count
        while sum(2 + x + beside for x in held.values()) > 3 * beside + 12:  # a prompt of 2 tokens each
            del held[next(iter(held))]
    for number, (count, scored) in enumerate(samples):
        log_probs = [-x * (2.0 if scored else 1.0) for x in range(1, count + 1)]
        assert resolved(records, f"s:1:{number}", count) == (log_probs if f"s:1:{number}" in held else None)


def test_samplers_are_of_the_session_in_their_names(tmp_path):
    registry = Registry(tmp_path / "server.log", Clock())
    for session in ("abcd1", "abcd12", "abcd2"):
        registry.add_sampler(Sampler(name=f"{session}:sample:1", owner="me", base="tiny", weights="base"))
    assert [each.name for each in registry.samplers_of("abcd1")] == ["abcd1:sample:1"]
    registry.close()
