"""What is wrong inside of the files that settings name, seen without torch and without the tokenizers' library."""

from __future__ import annotations

from pathlib import Path

from fppo._errors import json_of
from fppo.data.examples import Fields, example_of
from fppo.data.problems import Problems
from fppo.data.read import FORMATS, read_rows
from fppo.settings.checks_data import has_held_out
from fppo.settings.problems import problem
from fppo.settings.train import TrainSettings

_MOST_BYTES = 32 << 20  # of rows that are looked at: reading takes time


def row_problems(settings: TrainSettings) -> list[str]:
    """The faulty rows of the data sets that are files here, and not large: all as one text."""
    data, lines = settings.data, []
    truth = data.ground_truth or None
    fields = Fields(
        prompt=data.prompt,
        ground_truth=truth,
        source=data.source,
        chat=data.chat,
        images=data.images if data.chat else None,
        videos=data.videos if data.chat else None,
        tools=data.row_tools,
    )
    noted = Problems()
    for paths in dict.fromkeys((data.path, data.eval_path if has_held_out(settings) else ())):
        places = [Path(path) for path in paths]
        local = all(place.is_file() and place.suffix.lower() in FORMATS for place in places)
        if not places or not local or sum(place.stat().st_size for place in places) > _MOST_BYTES:
            continue
        try:
            for row in read_rows(places, problems=noted):
                example_of(row, fields, noted)
        except ValueError as error:
            lines.append(str(error))
    try:
        noted.check("data")
    except ValueError as error:
        lines.append(str(error))
    return lines


def token_problems(settings: TrainSettings) -> list[str]:
    """Ids among the stop tokens that a tokenizer here does not have."""
    asked = settings.rollout.stop_token_ids
    file = Path(settings.model.tokenizer or settings.model.path) / "tokenizer.json"
    if not asked or not file.exists():
        return []
    try:
        tokenizer = json_of(file.read_text(encoding="utf-8"))
        vocabulary = tokenizer["model"]["vocab"]
        ids = set(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))
        ids |= {token["id"] for token in tokenizer["added_tokens"]}
    except (ValueError, KeyError, TypeError):  # another kind of file, which its library will judge
        return []
    unknown = [i for i in asked if i not in ids]
    text = f"the tokenizer has no such ids; they go up to {max(ids, default=0)}"
    return [problem("rollout.stop_token_ids", unknown, text)] if unknown else []
