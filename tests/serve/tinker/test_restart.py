"""A server that goes on from another's folder: what was taken in is done, to the bit, and results are still there."""

from __future__ import annotations

import shutil
import uuid

import pytest
import tinker
from tinker import types

from fppo.serve.tinker import runs
from fppo.serve.tinker.runs import Adapters
from fppo.serve.tinker.work import Worker
from tests.serve.tinker.served import KEY, base, equal, served
from tests.serve.tinker.test_client import STEP, theirs, train, train_ours


def passed(number, seed):
    """The body of a pass."""
    from tinker.proto.request_conv import forward_backward_request_to_proto

    given = types.ForwardBackwardInput(data=theirs(seed), loss_fn="importance_sampling")

    def body(run):
        request = types.ForwardBackwardRequest(forward_backward_input=given, model_id=run, seq_id=number)
        return forward_backward_request_to_proto(request).SerializeToString()

    return body


def begun(host, rank=2):
    """A run that was created."""
    session = host.post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"}).json()["session_id"]
    lora = {"rank": rank, "seed": 0}
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
    answer = host.post("create_model", body).json()
    assert result(host, answer["request_id"])["model_id"] == answer["model_id"]
    return answer["model_id"]


def result(host, name):
    answer = host.post("retrieve_future", {"request_id": name})
    assert answer.status_code == 200, answer.text
    return answer.json() if "json" in answer.headers["content-type"] else answer.content


PROTO = {"content_type": "application/x-protobuf"}


def send(host, run, number, seed):
    """A pass and a step, taken in; the second first."""
    step = {"model_id": run, "seq_id": number + 1, "adam_params": STEP.model_dump()}
    names = [host.post("optim_step", step).json()["request_id"]]
    names.append(host.post("forward_backward", passed(number, seed)(run), **PROTO).json()["request_id"])
    return names[::-1]


@pytest.mark.parametrize("saved", [(), (4,), (2, 6)])
def test_whatever_was_saved_of_it_a_run_goes_on_to_the_same_bits(tmp_path, saved):
    """The folder is copied while the server still runs, as a kill would leave it."""
    with served(tmp_path / "first") as host:
        run = begun(host)
        for step in range(3):
            names = send(host, run, 2 * step + 1, step)
            outcomes = [result(host, name) for name in names]
            if 2 * step + 2 in saved:
                host.service.runs.save(run)
        shutil.copytree(tmp_path / "first", tmp_path / "second")
    with served(tmp_path / "second") as host:
        names = send(host, run, 7, 3)
        result(host, names[1])
        assert result(host, f"{run}:6") == outcomes[1]
        assert result(host, f"{run}:5") == outcomes[0]
        wanted, _ = train_ours(runs.create_run(base().base, Adapters(rank=2, seed=0)), range(4))
        assert equal(host.params(run), wanted.state.params)


def test_what_was_taken_in_and_not_done_is_done_by_the_next_server(tmp_path):
    with served(tmp_path / "first") as host:
        run = begun(host)
        host.service.worker.stop()
        names = send(host, run, 1, 0)
        again = send(host, run, 1, 0)
        assert names == again, "a request that is sent again is the same"
        shutil.copytree(tmp_path / "first", tmp_path / "second")
    with served(tmp_path / "second") as host:
        for name in names:
            result(host, name)
        wanted, _ = train_ours(runs.create_run(base().base, Adapters(rank=2, seed=0)), [0])
        assert equal(host.params(run), wanted.state.params)
        assert host.post("retrieve_future", {"request_id": f"{run}:99"}).status_code == 410


