"""Reward models: a classifier's number at the last token of a conversation, as a reward of the whole rollout."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fppo import batch as batches
from fppo import models
from fppo.batch import Rollout
from fppo.data.chat import ending
from fppo.data.examples import MESSAGES
from fppo.data.tokenizers import encode_text, within
from fppo.models.load import VALUE_HEADS, find_directory, read_config, read_value_head
from fppo.models.model import Model, Params
from fppo.rewards.functions import RewardFn, tensor_reward
from fppo.rewards.scoring import samples_of
from fppo.runtime.mesh import DATA_AXES, LOCAL, Mesh, place_on
from fppo.runtime.offload import OnHost
from fppo.runtime.weights import weight_files
from fppo.steps.forward import Forward, Rows, row_lengths
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.ranks import collect, shares
from fppo.steps.scores import compute_reward_scores
from fppo.tree import state
from fppo.workers.sample import Sample
from fppo_kernels.table import Kernels


@state
class Conversations:
    """Rows that a model reads whole."""

    tokens: Tensor  # [B, S] int64
    attention_mask: Tensor  # [B, S] bool

    @property
    def response_mask(self) -> Tensor:
        """[B, S] bool: nothing here tells a response from the rest."""
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
    """A model with a sequence- or token-classification head, or a value head, and its parameters on the CPU: this
    rank's shards on a mesh that cuts parameters.

    `label` is the name or the number of the label whose number is the score, where the head has several. Raises
    ValueError for a model without such a head, and for a head of several labels of which none is named.
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
    """Where a reward model is, and which row of its head gives the score. Raises ValueError as `load_reward_model`."""
    directory = find_directory(path)
    head = read_value_head(directory, torch.float32)
    if not head:
        raise ValueError(
            f"reward.model.path: {path} is no reward model: it has none of the heads "
            f"{[f'{name}.weight' for name in VALUE_HEADS]}; what it has outside its layers: {_outside(directory)}"
        )
    config = read_config(directory, trust_remote_code=trust_remote_code)
    return directory, _label_row(path, getattr(config, "id2label", None) or {}, label, len(head["score.weight"]))


def _outside(directory: Path) -> list[str]:
    """Names of parameters that stand in no list of layers."""
    names = [name for file in weight_files(directory) for name in safe_open(file, "pt").keys()]  # noqa: SIM118
    return sorted(name for name in names if not any(part.isdigit() for part in name.split(".")))[:8]


def _label_row(path: str | os.PathLike[str], names: Mapping[int, str], label: str | None, count: int) -> int:
    """Which of the head's `count` rows the score comes from."""
    known = [names.get(row, str(row)) for row in range(count)]
    if label is None:
        if count == 1:
            return 0
        raise ValueError(
            f"the reward model {path} has num_labels = {count}: name the label whose number is the score "
            f"(reward.model.label); there are {known}"
        )
    if label in known:
        return known.index(label)
    if label.isdigit() and int(label) < count:
        return int(label)
    raise ValueError(f"reward.model.label = {label!r}: the reward model {path} has the labels {known}")


def conversation(sample: Sample) -> list[dict[str, Any]]:
    """A sample as chat messages: the prompt's own where it was a chat, else its text as the user's; and the answer."""
    prompt = sample.extras.get(MESSAGES) or [{"role": "user", "content": sample.prompt}]
    return [*prompt, {"role": "assistant", "content": sample.response}]


def encode(rollout: Rollout, *, tokenizer: Any, own: Any, chat: bool, vocabulary: int | None = None) -> Conversations:
    """The rollout's conversations in the tokens of `own`; `tokenizer` is the rollout's own.

    With `chat` they go through the chat template of `own`; else prompt and response are one text, and the end token of
    `own` follows where the response ended ("stop"), by whichever of its stop tokens or texts. Tokens from `vocabulary`
    on, which the model has no embedding for, are left out. Padded on the right.
    """
    if chat:
        keywords = {"tokenize": True, "return_dict": False, "add_generation_prompt": False}
        with ending():
            rows = [list(own.apply_chat_template(conversation(s), **keywords)) for s in samples_of(rollout, tokenizer)]
    else:
        rows = [_encode_text(sample, own) for sample in samples_of(rollout, tokenizer)]
    rows = rows if vocabulary is None else [within(ids, vocabulary) for ids in rows]
    empty = [number for number, ids in enumerate(rows) if not ids]
    if empty:
        raise ValueError(f"the reward model's tokenizer makes no tokens of sample {empty[0]} ({len(empty)} are so)")
    device = rollout.tokens.device
    tokens = pad_sequence([torch.tensor(ids, dtype=torch.int64) for ids in rows], batch_first=True)
    lengths = torch.tensor([len(ids) for ids in rows])
    return Conversations(
        tokens=tokens.to(device), attention_mask=(torch.arange(tokens.shape[1]) < lengths[:, None]).to(device)
    )


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
    read: Callable[[Rollout], Rows] = lambda rollout: rollout,
) -> RewardFn:
    """The model as a reward of the rollout: its head's number at each row's last token that is not padding.

    All ranks hold all rows; each computes a share of equal work. `read` makes the rows that the model reads of the
    rollout, where it does not read them as they are.
    """

    @tensor_reward
    def scores(rollout: Rollout) -> Tensor:
        whole = read(rollout)
        ranks: Sequence[Sequence[int]] = shares(model, row_lengths(whole), mesh)
        own = whole if len(ranks) == 1 else batches.rows(whole, ranks[place_on(mesh, DATA_AXES)])
        forward = Forward(model, kernels=kernels, mesh=mesh)
        numbers = compute_reward_scores(params, own, forward=forward, micro_batching=micro_batching)
        return collect(numbers, ranks, mesh)

    return scores
