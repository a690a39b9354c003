"""Requests that are wrong: each gets the protocol's error, and the server goes on."""

from __future__ import annotations

import json
from zlib import crc32

import numpy as np
import pytest
import zstandard
from tinker.proto import tinker_public_pb2 as pb

from fppo.serve.tinker.decode import TinkerBounds
from fppo.serve.tinker.routes import tinker_app
from tests.serve.tinker.served import KEY, SIZE, base, served
from tests.serve.tinker.test_restart import PROTO, begun, result

BOUNDS = TinkerBounds(body_bytes=200_000, datums=4, tokens=60, numbers=10_000, samples=8, scored=1000, open_requests=50)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    with served(tmp_path_factory.mktemp("server"), [base()], bounds=BOUNDS) as found:
        yield found


@pytest.fixture(scope="module")
def run(host):
    return begun(host)


@pytest.fixture(scope="module")
def sampler(host, run):
    body = {"session_id": run.split(":")[0], "sampling_session_seq_id": 0, "base_model": "tiny"}
    return host.post("create_sampling_session", body).json()["sampling_session_id"]


def is_error(answer):
    body = answer.json()
    assert set(body) == {"error", "category"}
    assert body["category"] in ("user", "server")
    return body["error"]


SAMPLE = {
    "seq_id": 1,
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [3]}]},
    "sampling_params": {"max_tokens": 2},
}
WRONG_BODIES = [
    ("optim_step", b"", 400, "no JSON"),
    ("optim_step", b"[1]", 400, "not an object"),
    ("optim_step", b"[" * 100_000, 400, "nested"),
    ("optim_step", b'{"model_id": 3}', 400, "seq_id"),
    ("optim_step", {"model_id": "../../etc", "seq_id": 1}, 404, "training run"),
    ("optim_step", {"model_id": "RUN", "seq_id": 0}, 400, "seq_id"),
    ("optim_step", {"model_id": "RUN", "seq_id": 2**70}, 400, "seq_id"),
    ("optim_step", {"model_id": "RUN", "seq_id": "1"}, 400, "seq_id"),
    ("create_model", {"session_id": "SESSION", "model_seq_id": 1, "base_model": "gpt"}, 404, "base_model"),
    ("create_model", {"session_id": "x", "model_seq_id": 1, "base_model": "tiny"}, 404, "session"),
    ("create_model", {"session_id": "SESSION", "model_seq_id": -1, "base_model": "tiny"}, 400, "model_seq_id"),
    ("create_model", {"session_id": "SESSION", "model_seq_id": 1, "base_model": "tiny", "more": 1}, 400, "more"),
    (
        "create_model",
        {"session_id": "SESSION", "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 10**9}},
        400,
        "rank",
    ),
    (
        "create_model",
        {"session_id": "SESSION", "model_seq_id": 1, "base_model": "tiny", "optimizer_config": {"type": "dimuon"}},
        400,
        "not published",
    ),
    (
        "load_weights",
        {"session_id": "SESSION", "model_seq_id": 5, "path": "/etc/passwd", "optimizer": False},
        404,
        "tinker://",
    ),
    (
        "load_weights",
        {"session_id": "SESSION", "model_seq_id": 5, "path": "tinker://RUN/weights/..", "optimizer": False},
        404,
        "name",
    ),
    (
        "create_sampling_session",
        {"session_id": "SESSION", "sampling_session_seq_id": 9},
        400,
        "base_model or model_path",
    ),
    ("asample", {**SAMPLE, "sampling_session_id": "nobody"}, 404, "sampling session"),
    ("asample", {**SAMPLE, "seq_id": None, "sampling_session_id": "SAMPLER"}, 400, "seq_id"),
    ("retrieve_future", {"request_id": "nobody"}, 404, "no such request"),
    ("retrieve_futures", {"target": {"sampling_session_id": "x"}}, 404, "sampling session"),
    ("session_heartbeat", {"session_id": "x"}, 404, "session"),
    ("weights_info", {"tinker_path": 3}, 404, "no checkpoint"),
    (
        "create_custom_loss",
        {"session_id": "SESSION", "custom_loss_seq_id": 0, "name": "x", "inputs": [], "graph": {"nodes": []}},
        400,
        "graph",
    ),
    ("auth/token", {}, 404, "keys"),
    ("copy_weights", {}, 404, "publish"),
    ("nowhere", {}, 404, "nowhere"),
]


def filled(value, run, sampler):
    text = value.decode("latin-1") if isinstance(value, bytes) else json.dumps(value)
    for name, real in (("SESSION", run.split(":")[0]), ("RUN", run), ("SAMPLER", sampler)):
        text = text.replace(name, real)
    return text.encode("latin-1")


@pytest.mark.parametrize(("path", "body", "status", "text"), WRONG_BODIES)
def test_a_body_that_is_wrong_is_refused_by_name(host, run, sampler, path, body, status, text):
    answer = host.post(path, filled(body, run, sampler))
    assert (answer.status_code, text in is_error(answer)) == (status, True), answer.text


def test_keys_come_once_and_right(host):
    for headers in ({"key": None}, {"key": "tml-wrong"}, {"key": None, "authorization": f"Bearer {KEY}"}):
        answer = host.post("create_session", {}, **headers)
        assert answer.status_code == 401
        assert "X-API-Key" in is_error(answer)
    assert host.get("healthz", key=None).json() == {"status": "ok"}
    assert host.get("training_runs/healthz", key=None).status_code == 401
    for keys in ((), ("one", "")):
        with pytest.raises(ValueError, match="no key, or an empty one"):
            tinker_app(host.service, keys=keys)


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [
        (b"\0" * 200_001, "", 413),
        (zstandard.ZstdCompressor().compress(b"\0" * 10_000_000), "zstd", 413),
        (b"no zstd", "zstd", 400),
        (b"{}", "gzip", 415),
    ],
)
def test_bodies_are_bounded_also_once_they_are_written_out(host, body, encoding, status):
    answer = host.post("forward_backward", body, content_encoding=encoding, **PROTO)
    assert answer.status_code == status
    is_error(answer)


