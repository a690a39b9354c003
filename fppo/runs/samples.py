"""Rows of a batch as columns of a table, token by token, and as JSON objects."""

from __future__ import annotations

import io
import json
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from fppo import batch as batches
from fppo import rewards, tree
from fppo.batch import Experience, Rollout, RowInputs, Scored
from fppo.data.pieces import decode, decode_all, pieces, pieces_of
from fppo.pipeline.truth import Compared
from fppo.runs.jsonl import plain

# the columns of lists that an experience may have, with their types in a file; log-probs are subtracted, so float32
LISTS = {
    "rollout_log_probs": np.float32,
    "old_log_probs": np.float32,
    "ref_log_probs": np.float32,
    "teacher_log_probs": np.float32,
    "values": np.float16,
    "advantages": np.float16,
    "returns": np.float16,
    "entropy": np.float16,
    "token_rewards": np.float32,
    "correction_weights": np.float32,
    "token_versions": np.int32,
    "turn_ids": np.int32,
    "turn_rewards": np.float32,
    "process_rewards": np.float32,
}
_HALF = float(np.finfo(np.float16).max)


def on_host(experience: Experience) -> Experience:
    """Copy the columns that `table_of` reads to the host, and drop the other large ones."""
    dropped = dict.fromkeys(("routed", "hidden", "truth_signs", "sum_squared_probs", "disagreement"))
    kept = tree.replace(experience, inputs=None, **dropped)
    return tree.replace(tree.map(lambda x: x.detach().cpu(), kept), inputs=experience.inputs)


