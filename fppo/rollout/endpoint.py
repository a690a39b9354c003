"""A teacher behind HTTP, which tells the log-probs of a prompt's tokens by OpenAI's completions, as vLLM does."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import torch

from fppo.batch import Rollout
from fppo.steps.critic import as_it_is
from fppo.steps.outputs import TokenOutputs

_ID = "token_id:"  # how vLLM writes a token's id in place of its text


@attrs.frozen(kw_only=True)
class EndpointTeacher:
    """Ask a server for the log-probs [B, T] of sampled tokens: POST `url`/completions with the rows' token ids, "echo"
    and "logprobs".

    `model` is its name there. Rows are those that `view` shows; `concurrency` requests wait at a time, each for
    `patience` seconds at most. The server writes tokens as ids ("return_tokens_as_token_ids"), which are compared with
    those asked about. Its log-probs are of a temperature of 1. Raises ValueError for another temperature, a server that
    is not there or refuses, tokens that are not the policy's, and log-probs that lack some.
    """

    url: str
    model: str
    view: Callable[[Any], Any] = as_it_is
    concurrency: int = 32
    patience: float = 600.0

    def __call__(self, rows: Rollout, temperature: float) -> TokenOutputs:
        """The log-probs of the tokens in the response mask, float32 [B, T], 0 elsewhere."""
        if temperature != 1:
            raise ValueError(
                f"{self.url}: a server's log-probs are of temperature 1, and rows of {temperature}; give 1"
            )
        seen = self.view(rows)
        mask, found = rows.response_mask.cpu(), torch.zeros(rows.response_mask.shape)
        texts = [x[y].tolist() for x, y in zip(seen.tokens.cpu(), seen.attention_mask.cpu().bool(), strict=True)]
        with ThreadPoolExecutor(self.concurrency) as pool:
            answers = list(pool.map(self._log_probs, texts))
        there = seen.attention_mask.cpu().bool()[:, -mask.shape[1] :]
        for row, numbers in enumerate(answers):
            own = torch.tensor(numbers[len(numbers) - int(there[row].sum()) :])
            found[row, there[row]] = own
        return TokenOutputs(log_probs=found.where(mask, 0.0).to(rows.rollout_log_probs.device))

    def _log_probs(self, ids: Sequence[int]) -> list[float]:
        """The log-probs of a row's tokens; 0 for the first."""
        body = {"model": self.model, "prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1}
        body |= {"temperature": 1.0, "return_tokens_as_token_ids": True}
        noted = self._post(body)
        tokens, numbers = noted.get("tokens") or (), noted.get("token_logprobs") or ()
        if [str(x) for x in tokens[: len(ids)]] != [f"{_ID}{x}" for x in ids]:
            text = (
                "it does not write the tokens that it was asked about as ids: it has another tokenizer, or is no vLLM"
            )
            raise ValueError(f"{self.url}: {text}; it begins {list(tokens[:3])}, and was asked about {list(ids[:3])}")
        if len(numbers) < len(ids) or any(x is None for x in numbers[1 : len(ids)]):
            raise ValueError(f"{self.url}: it told no log-probs of some of {len(ids)} tokens; it must echo them all")
        return [0.0, *map(float, numbers[1 : len(ids)])]

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/completions", data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=self.patience) as reply:
                return json.load(reply)["choices"][0]["logprobs"]
        except urllib.error.HTTPError as error:
            said = error.read(300).decode(errors="replace")
            raise ValueError(f"{self.url}: it refuses a completion with {error.code}: {said}") from error
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{self.url}: no completion with log-probs, {type(error).__name__}: {error}") from error
