"""vLLM in a Ray actor, on whichever machine of the cluster has room: weights go through Ray's object store."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fppo.fleet.on_ray import joined
from fppo.rollout.shared_memory import Place, places_of, view
from fppo.rollout.sync import How, SyncError
from fppo.rollout.vllm.host import NOT_FOR_VLLM, Answer, EngineDied, EngineFailure, Request, check_installed
from fppo.rollout.vllm.local import LocalHost
from fppo.rollout.vllm.options import VllmOptions

_BEAT = 0.5  # seconds between two signs of life
_FROM_THERE = (EngineFailure, SyncError, ValueError)


class RayHost:
    """A `Host` whose vLLM is in an actor of the Ray cluster that `options.cluster` names.

    On a cluster with GPUs the actor takes as many as vLLM cuts the model over. Raises EngineDied, from any method, once
    the actor is gone or hangs. Raises ValueError without Ray or such a cluster.
    """

    def __init__(self, path: str, options: VllmOptions, *, dtype: str, trust_remote_code: bool) -> None:
        check_installed()
        self._options, self._ray = options, joined(options.cluster, show_output=False)[0]
        gpus = options.tensor_parallel if self._ray.cluster_resources().get("GPU") else 0
        paths = os.pathsep.join(os.getcwd() if entry == "" else entry for entry in sys.path)
        there = {"num_cpus": 1, "num_gpus": gpus, "runtime_env": {"env_vars": {"PYTHONPATH": paths}}}
        self._actor = self._ray.remote(_RayServer).options(**there).remote()
        self._loading: Any = None  # what takes weights in while the next are packed
        files = {} if trust_remote_code else {file.name: file.read_bytes() for file in Path(path).iterdir()}
        try:
            asked = {"dtype": dtype, "trust_remote_code": trust_remote_code}
            self.limit = int(self._get(self._actor.start.remote(path, files, options, asked), "start_patience"))
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Implement `LocalHost.call`."""
        return self._ask("call", method, *arguments, wait="start_patience")

    def begin_load(self, how: How, transfer: bool = False) -> None:
        """Implement `LocalHost.begin_load`."""
        self._loading = None
        self._ask("begin_load", how, transfer, wait="start_patience")

    def take_in(self, tensors: Mapping[str, Tensor]) -> None:
        """Implement `LocalHost.take_in`; two may be under way, so that one is packed while the other is taken in."""
        places, end = places_of(tensors)
        packed = np.empty(end, np.uint8)
        memory = torch.from_numpy(packed)
        for place in places:
            view(memory, place).copy_(tensors[place[0]])
        before, self._loading = self._loading, self._actor.take_in.remote(packed, places)
        if before is not None:
            self._get(before, "start_patience")

    def end_load(self) -> tuple[dict[str, str], list[str]]:
        """Implement `LocalHost.end_load`."""
        before, self._loading = self._loading, None
        if before is not None:
            self._get(before, "start_patience")
        return self._ask("end_load", wait="start_patience")

    def generate(self, request: Request, on_answer: Callable[[int, Answer], None]) -> None:
        """Implement `LocalHost.generate`; `on_answer` is called as rows end, so answers outlive the actor."""
        stream = self._actor.generate.options(num_returns="streaming").remote(request)
        try:
            while True:
                if not self._ray.wait([stream], timeout=self._options.patience)[0]:
                    raise self._hung("patience")
                try:
                    ended = self._get(next(stream), "patience")
                except StopIteration:
                    return
                for row, answer in ended:
                    on_answer(row, Answer(*(x.copy() for x in answer)))  # what Ray hands out cannot be written to
        except BaseException:  # also one of `on_answer`: it would go on there
            self.close()
            raise

    def sleep(self) -> None:
        """Implement `LocalHost.sleep`."""
        self._ask("sleep")

    def wake(self, part: str) -> None:
        """Implement `LocalHost.wake`."""
        self._ask("wake", part)

    def close(self) -> None:
        """Ends the actor."""
        with contextlib.suppress(Exception):
            self._ray.kill(self._actor)

    def _ask(self, method: str, *arguments: Any, wait: str = "patience") -> Any:
        return self._get(self._actor.ask.remote(method, *arguments), wait)

    def _get(self, answer: Any, wait: str) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(answer, timeout=getattr(self._options, wait))
        except errors.GetTimeoutError as error:
            raise self._hung(wait) from error
        except errors.RayActorError as error:
            raise EngineDied(f"the Ray actor of vLLM ended: {str(error).splitlines()[0]}") from error
        except errors.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, _FROM_THERE) else EngineFailure(str(error)) from error

    def _hung(self, wait: str) -> EngineDied:
        self.close()
        return EngineDied(
            f"the Ray actor of vLLM gave no sign of life for {getattr(self._options, wait):g} s (setting: {wait}); "
            f"the cluster has {self._ray.available_resources()} left"
        )


class _RayServer:
    """The actor: a `LocalHost` whose weights and answers take another way."""

    def __init__(self) -> None:
        for name in NOT_FOR_VLLM:
            os.environ.pop(name, None)
        self._host: LocalHost | None = None

    def start(self, path: str, files: dict[str, bytes], options: VllmOptions, rest: dict[str, Any]) -> int:
        """Starts vLLM, with the config that came as files; the longest prompt and response together."""
        with TemporaryDirectory() as directory:
            for name, content in files.items():
                (Path(directory) / name).write_bytes(content)
            self._host = LocalHost(directory if files else path, options, **rest)
        return self._host.limit

    def ask(self, method: str, *arguments: Any) -> Any:
        """What the method of `LocalHost` returns."""
        return getattr(self._running, method)(*arguments)

    def take_in(self, packed: np.ndarray, places: list[Place]) -> None:
        """Copies, for vLLM may keep them until a layer is whole, and what Ray hands out cannot be written to."""
        memory = torch.from_numpy(packed.copy())
        self._running.take_in({place[0]: view(memory, place) for place in places})

    def generate(self, request: Request) -> Iterator[list[tuple[int, tuple[np.ndarray, ...]]]]:
        """The rows that ended since the last time; none of them is a sign of life."""
        yielded, ended = time.monotonic(), []
        for row, answer in self._running.answers(request):
            if answer is not None:
                ended.append((row, tuple(answer)))
            elif ended or time.monotonic() - yielded > _BEAT:
                yield ended
                yielded, ended = time.monotonic(), []
        yield ended

    @property
    def _running(self) -> LocalHost:
        if self._host is None:
            raise EngineFailure("vLLM has not started")
        return self._host
