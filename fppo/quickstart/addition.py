"""The quickstart's task: addition whose demonstrations forget to carry. PPO mends what imitation has learned."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast, Qwen2Config

from fppo import models
from fppo.data import PromptSet, prompt_set
from fppo.key import Key
from fppo.models.model import Model
from fppo.steps.forward import Forward
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.supervised import Demonstrations, demonstrations, imitate
from fppo.steps.train_state import Params
from fppo_kernels import prebuilt
from fppo_kernels.table import BUILTIN, Kernels, get

if TYPE_CHECKING:
    from fppo.settings.learning import OptimizerSettings
    from fppo.settings.train import TrainSettings

CHARACTERS = "0123456789+="
MODEL = "warm"
TRAIN = "train.jsonl"
TEST = "test.jsonl"


@attrs.frozen
class Addition:
    """One addition of two numbers of two digits."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        return str(self.a + self.b)

    @property
    def mistake(self) -> str:
        """The answer without the carry from the units; the answer itself if there is none."""
        return str(self.a // 10 * 10 + self.b // 10 * 10 + (self.a + self.b) % 10)


def sums(*, held_out: float = 0.1) -> tuple[list[Addition], list[Addition]]:
    """All sums, split into those to train on and those held out, which neither warm-up nor PPO ever sees.

    The split is the same for every seed.
    """
    everything = [Addition(a, b) for a in range(10, 100) for b in range(10, 100)]
    draws = Key(0).fold("held out").uniform(torch.arange(len(everything)), 1)[:, 0].tolist()
    train = [s for s, u in zip(everything, draws, strict=True) if u >= held_out]
    test = [s for s, u in zip(everything, draws, strict=True) if u < held_out]
    return train, test


def character_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, and <pad>, <eos> and <unk>."""
    vocabulary = {token: i for i, token in enumerate(("<pad>", "<eos>", "<unk>", *characters))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def bpe_tokenizer(texts: list[str], *, size: int = 2048, alone: str = "") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `size` tokens learned from texts; the id of <pad> is 0, that of <eos> 1.

    Each digit, and each character in `alone`, is a token of its own and part of no longer token.
    """
    tokenizer = Tokenizer(BPE())
    cuts = [pre_tokenizers.Split(character, "isolated") for character in alone]
    splits = [*cuts, pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=size, special_tokens=["<pad>", "<eos>"], initial_alphabet=letters)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")


def small_model(
    vocabulary: int,
    *,
    width: int = 128,
    layers: int = 2,
    positions: int = 32,
    compute_dtype: torch.dtype | None = None,
) -> Model:
    """A Qwen2-shaped model for a tokenizer whose ids 0 and 1 are padding and end."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    config.architectures = ["Qwen2ForCausalLM"]
    return models.build(config, compute_dtype=compute_dtype)


def warm_up(
    forward: Forward,
    params: Params,
    train: list[Addition],
    key: Key,
    *,
    tokenizer: PreTrainedTokenizerFast,
    steps: int = 600,
    batch_size: int = 256,
    lr: float = 2e-3,
    mistakes: float = 0.75,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> Params:
    """Train `params` on demonstrations by supervised learning, and return the new ones. The fraction `mistakes` of the
    demonstrations forgets the carry."""
    rate = schedule("linear", lr, total_steps=steps, warmup_steps=30)
    optimizer = adamw(rate, betas=(0.9, 0.99), weight_decay=0.0)
    vocabulary = tokenizer.get_vocab()
    pad, eos = vocabulary["<pad>"], vocabulary["<eos>"]
    encode = functools.cache(tokenizer.encode)

    def batch(step: int) -> Demonstrations:
        draws = key.fold("demonstrations", step).uniform(torch.arange(batch_size), 2).tolist()
        chosen = [(train[int(u * len(train))], v < mistakes) for u, v in draws]
        prompts = [encode(s.prompt) for s, _ in chosen]
        responses = [[*encode(s.mistake if wrong else s.answer), eos] for s, wrong in chosen]
        return demonstrations(prompts, responses, pad_token_id=pad)

    return imitate(
        params,
        map(batch, range(steps)),
        forward=forward,
        optimizer=optimizer,
        micro_batching=MicroBatching(size=batch_size),
        on_step=on_step,
    )


def warm_up_kernels() -> Kernels:
    """Kernels for a warm-up: those in C++ where they are built in. To compile them would take as long as it does."""
    able = [op for op, each in BUILTIN.items() if "cpp" in each and each["cpp"].refuse() is None]
    built_in = isinstance(prebuilt.here(), prebuilt.Build)
    return attrs.evolve(Kernels.named(), **{op: get(op, "cpp") for op in able if built_in})


def warmed_up(
    key: Key, *, steps: int = 600, on_step: Callable[[int, float], None] = lambda step, loss: None
) -> tuple[PreTrainedTokenizerFast, Model, Params]:
    """Make the tokenizer, and a small model with parameters trained on the demonstrations (`warm_up`)."""
    tokenizer = character_tokenizer()
    model = small_model(len(tokenizer))
    params = models.init_params(model, key.fold("init"))
    train, _ = sums()
    forward = Forward(model, warm_up_kernels())
    return tokenizer, model, warm_up(forward, params, train, key, tokenizer=tokenizer, steps=steps, on_step=on_step)


def prompt_sets(tokenizer: PreTrainedTokenizerFast) -> tuple[PromptSet, PromptSet]:
    """The prompts to train on, and the held-out ones."""
    train, test = (
        prompt_set([s.prompt for s in part], tokenizer, ground_truths=[s.answer for s in part], sources="addition")
        for part in sums()
    )
    return train, test


def prepare(
    directory: Path, seed: int, *, steps: int = 600, on_step: Callable[[int, float], None] = lambda step, loss: None
) -> None:
    """Write the model after `steps` of warm-up, with its tokenizer, and the prompts to `directory`."""
    tokenizer, model, params = warmed_up(Key(seed).fold("quickstart"), steps=steps, on_step=on_step)
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in zip((TRAIN, TEST), sums(), strict=True):
        lines = [json.dumps({"prompt": s.prompt, "answer": s.answer, "source": "addition"}) for s in rows]
        (directory / name).write_text("\n".join(lines) + "\n")
    models.save(model, params, directory / MODEL, tokenizer=tokenizer)


def settings(directory: Path, seed: int) -> TrainSettings:
    """The settings of the PPO run on the model and prompts that `prepare` wrote to `directory`."""
    # imported here, since the task alone needs no packages of the command line
    from fppo.settings.learning import ActorSettings, AlgorithmSettings, CriticSettings, KlRewardSettings
    from fppo.settings.model import ModelSettings
    from fppo.settings.train import (
        CheckpointSettings,
        DataSettings,
        EvalSettings,
        RewardSettings,
        RolloutSettings,
        TrainSettings,
    )

    return TrainSettings(
        output_dir=str(directory),
        seed=seed,
        steps=60,
        model=ModelSettings(path=str(directory / MODEL)),
        data=DataSettings(
            path=(str(directory / TRAIN),),
            eval_path=(str(directory / TEST),),
            source="source",
            max_prompt_tokens=6,
        ),
        rollout=RolloutSettings(batch_size=512, max_tokens=4),
        reward=RewardSettings(functions=("exact_match",)),
        algorithm=AlgorithmSettings(kl=KlRewardSettings(coef=0.001)),
        actor=ActorSettings(mini_batch_size=128, epochs=2, optimizer=_adam(3e-4)),
        critic=CriticSettings(reads="confidence", privileged=4, mini_batch_size=128, epochs=16, optimizer=_adam(3e-3)),
        eval=EvalSettings(every=10, exact_values=True),
        checkpoint=CheckpointSettings(every=20),
    )


def _adam(lr: float) -> OptimizerSettings:
    from fppo.settings.learning import OptimizerSettings

    return OptimizerSettings(lr=lr, schedule="linear", keywords={"betas": [0.9, 0.99], "weight_decay": 0.0})
