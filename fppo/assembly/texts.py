"""Tools for the text of a run, as its settings name them: tokenizer, chat template, ends of a response."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import attrs
from transformers import AutoProcessor, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from fppo import data
from fppo._errors import json_of, words_of
from fppo.data import ChatOptions
from fppo.data.encode import check_open_end
from fppo.fields import shared
from fppo.models.load import find_directory, read_config
from fppo.models.model import build
from fppo.models.vision import Vision, takes_images
from fppo.rollout.engine import Sampling
from fppo.runtime.gguf_files import gguf_of
from fppo.settings.model import ModelSettings
from fppo.settings.places import NO_TEMPLATE, TOKENIZER_FILES
from fppo.settings.reward import RewardModelSettings
from fppo.settings.rollout import RolloutSettings
from fppo.settings.train import DataSettings, EvalSettings

GENERATION = "generation_config.json"


def directory_of(path: str, name: str, *, weights: bool = True) -> Path:
    """The directory of the model that the setting `name` names. Raises ValueError with that name if there is none."""
    try:
        return find_directory(path, weights=weights)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def config_place(path: str, name: str) -> Path:
    """The directory with the config of the model that the setting `name` names; its weights need not be there."""
    return directory_of(path, name, weights=False)


def has_tokenizer(directory: Path) -> bool:
    """Whether a tokenizer lies there."""
    return any((directory / name).exists() for name in TOKENIZER_FILES)


def open_tokenizer(path: str, name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer that the setting `name` names. Raises ValueError if there is none."""
    if gguf_of(path) is not None:
        path = str(config_place(path, name))
    local = Path(path)
    if (local.is_absolute() or local.exists() or path.startswith(".")) and not has_tokenizer(local):
        raise ValueError(f"{name}: {path} holds no tokenizer, none of {list(TOKENIZER_FILES)}")
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # errors of the hub, of http, and of files that are no tokenizer
        why = " ".join(str(error).split())
        raise ValueError(f"{name}: no tokenizer came from {path}: {type(error).__name__}: {why}") from error


def load_tokenizer(model: ModelSettings, rows: DataSettings, *, pads: bool = True) -> PreTrainedTokenizerBase:
    """The policy's tokenizer, with the settings' chat template. Raises ValueError if it lacks what the settings need; a
    padding token is needed only if it `pads` rows of data."""
    if model.tokenizer is None:
        directory = config_place(model.path, "model.path")
        tokenizer = open_tokenizer(str(directory), "model.path", model.trust_remote_code)
    else:
        tokenizer = open_tokenizer(model.tokenizer, "model.tokenizer", model.trust_remote_code)
    end = None if pads else cast(str | None, tokenizer.eos_token)
    data.check_tokenizer(tokenizer, pad_token=rows.pad_token or end)
    if rows.chat_template is not None:
        tokenizer.chat_template = Path(rows.chat_template).read_text(encoding="utf-8-sig")
    if rows.seen and tokenizer.chat_template is None:
        tokenizer.chat_template = open_processor(model, rows)[0].chat_template
    if rows.chat and tokenizer.chat_template is None:
        named = f"model.path = {model.path!r}" if model.tokenizer is None else f"model.tokenizer = {model.tokenizer!r}"
        raise ValueError(f"{named}: {NO_TEMPLATE}")
    if rows.chat:
        data.check_chat_template(tokenizer, options=chat_options(rows))
    return tokenizer


def open_processor(section: ModelSettings, rows: DataSettings) -> tuple[Any, Vision]:
    """The processor of images and videos for the policy, and the policy's handling of them. Raises ValueError
    without such a processor, and for a model that takes no images, or no videos if the rows have any."""
    directory, name = config_place(section.path, "model.path"), _named(rows.seen)
    config = config_of(section, directory)
    if not takes_images(config):
        raise ValueError(f"{name}: a model of type {config.model_type!r} takes no images")
    vision = build(config, trust_remote_code=section.trust_remote_code).vision
    assert vision is not None
    try:
        processor: Any = AutoProcessor.from_pretrained(directory, trust_remote_code=section.trust_remote_code)
    except Exception as error:  # those of files, and of packages that some processors need
        why = " ".join(str(error).split())
        raise ValueError(
            f"{name}: no processor of images came from {directory}: {type(error).__name__}: {why}"
        ) from error
    if getattr(processor, "image_processor", None) is None:  # without the files of one it is a tokenizer
        raise ValueError(f"{name}: {directory} has no processor of images (processor_config.json)")
    if rows.videos is not None:
        _check_videos(rows.videos, processor, vision)
    return processor, vision


