"""The unmodified client of the tinker protocol against a server: what it trains, samples, saves and loads."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import tinker
import torch
from safetensors import SafetensorError
from tinker import types
from tinker.types.tensor_data import TensorData

from fppo.key import Key
from fppo.models.several import Adapter
from fppo.rollout.engine import Sampling
from fppo.rollout.requests import Request
from fppo.serve.tinker import runs
from fppo.serve.tinker.checkpoints import address_of
from fppo.serve.tinker.data import Datum
from fppo.serve.tinker.futures import FailedRequest, Payload
from fppo.serve.tinker.losses import Loss
from fppo.serve.tinker.routes import ClientFlags
from fppo.serve.tinker.runs import Adapters, StepParams
from fppo.serve.tinker.sessions import owner_of
from fppo.serve.tinker.snapshots import WEIGHTS
from tests.serve.tinker.served import KEY, OTHER, SIZE, base, equal, served, tokenizer

STEP = types.AdamParams(learning_rate=1e-2, weight_decay=0.01, grad_clip_norm=1.0)
OURS = StepParams(learning_rate=1e-2, weight_decay=0.01, grad_clip_norm=1.0)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    with served(tmp_path_factory.mktemp("server"), [base(), base("second", 1)]) as found:
        yield found


def client_of(host):
    return tinker.ServiceClient(base_url=host.url, api_key=KEY)


@pytest.fixture
def service(host):
    with client_of(host) as client:
        yield client


def at_rest(host, trainer):
    """The client of a run once the server has nothing to do for it."""
    while not host.service.worker.idle(trainer.model_id):
        threading.Event().wait(0.005)
    return trainer


def rows(seed, count=3, *, length=6):
    """Random tokens and their inputs, by seed."""
    g = torch.Generator().manual_seed(seed)
    for _ in range(count):
        tokens = torch.randint(3, SIZE, (length + 1,), generator=g)
        advantages = torch.randn(length, generator=g)
        yield tokens[:-1], tokens[1:], {"logprobs": torch.randn(length, generator=g) - 3.0, "advantages": advantages}


def theirs(seed, **how):
    """Data of the protocol."""
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens.tolist()),
            loss_fn_inputs={"target_tokens": TensorData.from_torch(targets)}
            | {name: TensorData.from_torch(value) for name, value in inputs.items()},
        )
        for tokens, targets, inputs in rows(seed, **how)
    ]


def ours(seed, **how):
    """The same as values of fppo."""
    return [Datum(tokens=tokens, targets=targets, inputs=inputs) for tokens, targets, inputs in rows(seed, **how)]


def train(trainer, seeds, loss="importance_sampling"):
    outputs = []
    for seed in seeds:
        pending = trainer.forward_backward(theirs(seed), loss), trainer.optim_step(STEP)
        outputs.append(pending[0].result())
        pending[1].result()
    return outputs


def train_ours(run, seeds, loss="importance_sampling"):
    for seed in seeds:
        run, outputs = runs.forward_backward(run, ours(seed), Loss(loss))
        run, _ = runs.optim_step(run, OURS)
    return run, outputs


@pytest.mark.parametrize("rank", [4, 0])
def test_a_loop_through_the_client_ends_with_the_bits_of_the_same_loop_over_functions(host, service, rank):
    trainer = service.create_lora_training_client("tiny", rank=rank, seed=3).result()
    theirs_out = train(trainer, range(3))[-1]
    run, outputs = train_ours(runs.create_run(base().base, Adapters(rank=rank, seed=3)), range(3))
    assert equal(host.params(trainer.model_id), run.state.params)
    for one, other in zip(theirs_out.loss_fn_outputs, outputs.per_datum, strict=True):
        assert torch.equal(one["logprobs"].to_torch(), other["logprobs"])
    assert theirs_out.metrics["loss:sum"] == pytest.approx(outputs.metrics["loss:sum"], rel=0)


def reward(tokens):
    return float(sum(tokens) % 3 == 0)


def test_a_loop_that_samples_what_it_learns_from_ends_with_the_same_bits(host, service):
    """Reinforcement learning: prompts, seeded samples, rewards, a step; three times."""
    prompt = [5, 6, 7]
    trainer = service.create_lora_training_client("tiny", rank=2, seed=1).result()
    for step in range(3):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=5, seed=step, stop=[])
        found = sampler.sample(types.ModelInput.from_ints(prompt), 4, params).result().sequences
        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints([*prompt, *each.tokens[:-1]]),
                loss_fn_inputs={
                    "target_tokens": TensorData.from_torch(torch.tensor([*prompt[1:], *each.tokens])),
                    "logprobs": TensorData.from_torch(torch.tensor([0.0, 0.0, *each.logprobs])),
                    "advantages": TensorData.from_torch(torch.tensor([0.0, 0.0, *[reward(each.tokens) - 0.3] * 5])),
                },
            )
            for each in found
        ]
        trainer.forward_backward(data, "importance_sampling").result()
        trainer.optim_step(STEP).result()
    run = runs.create_run(base().base, Adapters(rank=2, seed=1))
    with base().engine.open(base().base.params) as requests:
        for step in range(3):
            requests.put("own", Adapter.of(*runs.sampling_params(run)))
            sampling = Sampling(max_tokens=5)
            requests.add(
                [
                    Request(
                        name=f"{step}:{row}",
                        ids=prompt,
                        sampling=sampling,
                        key=Key(step).fold("seed"),
                        row=row,
                        adapter="own",
                    )
                    for row in range(4)
                ]
            )
            ended = {}
            while requests.counts.open:
                ended |= {each.name: each for each in requests.step().finished}
            found = [ended[f"{step}:{row}"] for row in range(4)]
            data = [
                Datum(
                    tokens=torch.tensor([*prompt, *each.tokens.tolist()[:-1]]),
                    targets=torch.tensor([*prompt[1:], *each.tokens.tolist()]),
                    inputs={
                        "logprobs": torch.cat([torch.zeros(2), each.log_probs]),
                        "advantages": torch.tensor([0.0, 0.0, *[reward(each.tokens.tolist()) - 0.3] * 5]),
                    },
                )
                for each in found
            ]
            run, _ = runs.forward_backward(run, data, Loss("importance_sampling"))
            run, _ = runs.optim_step(run, OURS)
    assert equal(host.params(trainer.model_id), run.state.params)


@pytest.mark.slow
def test_two_runs_at_once_end_with_the_bits_of_each_alone(host, service):
    async def both():
        trainers = [service.create_lora_training_client("tiny", rank=2, seed=s) for s in range(2)]
        trainers = [await each for each in trainers]

        async def one(number, trainer):
            for step in range(4):
                passes = trainer.forward_backward(theirs(10 * number + step), "importance_sampling")
                await trainer.optim_step(STEP)
                await passes
            return trainer.model_id

        return await asyncio.gather(*(one(n, t) for n, t in enumerate(trainers)))

    for number, name in enumerate(asyncio.run(both())):
        alone, _ = train_ours(
            runs.create_run(base().base, Adapters(rank=2, seed=number)), range(10 * number, 10 * number + 4)
        )
        assert equal(host.params(name), alone.state.params)


@pytest.mark.slow
def test_gradients_do_not_depend_on_how_a_batch_is_cut_into_chunks(tmp_path):
    data = theirs(0, count=7)
    ends = []
    for most in (7, 2):
        with served(tmp_path / str(most), flags=ClientFlags(chunk=most)) as host, client_of(host) as service:
            trainer = service.create_lora_training_client("tiny", rank=2, seed=3).result()
            out = trainer.forward_backward(data, "importance_sampling").result()
            trainer.optim_step(STEP).result()
            ends.append((host.params(trainer.model_id), out))
    (one, first), (other, second) = ends
    assert len(first.loss_fn_outputs) == len(second.loss_fn_outputs) == 7
    for a, b in zip(first.loss_fn_outputs, second.loss_fn_outputs, strict=True):
        torch.testing.assert_close(a["logprobs"].to_torch(), b["logprobs"].to_torch(), atol=1e-5, rtol=0)
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=1e-4, rtol=1e-3)


def test_sparse_targets_are_those_written_out(service):
    trainer = service.create_lora_training_client("tiny", rank=2, seed=0).result()
    dense = torch.zeros(6, 12, dtype=torch.int64)
    weights = torch.zeros(6, 12)
    for place in range(6):
        dense[place, place] = place + 3
        weights[place, place] = 0.5
    outputs = []
    for write in (TensorData.from_torch, TensorData.from_torch_sparse):
        datum = types.Datum(
            model_input=types.ModelInput.from_ints([3, 4, 5, 6, 7, 8]),
            loss_fn_inputs={"target_tokens": write(dense), "weights": write(weights)},
        )
        outputs.append(trainer.forward([datum], "cross_entropy").result())
    assert outputs[0].metrics == outputs[1].metrics
    assert torch.equal(*(each.loss_fn_outputs[0]["logprobs"].to_torch() for each in outputs))


def test_scores_of_a_prompt_are_those_of_a_pass(service):
    """Prompt log-probs, likeliest tokens, targets dense and sparse, alternatives, and the likeliest where it drew."""
    trainer = service.create_lora_training_client("tiny", rank=2, seed=0).result()
    train(trainer, [5])
    sampler = trainer.save_weights_and_get_sampling_client().result()
    tokens = [4, 9, 6, 7]
    every = torch.arange(SIZE).repeat(3, 1)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": TensorData.from_torch(every),
            "weights": TensorData.from_torch(torch.ones(3, SIZE)),
        },
    )
    whole = trainer.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
    wanted = torch.full((3, 2), -1)
    wanted[1, 0], wanted[2, 1] = 5, 8
    prompt = types.ModelInput.from_ints(tokens)
    found = sampler.sample(
        prompt,
        2,
        types.SamplingParams(max_tokens=2, seed=1, temperature=0.5),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        target_prompt_logprobs=TensorData.from_torch(wanted),
        prompt_alt_tokens_k=4,
    ).result()
    near = {"atol": 2e-5, "rtol": 0}
    own = torch.tensor(found.prompt_logprobs_np)
    assert torch.isnan(own[0])
    torch.testing.assert_close(own[1:], whole[torch.arange(3), torch.tensor(tokens[1:])], **near)
    top = whole.topk(3)
    assert found.topk_prompt_logprobs[0] is None
    ids = torch.tensor(found.topk_prompt_logprobs_np.token_ids[1:].astype(np.int64))
    assert torch.equal(ids, top.indices)
    torch.testing.assert_close(torch.tensor(found.topk_prompt_logprobs_np.logprobs[1:]), top.values, **near)
    targets = found.target_prompt_logprobs.to_torch()
    torch.testing.assert_close(targets[1, 0], whole[1, 5], **near)
    torch.testing.assert_close(targets[2, 1], whole[2, 8], **near)
    assert targets[0].tolist() == [0.0, 0.0]
    drawn, log_probs = (x.to_torch() for x in (found.prompt_alt_tokens.tokens, found.prompt_alt_tokens.logprobs))
    assert drawn.shape == (3, 4)
    torch.testing.assert_close(log_probs, whole.gather(1, drawn), **near)
    for sequence in found.sequences:
        assert len(sequence.topk_logprobs) == len(sequence.tokens)
        assert all(
            value <= top[0][1] + 1e-6 for value, top in zip(sequence.logprobs, sequence.topk_logprobs, strict=True)
        )
    sparse = sampler.sample(
        prompt,
        1,
        types.SamplingParams(max_tokens=1),
        target_prompt_logprobs=TensorData.from_torch_sparse(wanted, pad_value=-1),
    ).result()
    torch.testing.assert_close(sparse.target_prompt_logprobs.to_torch(), targets, **near)
    last = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=1).result()
    assert last[:3] == [None, None, None]
    assert last[3] == pytest.approx(own[3].item(), abs=1e-6)


def test_sampled_log_probs_are_the_models_own_at_any_temperature(service):
    trainer = service.create_lora_training_client("tiny", rank=2, seed=0).result()
    train(trainer, [1, 2])
    sampler = trainer.save_weights_and_get_sampling_client().result()
    for temperature in (1.0, 0.6, 0.0):
        params = types.SamplingParams(max_tokens=6, seed=2, temperature=temperature, stop=[])
        (one,) = sampler.sample(types.ModelInput.from_ints([3, 4]), 1, params).result().sequences
        datum = types.Datum(
            model_input=types.ModelInput.from_ints([3, 4, *one.tokens[:-1]]),
            loss_fn_inputs={"target_tokens": [4, *one.tokens], "weights": [1.0] * 7},
        )
        passed = trainer.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
        torch.testing.assert_close(torch.tensor(one.logprobs), passed[1:], atol=2e-5, rtol=0)


def test_stops_are_tokens_texts_the_models_own_or_none(service):
    sampler = service.create_sampling_client(base_model="tiny").result()
    prompt, how = types.ModelInput.from_ints([3, 4]), {"max_tokens": 12, "seed": 5}

    def drawn(**more):
        return sampler.sample(prompt, 1, types.SamplingParams(**how, **more)).result().sequences[0]

    free = drawn(stop=[])
    assert len(free.tokens) == 12
    assert free.stop_reason == "length"
    by_token = drawn(stop=[free.tokens[4]])
    first = free.tokens.index(free.tokens[4])
    assert by_token.tokens == free.tokens[: first + 1]
    assert by_token.stop_reason == "stop"
    text = tokenizer().decode([free.tokens[4]])
    if text.strip() and not text.startswith("<"):
        assert drawn(stop=text).tokens == by_token.tokens
    assert drawn(stop=[]).tokens == free.tokens, "a seed draws the same again"


@pytest.mark.slow
def test_checkpoints_are_saved_loaded_listed_and_deleted(host, service):
    rest = tinker.RestClient(base_url=host.url, api_key=KEY)
    trainer = service.create_lora_training_client("tiny", rank=2, seed=0, user_metadata={"for": "tests"}).result()
    train(trainer, [0, 1])
    path = trainer.save_state("two", ttl_seconds=3600, user_metadata={"step": "2"}).result().path
    assert path == f"tinker://{trainer.model_id}/weights/two"
    with pytest.raises(tinker.RequestFailedError, match="there is a checkpoint"):
        trainer.save_state("two").result()
    whole = service.create_training_client_from_state_with_optimizer(path).result()
    weights = service.create_training_client_from_state(path).result()
    assert equal(host.params(whole.model_id), host.params(trainer.model_id))
    train(trainer, [2])
    train(whole, [2])
    train(weights, [2])
    assert equal(host.params(whole.model_id), host.params(trainer.model_id))
    assert not equal(host.params(weights.model_id), host.params(trainer.model_id)), "its optimizer is fresh"
    sampled = trainer.save_weights_for_sampler("now").result().path
    one = service.create_sampling_client(model_path=sampled).result()
    other = trainer.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=8, seed=1)
    prompt = types.ModelInput.from_ints([3, 4])
    assert one.sample(prompt, 1, params).result().sequences[0].tokens == (
        other.sample(prompt, 1, params).result().sequences[0].tokens
    )
    found = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert [each.checkpoint_id for each in found] == ["weights/two", "sampler_weights/now"]
    assert found[0].expires_at is not None
    assert found[0].user_metadata == {"step": "2"}
    assert found[0].size_bytes > 0
    run = rest.get_training_run_by_tinker_path(path).result()
    assert run.user_metadata == {"for": "tests"}
    assert run.lora_rank == 2
    assert run.last_checkpoint.tinker_path == path
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.train_mlp) == ("tiny", 2, True)
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert rest.list_checkpoints(trainer.model_id).result().checkpoints[0].expires_at is None
    assert {each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints} >= {path, sampled}
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert [each.tinker_path for each in rest.list_checkpoints(trainer.model_id).result().checkpoints] == [sampled]
    with pytest.raises(tinker.NotFoundError):
        rest.get_weights_info_by_tinker_path(path).result()


def test_a_checkpoint_that_cannot_be_read_fails_the_sample(host, service):
    trainer = service.create_lora_training_client("tiny", rank=2, seed=0).result()
    path = trainer.save_weights_for_sampler("lost").result().path
    sampler = service.create_sampling_client(model_path=path).result()
    meta = host.service.checkpoints.own(*address_of(path), owner_of(KEY))
    (host.service.checkpoints.data(meta) / WEIGHTS).write_bytes(b"damaged")
    with pytest.raises(tinker.RequestFailedError, match="the server failed: SafetensorError"):
        sampler.sample(types.ModelInput.from_ints([3, 4]), 1, types.SamplingParams(max_tokens=2)).result(timeout=60)


def test_a_state_that_cannot_be_saved_holds_nothing_up(host, service, monkeypatch):
    trainer = service.create_lora_training_client("tiny", rank=2, seed=0).result()
    path = trainer.save_state("one").result().path

    def full(info):
        raise SafetensorError("I/O error: no space left")

    with monkeypatch.context() as patch:
        patch.setattr(host.service.stores, "keep", full)
        with pytest.warns(RuntimeWarning, match="its state was not saved: SafetensorError"):
            again = at_rest(host, service.create_training_client_from_state(path).result())
    train(again, [0])
    train(trainer, [0])
    assert equal(host.params(again.model_id), host.params(trainer.model_id))


def test_keys_are_by_run(host, service):
    """What one key made another cannot use, until a checkpoint is published."""
    rest, others = (tinker.RestClient(base_url=host.url, api_key=key) for key in (KEY, OTHER))
    trainer = service.create_lora_training_client("tiny", rank=2, seed=0).result()
    path = trainer.save_state("mine").result().path
    with tinker.ServiceClient(base_url=host.url, api_key=OTHER) as stranger:
        for call in (
            lambda: others.get_training_run(trainer.model_id).result(),
            lambda: others.list_checkpoints(trainer.model_id).result(),
            lambda: others.delete_checkpoint_from_tinker_path(path).result(),
            lambda: others.publish_checkpoint_from_tinker_path(path).result(),
            lambda: stranger.create_sampling_client(model_path=path).result(),
            lambda: stranger.create_training_client_from_state(path).result(),
        ):
            with pytest.raises(tinker.NotFoundError):
                call()
        body = {"model_id": trainer.model_id, "seq_id": 2, "adam_params": {}}
        assert host.post("optim_step", body, key=OTHER).status_code == 404
        assert host.post("retrieve_future", {"request_id": f"{trainer.model_id}:1"}, key=OTHER).status_code == 404
        rest.publish_checkpoint_from_tinker_path(path).result()
        loaded = stranger.create_training_client_from_state(path).result()
        assert equal(host.params(loaded.model_id), host.params(trainer.model_id))
        rest.unpublish_checkpoint_from_tinker_path(path).result()
        with pytest.raises(tinker.NotFoundError):
            stranger.create_training_client_from_state(path).result()


def test_weights_in_flight_are_the_newest_for_all(service):
    trainer = service.create_lora_training_client("tiny", rank=2, seed=0).result()
    first = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    prompt, params = types.ModelInput.from_ints([3, 4]), types.SamplingParams(max_tokens=1)

    def scored(sampler):
        return sampler.compute_logprobs(prompt).result()[1]

    before = scored(first)
    train(trainer, [0, 1])
    second = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    assert scored(second) == scored(first) != before
    del params


def test_custom_losses_run_here_and_there(host, service):
    trainers = [service.create_lora_training_client("tiny", rank=2, seed=0).result() for _ in range(2)]

    def loss(logprobs, advantages):
        value = -(logprobs.exp() * advantages).sum()
        return value, {"custom/value:sum": value}

    handle = service.create_custom_loss(loss, input_ranks={"logprobs": 1, "advantages": 1}).result()
    assert handle.loss_id is not None
    there = trainers[0].forward_backward_custom(theirs(0), handle).result()

    def whole(data, log_probs):
        each = [loss(lp, d.loss_fn_inputs["advantages"].to_torch())[0] for d, lp in zip(data, log_probs, strict=True)]
        return sum(each), {}

    here = trainers[1].forward_backward_custom(theirs(0), whole).result()
    assert there.metrics["loss:sum"] == pytest.approx(here.metrics["loss:sum"], rel=1e-4)
    assert there.metrics["custom/value:sum"] == pytest.approx(there.metrics["loss:sum"], rel=1e-6)
    for trainer in trainers:
        trainer.optim_step(STEP).result()
    one, other = (host.params(trainer.model_id) for trainer in trainers)
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=1e-4, rtol=1e-3)


def test_stable_reinforce_takes_the_log_probs_that_were_recorded(host, service):
    trainer = service.create_lora_training_client("tiny", rank=2, seed=0).result()
    sampler = trainer.save_weights_and_get_sampling_client(record_stability_info=True).result()
    params = types.SamplingParams(max_tokens=4, seed=0, stop=[])
    (one,) = sampler.sample(types.ModelInput.from_ints([3, 4, 5]), 1, params).result().sequences
    spans = [
        types.PromptProvenanceSpan(sequence_id=one.sequence_id, offset=1, length=2),
        types.SampledProvenanceSpan(sequence_id=one.sequence_id, length=4),
    ]
    inputs = [
        types.PromptProvenanceSpan(sequence_id=one.sequence_id, length=3),
        types.SampledProvenanceSpan(sequence_id=one.sequence_id, length=3),
    ]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([3, 4, 5, *one.tokens[:-1]]),
        loss_fn_inputs={"target_tokens": [4, 5, *one.tokens], "advantages": [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]},
    )
    found = trainer.forward_backward([datum.with_provenance(inputs, spans)], "stable_reinforce").result()
    log_probs = found.loss_fn_outputs[0]["logprobs"].to_torch()[2:]
    assert found.metrics["loss:sum"] == pytest.approx(-log_probs.sum().item(), rel=1e-3)
    with pytest.raises(tinker.RequestFailedError, match="provenance"):
        trainer.forward_backward([datum], "stable_reinforce").result()
    with client_of(host) as stranger:
        other = stranger.create_lora_training_client("tiny", rank=2, seed=0).result()
        with pytest.raises(tinker.RequestFailedError, match="another session"):
            other.forward_backward([datum.with_provenance(inputs, spans)], "stable_reinforce").result()


def test_bodies_may_be_compressed_and_ends_polled(tmp_path):
    flags = ClientFlags(compress=True, poll=True)
    with served(tmp_path, flags=flags) as host, client_of(host) as service:
        trainer = service.create_lora_training_client("tiny", rank=2, seed=0).result()
        train(trainer, [0])
        run, _ = train_ours(runs.create_run(base().base, Adapters(rank=2, seed=0)), [0])
        assert equal(host.params(trainer.model_id), run.state.params)
        sampler = trainer.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints([3, 4])
        pending = [sampler.sample(prompt, 1, types.SamplingParams(max_tokens=3, seed=s)) for s in range(5)]
        assert all(1 <= len(each.result().sequences[0].tokens) <= 3 for each in pending)


def test_sampling_clients_are_copied_to_other_threads_by_a_handle(service):
    sampler = service.create_sampling_client(base_model="second").result()
    copies = [tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=KEY) for _ in range(2)]
    params, prompt = types.SamplingParams(max_tokens=3), types.ModelInput.from_ints([3])
    names = {each.sample(prompt, 1, params).result().sequences[0].sequence_id for each in (sampler, *copies)}
    assert len(names) == 3


def test_a_checkpoint_ends_with_its_time_and_a_session_with_its_silence(tmp_path):
    now = [1e9]
    with served(tmp_path, clock=lambda: now[0]) as host, client_of(host) as service:
        rest = tinker.RestClient(base_url=host.url, api_key=KEY)
        trainer = service.create_lora_training_client("tiny", rank=2, seed=0).result()
        path = trainer.save_state("short", ttl_seconds=3600).result().path
        assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 2
        now[0] += 3601
        with pytest.raises(tinker.NotFoundError):
            rest.get_weights_info_by_tinker_path(path).result()
        assert rest.list_checkpoints(trainer.model_id).result().checkpoints == []
        asyncio.run(host.service.sweep())
        now[0] += 8 * 24 * 3600
        asyncio.run(host.service.sweep())
        assert host.service.runs.value(trainer.model_id) is None
        body = {"model_id": trainer.model_id, "seq_id": 2, "adam_params": {}}
        assert host.post("optim_step", body).status_code == 410


@pytest.mark.slow
def test_abandoned_samples_are_cancelled(host, service):
    sampler = service.create_sampling_client(base_model="tiny").result()
    prompt, params = types.ModelInput.from_ints([3]), types.SamplingParams(max_tokens=30, stop=[])
    pending = sampler.sample(prompt, 400, params)
    (found,) = host.service.registry.samplers_of(service.holder.get_session_id())
    state = lambda: host.service.futures.state(f"{found.name}:0", owner_of(KEY))  # noqa: E731
    while state() is None:
        threading.Event().wait(0.005)
    pending.future().cancel()
    sampler.sample(prompt, 1, params).result()
    for _ in range(500):
        if (outcome := state().outcome) is not None:
            break
        threading.Event().wait(0.01)
    assert isinstance(outcome, FailedRequest | Payload)
