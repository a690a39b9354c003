"""vLLM in this process: where it starts, what it is asked, and the environment variables it reads."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from fppo.batch import RowInputs
from fppo.data.stops import StopReader, StopTexts
from fppo.fleet.codec import PackedTree
from fppo.models.vision import takes_images
from fppo.rollout.sync import DigestMethod, SyncError
from fppo.rollout.vllm.devices import GpuMemory, memory_keywords
from fppo.rollout.vllm.host import (
    Answer,
    EngineDied,
    EngineFailure,
    HostBatch,
    HostDraws,
    HostRow,
    check_installed,
)
from fppo.rollout.vllm.options import VllmOptions

# the first keeps vLLM in this process; the second chooses the model runner that fppo's logits processor is made for
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


class LocalHost:
    """vLLM inside this process. `path` is a directory with the model's config, all it needs beside the weights; it is
    `alone` if nobody trains on its GPUs."""

    def __init__(
        self, path: str, options: VllmOptions, *, dtype: str, trust_remote_code: bool, alone: bool = False
    ) -> None:
        check_installed()
        if dist.is_available() and dist.is_initialized():
            raise ValueError(
                "this process is in a torch.distributed group, the trainer's or another vLLM's, which vLLM would join: "
                'give host = "process", for a process of its own'
            )
        if torch.cuda.is_initialized() and (gpu := torch.cuda.current_device()):
            raise ValueError(
                f'host = "local": vLLM would take cuda:0, and this process is on cuda:{gpu}; give host = "process"'
            )
        _set_environment(options)
        memory = memory_keywords(options, _memories(options.tensor_parallel), alone=alone)
        self._llm: Any = _start(path, options, memory, dtype=dtype, trust_remote_code=trust_remote_code)
        self.limit = int(self._llm.llm_engine.model_config.max_model_len)
        self._rows: dict[int, HostRow] = {}  # open rows of turns
        self._had: dict[int, int] = {}  # how many tokens each of them has drawn
        self._adapter: int | None = None  # the number of the adapter that answers in turns

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Run a method on each of vLLM's workers and return the results. Raises EngineDied if one of them is gone."""
        with self._death_noticed():
            return self._llm.collective_rpc(method, args=arguments)

    def begin_load(self, method: DigestMethod, transfer: bool = False) -> None:
        """Prepare for weights, which are digested by `method`; with `transfer` they come through vLLM's own transfer
        engine, by `call("update_weights", ...)`."""
        with _as_sync_error():
            self.call("fppo_begin_load", method, transfer)

    def take_in(self, tensors: Mapping[str, Tensor]) -> None:
        """Load some weights. vLLM may keep them until a layer is whole, and write to them."""
        with _as_sync_error():
            self.call("fppo_take_in", tensors)

    def take_in_from(self, path: str, packed: PackedTree, spans: Sequence[tuple[int, int]]) -> None:
        """Load weights from the memory at `path` of another process of this machine; large tensors are in the `spans`
        of bytes."""
        with _as_sync_error():
            self.call("fppo_take_in_from", path, packed, spans)

    def end_load(self) -> tuple[dict[str, str], list[str]]:
        """The digest of each weight as every worker got it, and the parameters that a worker did not fill."""
        with _as_sync_error():
            return _agreed(self.call("fppo_end_load"))

    def generate(self, request: HostBatch, on_answer: Callable[[int, Answer], None]) -> None:
        """Call `on_answer` with each row's number and answer, when the row ends."""
        for ended in self.answers(request):
            for row, answer in ended:
                on_answer(row, answer)

    def answers(self, request: HostBatch) -> Iterator[list[tuple[int, Answer]]]:
        """Yield the rows that ended in each step, with their answers."""
        from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        from fppo.rollout.vllm import worker

        engine, sampling, inputs = self._llm.llm_engine, request.sampling, request.inputs
        texts = sampling.stop_texts if request.forced is None else None
        drawn = attrs.evolve(sampling, stop_texts=None)
        job = worker.Job(drawn, request.key, request.row_ids, request.forced, request.offset)
        self._begin(job, images=inputs is not None)
        adapter = _adapter(request.adapter)
        stops = list(sampling.stop_token_ids) if request.forced is None else []
        open_rows: set[str] = set()
        ends = _EndedRows(texts)
        try:
            for row, prompt in enumerate(request.prompts):
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=sampling.max_tokens if request.limits is None else request.limits[row],
                    stop_token_ids=stops,
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY if texts is None else RequestOutputKind.DELTA,
                    extra_args={worker.ROW: row},
                )
                own = None if inputs is None else inputs[row]
                engine.add_request(str(row), self._prompt_of(prompt, own), params, lora_request=adapter)
                open_rows.add(str(row))
            while engine.has_unfinished_requests():
                with self._death_noticed():
                    outputs = [x for x in engine.step() if x.request_id in open_rows]
                    ended, stopped = ends.of(outputs)
                    _check_prompts(outputs, ended, request.prompts)
                    if stopped:
                        engine.abort_request(stopped)
                open_rows.difference_update(str(row) for row, _ in ended)
                yield self._drawn(ended)
        finally:
            if open_rows and not self._failed():
                engine.abort_request(list(open_rows))

    def begin_turns(self, adapter: int | None) -> None:
        """Prepare for rows that come and go in turns, answered with the adapter of this number. Rows that are still
        open end."""
        if self._rows:
            self._llm.llm_engine.abort_request([str(number) for number in self._rows])
        self._rows, self._had, self._adapter = {}, {}, adapter
        self._begin(None, images=True)

    def turn(self, new: Sequence[HostRow], ended: Sequence[int]) -> list[HostDraws]:
        """Add rows, end others, and return the draws of all open rows in one step."""
        engine = self._llm.llm_engine
        if gone := [number for number in ended if self._rows.pop(number, None) is not None]:
            engine.abort_request([str(number) for number in gone])
            self._had = {number: had for number, had in self._had.items() if number in self._rows}
        for row in new:
            self._rows[row.number] = row
            engine.add_request(str(row.number), *self._added(row), lora_request=_adapter(self._adapter))
        if not self._rows:
            return []
        with self._death_noticed():
            outputs = [x for x in engine.step() if int(x.request_id) in self._rows]
            steps = self.call("fppo_drawn")[0]
        drawn = {(number, place): values for number, place, *values in steps}
        found: list[HostDraws] = []
        for output in outputs:
            number, tokens = int(output.request_id), list(output.outputs[0].token_ids)
            had = self._had.pop(number, 0)
            own = [drawn.get((number, had + place), [-1, 0.0, 0.0]) for place in range(len(tokens))]
            _check_drawn(self._rows[number], output, tokens, own)
            cached = int(output.num_cached_tokens or 0)
            found.append(HostDraws(number, tokens, [x[1] for x in own], [x[2] for x in own], output.finished, cached))
            if output.finished:
                del self._rows[number]
            else:
                self._had[number] = had + len(tokens)
        return found

    def _added(self, row: HostRow) -> tuple[Any, Any]:
        """A row as vLLM takes it: its prompt, and how it is drawn."""
        from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        from fppo.rollout.vllm import worker

        sampling = row.sampling
        drawn = worker.DrawnRow(row.number, row.key, row.row, row.position, sampling.per_token)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={worker.ROW: drawn},
        )
        return self._prompt_of(row.tokens, row.inputs), params

    def _begin(self, job: Any, *, images: bool) -> None:
        """Begin a rollout, or turns (no job), with an empty prefix cache."""
        self.call("fppo_begin", job)
        if not self._llm.reset_prefix_cache():
            raise EngineFailure("vLLM does not let go of what it computed for an earlier rollout")
        if images:
            self._llm.llm_engine.reset_encoder_cache()

    def _prompt_of(self, prompt: Sequence[int], inputs: RowInputs | None) -> Any:
        """The prompt as vLLM takes it: its ids, and its images as they were processed."""
        if inputs is None:
            return {"prompt_token_ids": list(prompt)}
        from fppo.rollout.vllm.images import with_images

        config = self._llm.llm_engine.model_config
        return with_images(config.hf_config, config.dtype, prompt, inputs)

    def _drawn(self, ended: Sequence[tuple[int, list[int]]]) -> list[tuple[int, Answer]]:
        """The answers of the rows that ended. Raises EngineFailure if vLLM went on with other tokens than were
        drawn."""
        if not ended:
            return []
        answers = self.call("fppo_take", [(row, len(own)) for row, own in ended])[0]
        for (row, own), answer in zip(ended, answers, strict=True):
            if answer.tokens.tolist() != own:
                if np.isnan(answer.log_probs).any():
                    raise EngineFailure(f"the model's log-probs are not numbers in row {row}: are its weights finite?")
                raise EngineFailure(
                    f"vLLM went on with other tokens than were drawn in row {row}: {own[:8]} for "
                    f"{answer.tokens[:8].tolist()}: is speculative decoding on, or another logits processor?"
                )
        return [(row, answer) for (row, _), answer in zip(ended, answers, strict=True)]

    def _failed(self) -> bool:
        """Whether a separate worker process has ended."""
        return bool(getattr(self._llm.llm_engine.engine_core.engine_core.model_executor, "is_failed", False))

    @contextlib.contextmanager
    def _death_noticed(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._failed():
                raise EngineDied("a worker of vLLM ended; the others cannot go on without it") from error
            raise

    def sleep(self) -> None:
        """Release the memory of weights and cache; both are lost."""
        self._llm.sleep(level=2)

    def wake(self, part: str) -> None:
        """Allocate the memory of "weights" or "kv_cache" again."""
        self._llm.wake_up(tags=[part])

    def close(self) -> None:
        """End vLLM and free its memory. Idempotent."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        llm.llm_engine.engine_core.shutdown()
        del llm
        _clean_up()


class _EndedRows:
    """A search for ended rows in vLLM's outputs. vLLM reports whole rows at their ends or, with stop `texts`, each
    step's new tokens."""

    def __init__(self, texts: StopTexts | None) -> None:
        self._reader = None if texts is None else StopReader(texts)
        self._written: dict[int, list[int]] = {}

    def of(self, outputs: Sequence[Any]) -> tuple[list[tuple[int, list[int]]], list[str]]:
        """The rows that ended in a step, with their tokens; and the ids of those requests that vLLM would continue."""
        ended: list[tuple[int, list[int]]] = []
        stopped: list[str] = []
        for output in outputs:
            row, new = int(output.request_id), list(output.outputs[0].token_ids)
            tokens = self._written.setdefault(row, [])
            tokens += new
            if output.finished:
                ended.append((row, self._written.pop(row)))
            elif self._reader is not None and any(self._reader.ends(row, token) for token in new):
                ended.append((row, self._written.pop(row)))
                stopped.append(output.request_id)
        return ended, stopped


def _adapter(number: int | None) -> Any:
    """vLLM's handle of an adapter, named by its number, so that no cache mixes it with another."""
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    return None if number is None else LoRARequest(f"fppo-{number}", number, f"memory:{number}")


def _check_drawn(row: HostRow, output: Any, tokens: Sequence[int], own: Sequence[Any]) -> None:
    """Raise EngineFailure if vLLM, by its `output`, read another prompt than it was sent, or went on with other
    `tokens` than fppo drew: `own` are its draws, each a token and log-probs."""
    if len(output.prompt_token_ids) != len(row.tokens) or [*output.prompt_token_ids] != [*row.tokens]:
        raise EngineFailure(f"vLLM answered another prompt than it was asked, of {len(output.prompt_token_ids)} tokens")
    drawn = [int(x[0]) for x in own]
    if drawn != list(tokens):
        if any(np.isnan(x[1]) for x in own):
            raise EngineFailure("the model's log-probs are not numbers: are its weights finite?")
        raise EngineFailure(
            f"vLLM went on with other tokens than were drawn: {list(tokens)} for {drawn}: is speculative decoding on, "
            "or another logits processor?"
        )


def _check_prompts(outputs: Sequence[Any], ended: Sequence[tuple[int, Any]], prompts: Sequence[Sequence[int]]) -> None:
    """Raise EngineFailure if vLLM answered other prompts than were sent, in rows that ended."""
    answered = {int(output.request_id): list(output.prompt_token_ids) for output in outputs}
    for row, _ in ended:
        own, asked = answered[row], list(prompts[row])
        if own != asked:
            raise EngineFailure(
                f"vLLM answered another prompt than it was asked in row {row}, of {len(own)} tokens for {len(asked)}: "
                f"{own[:8]} for {asked[:8]}"
            )


def _clean_up() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]

    cleanup_dist_env_and_memory()


