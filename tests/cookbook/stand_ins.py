"""A directory in which the cookbook's recipes run without a network: small models and data sets under the hub's names.

A name of the hub that is also a directory below the working directory is read from there, by transformers as by
datasets. So a recipe keeps its own names of models and data sets, and nothing in it is changed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from transformers import MistralConfig, PreTrainedTokenizerFast

from fppo import models
from fppo.key import Key
from fppo.models.model import Model, Params
from fppo.quickstart import bpe_tokenizer
from fppo.steps.forward import Forward
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.supervised import Demonstrations, demonstrations, imitate

BASE, CHAT, PLAYER = "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-4B"
LONG, OLDER = "Qwen/Qwen3.6-35B-A3B", "Qwen/Qwen3-8B"
MODELS = (BASE, CHAT, PLAYER, LONG, OLDER)  # those that the recipes name where nothing is said
MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")  # one token each
WORDS = ("lamp", "tree", "ship", "bell", "coat", "rope", "drum", "nail", "time", "dog")
LANGUAGES = {"en": "the dog is in the coat", "de": "der Hund ist in dem Mantel", "fr": "le chien est dans le manteau"}

Row = Mapping[str, Any]


@attrs.frozen
class Exchange:
    """A question and an answer that a model may give to it."""

    question: str
    answer: str


def exchanges(draws: random.Random) -> list[Exchange]:
    """One exchange of each kind that recipes have: answers of the right form, whose content is drawn."""
    digit, word, other = draws.randrange(10), draws.choice(WORDS), draws.choice(WORDS)
    language = draws.choice(tuple(LANGUAGES))
    return [
        Exchange(f"{_sum(draws)} Provide a numerical answer without units, written inside \\boxed{{}}.", _boxed(digit)),
        Exchange(f"What is {draws.randrange(101)} + {draws.randrange(101)}?", str(draws.randrange(201))),
        Exchange("Then we will tell you whether you guess is too high, too low, or correct.", _guess(draws)),
        Exchange(draws.choice(("Too low", "Too high")), _guess(draws)),
        Exchange("less than 20 words.", f"Is it a {word}?"),
        Exchange(draws.choice(("yes", "no")), draws.choice((f"Is it a {other}?", f"Guess: {word}"))),
        Exchange(f"Is it a {word}?", draws.choice(("yes", "no"))),
        Exchange(f"Available Moves: {_moves(draws)}", f"[{draws.randrange(9)}]\n"),
        Exchange("where <count> is a single integer.", draws.choice((_call(draws), f"Answer: {digit % 4}"))),
        Exchange(f"[Page 1]\n{prose(draws, 6)}</tool_response>", f"Answer: {digit % 4}"),
        Exchange(f"Text to classify:\n{LANGUAGES[language]}\n", f"Final Answer: {language}"),
        Exchange(f"Say {word}.", f"{word} {other}"),
    ]


def prose(draws: random.Random, words: int) -> str:
    """Words that mean nothing."""
    return " ".join(draws.choice(WORDS) for _ in range(words))


def _sum(draws: random.Random) -> str:
    a, b = draws.randrange(5), draws.randrange(5)
    return f"Tom has {a} nails and buys {b}. How many nails has he?"


def _moves(draws: random.Random) -> str:
    return ", ".join(f"'[{square}]'" for square in sorted(draws.sample(range(9), draws.randrange(1, 10))))


def _boxed(digit: int) -> str:
    return f"\\boxed{{{digit}}}"


def _guess(draws: random.Random) -> str:
    return f"Guess: {draws.randrange(1024)}"


def _call(draws: random.Random) -> str:
    page = draws.randrange(1, 4)
    return f"<tool_call>\n<function=read_page>\n<parameter=page>\n{page}\n</parameter>\n</function>\n</tool_call>"


def plain(exchange: Exchange) -> tuple[str, str]:
    """An exchange in the form of the renderer role_colon, for base models: prompt and response."""
    return f"User: {exchange.question}\n\nAssistant:", f" {exchange.answer}\n\nUser:"


def chat(exchange: Exchange) -> tuple[str, str]:
    """An exchange in Qwen's form, with an empty thought: prompt and response."""
    begun = f"<|im_start|>user\n{exchange.question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    return begun, f"{exchange.answer}<|im_end|>"


def thoughtful(exchange: Exchange) -> tuple[str, str]:
    """An exchange in Qwen's form whose thought the model ends: prompt and response."""
    begun = f"<|im_start|>user\n{exchange.question}<|im_end|>\n<|im_start|>assistant\n<think>\n"
    return begun, f"</think>\n\n{exchange.answer}<|im_end|>"


FORMS = (plain, chat, thoughtful)


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that has seen the exchanges, with the marks of Qwen's form as tokens of their own."""
    draws = random.Random(0)
    texts = [text for _ in range(40) for each in exchanges(draws) for text in (*plain(each), each.answer)]
    made = bpe_tokenizer(texts, size=600)
    made.add_special_tokens({"additional_special_tokens": list(MARKS)})
    return made