def spread(experience: Experience, count: int | None) -> Experience:
    """Select `count` rows, spread evenly over the batch; all rows if there are no more, or if `count` is None."""
    total = batches.num_rows(experience)
    if count is None or count >= total:
        return experience
    return batches.rows(experience, [i * total // count for i in range(count)])


def table_of(experience: Experience, tokenizer: Any, step: int) -> pa.Table:
    """One row for each response of a batch on the host; docs/guides/looking-into-a-run.md lists the columns.

    Lists have one entry for each token of the response, also for those that are not trained on (`mask` is false there).
    `images` are PNG files, one list for each image, or video with its frames; the first row of a group has them, the
    others null.
    """
    width = experience.response_mask.shape[1]
    present = experience.attention_mask[:, -width:]
    counts = present.sum(1).numpy()
    ids = np.split(experience.tokens[:, -width:][present].numpy(), np.cumsum(counts)[:-1])
    responses = [row.tolist() for row in ids]
    texts = decode_all(tokenizer, responses)
    columns: dict[str, Any] = {
        "step": np.full(len(responses), step, np.int32),
        "row_id": experience.row_ids.numpy(),
        "group": experience.groups.numpy(),
        **({} if experience.episodes is None else {"episode": experience.episodes.numpy()}),
        "id": [_text(x) for x in experience.ids],
        "source": pa.array([_text(x) for x in experience.source]).dictionary_encode(),
        "finish": pa.array([_text(x) for x in experience.finish]).dictionary_encode(),
        "version": experience.versions.numpy(),
        "prompt": pa.array(decode_all(tokenizer, _prompts(experience))).dictionary_encode(),
        "response": texts,
        "ground_truth": [_text(x) for x in experience.ground_truth],
        "score": pa.array(experience.scores.numpy(), from_pandas=True),
        **{f"score.{name}": pa.array(x.numpy(), from_pandas=True) for name, x in experience.named_scores.items()},
        "length": experience.response_mask.sum(1).numpy().astype(np.int32),
        "tokens": _lists(counts, np.concatenate(ids).astype(np.int32)),
        "pieces": _lists(counts, pa.array(chain(*pieces_of(tokenizer, responses, texts)), pa.string())),
        "mask": _lists(counts, experience.response_mask[present].numpy()),
    }
    for name, kind in LISTS.items():
        if (x := getattr(experience, name)) is not None:
            columns[name] = _lists(counts, _narrow(x[present].numpy(), kind))
    if experience.inputs is not None:
        columns["images"] = pa.array(_pictures_once(experience), pa.list_(pa.list_(pa.binary())))
    return pa.table(columns)


def _lists(counts: np.ndarray, values: Any) -> Any:
    """A column of lists with `counts` of the values each."""
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _narrow(x: np.ndarray, kind: type) -> np.ndarray:
    """The numbers as `kind`; as float32 if a finite one is too large for float16."""
    finite = np.abs(x[np.isfinite(x)]) if kind is np.float16 else x[:0]
    return x.astype(np.float32 if (finite > _HALF).any() else kind)


def _text(value: Any) -> str | None:
    """A value of a data row as text: itself, or else as JSON."""
    return value if value is None or isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)


def _prompts(experience: Experience) -> list[list[int]]:
    """The ids of each prompt, with each run of image or video placeholders reduced to one token."""
    width = experience.response_mask.shape[1]
    rows = zip(experience.tokens[:, :-width], experience.attention_mask[:, :-width], strict=True)
    inputs = experience.inputs or [None] * batches.num_rows(experience)
    return [_marked_once(ids[kept].tolist(), x) for (ids, kept), x in zip(rows, inputs, strict=True)]


def _pictures_once(experience: Experience) -> list[list[list[bytes]] | None]:
    """The images of the first row of each group; None for the others, and for prompts without any."""
    seen, result = set[int](), list[list[list[bytes]] | None]()
    for group, inputs in zip(experience.groups.tolist(), experience.inputs or (), strict=True):
        result.append(None if inputs is None or group in seen else pictures(inputs))
        seen.add(group)
    return result


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


def shown(experience: Experience, tokenizer: Any, step: int) -> list[dict[str, Any]]:
    """The rows of a batch as trackers show them: texts and scores, named as the columns of `table_of`."""
    return [
        {
            "prompt": line["prompt"],
            "response": line["response"],
            "score": line["score"],
            **{f"score.{name}": score for name, score in line["named_scores"].items()},
            "ground_truth": _text(line["ground_truth"]),
            "finish": line["finish"],
        }
        for line in scored_lines(experience, tokenizer, step)
    ]


def truth_lines(compared: Compared, tokenizer: Any, step: int) -> list[dict[str, Any]]:
    """Responses as JSON objects with each token's values and advantages, estimated and exact."""
    rollout, lines = compared.rollout, []
    width = rollout.response_mask.shape[1]
    for row, mask in enumerate(rollout.response_mask.cpu()):
        tokens, attended = rollout.tokens[row].cpu(), rollout.attention_mask[row].cpu()
        line = {
            "step": step,
            "id": plain(rollout.ids[row]),
            "prompt": decode(tokenizer, tokens[:-width][attended[:-width]].tolist()),
            "tokens": pieces(tokenizer, tokens[-width:][mask].tolist()),
        }
        for name in ("values", "exact_values", "advantages", "exact_advantages"):
            line[name] = [round(x, 6) for x in getattr(compared, name)[row].cpu()[mask].tolist()]
        lines.append(line)
    return lines


def _marked_once(prompt: list[int], inputs: RowInputs | None) -> list[int]:
    """The prompt with each run of image or video placeholders reduced to one token."""
    places = set() if inputs is None else {*inputs.places.tolist(), *inputs.video_places.tolist()}
    before = (None, *prompt)
    return [token for place, token in enumerate(prompt) if place not in places or token != before[place]]


def pictures(inputs: RowInputs) -> list[list[bytes]]:
    """One list of PNG files for each image, or video with its frames, in the order of the prompt."""
    from PIL import Image

    files: dict[int, list[bytes]] = {}
    for number, frame in zip(inputs.shown_of.tolist(), inputs.shown, strict=True):
        file = io.BytesIO()
        Image.fromarray(frame.cpu().numpy()).save(file, "PNG", optimize=True)
        files.setdefault(number, []).append(file.getvalue())
    return list(files.values())