def _named(seen: Mapping[str, str]) -> str:
    return ", ".join(f"{name} = {field!r}" for name, field in seen.items())


def _check_videos(field: str, processor: Any, vision: Vision) -> None:
    """Raises ValueError for a processor that reads no videos, and for a model that fppo does not run with them."""
    reader = getattr(processor, "video_processor", None)
    if reader is None:
        raise ValueError(
            f"data.videos = {field!r}: {type(processor).__name__} reads no videos, or the model's directory does not "
            "say how (video_preprocessor_config.json)"
        )
    if vision.video is None and "pixel_values_videos" in reader.model_input_names:
        raise ValueError(
            f"data.videos = {field!r}: fppo does not run a model of type {vision.config.model_type!r} with videos"
        )


def load_images(
    model: ModelSettings, rows: DataSettings, tokenizer: PreTrainedTokenizerBase
) -> data.ImageReader | None:
    """The reader of prompts with images and videos, with the tokenizer's chat template; None without any."""
    if not rows.seen:
        return None
    processor, vision = open_processor(model, rows)
    processor.chat_template = tokenizer.chat_template
    chat = chat_options(rows)
    return data.ImageReader(processor, vision.token, chat, vision.video, rows.video_fps, rows.video_frames)


def chat_options(rows: DataSettings) -> ChatOptions:
    """The arguments and tools of the settings for the chat template, beside messages."""
    path = rows.tools
    tools: Any = [] if path is None else json_of(Path(path).read_text(encoding="utf-8-sig"))
    return ChatOptions(arguments=rows.chat_arguments, tools=tools, row_tools=rows.row_tools is not None)


def generation_config(
    directory: Path,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: ChatOptions | None,
) -> GenerationConfig:
    """A model's generation config, with all tokens that end its responses: its own, the tokenizer's end, and the one
    with which its chat template, if `chat` is used, ends an assistant's turn.

    Raises ValueError for a file that transformers would not write again.
    """
    there = (directory / GENERATION).exists()
    generation = _read_generation(directory) if there else GenerationConfig.from_model_config(config)
    ids = ends_of(generation)
    if wrong := [x for x in ids if isinstance(x, bool) or not isinstance(x, int)]:
        raise ValueError(f"{directory / GENERATION}: eos_token_id holds {wrong[:3]}, which are no ids of tokens")
    if beyond := [x for x in ids if not 0 <= x < data.vocabulary_size(config)]:
        place = directory / GENERATION if there else directory / "config.json"
        text = f"and the model has {data.vocabulary_size(config)} tokens; mend it"
        raise ValueError(f"{place}: eos_token_id names {beyond[:3]}, {text}")
    turn = None if chat is None else data.end_of_turn(tokenizer, options=chat)
    every = list(dict.fromkeys(x for x in (*ids, tokenizer.eos_token_id, turn) if x is not None))
    if every == ids:
        return generation
    generation.eos_token_id = every if len(every) > 1 else every[0]
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True  # published ones often have a temperature, and leave this out
        try:
            generation.validate(strict=True)
        except ValueError as error:
            why = " ".join(str(error).split())
            raise ValueError(f"{directory / GENERATION} does not fit itself; mend or remove it: {why}") from error
    return generation


def _read_generation(directory: Path) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(directory)
    except (OSError, ValueError):
        raise
    except Exception as error:  # transformers raises what it likes of values of a wrong kind
        raise ValueError(f"{directory / GENERATION} cannot be read: {words_of(error, 400)}") from error


def config_of(section: ModelSettings, directory: Path) -> PreTrainedConfig:
    """The config of one of the settings' models, with their changes. Raises ValueError for changes that do not fit."""
    try:
        return read_config(directory, changes=section.config, trust_remote_code=section.trust_remote_code)
    except ValueError as error:
        raise ValueError(f"model.config: {error}" if section.config else str(error)) from error


