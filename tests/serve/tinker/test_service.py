"""Requests that a service takes in or refuses, without a server around it and before anything is done."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from fppo.rollout.engine import Sampling
from fppo.serve.tinker import decode, routes, samples
from fppo.serve.tinker.checkpoints import CheckpointMeta
from fppo.serve.tinker.decode import (
    CreateVerb,
    LoadVerb,
    PassVerb,
    RefusedVerb,
    SaveVerb,
    SnapshotVerb,
    StepVerb,
    TinkerBounds,
)
from fppo.serve.tinker.futures import FailedRequest, Payload, Refusal
from fppo.serve.tinker.guard import OWNER
from fppo.serve.tinker.journal import JournalRecord, read
from fppo.serve.tinker.runs import Adapters, StepParams
from fppo.serve.tinker.service import TinkerService
from fppo.serve.tinker.sessions import StoredLoss
from tests.serve.tinker.served import SIZE, base
from tests.serve.tinker.test_futures import Clock
from tests.serve.tinker.test_restart import passed

BOUNDS = TinkerBounds(open_requests=12, open_bytes=100_000, samples=3)


class Held:
    """A service whose worker does nothing, with a session of "me"."""

    def __init__(self, root):
        self.clock = Clock()
        self.bases = {"tiny": base(), "second": base("second", 1)}
        self.service = TinkerService(root, self.bases, bounds=BOUNDS, clock=self.clock)
        self.session = self.begun()

    def begun(self, owner="me"):
        given = {"tags": ["a"], "user_metadata": {"n": 1}, "sdk_version": "0", "display_name": "d" * 600}
        return self.service.create_session(owner, decode.of_type(types.CreateSessionRequest, given))

    def create(self, number=0, owner="me", **changes):
        body = {"session_id": self.session, "model_seq_id": number, "base_model": "tiny"}
        given = decode.of_type(types.CreateModelRequest, {**body, "lora_config": {"rank": 2, "seed": 1}, **changes})
        return asyncio.run(self.service.create_run(owner, given))

    def load(self, number, path, **changes):
        body = {"session_id": self.session, "model_seq_id": number, "path": path, "optimizer": False}
        given = decode.of_type(types.LoadWeightsRequest, {**body, **changes})
        return asyncio.run(self.service.create_run_from("me", given))

    def accept(self, run, number, kind, body, owner="me"):
        whole = body if isinstance(body, bytes) else json.dumps({"model_id": run, "seq_id": number, **body}).encode()
        return asyncio.run(self.service.accept(owner, run, number, kind, whole))

    def sampler(self, number, **changes):
        body = {"session_id": self.session, "sampling_session_seq_id": number, **changes}
        return self.service.create_sampler("me", decode.of_type(types.CreateSamplingSessionRequest, body))

    def todo(self, run):
        return self.service.worker._runs[run].todo

    def saved(self, run, kind, name, **changes):
        meta = CheckpointMeta(
            run=run,
            kind=kind,
            name=name,
            owner="me",
            base="second",
            adapters=Adapters(rank=3, seed=4),
            optimizer="muon",
            number=1,
            created=self.clock.now,
            data="data-1",
        )
        meta = attrs.evolve(meta, **changes)
        self.service.checkpoints.data(meta).mkdir(parents=True)
        return self.service.checkpoints.commit(meta).path


@pytest.fixture
def held(tmp_path):
    made = Held(tmp_path)
    yield made
    made.service.stop()


def refused(call, text, status=400):
    with pytest.raises(Refusal, match=text) as raised:
        call()
    assert raised.value.status == status


def test_a_session_is_noted_as_its_client_describes_it(held):
    found = held.service.registry.any_session(held.session, "me")
    assert (found.tags, found.metadata, len(found.display_name)) == (("a",), {"n": "1"}, 500)
    assert found.created == held.clock.now
    refused(lambda: held.service.registry.any_session(held.session, "you"), "no session", 404)


def test_a_run_is_created_once(held):
    name, run = held.create(7, user_metadata={"x": "y"}, optimizer_config={"type": "muon"})
    assert (name, run) == (f"{held.session}:train:7:0", f"{held.session}:train:7")
    info = held.service.runs.info(run, "me")
    expected = {"name": run, "session": held.session, "owner": "me", "base": "tiny", "optimizer": "muon"}
    assert {field: getattr(info, field) for field in expected} == expected
    assert (info.adapters, info.metadata, info.created) == (Adapters(rank=2, seed=1), {"x": "y"}, held.clock.now)
    assert held.todo(run) == {0: CreateVerb()}
    held.clock.now += 5
    assert held.create(7, user_metadata={"x": "y"}, optimizer_config={"type": "muon"}) == (name, run)
    for changes in ({}, {"base_model": "second"}, {"user_metadata": {"x": "z"}, "optimizer_config": {"type": "muon"}}):
        refused(lambda changes=changes: held.create(7, **changes), "is another run already")
    assert held.todo(run) == {0: CreateVerb()}
    held.service.futures.settle(name, Payload(b""))
    held.service.futures.forget([name])
    refused(lambda: held.create(7), "is no longer held", 410)
    assert held.service.futures.state(name, "me") is None
    refused(lambda: held.create(8, owner="you"), "no session", 404)
    refused(lambda: held.create(8, base_model="other"), "no model 'other'; there are tiny, second", 404)


def test_a_run_goes_on_from_a_checkpoint_of_another(held):
    _, run = held.create()
    whole, sampler = held.saved(run, "weights", "w"), held.saved(run, "sampler_weights", "s")
    files = held.saved(run, "external_weights", "e")
    cases = (
        (1, whole, {}, "second", "adamw", False),
        (2, whole, {"optimizer": True}, "second", "muon", True),
        (3, sampler, {"optimizer_config": {"type": "muon"}, "base_model": "tiny"}, "tiny", "muon", False),
    )
    for number, path, changes, of, optimizer, with_optimizer in cases:
        name, made = held.load(number, path, user_metadata={"k": "v"}, **changes)
        info = held.service.runs.info(made, "me")
        assert (name, info.session, info.base) == (f"{made}:0", held.session, of)
        assert (info.adapters, info.optimizer) == (Adapters(rank=3, seed=4), optimizer)
        assert (info.loaded, info.with_optimizer, info.metadata) == (path, with_optimizer, {"k": "v"})
    refused(lambda: held.load(4, files), "has no weights to train")
    refused(lambda: held.load(4, sampler, optimizer=True), "has no optimizer state")
    refused(lambda: held.load(4, whole, optimizer=True, optimizer_config={"type": "adamw"}), "leave one of them out")
    refused(lambda: held.load(4, whole + "x"), "there is no checkpoint", 404)
    refused(lambda: held.load(4, whole, base_model="other"), "no model", 404)


REQUESTS = [
    (
        "optim_step",
        {"adam_params": {"learning_rate": 0.5}},
        StepVerb(kind="adamw", params=StepParams(learning_rate=0.5)),
    ),
    (
        "save_weights",
        {"path": "x", "ttl_seconds": 3600, "overwrite": True, "user_metadata": {"a": "b"}},
        SaveVerb(kind="weights", name="x", seconds=3600, overwrite=True, metadata={"a": "b"}),
    ),
    (
        "save_weights_for_sampler",
        {"path": "x", "ttl_seconds": 4000, "user_metadata": {"a": "b"}},
        SaveVerb(kind="sampler_weights", name="x", seconds=4000, metadata={"a": "b"}),
    ),
    ("save_weights_for_sampler", {"sampling_session_seq_id": 5}, SnapshotVerb(session=5, inflight=False)),
    (
        "save_weights_for_sampler",
        {"sampling_session_seq_id": 6, "kind": "inflight"},
        SnapshotVerb(session=6, inflight=True),
    ),
    (
        "save_weights_external",
        {"path": "x", "ttl_seconds": 5000},
        SaveVerb(kind="external_weights", name="x", seconds=5000),
    ),
    ("load_weights", {"path": "tinker://y", "optimizer": True}, LoadVerb(path="tinker://y", optimizer=True)),
]


def test_requests_are_noted_for_good_and_wait_as_verbs(held):
    _, run = held.create()
    for number, (kind, body, verb) in enumerate(REQUESTS, start=1):
        assert held.accept(run, number, kind, body) == f"{run}:{number}"
        assert held.todo(run)[number] == verb
    last = len(REQUESTS) + 1
    held.accept(run, last, "pass", passed(last, 0)(run))
    verb = held.todo(run)[last]
    assert isinstance(verb, PassVerb)
    assert (len(verb.data), verb.loss, verb.backward) == (3, "importance_sampling", True)
    held.accept(run, last + 1, "optim_step", {"adam_params": {"beta1": 2.0}})
    assert held.todo(run)[last + 1].breaks is False
    held.accept(run, last + 2, "pass", b"\xff")
    assert held.todo(run)[last + 2].breaks is True
    assert held.service.runs.last_request(run) == held.clock.now
    records = read(held.service.runs._held[run].place / "journal.log")
    kinds = [kind for kind, *_ in REQUESTS]
    assert [(x.number, x.kind) for x in records] == [
        *enumerate([*kinds, "pass", "refused", "refused"], start=1),
    ]
    info = held.service.runs.info(run, "me")
    for record in records:  # the next server makes the same of them
        verb, again = held.todo(run)[record.number], held.service._verb_of_record(info, record)
        if isinstance(verb, PassVerb):
            assert [x.tokens.tolist() for x in again.data] == [x.tokens.tolist() for x in verb.data]
        else:
            assert again == verb


@pytest.mark.parametrize(
    ("kind", "body", "breaks"),
    [
        ("save_weights", b'{"model_id": "r", "seq_id": 9, "path": "x", "ttl_seconds": 1}', False),
        ("pass", pb.ForwardBackwardRequest(forward_only=True).SerializeToString(), False),
        ("pass", pb.ForwardBackwardRequest().SerializeToString(), True),
    ],
)
def test_what_is_refused_breaks_a_step_only_if_it_was_to_add_gradients(held, kind, body, breaks):
    """When it comes, and by the next server, with other bounds or other models."""
    _, run = held.create()
    held.accept(run, 9, kind, body)
    noted = held.service._verb_of_record(held.service.runs.info(run, "me"), JournalRecord(9, kind, body))
    for verb in (held.todo(run)[9], noted):
        assert isinstance(verb, RefusedVerb)
        assert verb.breaks is breaks


def test_a_number_that_came_before_is_the_same_request(held):
    _, run = held.create()
    name = held.accept(run, 3, "optim_step", {"adam_params": {}})
    assert held.accept(run, 3, "load_weights", {"path": "x", "optimizer": False}) == name
    assert isinstance(held.todo(run)[3], StepVerb)
    held.service.futures.settle(name, Payload(b""))
    held.service.futures.forget([name])
    refused(lambda: held.accept(run, 3, "optim_step", {"adam_params": {}}), "is no longer held", 410)
    assert held.service.futures.state(name, "me") is None
    refused(lambda: held.accept(run, 4, "optim_step", {"adam_params": {}}, "you"), "no training run", 404)
    for number in range(4, 15):
        held.accept(run, number, "optim_step", {"adam_params": {}})
    refused(lambda: held.accept(run, 15, "optim_step", {"adam_params": {}}), "at most 12 may", 429)
    assert held.service.futures.state(f"{run}:15", "me") is None
    assert 15 not in held.todo(run)
    asyncio.run(held.service.finish_session(held.session, "me", "success"))
    refused(lambda: held.accept(run, 16, "optim_step", {"adam_params": {}}), "has finished", 410)


def test_samplers_are_of_a_base_or_a_checkpoint(held):
    _, run = held.create()
    path, files = held.saved(run, "sampler_weights", "s"), held.saved(run, "external_weights", "e")
    one, other = held.sampler(1, base_model="tiny"), held.sampler(2, model_path=path)
    assert (one, other) == (f"{held.session}:sample:1", f"{held.session}:sample:2")
    found = [held.service.registry.sampler(name, "me") for name in (one, other)]
    assert [(x.base, x.weights, x.path) for x in found] == [("tiny", "base", None), ("second", "path", path)]
    assert held.sampler(1, base_model="second") == one  # it has been
    assert held.service.registry.sampler(one, "me").base == "tiny"
    assert held.sampler(3, model_path=path, base_model="second") == f"{held.session}:sample:3"
    refused(lambda: held.sampler(4, model_path=path, base_model="tiny"), "weights are of 'second'")
    refused(lambda: held.sampler(4, model_path=files), "files for other programs")
    refused(lambda: held.sampler(4), "give base_model or model_path")
    refused(lambda: held.sampler(4, base_model="x"), "no model", 404)


def sample_body(sampler, number, count, **changes):
    body = {"sampling_session_id": sampler, "seq_id": number, "num_samples": count}
    body |= {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [3]}]}, "sampling_params": {"max_tokens": 2}}
    return decode.of_type(types.SampleRequest, {**body, **changes})


def test_samples_have_names_and_what_is_wrong_with_them_ends_them(held):
    sampler = held.sampler(1, base_model="tiny")

    async def play():
        service, number = held.service, 5_000_000_002
        name, names = service.sample("me", sample_body(sampler, number, 9))
        assert name == f"{sampler}:{number}"
        assert names == [f"{name}:{i}" for i in range(3)]
        outcome = service.futures.state(name, "me").outcome
        assert isinstance(outcome, FailedRequest)
        assert "num_samples" in outcome.error
        found, _ = await service.completions.after((sampler, 5), 0, 0.0)
        assert [(each.name, each.size) for each in found] == [(name, None)]
        assert (await service.completions.after((sampler, 0), 0, 0.0))[0] == []
        assert service.sample("me", sample_body(sampler, number, 2)) == (name, [f"{name}:0", f"{name}:1"])
        assert service.knows(name, "me")
        assert not service.knows(name, "you")
        assert not service.knows("nobody:1", "me")
        for wrong in ({"seq_id": None}, {"sampling_session_id": None}):
            with pytest.raises(Refusal, match="give both"):
                service.sample("me", sample_body(sampler, 1, 1, **wrong))
        for owner in ("you",):
            with pytest.raises(Refusal, match="no sampling session"):
                service.sample(owner, sample_body(sampler, 1, 1))
        for i in range(13):
            service.futures.open(f"x{i}", "me")
        with pytest.raises(Refusal) as raised:
            service.sample("me", sample_body(sampler, 8, 1))
        assert raised.value.status == 429
        assert service.futures.state(f"{sampler}:8", "me") is None

    asyncio.run(play())


def test_what_is_old_is_forgotten_and_silent_sessions_end(held):
    _, run = held.create()
    other = held.begun("you")
    service = held.service
    service.futures.open("x", "me")
    service.futures.settle("x", Payload(b""))
    asyncio.run(service.sweep())
    held.clock.now += 3 * 24 * 3600
    service.registry.session(other, "you")
    held.clock.now += 5 * 24 * 3600
    asyncio.run(service.sweep())
    assert service.futures.state("x", "me") is None
    assert service.registry.any_session(held.session, "me").finished == "interrupted"
    assert service.registry.any_session(other, "you").finished is None
    assert service.runs.has(run)


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "rank": st.sampled_from([0, 1, 4096]),
        "seed": st.sampled_from([None, 0, 7, -1]),
        "train_attn": st.booleans(),
        "train_mlp": st.booleans(),
        "train_unembed": st.booleans(),
    },
)


@given(VALUES)
def test_adapters_are_what_a_client_says(given_values):
    config = decode.of_type(types.LoraConfig, {"rank": 4, **given_values})
    kinds = [given_values.get(name, True) for name in ("train_attn", "train_mlp", "train_unembed")]
    if not any(kinds):
        with pytest.raises(Refusal, match="nothing would be trained"):
            decode.adapters_of(config, 99)
        return
    found, seed = decode.adapters_of(config, 99), given_values.get("seed")
    assert (found.attention, found.mlp, found.unembed) == tuple(kinds)
    assert found.rank == given_values.get("rank", 4)
    assert found.seed == (99 if seed is None else seed % 2**64)
    assert found.alpha == Adapters(rank=1).alpha
    assert decode.adapters_of(None, 5) == Adapters(rank=0, seed=5)


NUMBERS = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")


@given(st.dictionaries(st.sampled_from(NUMBERS), st.sampled_from([0.25, 0.5, 0.75]), max_size=6))
def test_steps_have_the_numbers_that_a_client_says(numbers):
    defaults = types.AdamParams().model_dump()
    found = decode.step_verb({"model_id": "r", "seq_id": 1, "adam_params": numbers})
    assert found.kind == "adamw"
    assert attrs.asdict(found.params) == {name: numbers.get(name, defaults[name]) for name in NUMBERS}
    clipped = decode.step_verb({"model_id": "r", "seq_id": 1, "adam_params": {**numbers, "grad_clip_norm": -1.0}})
    assert clipped.params.grad_clip_norm == 0.0


def test_a_request_that_was_refused_says_what_it_breaks():
    assert RefusedVerb(error="x").breaks


def test_runs_without_a_seed_begin_with_adapters_of_their_own(held):
    seeds = []
    for number in range(3):
        _, run = held.create(number, lora_config={"rank": 2, "seed": None})
        seeds.append(held.service.runs.info(run, "me").adapters.seed)
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(
    ("bounds", "limit", "vocabulary", "says"),
    [
        ({"datums": 3, "tokens": 18, "numbers": 6}, 6, SIZE, None),
        ({"datums": 2}, 6, SIZE, "data: 3 datums; give 1 to 2"),
        ({"tokens": 17}, 6, SIZE, "data: over 17 tokens"),
        ({"numbers": 5}, 6, SIZE, r"data\[0\]\..*: shape \[6\]: .* at most 5 numbers"),
        ({}, 5, SIZE, r"data\[0\]\.model_input: 6 tokens; the model takes 1 to 5"),
        ({}, 6, 3, "none of the model's 3"),
    ],
)
def test_a_pass_is_taken_up_to_its_bounds(bounds, limit, vocabulary, says):
    message = decode.pass_message(passed(1, 0)("r"))
    take = lambda: decode.pass_verb(message, bounds=TinkerBounds(**bounds), vocabulary=vocabulary, limit=limit)  # noqa: E731
    if says is None:
        assert [len(datum.tokens) for datum in take().data] == [6, 6, 6]
        assert take().backward
        message.forward_only = True
        assert not take().backward
    else:
        refused(take, says)


ASKED = {"samples": 3, "stops": 2, "drawn_top": 4, "scored": 12}


@pytest.mark.parametrize(
    ("taken", "refused_ones"),
    [
        ({"num_samples": 3}, ({"num_samples": 4}, {"num_samples": 0})),
        ({"stop": [3, 4]}, ({"stop": [3, 4, 5]},)),
        ({"prompt_logprobs_last_n": 3}, ({"prompt_logprobs_last_n": 4}, {"prompt_logprobs_last_n": 0})),
        ({"topk_prompt_logprobs": 3}, ({"topk_prompt_logprobs": 4},)),
        ({"prompt_alt_tokens_k": 3}, ({"prompt_alt_tokens_k": 4},)),
        ({"topk_sample_logprobs": 4}, ({"topk_sample_logprobs": 5},)),
        ({"max_tokens": 28}, ({"max_tokens": 29}, {"max_tokens": 0})),
        ({"tokens": [3] * 31, "max_tokens": 1}, ({"tokens": [3] * 32, "max_tokens": 1},)),
    ],
)
def test_samples_are_drawn_up_to_their_bounds(taken, refused_ones):
    def work(tokens=(3, 4, 5, 6), stop=None, max_tokens=2, **changes):
        params = {"max_tokens": max_tokens, "stop": stop}
        body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}, "sampling_params": params}
        body |= {"num_samples": 1, "prompt_logprobs": True, **changes}
        request = samples.sample_request(json.dumps(body).encode())
        return samples.sample_work(request, "a", rules=base().rules, bounds=TinkerBounds(**ASKED))

    work(**taken)
    for changes in refused_ones:
        refused(lambda changes=changes: work(**changes), "give|at most")


def test_samples_without_a_seed_are_draws_of_their_own_request():
    def key(name, seed=None):
        body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [3]}]}, "num_samples": 1}
        request = samples.sample_request(
            json.dumps({**body, "sampling_params": {"max_tokens": 1, "seed": seed}}).encode()
        )
        return samples.sample_work(request, name, rules=base().rules, bounds=TinkerBounds()).key

    assert key("a") == key("a") != key("b")
    assert key("a", 1) == key("b", 1) != key("a", 2)


def test_a_custom_loss_is_its_sessions(held):
    info = held.service.runs.info(held.create()[1], "me")
    for session in (held.session, "other"):
        held.service.registry.add_loss(StoredLoss(name=f"{session}:loss:1", session=session, owner="me", body="{}"))
    verb = PassVerb(data=(), loss="custom", config={"loss_id": "other:loss:1"}, backward=True)
    refused(lambda: held.service._loss_of(info, verb), "the session has no such custom loss")
    own = attrs.evolve(verb, config={"loss_id": f"{held.session}:loss:1"})
    refused(lambda: held.service._loss_of(info, own), "Field required|required")


def test_samples_of_a_session_share_its_places_and_are_recorded_by_the_server(held):
    given = []

    class Engines:
        async def sample(self, *drawn, **how):
            given.append((drawn, how))
            return Payload(b"drawn")

    held.service._engines = Engines()
    sampler = held.service.registry.sampler(held.sampler(3, base_model="second"), "me")
    held.service.futures.open("a", "me")
    asyncio.run(held.service._sample("a", sampler, 2 * 10**9 + 1, "work"))
    held.service._engines = None
    assert given == [(("a", "work", "second"), {"owner": held.session, "record": held.service.records.add})]
    assert held.service.futures.state("a", "me").outcome == Payload(b"drawn")
    ends, _ = asyncio.run(held.service.completions.after((sampler.name, 2), 0, 0.0))
    assert [(each.name, each.size) for each in ends] == [("a", 5)]


def test_targets_of_a_prompt_are_as_many_as_their_shape_says():
    def targets(count):
        given = {"data": [3] * count, "dtype": "int64", "shape": [3, 2]}
        body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [3, 4, 5, 6]}]}, "num_samples": 1}
        body |= {"sampling_params": {"max_tokens": 1}, "target_prompt_logprobs": given}
        return samples.targets_of(samples.sample_request(json.dumps(body).encode()), 4, TinkerBounds())

    assert targets(6).tolist() == [[3, 3]] * 3
    refused(lambda: targets(5), r"shape \[3, 2\] with 5 numbers")


def test_results_are_read_by_their_owners_and_the_ends_of_a_copy_by_its_own_number(held, monkeypatch):
    monkeypatch.setattr(routes, "_POLL", 0.01)
    service, clock = held.service, held.clock
    name, _ = held.create()
    asked = lambda **given: types.FutureRetrieveRequest(request_id=given.pop("request_id", name), **given)  # noqa: E731
    answer = lambda given, owner="me": asyncio.run(routes._result(service, given, owner))  # noqa: E731
    assert json.loads(answer(asked()).body) == {"type": "try_again", "request_id": name, "queue_state": "active"}
    service.futures.settle(name, Payload(b"x" * (routes._INLINE + 1)))
    size = {"status": "complete_metadata", "response_payload_size": routes._INLINE + 1}
    assert json.loads(answer(asked(allow_metadata_only=True)).body) == size
    clock.now += 10 * 3600.0
    assert service.futures.sweep() == []  # its size is not the result
    assert len(answer(asked()).body) == routes._INLINE + 1
    refused(lambda: answer(asked(), "you"), "there is no such request", 404)
    clock.now += 601.0
    assert service.futures.sweep() == [name]
    refused(lambda: answer(asked()), "send the request again", 410)
    refused(lambda: answer(asked(request_id="x:train:1:0")), "there is no such request", 404)
    sampler = held.sampler(1, base_model="tiny")
    for number, of in enumerate(("own", "copy", "copy")):
        service.completions.add((sampler, int(of == "copy")), f"{of} {number}", Payload(b"xyz"))
    router = routes._sampling_router(service)
    (poll,) = (route.endpoint for route in router.routes if route.path == "/retrieve_futures")

    def ends(**given):
        target = {"sampling_session_id": sampler, "cloned_sampler_id": given.pop("copy")}
        body = json.dumps({"target": target, "timeout": 1e9, **given}).encode()

        async def whole():
            return body

        return json.loads(asyncio.run(poll(SimpleNamespace(body=whole, scope={OWNER: "me"}))).body)

    first = ends(copy=1)
    done = {"state": "finished", "response_payload_uncompressed_size": 3}
    assert first["completions"] == [{**done, "request_id": "copy 1"}, {**done, "request_id": "copy 2"}]
    assert ends(copy=1, prev_cursor=first["cursor"]) == {"completions": [], "cursor": first["cursor"]}
    assert [each["request_id"] for each in ends(copy=0)["completions"]] == ["own 0"]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {"stop_token_ids": (1,)}),
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.5}, {"temperature": 0.7, "top_k": 5, "top_p": 0.5}),
        ({"temperature": 0.0, "top_k": -1}, {"greedy": True, "temperature": 1.0}),
        ({"stop": [4, 6, 4], "top_p": 0.25}, {"stop_token_ids": (4, 6), "top_p": 0.25}),
        ({"stop": []}, {"stop_token_ids": ()}),
        ({"max_tokens": None}, {"max_tokens": 31}),
    ],
)
def test_draws_are_as_a_client_says(params, expected):
    body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [3]}]}, "num_samples": 1}
    body |= {"sampling_params": {"max_tokens": 2, **params}}
    request = samples.sample_request(json.dumps(body).encode())
    work = samples.sample_work(request, "a", rules=base().rules, bounds=TinkerBounds())
    assert work.sampling == Sampling(**{"max_tokens": 2, "stop_token_ids": (1,), **expected})
    assert work.scores.drawn_top == int("temperature" in params and params["temperature"] > 0)
