"""Typed records of rows, where each stage's record extends the previous one's, and functions on any of them.

B rows, P prompt positions (padded on the left), T response positions (padded on the right), S = P + T.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# safetensors, json and Tensor.tolist lack types
from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from fppo import tree
from fppo.tree import state
from fppo_kernels.padding import sent

R = TypeVar("R")
_COLUMNS = "columns"  # metadata of a field that holds columns by name, in a dict
_BESIDE = ("places", "shown", "video_places", "shown_of")  # the fields of `RowInputs` other than the model's tensors


class Column(Sequence[Any]):
    """One Python object per row (ids, ground truth, tool traces), immutable: a leaf of its record."""

    __slots__ = ("_items",)

    def __init__(self, items: Sequence[Any] | Iterator[Any] = ()) -> None:
        self._items = tuple(items)

    def __getitem__(self, index: Any) -> Any:
        return Column(self._items[index]) if isinstance(index, slice) else self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Column) and self._items == other._items

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return f"Column({list(self._items)!r})"


def _no_places() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


def _each_alone(inputs: RowInputs) -> Tensor:
    return torch.arange(len(inputs.shown))


@attrs.frozen(eq=False, repr=False)
class RowInputs:
    """A row's inputs to a model other than tokens (images, videos), of row-dependent sizes; shared by rows of a prompt.

    Indices of tokens count only a row's real tokens, without padding.
    """

    tensors: Mapping[str, Tensor]  # by the model's argument names, such as "pixel_values" and "image_grid_thw"
    places: Tensor  # [M] int64: indices of the row's placeholder tokens of image features, ascending
    shown: Tensor  # [K, h, w, 3] uint8: thumbnails of its images, and of a few frames of its videos
    video_places: Tensor = attrs.field(factory=_no_places)  # [N] int64: indices of placeholders of video features
    # [K] int64: the image or video of each thumbnail, numbered in the order of the prompt
    shown_of: Tensor = attrs.field(default=attrs.Factory(_each_alone, takes_self=True))
    _digests: dict[tuple[int, ...], str] = attrs.field(factory=dict, init=False)  # by the versions of the tensors

    def named(self) -> dict[str, Tensor]:
        """All tensors by name: the model's arguments by their names, and the other fields."""
        beside = self.places, self.shown, self.video_places, self.shown_of
        return {**dict(zip(_BESIDE, beside, strict=True)), **self.tensors}

    def digest(self) -> str:
        """One digest of all tensors, cached until one of them is written to."""
        named = self.named()
        if any(x.is_inference() for x in named.values()):  # inference tensors have no version counter
            return tree.combine(tree.digest(named))
        written = tuple(x._version for x in named.values())
        if written not in self._digests:
            self._digests[written] = tree.combine(tree.digest(named))
        return self._digests[written]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, RowInputs) and self.digest() == other.digest())

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in sorted(self.named().items()))
        return f"RowInputs({shapes}, {self.digest()})"

    def __reduce__(self) -> tuple[type[RowInputs], tuple[Any, ...]]:
        beside = self.places, self.shown, self.video_places, self.shown_of
        return RowInputs, (self.tensors, *beside)  # without digests: the version counters of a copy start anew

    @staticmethod
    def of(named: Mapping[str, Tensor]) -> RowInputs:
        """Make the inputs from tensors by name, as `named` returns them."""
        tensors = {name: x for name, x in named.items() if name not in _BESIDE}
        return RowInputs(tensors, *(named[name] for name in _BESIDE))


@state
class Shared:
    """The `inputs` column as a tree of tensors, in which inputs shared by rows occur once."""

    numbers: Column  # for each row its index into `inputs`, or None
    inputs: tuple[dict[str, Tensor], ...]

    @staticmethod
    def of(column: Sequence[RowInputs | None]) -> Shared:
        """Collect the inputs of a column."""
        distinct = {id(x): x for x in column if x is not None}
        numbers = {key: number for number, key in enumerate(distinct)}
        rows = Column(None if x is None else numbers[id(x)] for x in column)
        return Shared(numbers=rows, inputs=tuple(x.named() for x in distinct.values()))

    def column(self) -> Column:
        """Restore the column."""
        every = [RowInputs.of(named) for named in self.inputs]
        return Column(None if number is None else every[number] for number in self.numbers)