def vocabulary_size_of(model: ModelSettings) -> int:
    """Rows of the policy's embedding."""
    return data.vocabulary_size(config_of(model, config_place(model.path, "model.path")))


def ends_of(generation: GenerationConfig) -> list[int]:
    """The tokens that end a response."""
    own = generation.eos_token_id
    return own if isinstance(own, list) else [] if own is None else [own]


def sampling_of(
    rollout: RolloutSettings,
    tokenizer: PreTrainedTokenizerBase,
    generation: GenerationConfig,
    *,
    like: Sampling | None = None,
) -> Sampling:
    """How responses are sampled in training. `like`: an earlier sampling with the same tokenizer, whose analysis of the
    tokens' texts is reused."""
    ids = data.stop_tokens(tokenizer, rollout.stop, rollout.stop_token_ids, turn_ends=ends_of(generation))
    texts = data.stop_texts(tokenizer, rollout.stop, like=None if like is None else like.stop_texts)
    return Sampling(**shared(rollout, Sampling) | {"stop_token_ids": ids, "stop_texts": texts})


def eval_sampling_of(
    section: EvalSettings,
    rollout: RolloutSettings,
    tokenizer: PreTrainedTokenizerBase,
    generation: GenerationConfig,
    *,
    like: Sampling | None = None,
) -> Sampling:
    """How held-out prompts are answered: as in training, except for the settings of section eval."""
    own = {name: value for name, value in shared(section, RolloutSettings).items() if value is not None}
    asked = attrs.evolve(rollout, **own | {"temperature": section.temperature or 1.0})
    return attrs.evolve(sampling_of(asked, tokenizer, generation, like=like), greedy=section.temperature == 0)


def reward_tokenizer_of(
    section: RewardModelSettings,
    tokenizer: PreTrainedTokenizerBase,
    configs: Mapping[str, PreTrainedConfig],
    *,
    chat: bool,
    trust_remote_code: bool,
) -> PreTrainedTokenizerBase | None:
    """The reward model's tokenizer, which encodes responses for it; None if it reads the policy's tokens as they are.
    `configs` are those of the "policy" and the "reward model".

    Raises ValueError if the reward model's vocabulary does not fit the tokenizer whose tokens it reads, or if the
    settings of its chat template do not fit.
    """
    assert section.path is not None
    path, own = section.tokenizer, None
    if path is not None:
        own = open_tokenizer(path, "reward.model.tokenizer", trust_remote_code)
    elif has_tokenizer(directory := directory_of(section.path, "reward.model.path")):
        path = section.path
        own = open_tokenizer(str(directory), "reward.model.path", trust_remote_code)
    if own is not None and (section.tokenizer is not None or _differs(own, tokenizer, chat=chat)):
        data.check_vocabulary(own, {"reward model": configs["reward model"]}, any_text=True)
        if chat and own.chat_template is None:
            raise ValueError(
                f"the reward model's tokenizer {path} has no chat template; give another (reward.model.tokenizer), "
                "or texts without one (reward.model.chat = false)"
            )
        return own
    if section.chat is not None:
        raise ValueError(
            f"reward.model.chat = {section.chat}: the reward model reads the policy's tokens as they are, since it has "
            "no tokenizer that differs; leave it out, or name its tokenizer (reward.model.tokenizer)"
        )
    data.check_vocabulary(tokenizer, configs, tokenizers={} if own is None else {"reward model": own})
    return None


def _differs(own: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase, *, chat: bool) -> bool:
    """Whether a model with the tokenizer `own` would misread the policy's tokens: another vocabulary or, for a `chat`,
    another chat template."""
    if own.get_vocab() != policy.get_vocab():
        return True
    return chat and own.chat_template is not None and own.chat_template != policy.chat_template


def judge_tokenizer_of(directory: Path, *, chat: bool, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The judge's tokenizer. Raises ValueError if there is none, or it does not fit the settings."""
    tokenizer = open_tokenizer(str(directory), "reward.judge.path", trust_remote_code)
    if not chat:
        check_open_end("a question", tokenizer)
    elif tokenizer.chat_template is None:
        raise ValueError(
            "reward.judge.chat: the judge's tokenizer has no chat template; use a chat model, or set it to false"
        )
    else:
        data.check_chat_template(tokenizer)
    return tokenizer
