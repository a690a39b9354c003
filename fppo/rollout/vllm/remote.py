"""vLLM on a rank of its own: a process of this machine, or an actor of a Ray cluster, that may die or hang."""

from __future__ import annotations

import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import torch
from torch import Tensor

from fppo.fleet import Group, GroupDied, Processes, RankSpec
from fppo.fleet.codec import flat, pack
from fppo.fleet.group import Ranks
from fppo.fleet.on_ray import RayCluster, joined
from fppo.fleet.shared import Memory
from fppo.models.model import Model
from fppo.rollout.sync import DigestMethod, SyncError
from fppo.rollout.vllm.devices import EngineGpus, gpus_of
from fppo.rollout.vllm.families import check_family
from fppo.rollout.vllm.host import (
    NOT_FOR_VLLM,
    Answer,
    EngineDied,
    EngineFailure,
    Host,
    HostBatch,
    HostDraws,
    HostRow,
    check_installed,
    config_directory,
)
from fppo.rollout.vllm.local import LocalHost
from fppo.rollout.vllm.options import VllmOptions
from fppo.runtime.launch import Place, visible

_BEAT = 0.5  # seconds between two signs of life


class RemoteHost:
    """A `Host` whose vLLM runs on a rank of its own, in the place that the options name. Any method raises EngineDied
    once the rank is gone or gives no sign of life; the start raises ValueError if GPUs or the cluster are missing.

    Weights go through memory that processes of this machine share, or as arguments to another machine. One piece is
    packed while vLLM loads the one before.
    """

    def __init__(self, path: str, options: VllmOptions, *, dtype: str, trust_remote_code: bool) -> None:
        self._options = options
        ranks, alone = _ranks_of(options)
        self._group = Group("vllm", ranks, patience=options.start_patience)
        self._memories = [Memory(reused=True) for _ in range(2)] if options.host == "process" else []
        self._loading: Future[None] | None = None
        self._finalizer = weakref.finalize(self, _end, self._group, self._memories)
        files = {} if trust_remote_code else {file.name: file.read_bytes() for file in Path(path).iterdir()}
        rest = {"dtype": dtype, "trust_remote_code": trust_remote_code, "alone": alone}
        try:
            self._call("start", self._group.start)
            start = partial(self._group.call, _started, path, files, options, rest, stays=(0,))
            self._host, self.limit = self._call("start", start)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Run a method on each of vLLM's workers, and return their results."""
        return self._ask("call", method, *arguments)

    def begin_load(self, method: DigestMethod, transfer: bool = False) -> None:
        """Prepare vLLM for weights, digested by `method`; with `transfer` they come by vLLM's transfer engine."""
        self._loading = None
        self._ask("begin_load", method, transfer)

    def take_in(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin to load some weights. The next call, or `end_load`, raises its errors."""
        if self._memories:
            self._memories.reverse()
            packed, large = pack(dict(tensors))
            spans = [place[1:] for place in self._memories[0].put([flat(x) for x in large])]
            load = partial(self._ask, "take_in_from", self._memories[0].path, packed, spans)
        else:
            load = partial(self._ask, "take_in", tensors, fn=_take_in)
        self._loaded()
        self._loading = _begun(load)

    def end_load(self) -> tuple[dict[str, str], list[str]]:
        """Wait for the last weights. Returns the digest of each weight as every worker got it, and the parameters that
        a worker did not fill."""
        self._loaded()
        return self._ask("end_load")

    def generate(self, request: HostBatch, on_answer: Callable[[int, Answer], None]) -> None:
        """Generate a batch. Answers come from vLLM's rank as rows end; they stay if it dies later."""

        def on_rows(rows: Sequence[tuple[int, Answer]]) -> None:
            for row, answer in rows:
                on_answer(row, Answer(*(x.copy() for x in answer)))  # what Ray hands out cannot be written to

        self._ask("generate", request, wait="patience", fn=_answers, on_item=on_rows)

    def begin_turns(self, adapter: int | None) -> None:
        """Prepare for rows that come and go in turns, with the adapter of this number or none. Rows still open end."""
        self._ask("begin_turns", adapter)

    def turn(self, new: Sequence[HostRow], ended: Sequence[int]) -> list[HostDraws]:
        """Add the rows `new`, end those with the numbers `ended`, and return the draws of all open rows in one step."""
        return [HostDraws(*each) for each in self._ask("turn", list(new), list(ended), wait="patience")]

    def sleep(self) -> None:
        """Release the memory of vLLM's weights and cache; both are lost."""
        self._ask("sleep", wait="patience")

    def wake(self, part: str) -> None:
        """Allocate the memory of "weights" or "kv_cache" again."""
        self._ask("wake", part, wait="patience")

    def close(self) -> None:
        """End the rank, and free the memory that it shares with this process."""
        self._finalizer()

    def _loaded(self) -> None:
        """Wait until the last piece of weights is loaded."""
        before, self._loading = self._loading, None
        if before is not None:
            before.result()

    def _ask(
        self,
        method: str,
        *arguments: Any,
        wait: str = "start_patience",
        fn: Callable[..., Any] | None = None,
        on_item: Callable[[Any], None] | None = None,
    ) -> Any:
        """Run a method of `LocalHost` on the rank, or `fn` in its place, and return the result. `wait` is the option
        with the time limit in seconds, and `on_item` gets the items of a stream."""
        call = partial(self._group.call, label=method, patience=getattr(self._options, wait), on_item=on_item)
        return self._call(method, partial(call, fn or getattr(LocalHost, method), self._host, *arguments), wait)

    def _call(self, name: str, call: Callable[[], Any], wait: str = "start_patience") -> Any:
        """Run a call and return the result; its errors become those of a host. Errors mention `name`, the call's name,
        and the option `wait`."""
        try:
            return call()
        except GroupDied as error:
            if not error.again:
                raise EngineDied(f"vLLM's {error} (setting: {wait})") from error
            silent = f"vLLM gave no sign of life for {getattr(self._options, wait):g} s (setting: {wait}), in {name}"
            raise EngineDied(f"{silent}: {error}" if error.silent else f"vLLM's {error}") from error
        except (EngineFailure, SyncError, ValueError):
            raise
        except Exception as error:
            raise EngineFailure("".join(traceback.format_exception(error))) from error


def _ranks_of(options: VllmOptions) -> tuple[Ranks, bool]:
    """The rank for vLLM, and whether no trainer uses its GPUs."""
    spec = RankSpec(device="cpu", threads=len(os.sched_getaffinity(0)), patience=options.start_patience)
    if options.host == "process":
        gpus = _gpus(options)
        return Processes(spec, environment=_environment(gpus)), gpus is None or gpus.alone
    ray, _ = joined(options.cluster, show_output=False)
    count = options.tensor_parallel if ray.cluster_resources().get("GPU") else 0
    return RayCluster(options.cluster).ranks(attrs.evolve(spec, gpus=count)), False


def _gpus(options: VllmOptions) -> EngineGpus | None:
    """The GPUs for the process; None: those of this process. Raises ValueError if there are too few."""
    on_gpu, place = torch.cuda.is_initialized(), Place.of_environment()
    if not (on_gpu or options.devices):
        return None
    own, count = torch.cuda.current_device() if on_gpu else None, torch.cuda.device_count()
    return gpus_of(options, own=own, count=count, engine=place.local_rank, engines=place.local_world)


def _environment(gpus: EngineGpus | None) -> dict[str, str]:
    """The process's environment, in which it sees its own GPUs alone."""
    variables = {name: value for name, value in os.environ.items() if name not in NOT_FOR_VLLM}
    if gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = visible(gpus.numbers, variables.get("CUDA_VISIBLE_DEVICES"))
    return variables


def _end(group: Group, memories: list[Memory]) -> None:
    group.close()
    memories.clear()


def _begun(do: Callable[[], None]) -> Future[None]:
    """Start work in a daemon thread, and return its future."""
    result: Future[None] = Future()

    def run() -> None:
        try:
            result.set_result(do())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def _started(
    path: str, files: dict[str, bytes], options: VllmOptions, keywords: dict[str, Any]
) -> tuple[LocalHost, int]:
    """Start vLLM with the config that came as files. Returns its host, and the most tokens of a prompt and its response
    together."""
    for name in NOT_FOR_VLLM:
        os.environ.pop(name, None)
    with TemporaryDirectory() as directory:
        for name, content in files.items():
            (Path(directory) / name).write_bytes(content)
        host = LocalHost(directory if files else path, options, **keywords)
    return host, host.limit


def _take_in(host: LocalHost, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors, since arrays from Ray are read-only, and load them."""
    host.take_in({name: x.clone() for name, x in tensors.items()})


def _answers(host: LocalHost, request: HostBatch) -> Iterator[list[tuple[int, Answer]]]:
    """Yield the rows that ended in each step; an empty list now and then, as a sign of life."""
    yielded = time.monotonic()
    for ended in host.answers(request):
        if ended or time.monotonic() - yielded > _BEAT:
            yield ended
            yielded = time.monotonic()


def start_host(model: Model, options: VllmOptions, dtype: str) -> Host:
    """Start vLLM for the model, whose weights are still to come. Raises ValueError without a vLLM that fppo can run on,
    and for a model that vLLM cannot run."""
    check_installed()
    check_family(model.whole_config, tensor_parallel=options.tensor_parallel, alone=options.adapter == "alone")
    give_memory_back()
    remote = model.trust_remote_code
    with config_directory(model.whole_config, trust_remote_code=remote) as path:
        chosen = LocalHost if options.host == "local" else RemoteHost
        return chosen(path, options, dtype=dtype, trust_remote_code=remote)


def give_memory_back() -> None:
    """Release the GPU memory that torch caches: vLLM is another user of the GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