def _set_environment(options: VllmOptions) -> None:
    level = {} if options.verbose else {"VLLM_LOGGING_LEVEL": "ERROR"}
    threads = {}
    if options.tensor_parallel > 1 and not torch.cuda.is_available():  # else vLLM wants a NUMA node for each worker
        threads = {"VLLM_CPU_OMP_THREADS_BIND": _shares(options.tensor_parallel)}
    for name, value in (_ENVIRONMENT | level | threads).items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0" or os.environ["VLLM_USE_V2_MODEL_RUNNER"] != "0":
        raise ValueError(
            "VLLM_ENABLE_V1_MULTIPROCESSING and VLLM_USE_V2_MODEL_RUNNER are set: fppo needs both 0, or unset"
        )


def _shares(workers: int) -> str:
    """The processors of each worker's threads, in vLLM's notation."""
    own = sorted(os.sched_getaffinity(0))
    if len(own) < workers:
        return "nobind"
    return "|".join(",".join(str(cpu) for cpu in own[worker::workers]) for worker in range(workers))


def _agreed(workers: Sequence[tuple[dict[str, str], list[str]]]) -> tuple[dict[str, str], list[str]]:
    """Combine the reports of all workers: the digest of each weight, or the workers' digests joined if they differ, and
    the parameters that a worker did not fill."""
    names = set.intersection(*(set(got) for got, _ in workers))
    digests = {name: "|".join(dict.fromkeys(got[name] for got, _ in workers)) for name in sorted(names)}
    return digests, sorted({name for _, unfilled in workers for name in unfilled})