@state
class Prompts:
    """Prompts: token ids, with ground truth, source and extras for rewards."""

    tokens: Tensor  # [B, P] int64, padded on the left
    attention_mask: Tensor  # [B, P] bool
    row_ids: Tensor  # [B] int64, unique in the batch
    ids: Column  # the data row of each prompt
    ground_truth: Column
    source: Column  # name of the data set, for metrics by source
    extras: Column  # the data row's other fields, as dicts
    inputs: Column | None = None  # RowInputs of rows that have images or videos, else None
    earlier: Column | None = None  # for each prompt a list of responses, as lists of token ids, to draft from


@state
class Rollout(Prompts):
    """Prompts with sampled responses: `tokens` and `attention_mask` are [B, S], padded on both sides.

    `groups` holds one number per prompt, so samples of a prompt share it.
    """

    response_mask: Tensor  # [B, T] bool: True where the policy chose the token
    rollout_log_probs: Tensor  # [B, T] float32, of the full distribution at the sampling temperature
    sampling_log_probs: Tensor  # [B, T] float32, of the distribution that tokens were drawn from
    groups: Tensor  # [B] int64
    versions: Tensor  # [B] int64, the policy version that generated the row
    finish: Column  # "stop" or "length"
    routed: Tensor | None = None  # [B, S, L, k] uint8 or int32: the experts that routers chose; zero at padding
    token_versions: Tensor | None = None  # [B, T] int32: each token's version; `versions` are then the first tokens'
    turn_ids: Tensor | None = None  # [B, T] int32: the number of each chosen token's turn, from 0; -1 elsewhere
    turn_rewards: Tensor | None = None  # [B, T] float32: the environment's, at a turn's last token; nan if it failed
    episodes: Tensor | None = None  # [B] int64: the number of each row's episode; None: each row is one. See `episodes`
    drafts: Tensor | None = None  # [B, 2] int64: tokens that were drafted for each row, and those accepted of them
    observed: Column | None = None  # lists of token ids: observations between the episode's previous row and this one


@state
class Scored(Rollout):
    """A rollout with one score per row, and the scores of the reward's terms by name; nan is a missing score.

    `outcomes` are the scores without shaping terms, such as a penalty for length, if the reward has such terms.
    """

    scores: Tensor  # [B] float32
    named_scores: dict[str, Tensor] = attrs.field(metadata={_COLUMNS: True})  # each [B] float32
    baselines: Tensor | None = None  # [B] float32: the score of the greedy response (ReMax)
    outcomes: Tensor | None = None  # [B] float32
    teacher_log_probs: Tensor | None = None  # [B, T] float32, at the sampling temperature
    teacher_top_ids: Tensor | None = None  # [B, T, K] int32: the teacher's most probable tokens, or all
    teacher_top_log_probs: Tensor | None = None  # [B, T, K] float32
    taught: Tensor | None = None  # [B] bool: the rows that the teacher has something to say about; None: all
    process_rewards: Tensor | None = None  # [B, T] float32: the score by steps, at their last tokens; nan elsewhere

    @property
    def outcome(self) -> Tensor:
        """The score of each row without shaping terms, which distinguishes right from wrong responses, [B] float32."""
        return self.scores if self.outcomes is None else self.outcomes

    @property
    def step_rewards(self) -> Tensor:
        """The rewards of steps at their last tokens, [B, T] float32, nan elsewhere. A row without steps is one step,
        whose reward is the score."""
        whole = self.scores[:, None].where(last_tokens(self.response_mask), torch.nan)
        return whole if self.process_rewards is None else self.process_rewards.where(self._has_steps, whole)

    @property
    def rewards_within(self) -> Tensor | None:
        """The parts of the score that stay at their tokens, [B, T] float32, of steps or an environment's turns; None:
        it is at the last token."""
        rewards, turns = self.process_rewards, self.turn_rewards
        if rewards is None or turns is None:
            return turns if rewards is None else rewards
        return rewards.where(self._has_steps, turns)

    @property
    def _has_steps(self) -> Tensor:
        assert self.process_rewards is not None
        return (self.response_mask & ~self.process_rewards.isnan()).any(1, keepdim=True)

    @property
    def has_score(self) -> Tensor:
        """The rows with a score and, if there are baselines, with a baseline; bool [B]."""
        both = self.scores if self.baselines is None else self.scores + self.baselines
        return ~both.isnan()


