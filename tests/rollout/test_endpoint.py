"""A teacher behind HTTP tells the log-probs of a row's own tokens, or is refused by its address."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from fppo.rollout.endpoint import EndpointTeacher
from tests import tiny


def logit(ids, place):
    """A made up log-prob of a token in its text."""
    return -0.01 * (ids[place] + 3 * ids[place - 1] + place)


@pytest.fixture
def server():
    asked, shift = [], {"ids": 0, "cut": 0}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            ids = body["prompt"]
            numbers = [None, *(logit(ids, place) for place in range(1, len(ids)))]
            noted = {"tokens": [f"token_id:{x + shift['ids']}" for x in ids], "token_logprobs": numbers}
            noted["token_logprobs"] = numbers[: len(ids) - shift["cut"]]
            reply = json.dumps({"choices": [{"logprobs": noted}]}).encode()
            self.send_response(200 if body["model"] == "right" else 404)
            self.end_headers()
            self.wfile.write(reply if body["model"] == "right" else b"no such model")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}/v1", asked, shift
        made.shutdown()


def test_rows_have_the_servers_log_probs_of_their_own_tokens(server):
    url, asked, _ = server
    rows = tiny.experience(0, 6)
    found = EndpointTeacher(url=url, model="right", concurrency=2)(rows, 1.0).log_probs
    width = rows.response_mask.shape[1]
    for row in range(6):
        ids = rows.tokens[row][rows.attention_mask[row]].tolist()
        before = int(rows.attention_mask[row, :-width].sum())
        for place in range(width):
            expected = logit(ids, before + place) if rows.response_mask[row, place] else 0.0
            assert found[row, place] == pytest.approx(expected, rel=1e-5)
    assert len(asked) == 6
    path, body = asked[0]
    assert path == "/v1/completions"
    assert (body["echo"], body["max_tokens"], body["logprobs"]) == (True, 0, 1)
    assert found.dtype == torch.float32


def test_what_a_server_does_not_do_is_named_with_its_address(server):
    url, _, shift = server
    rows, teacher = tiny.experience(0, 2), EndpointTeacher(url=url, model="right")
    with pytest.raises(ValueError, match=r"127\.0\.0\.1.*of temperature 1, and rows of 0\.5"):
        teacher(rows, 0.5)
    with pytest.raises(ValueError, match=r"127\.0\.0\.1.*: it refuses a completion with 404: no such model"):
        EndpointTeacher(url=url, model="wrong")(rows, 1.0)
    shift["cut"] = 1
    with pytest.raises(ValueError, match="it told no log-probs of some of"):
        teacher(rows, 1.0)
    shift["ids"] = 1
    with pytest.raises(ValueError, match="it has another tokenizer, or is no vLLM; it begins"):
        teacher(rows, 1.0)
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:9/v1: no completion with log-probs, URLError"):
        EndpointTeacher(url="http://127.0.0.1:9/v1", model="right")(rows, 1.0)
