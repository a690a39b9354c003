"""Rows of an experience as JSON objects, token by token, for `samples.jsonl` and the report."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fppo import batch as batches
from fppo import rewards
from fppo.batch import Experience, Rollout, RowInputs, Scored
from fppo.pipeline.truth import Beside
from fppo.runs.jsonl import plain


def samples_of(experience: Experience, tokenizer: Any, step: int, count: int) -> list[dict[str, Any]]:
    """`count` rows, spread evenly over the batch, as JSON objects.

    `tokens` are the pieces of the response's text; `log_probs`, `advantages` and `values` have one entry for each, None
    for tokens that are not trained on and numbers that are not finite. `values` is None without a critic. `images` are
    data URIs, for a video the list of its frames'; a prompt without any lacks the key.
    """
    total = len(experience.tokens)
    count = min(count, total)
    picked = [i * total // count for i in range(count)]
    return [_sample(experience, tokenizer, step, row) for row in picked]


def scored_lines(scored: Scored, tokenizer: Any, step: int) -> list[dict[str, Any]]:
    """All rows of a batch as JSON objects: texts with their scores."""
    return [
        {
            "step": step,
            "id": plain(scored.ids[row]),
            "source": plain(judged.source),
            "prompt": judged.prompt,
            "response": judged.response,
            "score": plain(float(scored.scores[row])),
            "named_scores": {name: plain(float(x[row])) for name, x in scored.named_scores.items()},
            "ground_truth": plain(judged.ground_truth),
            "finish": judged.finish,
        }
        for row, judged in enumerate(rewards.samples_of(batches.narrow(Rollout, scored), tokenizer))
    ]


def truth_lines(beside: Beside, tokenizer: Any, step: int) -> list[dict[str, Any]]:
    """Responses as JSON objects with each token's values and advantages, estimated and exact."""
    rollout, lines = beside.rollout, []
    width = rollout.response_mask.shape[1]
    for row, mask in enumerate(rollout.response_mask.cpu()):
        tokens, attended = rollout.tokens[row].cpu(), rollout.attention_mask[row].cpu()
        line = {
            "step": step,
            "id": plain(rollout.ids[row]),
            "prompt": _decode(tokenizer, tokens[:-width][attended[:-width]].tolist()),
            "tokens": pieces(tokenizer, tokens[-width:][mask].tolist()),
        }
        for name in ("values", "exact_values", "advantages", "exact_advantages"):
            line[name] = [round(x, 6) for x in getattr(beside, name)[row].cpu()[mask].tolist()]
        lines.append(line)
    return lines


def _sample(experience: Experience, tokenizer: Any, step: int, row: int) -> dict[str, Any]:
    width = experience.response_mask.shape[1]
    attended = experience.attention_mask[row].cpu()
    tokens = experience.tokens[row].cpu()
    inputs = None if experience.inputs is None else experience.inputs[row]
    prompt = _marked_once(tokens[:-width][attended[:-width]].tolist(), inputs)
    present = attended[-width:]
    response = tokens[-width:][present].tolist()

    def numbers(column: Tensor | None) -> list[float | None] | None:
        if column is None:
            return None
        trained = experience.response_mask[row].cpu()[present].tolist()
        kept = column[row].detach().cpu()[present].tolist()
        return [round(x, 6) if keep and math.isfinite(x) else None for x, keep in zip(kept, trained, strict=True)]

    return {
        "step": step,
        "id": plain(experience.ids[row]),
        "row_id": int(experience.row_ids[row]),
        "source": plain(experience.source[row]),
        "prompt": _decode(tokenizer, prompt),
        "response": _decode(tokenizer, response),
        "tokens": pieces(tokenizer, response),
        "log_probs": numbers(experience.old_log_probs),
        "advantages": numbers(experience.advantages),
        "values": numbers(experience.values),
        "score": plain(float(experience.scores[row])),
        "named_scores": {name: plain(float(scores[row])) for name, scores in experience.named_scores.items()},
        "ground_truth": plain(experience.ground_truth[row]),
        "finish": plain(experience.finish[row]),
        **({} if inputs is None else {"images": pictures(inputs)}),
    }


def _marked_once(prompt: list[int], inputs: RowInputs | None) -> list[int]:
    """The prompt with each run of image or video placeholders reduced to one token."""
    places = set() if inputs is None else {*inputs.places.tolist(), *inputs.video_places.tolist()}
    before = (None, *prompt)
    return [token for place, token in enumerate(prompt) if place not in places or token != before[place]]


def pictures(inputs: RowInputs) -> list[str | list[str]]:
    """The images as data URIs, in the order of the prompt; for a video the list of its frames'."""
    from PIL import Image

    urls: dict[int, list[str]] = {}
    for number, frame in zip(inputs.shown_of.tolist(), inputs.shown, strict=True):
        file = io.BytesIO()
        Image.fromarray(frame.cpu().numpy()).save(file, "PNG", optimize=True)
        urls.setdefault(number, []).append(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")
    return [each[0] if len(each) == 1 else each for each in urls.values()]


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; joined, they are the decoded text.

    A character spelled by several tokens belongs to the last of them. A token is decoded after the tokens of the piece
    before it, since some tokenizers drop the space before a first word.
    """
    pieces: list[str] = []
    start = done = 0  # tokens [start, done) are decoded and kept as context
    for end in range(1, len(ids) + 1):
        before = _decode(tokenizer, ids[start:done]) if done > start else ""
        text = _decode(tokenizer, ids[start:end])
        if text.endswith("\ufffd") and end < len(ids):  # an unfinished character
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        start, done = done, end
    return pieces
