"""What the check of a model costs when it is loaded.

    python experiments/bench/load.py                  # --repeats, --only

Random models are saved in bfloat16 and loaded in float32 on one core, from the file system's cache: seconds of
`models.load`, of the check that it makes of small instances of the architecture (`models.check_model`), and its share.
Medians, as a Markdown table. The check's time does not grow with the model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig

from fppo import models
from fppo.key import Key

TEXT = {"vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 32768}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Qwen2.5 0.5B": (
        "qwen2",
        TEXT
        | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
        | {"num_attention_heads": 14, "num_key_value_heads": 2},
    ),
    "Qwen2.5 1.5B": (
        "qwen2",
        TEXT
        | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
        | {"num_attention_heads": 12, "num_key_value_heads": 2},
    ),
    "mixture, 16 experts, 1.1B": (
        "qwen3_moe",
        TEXT
        | {"hidden_size": 1024, "moe_intermediate_size": 768, "num_hidden_layers": 24, "num_experts": 16}
        | {"num_experts_per_tok": 2, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64},
    ),
}


def seconds(fn: Callable[[], Any], repeats: int) -> float:
    """The median time of some calls, after one."""
    fn()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def row(name: str, repeats: int) -> str:
    """A line of the table."""
    kind, sizes = MODELS[name]
    model = models.build(AutoConfig.for_model(kind, **sizes))
    with TemporaryDirectory() as place:
        models.save(model, models.init_params(model, Key(0), dtype=torch.bfloat16), Path(place))
        loading = seconds(lambda: models.load(place, dtype=torch.float32), repeats)
    checking = seconds(lambda: models.check_model(model), repeats)
    return f"| {name} | {loading:.2f} | {checking:.3f} | {checking / loading:.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | load, s | check, s | share |\n|---|---|---|---|")
    for name in options.only:
        print(row(name, options.repeats), flush=True)


if __name__ == "__main__":
    main()
