"""Models in GGUF files, unpacked once into directories as transformers writes them."""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from fppo._errors import words_of
from fppo.models.model import BUILDING, Model, Params, build, model_class, named_state
from fppo.models.save import save, save_config
from fppo.runtime.gguf_files import GgufHeader, read_header
from fppo.runtime.kept import alone_in, cache_directory

_FORM = "1"  # the version of the directories' contents: to be raised when these change
_FILE = "model.gguf"
_ADVICE = "give the model's own directory, or its name on the hub"
# llama.cpp's names for splitting off each digit, and other text as GPT-2 does; transformers splits only as GPT-2 does
_DIGITS = ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")


def unpacked(file: Path, *, weights: bool) -> Path:
    """The directory of the model in a GGUF file: its config, its tokenizer with the chat template and, with `weights`,
    its weights dequantised to float32.

    It is made once for a file, below XDG_CACHE_HOME or ~/.cache, and reused until the file or transformers changes.
    Raises ValueError for a file that is damaged or cut off, for a model that transformers cannot read from such a file
    or would read wrongly, and for a disk without room.
    """
    header = read_header(file)
    place = cache_directory(file, "gguf", transformers.__version__, _FORM)
    try:
        with alone_in(place):
            for name in ("model", "config"):
                if (place / name).is_dir() and (name == "model" or not weights):
                    return place / name
            for left in place.glob(".*.partial"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            return _written(file, header, place / ("model" if weights else "config"), weights)
    except OSError as error:
        text = f"{file} is unpacked in {place}: {error.strerror or error}; XDG_CACHE_HOME names another place"
        raise ValueError(text) from error


def _written(file: Path, header: GgufHeader, directory: Path, weights: bool) -> Path:
    with tempfile.TemporaryDirectory(prefix="fppo_") as alone:  # transformers must not read files beside it
        (Path(alone) / _FILE).symlink_to(file.resolve())
        config = _config(file, Path(alone), header)
        tokenizer = _tokenizer(file, Path(alone), header)
        model = build(config)
        if not weights:
            save_config(model, directory, tokenizer=tokenizer)
            return directory
        size = 4 * sum(shape.numel() for shape in model.whole_shapes.values())
        if (free := shutil.disk_usage(directory.parent).free) < size:
            text = (
                f"its weights take {size / 1e9:.1f} GB in float32, and {directory.parent} has room for {free / 1e9:.1f}"
            )
            raise ValueError(f"{file}: {text}; XDG_CACHE_HOME names another place")
        save(model, _params(file, Path(alone), header, model), directory, tokenizer=tokenizer)
        return directory


def _config(file: Path, directory: Path, header: GgufHeader) -> PreTrainedConfig:
    """The config as transformers reads it, with Llama 3's scaling of rotary positions, which it leaves out. Raises
    ValueError for an architecture that transformers cannot read, and for other scalings that it leaves out."""
    try:
        config = AutoConfig.from_pretrained(directory, gguf_file=_FILE)
    except Exception as error:  # transformers may raise any exception for an unknown header
        which = f"transformers {transformers.__version__} cannot read a GGUF model of the architecture"
        text = f"{file}: {which} {header.architecture!r} ({words_of(error, 300)})"
        raise ValueError(f"{text}; {_ADVICE}") from error
    vars(config).pop("_model_name_or_path", None)  # the file's title
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_freqs.weight" in header.tensors:
        config.rope_parameters = rope | _llama3(file, header, config)
    kind, factor = header.own("rope.scaling.type"), header.own("rope.scaling.factor")
    if kind not in (None, "none") and factor != 1 and rope.get("rope_type", "default") == "default":
        text = f"its rotary positions are scaled ({kind} by {factor}), which transformers does not read from it"
        raise ValueError(f"{file}: {text}; {_ADVICE}")
    return config


def _llama3(file: Path, header: GgufHeader, config: PreTrainedConfig) -> dict[str, Any]:
    """The scaling of rotary positions of Llama 3.1 and later, which the file keeps as a divisor of each frequency.

    Formula: llama.cpp's convert_hf_to_gguf.py, and transformers' rope type llama3. Raises ValueError for divisors that
    the formula gives for no factor.
    """
    entry, theta = header.tensors["rope_freqs.weight"], config.rope_parameters["rope_theta"]
    stored = np.fromfile(file, "<f4", count=math.prod(entry.shape), offset=entry.start).astype(np.float64)
    original, low, high, factor = 8192, 1.0, 4.0, float(stored.max())
    share = original * theta ** (-np.arange(len(stored)) / len(stored)) / (2 * math.pi)  # turns in `original` tokens
    smooth = np.clip((share - low) / (high - low), 0.0, 1.0)
    if entry.kind != "F32" or not np.allclose(stored, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        text = "its rotary positions are scaled (rope_freqs.weight) in a way that is not Llama 3's"
        raise ValueError(f"{file}: {text}, and transformers does not read that; {_ADVICE}")
    scaled = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    return scaled | {"original_max_position_embeddings": original}


def _tokenizer(file: Path, directory: Path, header: GgufHeader) -> PreTrainedTokenizerBase | None:
    """The tokenizer with the chat template; None for a file without one."""
    if "tokenizer.ggml.model" not in header.metadata:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=_FILE)
    except Exception as error:
        text = f"transformers {transformers.__version__} cannot read its tokenizer ({words_of(error, 300)})"
        raise ValueError(f"{file}: {text}; {_ADVICE}") from error
    if header.metadata.get("tokenizer.ggml.pre") in _DIGITS:
        between = pre_tokenizers.ByteLevel(add_prefix_space=False)
        own = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), between])
        tokenizer.backend_tokenizer.pre_tokenizer = own
    return tokenizer


