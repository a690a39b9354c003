"""Requests that a service takes in or refuses, without a server around it and before anything is done."""

from __future__ import annotations

import asyncio
import json

import attrs
import httpx2 as httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from fppo.serve.refusal import Refusal
from fppo.serve.tinker import decode, routes, samples
from fppo.serve.tinker.checkpoints import CheckpointMeta
from fppo.serve.tinker.decode import (
    CreateVerb,
    LaterVerb,
    LoadVerb,
    PassVerb,
    SaveVerb,
    SnapshotVerb,
    StepVerb,
    TinkerBounds,
)
from fppo.serve.tinker.futures import FailedRequest, Payload
from fppo.serve.tinker.journal import JournalRecord, read
from fppo.serve.tinker.runs import Adapters, StepParams
from fppo.serve.tinker.service import TinkerService
from fppo.serve.tinker.sessions import StoredLoss, owner_of
from tests.serve.tinker.served import SIZE, base
from tests.serve.tinker.test_futures import Clock
from tests.serve.tinker.test_restart import passed

ME, YOU = owner_of("me"), owner_of("you")
BOUNDS = TinkerBounds(open_requests=12, open_bytes=100_000, samples=3)


class Held:
    """A service whose worker does nothing, with a session of ME."""

    def __init__(self, root):
        self.root, self.clock = root, Clock()
        self.bases = {"tiny": base(), "second": base("second", 1)}
        self.service = TinkerService(root, self.bases, bounds=BOUNDS, clock=self.clock)
        self.session = self.begun()

    def begun(self, owner=ME):
        given = {"tags": ["a"], "user_metadata": {"n": 1}, "sdk_version": "0", "display_name": "d" * 600}
        return self.service.create_session(owner, decode.of_type(types.CreateSessionRequest, given))

    def create(self, number=0, owner=ME, **changes):
        body = {"session_id": self.session, "model_seq_id": number, "base_model": "tiny"}
        given = decode.of_type(types.CreateModelRequest, {**body, "lora_config": {"rank": 2, "seed": 1}, **changes})
        return asyncio.run(self.service.create_run(owner, given))

    def load(self, number, path, **changes):
        body = {"session_id": self.session, "model_seq_id": number, "path": path, "optimizer": False}
        given = decode.of_type(types.LoadWeightsRequest, {**body, **changes})
        return asyncio.run(self.service.create_run_from(ME, given))

    def accept(self, run, number, kind, body, owner=ME):
        whole = body if isinstance(body, bytes) else json.dumps({"model_id": run, "seq_id": number, **body}).encode()
        return asyncio.run(self.service.accept(owner, run, number, kind, whole))

    def sampler(self, number, **changes):
        body = {"session_id": self.session, "sampling_session_seq_id": number, **changes}
        return self.service.create_sampler(ME, decode.of_type(types.CreateSamplingSessionRequest, body))

    def post(self, path, key="me", **body):
        """The response to a request over HTTP."""
        transport = httpx.ASGITransport(routes.tinker_app(self.service, keys=("me", "you")))

        async def send():
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.post(f"/api/v1/{path}", json=body, headers={"x-api-key": key})

        return asyncio.run(send())

    def todo(self, run):
        return self.service.worker._runs[run].todo

    def saved(self, run, kind, name, **changes):
        meta = CheckpointMeta(
            run=run,
            kind=kind,
            name=name,
            owner=ME,
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
    found = held.service.registry.any_session(held.session, ME)
    assert (found.tags, found.metadata, len(found.display_name)) == (("a",), {"n": "1"}, 500)
    assert found.created == held.clock.now
    refused(lambda: held.service.registry.any_session(held.session, YOU), "no session", 404)


def test_a_run_is_created_once(held):
    name, run = held.create(7, user_metadata={"x": "y"}, optimizer_config={"type": "muon"})
    assert (name, run) == (f"{held.session}:train:7:0", f"{held.session}:train:7")
    info = held.service.runs.info(run, ME)
    expected = {"name": run, "session": held.session, "owner": ME, "base": "tiny", "optimizer": "muon"}
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
    assert held.service.futures.state(name, ME) is None
    refused(lambda: held.create(8, owner=YOU), "no session", 404)
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
        info = held.service.runs.info(made, ME)
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

STEP = StepVerb(kind="adamw", params=StepParams())


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
    records = read(held.root / "runs" / f"{held.session}.0" / "journal.log")
    kinds = [kind for kind, *_ in REQUESTS]
    assert [(x.number, x.kind) for x in records] == [
        *enumerate([*kinds, "pass", "refused", "refused"], start=1),
    ]
    info = held.service.runs.info(run, ME)
    for record in records:  # the next server makes the same of them
        if record.kind == "refused":
            continue
        verb, again = held.todo(run)[record.number], held.service.verb_of(info, record.kind, record.body)
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
    noted = LaterVerb(JournalRecord(9, kind, body))
    for number, verb in enumerate([CreateVerb(), held.todo(run)[9], STEP, noted, STEP]):
        outcome = held.service.runs.do(run, number, verb)
        if verb is STEP:
            assert outcome.error.startswith("no step was taken" if breaks else "optim_step without gradients")
        else:
            assert isinstance(outcome, Payload if number == 0 else FailedRequest)


def test_an_owner_has_room_for_so_many_bytes(held):
    _, run = held.create()
    refused(lambda: held.accept(run, 1, "pass", bytes(100_001)), "of 100,000 bytes: send it later", 429)
    assert held.service.futures.pending(ME).size == 0


def test_a_number_that_came_before_is_the_same_request(held):
    _, run = held.create()
    name = held.accept(run, 3, "optim_step", {"adam_params": {}})
    assert held.accept(run, 3, "load_weights", {"path": "x", "optimizer": False}) == name
    assert isinstance(held.todo(run)[3], StepVerb)
    held.service.futures.settle(name, Payload(b""))
    held.service.futures.forget([name])
    refused(lambda: held.accept(run, 3, "optim_step", {"adam_params": {}}), "is no longer held", 410)
    assert held.service.futures.state(name, ME) is None
    refused(lambda: held.accept(run, 4, "optim_step", {"adam_params": {}}, YOU), "no training run", 404)
    for number in range(4, 15):
        held.accept(run, number, "optim_step", {"adam_params": {}})
    refused(lambda: held.accept(run, 15, "optim_step", {"adam_params": {}}), "at most 12 may", 429)
    assert held.service.futures.state(f"{run}:15", ME) is None
    assert 15 not in held.todo(run)
    asyncio.run(held.service.finish_session(held.session, ME, "success"))
    refused(lambda: held.accept(run, 16, "optim_step", {"adam_params": {}}), "has finished", 410)


def test_samplers_are_of_a_base_or_a_checkpoint(held):
    _, run = held.create()
    path, files = held.saved(run, "sampler_weights", "s"), held.saved(run, "external_weights", "e")
    one, other = held.sampler(1, base_model="tiny"), held.sampler(2, model_path=path)
    assert (one, other) == (f"{held.session}:sample:1", f"{held.session}:sample:2")
    found = [held.service.registry.sampler(name, ME) for name in (one, other)]
    assert [(x.base, x.weights, x.path) for x in found] == [("tiny", "base", None), ("second", "path", path)]
    assert held.sampler(1, base_model="second") == one  # it has been
    assert held.service.registry.sampler(one, ME).base == "tiny"
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
        name, names = service.sample(ME, sample_body(sampler, number, 9))
        assert name == f"{sampler}:{number}"
        assert names == [f"{name}:{i}" for i in range(3)]
        outcome = service.futures.state(name, ME).outcome
        assert isinstance(outcome, FailedRequest)
        assert "num_samples" in outcome.error
        found, _ = await service.completions.after((sampler, 5), 0, 0.0)
        assert [(each.name, each.size) for each in found] == [(name, None)]
        assert (await service.completions.after((sampler, 0), 0, 0.0))[0] == []
        assert service.sample(ME, sample_body(sampler, number, 2)) == (name, [f"{name}:0", f"{name}:1"])
        assert service.knows(name, ME)
        assert not service.knows(name, YOU)
        assert not service.knows("nobody:1", ME)
        for wrong in ({"seq_id": None}, {"sampling_session_id": None}):
            with pytest.raises(Refusal, match="give both"):
                service.sample(ME, sample_body(sampler, 1, 1, **wrong))
        for owner in (YOU,):
            with pytest.raises(Refusal, match="no sampling session"):
                service.sample(owner, sample_body(sampler, 1, 1))
        for i in range(13):
            service.futures.open(f"x{i}", ME)
        with pytest.raises(Refusal) as raised:
            service.sample(ME, sample_body(sampler, 8, 1))
        assert raised.value.status == 429
        assert service.futures.state(f"{sampler}:8", ME) is None

    asyncio.run(play())


def test_what_is_old_is_forgotten_and_silent_sessions_end(held):
    _, run = held.create()
    other = held.begun(YOU)
    service = held.service
    service.futures.open("x", ME)
    service.futures.settle("x", Payload(b""))
    asyncio.run(service.sweep())
    held.clock.now += 3 * 24 * 3600
    service.registry.session(other, YOU)
    held.clock.now += 5 * 24 * 3600
    asyncio.run(service.sweep())
    assert service.futures.state("x", ME) is None
    assert service.registry.any_session(held.session, ME).finished == "interrupted"
    assert service.registry.any_session(other, YOU).finished is None
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


def test_runs_without_a_seed_begin_with_adapters_of_their_own(held):
    seeds = []
    for number in range(3):
        _, run = held.create(number, lora_config={"rank": 2, "seed": None})
        seeds.append(held.service.runs.info(run, ME).adapters.seed)
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


def test_a_custom_loss_is_its_sessions(held):
    _, run = held.create()
    for session in (held.session, "other"):
        held.service.registry.add_loss(StoredLoss(name=f"{session}:loss:1", session=session, owner=ME, body="{}"))
    for number, (session, text) in enumerate([("other", "has no such custom loss"), (held.session, "required")], 1):
        message = decode.pass_message(passed(number, 0)(run))
        message.loss_fn = "custom"
        message.loss_fn_config_v2["loss_id"].text = f"{session}:loss:1"
        held.accept(run, number, "pass", message.SerializeToString())
        assert text in held.todo(run)[number].error.lower()


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
    answer = lambda given=name, key="me", **how: held.post("retrieve_future", key, request_id=given, **how)  # noqa: E731
    assert answer().json() == {"type": "try_again", "request_id": name, "queue_state": "active"}
    service.futures.settle(name, Payload(b"x" * ((1 << 20) + 1)))
    size = {"status": "complete_metadata", "response_payload_size": (1 << 20) + 1}
    assert answer(allow_metadata_only=True).json() == size
    clock.now += 10 * 3600.0
    assert service.futures.sweep() == []  # its size is not the result
    assert len(answer().content) == (1 << 20) + 1
    assert (answer(key="you").status_code, "there is no such request" in answer(key="you").text) == (404, True)
    clock.now += 601.0
    assert service.futures.sweep() == [name]
    assert (answer().status_code, "send the request again" in answer().text) == (410, True)
    assert answer("x:train:1:0").status_code == 404
    sampler = held.sampler(1, base_model="tiny")
    for number, of in enumerate(("own", "copy", "copy")):
        service.completions.add((sampler, int(of == "copy")), f"{of} {number}", Payload(b"xyz"))

    def ends(*, copy, **given):
        target = {"sampling_session_id": sampler, "cloned_sampler_id": copy}
        return held.post("retrieve_futures", target=target, timeout=1e9, **given).json()

    first = ends(copy=1)
    done = {"state": "finished", "response_payload_uncompressed_size": 3}
    assert first["completions"] == [{**done, "request_id": "copy 1"}, {**done, "request_id": "copy 2"}]
    assert ends(copy=1, prev_cursor=first["cursor"]) == {"completions": [], "cursor": first["cursor"]}
    assert [each["request_id"] for each in ends(copy=0)["completions"]] == ["own 0"]
