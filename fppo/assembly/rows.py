"""The rows of a run, as its settings name them: prompts, how they are drawn, and demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import attrs
from transformers import PreTrainedTokenizerBase

from fppo import data
from fppo.assembly.functions import curriculum_of
from fppo.assembly.texts import chat_options
from fppo.batch import Column
from fppo.data import Curriculum, DataCursor, DemonstrationSet, Learn, PromptSet
from fppo.data.cursor import Order
from fppo.data.examples import Answers, check_fields
from fppo.data.privileged import TEACHER_PROMPT
from fppo.fields import only
from fppo.key import Key
from fppo.pipeline.program import LearnOfPrompts, learn_nothing
from fppo.settings.sft import SftSettings
from fppo.settings.train import DataSettings
from fppo.tree import replace
from fppo.workers.imports import imported


@attrs.frozen(kw_only=True)
class Drawing:
    """How prompts are drawn from the cursor `begin` on: by the user's order, or by a curriculum that `learn`
    updates."""

    order: Order | None = None
    curriculum: Curriculum | None = None
    begin: DataCursor = attrs.field(factory=DataCursor)
    learn: LearnOfPrompts = learn_nothing


def read_data(section: DataSettings, problems: data.Problems) -> Sequence[data.Row]:
    """The rows to train on; faulty ones are noted in `problems`. Raises ValueError."""
    fn = section.rows
    if fn is None:
        return data.read_rows(section.path, **only(section, "split", "stream"), problems=problems)
    return data.rows_of(imported(fn, "data.rows")(), fn, problems=problems)


def load_prompts(
    section: DataSettings, tokenizer: PreTrainedTokenizerBase, images: data.ImageReader | None = None
) -> PromptSet:
    """The prompts to train on, with a teacher's own prompts in their extras. Raises ValueError that names every faulty
    row."""
    problems = data.Problems()
    rows = read_data(section, problems)
    encode = partial(data.encode_rows, rows, tokenizer, pad_token=section.pad_token, chat=chat_options(section))
    check_fields(rows, {"data.teacher_prompt": section.teacher_field}, problems)
    own = only(section, "max_prompt_tokens", "over_long")
    prompts = encode(fields=section.fields, images=images, problems=problems, **own)
    if section.teacher_field is None:
        return prompts
    fields = attrs.evolve(section.fields, prompt=section.teacher_field)
    try:
        taught = encode(fields=fields, max_prompt_tokens=section.teacher_prompt_tokens)
    except ValueError as error:
        raise ValueError(f"data.teacher_prompt = {section.teacher_field!r}: {error}") from error
    tokens = dict(zip(taught.ids, taught.tokens, strict=True))
    extras = ({**extra, TEACHER_PROMPT: [*tokens[i]]} for i, extra in zip(prompts.ids, prompts.extras, strict=True))
    return attrs.evolve(prompts, extras=tuple(extras))


def held_out_of(section: DataSettings) -> DataSettings:
    """The section with the held-out rows in place of those to train on."""
    return attrs.evolve(section, path=section.eval_path, split=section.eval_split, rows=section.eval_rows)


def order_of(name: str | None, prompts: PromptSet, key: Key) -> Order | None:
    """The order of prompts by epoch, from the user's function `name`; None without one.

    The first epoch's order is computed at once. Raises ValueError if the function does not import or its order is
    invalid.
    """
    if name is None:
        return None
    own = imported(name, "data.sampler")

    @lru_cache(maxsize=2)
    def order(epoch: int) -> list[int]:
        return data.checked_order(own(prompts, epoch, key.fold("epoch", epoch)), len(prompts), f"data.sampler {name!r}")

    order(0)
    return order


def drawing_of(section: DataSettings, prompts: PromptSet, key: Key, *, drafts: bool) -> Drawing:
    """Make the drawing of these prompts, by the settings; if the engine `drafts`, with earlier responses. Raises
    ValueError for an order or a curriculum that does not import, is invalid, or does not fit the prompts."""
    drawing = _drawing(section, prompts, key)
    if not drafts:
        return drawing
    begin, learn = replace(drawing.begin, earlier=Column()), data.KeepResponses(drawing.learn)
    return attrs.evolve(drawing, begin=begin, learn=learn)


def _drawing(section: DataSettings, prompts: PromptSet, key: Key) -> Drawing:
    curriculum = curriculum_of(section.curriculum)
    if curriculum is None:
        return Drawing(order=order_of(section.sampler, prompts, key))
    try:
        begin, learn = data.begin_course(curriculum, prompts), Learn.of(curriculum, prompts)
    except ValueError as error:
        raise ValueError(f"data.curriculum = {section.curriculum.name!r}: {error}") from error
    return Drawing(curriculum=curriculum, begin=begin, learn=learn)


def load_demonstrations(
    section: DataSettings, sft: SftSettings, tokenizer: PreTrainedTokenizerBase
) -> DemonstrationSet:
    """The demonstrations to train on. Raises ValueError that names every faulty row."""
    problems = data.Problems()
    return data.encode_demonstrations(
        read_data(section, problems),
        tokenizer,
        fields=attrs.evolve(section.fields, ground_truth=None),
        answers=Answers(**only(sft, "response", "messages", "turns")),
        max_tokens=sft.max_tokens,
        **only(section, "over_long", "pad_token"),
        chat=chat_options(section),
        problems=problems,
    )


def check_ids(found: DemonstrationSet, vocabulary: int) -> None:
    """Raise ValueError for token ids that the model has no embedding for, naming the rows."""
    problems = data.Problems()
    for row, name in zip(found.rows, found.ids, strict=True):
        largest = max(*row.prompt, *row.response)
        if largest >= vocabulary:
            problems.add(f"token id {largest} is outside the model's vocabulary of {vocabulary}", at=name)
    problems.check("demonstrations")


def check_row_lengths(found: DemonstrationSet, most: int | None, path: str) -> None:
    """Raise ValueError for rows of more tokens than the model was made for, naming them."""
    problems = data.Problems()
    for row, name in zip(found.rows, found.ids, strict=True):
        if most is not None and (size := row.num_tokens) > most:
            text = f"{size} tokens, and model.path = {path!r} has {most} positions (max_position_embeddings)"
            problems.add(f"{text}; with sft.max_tokens = {most} and data.over_long such rows are left out", at=name)
    problems.check("demonstrations")