@contextlib.contextmanager
def _as_sync_error() -> Iterator[None]:
    try:
        yield
    except (SyncError, EngineDied):
        raise
    except Exception as error:
        raise SyncError(f"vLLM could not load the weights: {type(error).__name__}: {error}") from error


def _start(path: str, options: VllmOptions, memory: Mapping[str, Any], *, dtype: str, trust_remote_code: bool) -> Any:
    """A `vllm.LLM` whose weights are still to come."""
    from vllm import LLM  # pyright: ignore[reportAttributeAccessIssue]

    from fppo.rollout.vllm import worker

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    seeing = _sees(config) if takes_images(config) else {}
    chosen = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_rows,
        "enforce_eager": options.eager is not False,
        "enable_prefix_caching": options.prefix_cache,
        "enable_sleep_mode": options.sleep,
        "generation_config": "vllm",
        "trust_remote_code": trust_remote_code,
        "tensor_parallel_size": options.tensor_parallel,
        "async_scheduling": False,  # draws count the tokens so far, which must all be known
        "logits_processors": [worker.KeyedDraws],
        "worker_extension_cls": f"{worker.__name__}.{worker.Extension.__name__}",
        **memory,
        **seeing,
        **({} if options.transport == "auto" else {"weight_transfer_config": {"backend": options.transport}}),
        **options.extra,
    }
    if options.sleep and not torch.cuda.is_available():
        raise EngineFailure("sleep = True: vLLM's CPU build cannot give its memory back; leave it False")
    state = torch.random.get_rng_state()
    try:
        return LLM(path, **chosen)
    except BaseException as error:
        _clean_up()
        if not isinstance(error, Exception):
            raise
        raise EngineFailure(f"vLLM did not start: {_why(error, options)}") from error
    finally:
        torch.random.set_rng_state(state)