@state
class Annotated(Scored):
    """Scored rows with the outputs of the models on them before the update, zero outside the response mask."""

    old_log_probs: Tensor  # [B, T] float32
    ref_log_probs: Tensor | None = None  # [B, T] float32
    values: Tensor | None = None  # [B, T] float32
    disagreement: Tensor | None = None  # [B, T] float32, of the members of an ensemble of critics
    sum_squared_probs: Tensor | None = None  # [B, T] float32
    entropy: Tensor | None = None  # [B, T] float32, of the policy's distribution of each token
    hidden: Tensor | None = None  # [B, T, H] float32, the input of the policy's head before each token
    truth_signs: Tensor | None = None  # [B, T, 2] float32, agreement of the response before each token with the truth


@state
class Experience(Annotated):
    """All constant inputs of the losses. `response_mask` is the loss mask, without rejected tokens."""

    token_rewards: Tensor  # [B, T] float32
    advantages: Tensor  # [B, T] float32
    returns: Tensor  # [B, T] float32
    correction_weights: Tensor | None = None  # [B, T] float32
    entropy_mask: Tensor | None = None  # [B, T] bool: the tokens whose entropy has a bonus; None: all
    entropy_coef: Tensor | None = None  # [B] float64, one factor of the bonus; None: the objective's own


def last_tokens(mask: Tensor) -> Tensor:
    """Mark the last token of each row in a mask, bool [B, T]."""
    return mask & (mask.flip(1).cumsum(1).flip(1) == 1)


def turn_bounds(mask: Tensor, turn_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mark the turns of rows: bool [B, T], True at the last token of each; and True at its first.

    Tokens of one turn have the same number in `turn_ids` [B, T], integers; without it a turn is a run of tokens in the
    mask [B, T], bool. Raises ValueError for other numbers, or of another shape.
    """
    if turn_ids is None:
        return mask & ~pad(mask, (0, 1))[:, 1:], mask & ~pad(mask, (1, 0))[:, :-1]
    if turn_ids.shape != mask.shape or turn_ids.is_floating_point():
        shape = f"{turn_ids.dtype} {tuple(turn_ids.shape)}"
        raise ValueError(f"turn_ids are {shape}: give integers of the mask's shape, {tuple(mask.shape)}")
    numbers = turn_ids.double() + 1  # 0 where there is no token
    before = next_in_mask(numbers.flip(1), mask.flip(1)).flip(1)
    return mask & (next_in_mask(numbers, mask) != numbers), mask & (before != numbers)


def next_in_mask(x: Tensor, mask: Tensor) -> Tensor:
    """The number of `x` at the row's next token in the mask after each position, [B, T]; 0 after the last token."""
    width = mask.shape[1]
    if not mask.numel():
        return x
    places = torch.arange(width, device=mask.device).expand_as(mask).where(mask, width)
    nearest = places.flip(1).cummin(1).values.flip(1)
    return pad(x.where(mask, 0.0), (0, 1)).gather(1, pad(nearest, (0, 1), value=width)[:, 1:])


def num_rows(record: Any) -> int:
    """The number of rows of a record. Raises ValueError if its columns have different numbers."""
    sizes = {path: len(leaf) for path, leaf in tree.leaves_with_paths(record)}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"the columns of a {type(record).__name__} differ in length: {sizes}")
    return next(iter(sizes.values()))