def message(**changes) -> pb.ForwardBackwardRequest:
    made = pb.ForwardBackwardRequest(loss_fn="cross_entropy")
    datum = made.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(3, 7, dtype=np.int32).tobytes()
    write(datum, "target_tokens", np.arange(4, 8))
    write(datum, "weights", np.ones(4, np.float32))
    return made


def write(datum, name, values):
    tensor = datum.loss_fn_inputs[name]
    tensor.Clear()
    tensor.dtype = pb.DTYPE_INT64 if values.dtype.kind == "i" else pb.DTYPE_FLOAT32
    tensor.dense = values.tobytes()
    tensor.shape.extend(values.shape)


def change(how):
    def changed(made):
        how(made.data[0], made)
        return made

    return changed


def sparse(rows, columns, values, shape):
    def how(datum, made):
        tensor = datum.loss_fn_inputs["weights"]
        tensor.Clear()
        tensor.dtype = pb.DTYPE_FLOAT32
        tensor.shape.extend(shape)
        tensor.sparse_csr.crow_indices = np.array(rows, np.int64).tobytes()
        tensor.sparse_csr.col_indices = np.array(columns, np.int64).tobytes()
        tensor.sparse_csr.values = np.array(values, np.float32).tobytes()

    return how


def tokens(values):
    def how(datum, made):
        datum.model_input[0].encoded_text.tokens = np.array(values, np.int32).tobytes()

    return how


def raw(datum, made):
    datum.model_input[0].encoded_text.tokens = b"abc"


def image(datum, made):
    datum.model_input[0].image.data = b"x"


def audio(datum, made):
    datum.model_input[0].dmel.dmel = b"x"


def config(name, value):
    def how(datum, made):
        made.loss_fn_config_v2[name].number = value

    return how


def huge(datum, made):
    datum.loss_fn_inputs["weights"].shape[:] = [2**40]


def bfloat(datum, made):
    datum.loss_fn_inputs["weights"].dtype = pb.DTYPE_BFLOAT16


def without(name):
    def how(datum, made):
        del datum.loss_fn_inputs[name]

    return how


def named(loss):
    def how(datum, made):
        made.loss_fn = loss

    return how


def many(datum, made):
    for _ in range(5):
        made.data.add().CopyFrom(datum)


def none(datum, made):
    del made.data[:]