def imitations(form: PreTrainedTokenizerFast, steps: range, *, rows: int = 1) -> Iterator[Demonstrations]:
    """Batches of all exchanges in all forms, each behind another one and words, so that answers follow from how a
    prompt ends."""
    for step in steps:
        draws = random.Random(step)
        pairs = [(shape, each) for _ in range(rows) for each in exchanges(draws) for shape in FORMS]
        before = ["".join(shape(draws.choice(exchanges(draws)))) for shape, _ in pairs]
        prompts = [f"{prose(draws, draws.randrange(20))}{begin}\n" for begin in before]
        shaped = [shape(each) for shape, each in pairs]
        tokens = [form.encode(a) + form.encode(b) for a, (b, _) in zip(prompts, shaped, strict=True)]
        yield demonstrations(tokens, [form.encode(response) for _, response in shaped], pad_token_id=0)


def taught(form: PreTrainedTokenizerFast, params: Params, model: Model, steps: range) -> Params:
    """The parameters after supervised learning on the exchanges of some steps."""
    optimizer = adamw(schedule("constant", 5e-3), betas=(0.9, 0.99), weight_decay=0.0)
    micro, batches = MicroBatching(size=64), imitations(form, steps)
    return imitate(params, batches, forward=Forward(model), optimizer=optimizer, micro_batching=micro)


def short_sighted(vocabulary: int) -> Model:
    """A small model whose layers see 48 tokens each: what it learns behind short prompts holds behind long ones."""
    config = MistralConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        sliding_window=48,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    config.architectures = ["MistralForCausalLM"]
    return models.build(config)


def write_models(place: Path, *, steps: int = 120) -> None:
    """The recipes' models, each small: the base has learned half as long as the others, so that it can be taught."""
    form = tokenizer()
    model = short_sighted(len(form))
    half = taught(form, models.init_params(model, Key(0)), model, range(steps))
    whole = taught(form, half, model, range(steps, 2 * steps))
    for name in MODELS:
        models.save(model, half if name == BASE else whole, place / name, tokenizer=form)


def write_data(place: Path) -> None:
    """The recipes' data sets, each with a few rows of the columns that the hub's have."""
    draws = random.Random(1)
    solved = [{"question": _sum(draws), "answer": f"He counts.\n#### {draws.randrange(10)}"} for _ in range(16)]
    chats = [_messages(each) for _ in range(24) for each in exchanges(draws)]
    pairs = [_preference(draws) for _ in range(64)]
    deep = [{"question": _sum(draws), "final_answer": str(draws.randrange(10))} for _ in range(64)]
    pages = [{"text": prose(draws, 60)} for _ in range(200)]
    choices = [_choice(draws) for _ in range(32)]
    write_set(place / "openai/gsm8k", "main", {"train": solved, "test": solved[:8]})
    write_set(place / "HuggingFaceH4/no_robots", "default", {"train": chats, "test": chats[:128]})
    write_set(place / "Anthropic/hh-rlhf", "default", {"train": pairs, "test": pairs[:8]})
    write_set(place / "zwhe99/DeepMath-103K", "default", {"train": deep})
    write_set(place / "Salesforce/wikitext", "wikitext-103-raw-v1", {"train": pages})
    write_set(place / "hicai-zju/SciKnowEval", "default", {"test": choices})
    texts = place / "tinker_cookbook/example_data/multilingual.txt"  # read by this name from the working directory
    texts.parent.mkdir(parents=True)
    texts.write_text("\n".join([*LANGUAGES.values()] * 8))


def _messages(exchange: Exchange) -> Row:
    said = (("user", exchange.question), ("assistant", exchange.answer))
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def _preference(draws: random.Random) -> Row:
    """A pair whose rejected answer is the same in each, so that a few steps learn it."""
    word = draws.choice(WORDS)
    begun = f"\n\nHuman: Say {word}.\n\nAssistant: "
    return {"chosen": begun + word, "rejected": f"{begun}no"}


def _choice(draws: random.Random) -> Row:
    """A question with three answers to choose from."""
    choices = {"label": ["A", "B", "C"], "text": draws.sample(WORDS, 3)}
    kind = {"domain": "Chemistry", "type": "mcq-4-choices", "details": {"level": "L3"}}
    return {"question": prose(draws, 5) + "?", "choices": choices, "answerKey": draws.choice("ABC"), **kind}


def write_set(place: Path, name: str, splits: Mapping[str, Sequence[Row]]) -> None:
    """A data set of JSON lines whose card names one configuration and its splits, as datasets reads them."""
    place.mkdir(parents=True)
    files = [{"split": split, "path": f"{split}.jsonl"} for split in splits]
    card = json.dumps({"configs": [{"config_name": name, "data_files": files}]})  # JSON is YAML
    (place / "README.md").write_text(f"---\n{card}\n---\n")
    for split, rows in splits.items():
        (place / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