def rows(record: R, index: Tensor | Sequence[int]) -> R:
    """Select the rows at `index` (int64 [N], a list of numbers, or bool [B] for the rows to keep), in that order, in
    every column of a tree of records and columns. The index is copied once to each device."""
    index = torch.as_tensor(index, device="cpu")
    if index.dtype == torch.bool:
        if len(index) != num_rows(record):
            raise ValueError(f"a bool index of {len(index)} entries for {num_rows(record)} rows")
        index = index.nonzero().flatten()
    elif index.is_floating_point() and len(index):
        raise ValueError(f"rows are selected by integers or by bool, not by {index.dtype}")
    index = index.long()
    numbers, places = index.tolist(), {index.device: index}

    def take(column: Any) -> Any:
        if isinstance(column, Tensor):
            if column.device not in places:
                places[column.device] = sent(index, column.device)
            return column[places[column.device]]
        if column is None:  # an optional column that is not there
            return None
        return Column([column[i] for i in numbers])

    return pytree.tree_map(take, record)


def same_scores(records: Sequence[Scored]) -> list[Scored]:
    """Give each record the named scores of all records, and rewards of steps if one has them; nan where a record lacks
    some, as its reward always failed, or gave no steps."""
    stepwise = any(record.process_rewards is not None for record in records)
    names = list(dict.fromkeys(name for record in records for name in record.named_scores))

    def filled(record: Scored) -> Scored:
        none = torch.full_like(record.scores, torch.nan)
        steps = record.process_rewards
        if steps is None and stepwise:
            steps = none[:, None].expand(record.response_mask.shape)
        named = {name: record.named_scores.get(name, none) for name in names}
        return tree.replace(record, named_scores=named, process_rewards=steps)

    return [filled(record) for record in records]


def concat(records: Sequence[R]) -> R:
    """Concatenate the rows of `records`, which have one type, equal fields and equal widths, else ValueError."""
    if not records:
        raise ValueError("concat of no records: type and widths are unknown")
    kinds = {type(r).__name__ for r in records}
    present = [{path for path, _ in tree.leaves_with_paths(r)} for r in records]
    if len(kinds) > 1 or any(p != present[0] for p in present):
        missing = sorted(set.union(*present) - set.intersection(*present))
        raise ValueError(f"concat of unlike records: types {sorted(kinds)}, fields not in all of them: {missing}")
    shapes = [
        {p: (x.dtype, *x.shape[1:]) for p, x in tree.leaves_with_paths(r) if isinstance(x, Tensor)} for r in records
    ]
    for path in shapes[0]:
        kinds_of_column = list(dict.fromkeys(s[path] for s in shapes))
        if len(kinds_of_column) > 1:
            raise ValueError(f"concat of unlike records: {path} differs in dtype or width: {kinds_of_column}")

    def join_columns(first: Any, *others: Any) -> Any:
        if isinstance(first, Tensor):
            return torch.cat([first, *others])
        return Column([item for column in (first, *others) for item in column])

    return pytree.tree_map(join_columns, records[0], *records[1:])


def repeat(record: R, n: int, *, interleave: bool = True) -> R:
    """Repeat every row `n` times: a a b b with `interleave`, else a b a b."""
    if n < 1:
        raise ValueError(f"repeat rows {n} times: give 1 or more")
    index = torch.arange(num_rows(record))
    return rows(record, index.repeat_interleave(n) if interleave else index.repeat(n))


def inverse(order: Tensor | Sequence[int]) -> Tensor:
    """The permutation that undoes `order`: rows(rows(x, order), inverse(order)) is x."""
    return torch.argsort(torch.as_tensor(order))


def _fields(record: Any) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in attrs.fields(type(record))}


def extend(cls: type[R], record: Any, **fields: Any) -> R:
    """The next stage's record: a `cls` with `record`'s fields, overridden or extended by `fields`."""
    return _make(cls, _fields(record) | fields)


def narrow(cls: type[R], record: Any) -> R:
    """An earlier stage's record: a `cls` with the fields that it shares with `record`."""
    return _make(cls, {f.name: getattr(record, f.name) for f in attrs.fields(cls)})  # type: ignore[arg-type]


