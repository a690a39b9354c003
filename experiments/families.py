"""Which types of models run: whole, on a tensor axis of two ranks, with adapters, with images; and why others do not.

    python experiments/families.py                  # every type that transformers maps, as tables of Markdown
    python experiments/families.py llama gpt2       # some of them

Each is asked what it is asked when it is loaded (`models.check_model`, `check_placed`, `lora.check_adapted`): its
default config, with at most four layers where that may be, as a small random instance, in a process of its own.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kinds.page import page
from kinds.process import in_process
from kinds.verdicts import WHOLE, Verdict, verdict_of
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

LIMIT, WORKERS = 600.0, 2  # seconds that a type has; types at a time


def main(kinds: list[str]) -> None:
    every = kinds or sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
    asked = partial(in_process, verdict_of, limit=LIMIT, imports=("fppo.models", "fppo.models.lora"))
    verdicts: dict[str, Verdict] = {}
    with ThreadPoolExecutor(WORKERS) as threads:
        for kind, said in zip(every, threads.map(asked, every), strict=True):
            verdicts[kind] = {WHOLE: said} if isinstance(said, str) else said
            print(f"{len(verdicts)}/{len(every)} {kind}: {verdicts[kind]}", file=sys.stderr, flush=True)
    print(page(verdicts))


if __name__ == "__main__":
    main(sys.argv[1:])
