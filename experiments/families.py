"""Which families of decoders run: whole, and on a tensor axis of two ranks; and why the others do not.

    python experiments/families.py                  # every type that transformers maps, as a page of Markdown
    python experiments/families.py llama gpt2       # some of them

Each is asked what it is asked when it is loaded (`models.check_model`, `check_placed`, `lora.check_adapted`): its
default config, with at most four layers where that may be, as a small random instance.
"""

import contextlib
import re
import sys
import warnings

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from fppo import models
from fppo.models import lora

LAYERS, RANKS = 4, 2
REFUSED = re.compile(r"^(fppo cannot (run|adapt) )?model type '[\w-]+'( on a tensor axis of \d ranks)?(: |, whose | )")


def shortened(kind: str):
    """The default config of a type, with fewer layers if it has each kind of them among the first."""
    config = AutoConfig.for_model(kind)
    kinds = getattr(config, "layer_types", None) or [None]
    if getattr(config, "num_hidden_layers", 0) > LAYERS and len(set(kinds[:LAYERS])) == len(set(kinds)):
        with contextlib.suppress(AttributeError):  # one that follows from another
            config.num_hidden_layers, config.layer_types = LAYERS, kinds[:LAYERS] if kinds[0] else None
    return config


def refusal(check, kind: str, *arguments) -> str | None:
    """Why a check of the type's model fails; None if it does not."""
    try:
        check(models.build(shortened(kind)), *arguments)
    except Exception as error:
        return REFUSED.sub("", " ".join(str(error).split()).replace("|", "/"))[:200] or type(error).__name__
    return None


def main(kinds: list[str]) -> None:
    """Prints the page."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    whole = {kind: refusal(models.check_model, kind) for kind in kinds or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    cut = {kind: refusal(models.check_placed, kind, RANKS) for kind, why in whole.items() if why is None}
    adapted = {kind: refusal(lora.check_adapted, kind, models.Lora(2, 4.0)) for kind in cut}
    print("## Whole, and on a tensor axis\n\n" + ", ".join(f"`{kind}`" for kind, why in cut.items() if why is None))
    for title, verdicts in (("Whole, and on no tensor axis", cut), ("Not adapted", adapted), ("Refused", whole)):
        lines = [f"| `{kind}` | {why} |" for kind, why in verdicts.items() if why is not None]
        print(
            "\n".join([f"\n## {title}\n\n| type | why |\n|---|---|", *lines] if lines else []), end="\n" * bool(lines)
        )


main(sys.argv[1:])
