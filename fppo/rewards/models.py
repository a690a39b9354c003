"""Reward models: a classifier's output at the last token of a conversation, as a reward of the whole rollout."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fppo import batch as batches
from fppo import metrics, models
from fppo.batch import Rollout
from fppo.data.chat import EndlessTemplate, encode_chat
from fppo.data.examples import MESSAGES
from fppo.data.tokenizers import encode_text, within
from fppo.metrics import Metrics
from fppo.models.load import VALUE_HEADS, find_directory, read_config, read_value_head
from fppo.models.model import Model, Params
from fppo.rewards.functions import RewardFn, tensor_reward
from fppo.rewards.scoring import samples_of
from fppo.runtime.mesh import DATA_AXES, LOCAL, Mesh, place_on
from fppo.runtime.offload import OnHost
from fppo.runtime.weights import weight_files
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.outputs import Forward, Rows
from fppo.steps.packed import masks_of
from fppo.steps.ranks import collect, shares
from fppo.steps.scores import compute_reward_scores
from fppo.tree import state
from fppo.workers.sample import Sample
from fppo_kernels.table import Kernels


@state
class Conversations:
    """Conversations in a reward model's tokens, padded on the right."""

    tokens: Tensor  # [B, S] int64
    attention_mask: Tensor  # [B, S] bool

    @property
    def response_mask(self) -> Tensor:
        """The attention mask, bool [B, S]: prompts and responses are not distinguished."""
        return self.attention_mask


def load_reward_model(
    path: str | os.PathLike[str],
    *,
    label: str | None = None,
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    mesh: Mesh = LOCAL,
) -> tuple[Model, Params]:
    """Load a model with a sequence- or token-classification head, or a value head, with its parameters on the CPU: this
    rank's shards on a mesh that cuts parameters.

    `label` is the name or index of the label whose output is the score, for a head of several. Raises ValueError for a
    model without such a head, and for a head of several labels without `label`.
    """
    directory, row = find_reward_model(path, label=label, trust_remote_code=trust_remote_code)
    return models.load(
        directory,
        "value",
        dtype=dtype,
        outputs=range(row, row + 1),
        compute_dtype=compute_dtype,
        trust_remote_code=trust_remote_code,
        mesh=mesh,
    )


def find_reward_model(
    path: str | os.PathLike[str], *, label: str | None = None, trust_remote_code: bool = False
) -> tuple[Path, int]:
    """A reward model's directory, and the row of its head for the score. Raises ValueError as `load_reward_model`."""
    directory = find_directory(path)
    head = read_value_head(directory, torch.float32)
    if not head:
        raise ValueError(
            f"reward.model.path: {path} is not a reward model: it has none of the heads "
            f"{[f'{name}.weight' for name in VALUE_HEADS]}; its parameters outside the layers: {_outside(directory)}"
        )
    config = read_config(directory, trust_remote_code=trust_remote_code)
    return directory, _label_row(path, getattr(config, "id2label", None) or {}, label, len(head["score.weight"]))


def _outside(directory: Path) -> list[str]:
    """The first names of parameters outside lists of layers."""
    names = [name for file in weight_files(directory) for name in safe_open(file, "pt").keys()]  # noqa: SIM118
    return sorted(name for name in names if not any(part.isdigit() for part in name.split(".")))[:8]


def _label_row(path: str | os.PathLike[str], names: Mapping[int, str], label: str | None, count: int) -> int:
    """The row of the head, of `count`, for the label. Raises ValueError for an unknown or missing label."""
    known = [names.get(row, str(row)) for row in range(count)]
    if label is None:
        if count == 1:
            return 0
        raise ValueError(
            f"the reward model {path} has num_labels = {count}: name the label whose output is the score "
            f"(reward.model.label); there are {known}"
        )
    if label in known:
        return known.index(label)
    if label.isdigit() and int(label) < count:
        return int(label)
    raise ValueError(f"reward.model.label = {label!r}: the reward model {path} has the labels {known}")


def conversation(sample: Sample) -> list[dict[str, Any]]:
    """A sample as chat messages: the prompt's own messages, or its text as the user's, and the response."""
    prompt = sample.extras.get(MESSAGES) or [{"role": "user", "content": sample.prompt}]
    return [*prompt, {"role": "assistant", "content": sample.response}]