def _params(file: Path, directory: Path, header: GgufHeader, model: Model) -> Params:
    """The weights as transformers dequantises and renames them. Raises ValueError unless the model takes all numbers
    of the file, and has no others."""
    config = model.whole_config
    try:
        with BUILDING, torch.random.fork_rng(devices=[]):  # missing weights are drawn
            module, read = model_class(config).from_pretrained(
                directory, gguf_file=_FILE, config=config, dtype=torch.float32, output_loading_info=True
            )
    except Exception as error:
        kinds = ", ".join(sorted({tensor.kind for tensor in header.tensors.values()}))
        text = f"transformers {transformers.__version__} cannot read its weights, of kinds {kinds}"
        raise ValueError(f"{file}: {text} ({words_of(error, 300)}); {_ADVICE}") from error
    named = {name: x.detach() for name, x in named_state(module).items() if name in model.whole_shapes}
    if missing := sorted({*read["missing_keys"]} & {*model.whole_shapes} | {*model.whole_shapes} - {*named}):
        raise ValueError(f"{file} does not hold a whole {config.model_type!r} model: missing {missing[:5]}; {_ADVICE}")
    stored = {name: math.prod(tensor.shape) for name, tensor in header.tensors.items() if _is_of(name, config)}
    own = sum(x.numel() for x in named.values())
    if sum(stored.values()) != own:
        text = f"it holds {sum(stored.values()):,} numbers, and the {config.model_type!r} model that transformers makes"
        raise ValueError(f"{file}: {text} of it {own:,}: some of its tensors would go unread; {_ADVICE}")
    return named


def _is_of(name: str, config: PreTrainedConfig) -> bool:
    """True if a tensor is a parameter of the model. False for rotary angles, a stored copy of a tied head, and extra
    layers that predict several tokens."""
    layer = name.split(".")[1] if name.startswith("blk.") else ""
    if layer.isdigit() and int(layer) >= config.get_text_config().num_hidden_layers:
        return False
    return name != "rope_freqs.weight" and not (name == "output.weight" and config.tie_word_embeddings)