def _make(cls: type[R], values: Mapping[str, Any]) -> R:
    names = {f.name: f.default is attrs.NOTHING for f in attrs.fields(cls)}  # type: ignore[arg-type]
    unknown = [n for n, v in values.items() if n not in names and v is not None]
    missing = [n for n, required in names.items() if required and values.get(n) is None]
    if unknown or missing:
        raise ValueError(f"cannot make a {cls.__name__}: unknown fields {unknown}, missing fields {missing}")
    record = cls(**{n: values[n] for n in names if n in values})
    num_rows(record)
    return record


def _owned(x: Tensor) -> Tensor:
    """A host copy of `x`: safetensors refuses two fields that share one tensor."""
    return x.detach().cpu().clone(memory_format=torch.contiguous_format)


def columns(record: Any) -> dict[str, Tensor | Column]:
    """The record's columns by name, entries of a dict as "field.key"."""
    result: dict[str, Tensor | Column] = {}
    for name, value in _fields(record).items():
        if isinstance(value, Mapping):
            result |= {f"{name}.{key}": x for key, x in value.items()}
        elif value is not None:
            result[name] = value
    return result


def record(cls: type[R], columns: Mapping[str, Tensor | Column]) -> R:
    """The `cls` with these columns. Raises ValueError for unknown or missing columns."""
    values: dict[str, Any] = {f.name: {} for f in attrs.fields(cls) if f.metadata.get(_COLUMNS)}  # type: ignore[arg-type]
    for name, column in columns.items():
        field, _, key = name.partition(".")
        if key:
            values.setdefault(field, {})[key] = column
        else:
            values[field] = column
    return _make(cls, values)


def _equal(a: Any, b: Any) -> bool:
    """True if two JSON values are equal; nan equals nan."""
    if a == b:
        return True
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a != a and b != b


def save(record: Any, path: str | os.PathLike[str]) -> None:
    """Write a record to one safetensors file; objects per row go to its header as JSON, else ValueError.

    Inputs shared by several rows are written once.
    """
    tensors = {name: _owned(x) for name, x in columns(record).items() if isinstance(x, Tensor)}
    objects = {name: list(x) for name, x in columns(record).items() if isinstance(x, Column)}
    shared: dict[str, list[int | None]] = {}
    for name in [name for name, items in objects.items() if any(isinstance(x, RowInputs) for x in items)]:
        each = Shared.of(objects.pop(name))
        shared[name] = list(each.numbers)
        for number, named in enumerate(each.inputs):
            tensors |= {f"{name}/{number}/{key}": _owned(x) for key, x in named.items()}
    try:
        text = json.dumps(objects, ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"{path}: a per-row object does not fit JSON: {error}") from error
    if not _equal(json.loads(text), objects):
        raise ValueError(
            f"{path}: a per-row object would come back changed from JSON (a tuple, or a key that is no str)"
        )
    metadata = {"record": type(record).__name__, "objects": text} | ({"inputs": json.dumps(shared)} if shared else {})
    safetensors.torch.save_file(tensors, path, metadata=metadata)


def load(cls: type[R], path: str | os.PathLike[str]) -> R:
    """Read a record that `save` wrote, as a `cls`. Raises ValueError for another type of record or a damaged file."""
    try:
        with safe_open(Path(path), "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file: {error}") from error
    if metadata.get("record") != cls.__name__:
        raise ValueError(f"{path} holds a {metadata.get('record')}, not a {cls.__name__}")
    objects = {name: Column(items) for name, items in json.loads(metadata["objects"]).items()}
    for name, numbers in json.loads(metadata.get("inputs", "{}")).items():
        named: dict[int, dict[str, Tensor]] = {}
        for key in [key for key in tensors if key.startswith(f"{name}/")]:
            _, number, part = key.split("/", 2)
            named.setdefault(int(number), {})[part] = tensors.pop(key)
        objects[name] = Shared(numbers=Column(numbers), inputs=tuple(named[i] for i in sorted(named))).column()
    return record(cls, {**tensors, **objects})