def encode(rollout: Rollout, *, tokenizer: Any, own: Any, chat: bool, vocabulary: int | None = None) -> Conversations:
    """Encode the rollout's conversations in the tokens of `own`, the reward model's tokenizer; `tokenizer` decodes the
    rollout.

    With `chat` they go through the chat template of `own`; else prompt and response are one text, and the end token of
    `own` follows a response that ended by a stop token or text. Tokens from `vocabulary` on, the rows of the model's
    embedding, are left out. Padded on the right. Raises ValueError for a conversation without tokens, and naming the
    row for one that the template refuses, or of which it leaves something out.
    """
    if chat:
        samples = samples_of(rollout, tokenizer)
        rows = [_encode_chat(sample, own, name) for sample, name in zip(samples, rollout.ids, strict=True)]
    else:
        rows = [_encode_text(sample, own) for sample in samples_of(rollout, tokenizer)]
    rows = rows if vocabulary is None else [within(ids, vocabulary) for ids in rows]
    empty = [number for number, ids in enumerate(rows) if not ids]
    if empty:
        raise ValueError(f"the reward model's tokenizer gives no tokens for sample {empty[0]} ({len(empty)} in all)")
    device = rollout.tokens.device
    tokens = pad_sequence([torch.tensor(ids, dtype=torch.int64) for ids in rows], batch_first=True)
    lengths = torch.tensor([len(ids) for ids in rows])
    return Conversations(
        tokens=tokens.to(device), attention_mask=(torch.arange(tokens.shape[1]) < lengths[:, None]).to(device)
    )


def _encode_chat(sample: Sample, own: Any, name: str) -> list[int]:
    try:
        return encode_chat(own, conversation(sample), generation=False, sampled=True)
    except EndlessTemplate:
        raise
    except Exception as error:  # templates raise what they like
        raise ValueError(f"{name}: the reward model's chat template refuses the conversation: {error}") from error


def _encode_text(sample: Sample, own: Any) -> list[int]:
    ids, end = encode_text(own, sample.prompt + sample.response), own.eos_token_id
    return [*ids, end] if sample.finish == "stop" and end is not None and ids[-1:] != [end] else ids


def model_reward(
    params: Params | OnHost,
    *,
    model: Model,
    kernels: Kernels,
    mesh: Mesh,
    micro_batching: MicroBatching,
    share_prompts: Literal["auto"] | bool = "auto",
    read: Callable[[Rollout], Rows] = lambda rollout: rollout,
    max_tokens: int | None = None,
    over_long: Literal["error", "truncate"] = "error",
) -> RewardFn:
    """The model as a reward of the rollout: its head's output at each row's last token that is not padding.

    All ranks hold all rows; each computes a share of equal work. `read` converts the rollout to the rows that the model
    reads, by default the rollout's own; `share_prompts` is that of `Forward`. Rows of more than `max_tokens` (None: no
    bound) raise ValueError or, with "truncate", the model reads their end, and a metric counts them.
    """
    forward = Forward(model, kernels=kernels, mesh=mesh, share_prompts=share_prompts)

    @tensor_reward
    def scores(rollout: Rollout) -> Tensor | tuple[Tensor, Metrics]:
        whole, cut = read(rollout), 0
        if max_tokens is not None:
            whole, cut = _within(whole, max_tokens, over_long, rollout.ids)
        masks = masks_of(whole, forward)
        ranks: Sequence[Sequence[int]] = shares(model, masks.lengths, mesh, masks.sorted())
        own = whole if len(ranks) == 1 else batches.rows(whole, ranks[place_on(mesh, DATA_AXES)])
        numbers = compute_reward_scores(params, own, forward=forward, micro_batching=micro_batching)
        every = collect(numbers, ranks, mesh)
        bounded = max_tokens is not None and over_long == "truncate"
        return (every, {"reward/model_truncated": metrics.total(cut)}) if bounded else every

    return scores


def _within(rows: Rows, limit: int, over_long: str, ids: Sequence[str]) -> tuple[Rows, int]:
    """Rows cut to their last `limit` tokens that are not padding, and the number of rows that were longer. Unless
    `over_long` is "truncate", a longer one raises ValueError by its name in `ids`."""
    mask = rows.attention_mask
    lengths = mask.sum(1)
    if not (long := (lengths > limit).nonzero().flatten().tolist()):
        return rows, 0
    if over_long != "truncate":
        raise ValueError(
            f"reward.model.max_tokens = {limit}: {ids[long[0]]} has {lengths[long[0]]} tokens for the reward model "
            f"({len(long)} of {len(lengths)} rows are longer); give a larger bound, or "
            'reward.model.over_long = "truncate", with which it reads the end of them'
        )
    to_end = mask.flip(1).cumsum(1).flip(1)  # tokens from each one to the row's end
    return Conversations(tokens=rows.tokens, attention_mask=mask & (to_end <= limit)), len(long)