@pytest.mark.slow
def test_samplers_outlive_a_server(tmp_path):
    """Of a base, of a checkpoint, a snapshot, and weights in flight; the snapshot of a state that was saved, too."""
    with served(tmp_path) as host:
        service = tinker.ServiceClient(base_url=host.url, api_key=KEY)
        trainer = service.create_lora_training_client("tiny", rank=2, seed=0).result()
        train(trainer, [0])
        path = trainer.save_weights_for_sampler("named").result().path
        samplers = [
            service.create_sampling_client(base_model="tiny").result(),
            service.create_sampling_client(model_path=path).result(),
            trainer.save_weights_and_get_sampling_client().result(),
            trainer.save_weights_and_get_sampling_client(kind="inflight").result(),
        ]
        train(trainer, [1])
        host.service.runs.save(trainer.model_id)
        later = trainer.save_weights_and_get_sampling_client().result()
        handles = [each.name for each in host.service.registry.samplers_of(service.holder.get_session_id())]
        prompt = types.ModelInput.from_ints([3, 4, 5])
        before = [each.compute_logprobs(prompt).result() for each in [*samplers, later]]
        service.holder.close()
    assert len({str(each) for each in before}) == 3
    with served(tmp_path) as host:
        for name, expected in zip(handles, before, strict=True):
            assert sampled(host, name, 77).prompt_logprobs == pytest.approx(expected, abs=1e-6)


def sampled(host, name, number=0):
    """The response to a request for samples of three tokens, with the prompt's log-probs."""
    asked = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [3, 4, 5]}]}, "prompt_logprobs": True}
    body = {"sampling_session_id": name, "seq_id": number, "sampling_params": {"max_tokens": 3}, **asked}
    answer = host.post("asample", body)
    while answer.status_code == 503:
        answer = host.post("asample", body)
    assert answer.status_code == 200, answer.text
    return tinker.proto.response_conv.deserialize_sample_response(result(host, answer.json()["request_id"]))


def test_clients_wait_for_samplers_that_a_next_server_has_still_to_make_again(tmp_path, monkeypatch):
    """The first server ends before it stores weights; the second has not begun to do again what made them."""
    with served(tmp_path / "first") as host:
        run = begun(host)
        names = []
        for number, how in ((1, {}), (2, {"kind": "inflight"})):
            body = {"model_id": run, "seq_id": number, "sampling_session_seq_id": number, **how}
            answer = host.post("save_weights_for_sampler", body)
            names.append(result(host, answer.json()["request_id"])["sampling_session_id"])
        before = [sampled(host, name) for name in names]
        shutil.copytree(tmp_path / "first", tmp_path / "second")
    begin = Worker.start
    monkeypatch.setattr(Worker, "start", lambda worker: None)
    with served(tmp_path / "second") as host:
        for name in names:
            body = {"sampling_session_id": name, "seq_id": 1, "prompt": {"chunks": []}, "sampling_params": {}}
            assert host.post("asample", body).status_code == 503
            assert host.post("join_sampling_session", {"sampling_session_id": name}).status_code == 503
            assert host.post("retrieve_future", {"request_id": f"{name}:0"}).status_code == 410
        stranger = str(uuid.uuid4())
        for name in (f"{stranger}:sample:1", "nobody"):
            assert host.post("asample", {**body, "sampling_session_id": name}).status_code == 404
            assert host.post("retrieve_future", {"request_id": f"{name}:0"}).status_code == 404
        begin(host.service.worker)
        assert [sampled(host, name).prompt_logprobs for name in names] == [each.prompt_logprobs for each in before]
        result(host, f"{run}:2")
        body["sampling_session_id"] = f"{names[0]}0"
        assert host.post("asample", body).status_code == 404, "all is done again: nothing is to come"


def test_a_sample_that_was_lost_is_sent_again(tmp_path):
    with served(tmp_path) as host:
        session = host.post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"}).json()
        body = {"session_id": session["session_id"], "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = host.post("create_sampling_session", body).json()["sampling_session_id"]
    with served(tmp_path) as host:
        assert host.post("retrieve_future", {"request_id": f"{sampler}:0"}).status_code == 410
        assert host.post("retrieve_future", {"request_id": "nobody:0"}).status_code == 404


def test_a_folder_has_one_server_at_a_time(tmp_path):
    with served(tmp_path), pytest.raises(OSError, match="another server has"), served(tmp_path):
        pass
    with served(tmp_path):
        pass
