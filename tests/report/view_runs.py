"""Runs on disk for the tests of the viewer, with every column that a run can have."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fppo.runs import memory
from fppo.runs.jsonl import JsonLines
from fppo.runs.memory import StageMemory
from fppo.runs.sample_files import SAMPLES

ARABIC = "مرحبا بالعالم: الجواب ٤٢"
MARKUP = '</script><img src=x onerror="window.HACKED=1"><b>bold</b>'
SETTINGS = """output_dir = "."
seed = {seed}
steps = 30

[reward]
functions = ["exact_match", "politeness"]
weights = [1.0, 0.5]

[actor.optimizer]
lr = {lr}
"""


def write_metrics(run: Path, steps: int, *, shift: float = 0.0) -> None:
    run.mkdir(parents=True, exist_ok=True)
    log = JsonLines(run / "metrics.jsonl")
    log.log(0, {"val-core/sums/reward/mean@1": 0.25})
    for step in range(1, steps + 1):
        numbers = {
            "critic/score/mean": 1 - math.exp(-step / 8) + shift,
            "actor/entropy": 1 / step,
            "timing_s/step": 2.0,
        }
        numbers |= {"actor/ppo_kl": 1e-4 * step, "timing_s/gen": 1.25, "timing_s/update_actor": 0.5, "my/own": step % 3}
        log.log(step, numbers)
    log.close()


def write_run(run: Path, *, steps: int = 6, seed: int = 0, lr: float = 1e-6, rows: int = 8) -> Path:
    """A run with metrics, settings, traces and rows; the last step has hostile texts, turns and an image."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "settings.toml").write_text(SETTINGS.format(seed=seed, lr=lr))
    write_metrics(run, steps, shift=0.01 * seed)
    for step in range(1, steps + 1):
        write_table(run, step, table(step, rows, odd=step == steps))
    log = JsonLines(run / "trace" / "rank_00000.jsonl")
    for step in range(1, steps + 1):
        at = 1.7e9 + 2 * step
        spans = [["step", at, 2.0], ["gen", at + 0.1, 1.0], ["reward", at + 1.1, 0.1], ["update_actor", at + 1.3, 0.6]]
        log.write({"step": step, "spans": spans, "calls": []})
    log.close()
    write_memory(run, 2, steps)
    return run


def write_memory(run: Path, *steps: int, ranks: int = 2) -> None:
    """The memory of two stages on each rank, of which the last has most."""
    state = {"parameters": 4 << 30, "moments": 8 << 30}
    (run / memory.MEMORY).mkdir(exist_ok=True)
    for step in steps:
        for rank in range(ranks):
            gen = state | {"gradients": 0, "cache": 3 << 30, "activations": 1 << 28}
            update = state | {"gradients": 2 << 30, "cache": 0, "activations": (4 + rank) << 30}
            rows = {"gen": gen, "update_actor": update}
            stages = [StageMemory(stage=name, peak=sum(row.values()), **row) for name, row in rows.items()]
            memory.write(run / memory.MEMORY / f"step_{step:08d}_rank_{rank}.json", step, stages)


def write_table(run: Path, step: int, rows: pa.Table) -> Path:
    path = run / SAMPLES / f"{step:06d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path, compression="zstd")
    return path


def table(step: int, rows: int, *, tokens: int = 4, odd: bool = False, texts: Sequence[str] | None = None) -> pa.Table:
    """Rows as `fppo.runs.samples.table_of` writes them, two to a prompt; the score of row r is r / rows.

    With `odd` the first rows hold Arabic, 100,000 characters and markup, and the first prompt an image.
    """
    number = np.arange(rows)
    pieces = [[f"{(step + row) % 10}", "+", f" {row}", "\n"][:tokens] + ["x"] * (tokens - 4) for row in number]
    responses = ["".join(row) for row in pieces]
    if odd:
        for row, text in enumerate((ARABIC, "x" * 100_000, MARKUP)[:rows]):
            responses[row], pieces[row] = text, [text, *[""] * (tokens - 1)]
    responses = list(texts) if texts is not None else responses
    mask = np.ones((rows, tokens), bool)
    mask[:, 2:3] = False
    spread = (np.arange(rows * tokens).reshape(rows, tokens) % 7 - 3) / 2
    columns: dict[str, Any] = {
        "step": np.full(rows, step, np.int32),
        "row_id": number + 1000 * step,
        "group": number // 2,
        "id": [f"sum-{row // 2}" for row in number],
        "source": pa.array(["sums"] * rows).dictionary_encode(),
        "finish": pa.array(["length" if row % 4 == 3 else "stop" for row in number]).dictionary_encode(),
        "version": np.full(rows, step - 1),
        "prompt": pa.array([f"<|user|>{row // 2}+{step if odd else 2}=" for row in number]).dictionary_encode(),
        "response": responses,
        "ground_truth": [str(row // 2) for row in number],
        "score": number / rows,
        "score.exact_match": (number % 2).astype(np.float64),
        "score.politeness": number / rows,
        "length": mask.sum(1).astype(np.int32),
        "tokens": lists(np.full((rows, tokens), 7, np.int32)),
        "pieces": pa.array(pieces),
        "mask": lists(mask),
        "rollout_log_probs": lists((spread - 4).astype(np.float32)),
        "old_log_probs": lists((spread * 1.01 - 4).astype(np.float32)),
        "ref_log_probs": lists((spread - 4.1).astype(np.float32)),
        "values": lists((spread / 4 + 0.5).astype(np.float16)),
        "advantages": lists(spread.astype(np.float16)),
        "returns": lists((spread / 4 + 0.5).astype(np.float16)),
        "entropy": lists(np.abs(spread).astype(np.float16)),
        "token_rewards": lists((spread * 0.1).astype(np.float32)),
    }
    if odd:
        turns = np.tile(np.minimum(np.arange(tokens) // 2, 1), (rows, 1)).astype(np.int32)
        turns[:, 2] = -1
        columns["turn_ids"] = lists(turns)
        columns["turn_rewards"] = lists((turns == 1).astype(np.float32))
        columns["images"] = pa.array(
            [[[png(24, 16)]] if row == 0 else None for row in number], pa.list_(pa.list_(pa.binary()))
        )
    return pa.table(columns)


def lists(values: np.ndarray) -> pa.Array:
    """A column of lists, one for each row of a matrix."""
    offsets = np.arange(values.shape[0] + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.reshape(-1)))


def png(width: int, height: int) -> bytes:
    """A grey image."""

    def part(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    lines = b"".join(b"\0" + bytes([40 * y % 256] * width) for y in range(height))
    parts = (part(b"IHDR", head), part(b"IDAT", zlib.compress(lines)), part(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