def _sees(config: PreTrainedConfig) -> Mapping[str, Any]:
    """Prepare vLLM for a model that takes images, and return the keywords to start it with."""
    try:
        from fppo.rollout.vllm import images

        images.take_processed(config)
    except ImportError as error:
        raise EngineFailure(
            f"vLLM did not start: its {config.architectures} lacks a package ({error}); install that for the torch "
            "that is here, or use the embedded engine"
        ) from error
    return images.KEYWORDS


def _memories(count: int) -> list[GpuMemory]:
    """The memory of each GPU that vLLM takes; none on a CPU."""
    if not torch.cuda.is_available():
        return []
    if count == 1:
        return [GpuMemory(*torch.cuda.mem_get_info(0))]
    # in a process that ends, since this one would keep a context on each of them
    code = f"import json, torch; print(json.dumps([torch.cuda.mem_get_info(gpu) for gpu in range({count})]))"
    answer = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE).stdout
    return [GpuMemory(*pair) for pair in json.loads(answer)]


def _why(error: Exception, options: VllmOptions) -> str:
    text = str(error)
    if "memory" in text.lower() or "KV cache" in text:
        memory = "neither cache_gb nor memory_share, so vLLM takes of what is free"
        if options.memory_share is not None:
            memory = f"memory_share = {options.memory_share}, vLLM's gpu_memory_utilization"
        elif options.cache_gb is not None:
            memory = f"cache_gb = {options.cache_gb}, in place of vLLM's gpu_memory_utilization"
        rest = f"max_model_len = {options.max_model_len}, max_rows = {options.max_rows}"
        return f"{text} (settings: {memory}, {rest})"
    if "max_model_len" in text or "max_position_embeddings" in text:
        return f"{text} (setting: max_model_len = {options.max_model_len})"
    return text