WRONG_PASSES = [
    (none, "0 datums"),
    (many, "6 datums"),
    (raw, "int32 tokens"),
    (image, "images"),
    (audio, "audio"),
    (tokens([]), "0 tokens"),
    (tokens([3] * 33), "33 tokens"),
    (tokens([3, 4, 5, -1]), "-1"),
    (tokens([3, 4, 5, SIZE]), str(SIZE)),
    (tokens([3, 4, 5]), "target_tokens"),
    (without("target_tokens"), "target_tokens"),
    (without("weights"), "weights"),
    (huge, "shape"),
    (bfloat, "dtype"),
    (lambda d, m: write(d, "target_tokens", np.ones(4, np.float32)), "int64"),
    (lambda d, m: write(d, "target_tokens", np.arange(4) + SIZE), "target_tokens"),
    (lambda d, m: write(d, "weights", np.ones(3, np.float32)), "weights"),
    (lambda d, m: write(d, "unheard", np.ones(4, np.float32)), "unheard"),
    (sparse([0, 1, 1, 1, 1], [9], [1.0], [4, 2]), "column"),
    (sparse([0, 9, 1, 1, 1], [0], [1.0], [4, 2]), "row pointers"),
    (sparse([0, 1], [0], [1.0], [4, 2]), "sparse"),
    (named("secret"), "secret"),
    (named("custom"), "loss_id"),
    (named("stable_reinforce"), "provenance"),
    (config("clip", 1.0), "clip"),
]


def test_a_pass_that_is_wrong_takes_its_turn_and_fails_by_name(host, run):
    """Later requests are not held up."""
    for number, (how, text) in enumerate(WRONG_PASSES, 1):
        made = change(how)(message())
        made.model_id, made.seq_id = run, number
        answer = host.post("forward_backward", made.SerializeToString(), **PROTO)
        assert answer.status_code == 200, answer.text
        found = result(host, answer.json()["request_id"])
        assert found["category"] == "user", (text, found)
        assert text in found["error"], (text, found)
    last = len(WRONG_PASSES) + 1
    for number, (path, body, text) in enumerate(
        [
            ("optim_step", {"adam_params": {"learning_rate": -1.0}}, "learning_rate"),
            ("optim_step", {"adam_params": {"beta1": 1.5}}, "beta1"),
            ("optim_step", {"adam_params": {"learning_rate": "fast"}}, "learning_rate"),
            ("optim_step", {"optimizer_params": {"type": "sgd"}}, "sgd"),
            ("save_weights", {"path": "../../x"}, "path"),
            ("save_weights", {}, "path"),
            ("save_weights", {"path": "x", "ttl_seconds": 1}, "ttl_seconds"),
            ("save_weights_for_sampler", {}, "path"),
            ("save_weights_external", {"path": "x", "age_encryption_recipients": ["age1x"]}, "age"),
            ("load_weights", {"path": "tinker://x", "optimizer": True}, "tinker://"),
        ],
        last,
    ):
        answer = host.post(path, {"model_id": run, "seq_id": number, **body})
        assert answer.status_code == 200, answer.text
        found = result(host, answer.json()["request_id"])
        assert found["category"] == "user"
        assert text in found["error"], (text, found)


def test_a_pass_of_another_form_is_refused(host):
    assert host.post("forward_backward", b"\xff\xff\xff", **PROTO).status_code == 400
    assert host.post("forward_backward", b"{}").status_code == 415


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompt": {"chunks": []}}, "0 tokens"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [-1]}]}}, "-1"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [10**6]}]}}, "1000000"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "image"),
        ({"sampling_params": {"temperature": -1.0}}, "temperature"),
        ({"sampling_params": {"top_p": 0.0}}, "top_p"),
        ({"sampling_params": {"stop": [SIZE]}}, "stop"),
        ({"sampling_params": {"stop": [""]}}, "stop"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [5, 1]}}, "target_prompt_logprobs"),
    ],
)
def test_samples_that_cannot_be_drawn_fail_by_name(host, sampler, changes, text):
    number = crc32(json.dumps(changes).encode())
    body = {**SAMPLE, "sampling_session_id": sampler, "seq_id": number, **changes}
    answer = host.post("asample", body)
    if answer.status_code != 200:
        assert text in is_error(answer)
        return
    found = result(host, answer.json()["request_id"])
    assert found["category"] == "user"
    assert text in found["error"], found


def test_more_requests_than_may_wait_are_sent_later(tmp_path):
    """A gap holds the others up."""
    with served(tmp_path, [base()], bounds=BOUNDS) as host:
        body = {"model_id": begun(host), "adam_params": {}}
        statuses = [host.post("optim_step", {**body, "seq_id": number}).status_code for number in range(1000, 1060)]
    assert set(statuses) == {200, 429}


def test_files_of_others_are_not_served(host, run):
    for path in ("files/x/y/z", f"files/{run}/x/..%2F..%2Fmeta.json?expires=9999999999&signature=0"):
        answer = host.get(path, key=None)
        assert answer.status_code in (403, 404)
        is_error(answer)
