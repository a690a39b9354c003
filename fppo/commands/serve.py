"""The command serve: a run's policy, or a model, behind OpenAI's protocol until ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
from transformers.utils import logging as transformers_logging

from fppo import batch as batches
from fppo._errors import UsageError, printable, words_of
from fppo.commands.options import ServeOptions
from fppo.fields import only
from fppo.key import Key
from fppo.models.lengths import longest_row, positions
from fppo.models.model import Params
from fppo.pipeline.timing import now
from fppo.runs import saved, session, starts
from fppo.runs.serving import ServedPolicy, served_policy
from fppo.runtime import checkpoint
from fppo.runtime.exports import private_files
from fppo.serve.app import app_of
from fppo.serve.episodes import EpisodeRow, Episodes
from fppo.serve.loop import EngineLoop
from fppo.serve.openai import router_of
from fppo.serve.rows import rollout_of_rows
from fppo.serve.server import bound_socket, check_key, new_key, serving
from fppo.serve.service import Bounds, Service, Sources
from fppo.settings.model import ModelSettings
from fppo.settings.rollout import RolloutSettings
from fppo.settings.train import TrainSettings

KEY = "FPPO_API_KEY"  # the variable of the environment that has the key
_LONGEST = 4096  # tokens of a row by default


def serve(options: ServeOptions, environment: Mapping[str, str]) -> int:
    """Serve until ctrl-C or SIGTERM; returns 0, or 1 if the engine failed before. Raises ValueError for a key that no
    client can send."""
    key = new_key() if KEY not in environment else environment[KEY]
    check_key(key, KEY)
    listener = bound_socket(options.host, options.port, public=options.public)
    with contextlib.closing(listener), private_files():
        transformers_logging.disable_progress_bar()
        (target,) = targets_of(options, most=1)
        policy, params, version, newer = _policy(options, target)
        bounds = bounds_of(options, policy)
        writer = None if options.record is None else EpisodeFiles(Path(options.record), policy.engine.pad_token_id)
        episodes = Episodes(
            bounds.recorded_tokens,
            on_dropped=unrecorded if writer is None else writer.add,
            on_forgotten=lambda names: service.forget(names),
        )
        service = Service(sources_of(options, policy, bounds, target), episodes)
        loop = EngineLoop(policy.engine, params, version=version, newer=newer, on_failure=say_failure)
        app = app_of([router_of(service)], key=key, bounds=bounds)
        with ended_by_signals() as ended, contextlib.ExitStack() as opened:
            loop.start()
            opened.callback(loop.stop)
            service.attach(loop)
            url = opened.enter_context(serving(app, listener))
            _say(options, service.sources.model, url, key, shown=KEY not in environment)
            ended.wait()
            service.attach(None)
            loop.stop()  # whoever waits for an answer gets an error
        if writer is not None:
            writer.end(episodes)
        print("stopped", flush=True)
    return 0 if loop.failure is None else 1


def say_failure(error: Exception) -> None:
    """Print the error that ended an engine."""
    traceback.print_exception(error)
    text = "the engine failed, and answers nothing more: end the server (ctrl-C), and start it again"
    print(text, file=sys.stderr, flush=True)


def _say(options: ServeOptions, model: str, url: str, key: str, *, shown: bool) -> None:
    lines = [f"{model} at {url}/v1"]
    lines += [f"key: {key}"] if shown else [f"key: that of {KEY}"]
    if options.public:
        lines.append("other machines may reach it, and nothing is encrypted")
    print("\n".join([*lines, "ctrl-C ends it"]), flush=True)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[threading.Event]:
    """An event that ctrl-C and SIGTERM set, for as long as the context lasts."""
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        ended.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def targets_of(options: ServeOptions, *, most: int | None = None) -> tuple[str, ...]:
    """The runs or models to be served. Raises UsageError if there are none, or more than `most`."""
    if not options.targets:
        raise UsageError("give the output_dir of a run, or a model")
    if most is not None and len(options.targets) > most:
        raise UsageError(f"{len(options.targets)} of them, {', '.join(options.targets)}: several need --tinker")
    return options.targets


def _policy(options: ServeOptions, target: str) -> tuple[ServedPolicy, Params, int, Callable[[], Any] | None]:
    """Load the policy of a run or model. Returns it, its parameters, the number of its updates, and a function that
    looks for newer parameters, or None without --follow."""
    directory = Path(target)
    if not (directory / session.SETTINGS).exists():
        if options.step is not None or options.follow:
            raise UsageError(f"{target} is no run: leave --step and --follow out")
        policy = served_policy(settings_of_model(options, target), begins=True)
        assert policy.params is not None
        return policy, policy.params, 0, None
    if options.exact or options.compute_dtype != "auto":
        raise UsageError(f"{target} is a run, which is served as it trained: leave --exact and --compute-dtype out")
    settings = starts.load(directory)
    drafts = settings.rollout.draft_tokens if options.draft_tokens is None else options.draft_tokens
    rollout = attrs.evolve(settings.rollout, draft_tokens=drafts)
    settings = attrs.evolve(settings, device=options.device, rollout=rollout)
    at = saved.newest(directory, options.step)
    if at is None or (options.step is not None and at != options.step):
        steps = checkpoint.steps(directory / session.CHECKPOINTS)
        raise UsageError(f"{directory} holds no checkpoint of step {options.step or 'any'}; there are those of {steps}")
    policy = served_policy(saved.bare(settings), begins=False)
    follow = FollowedRun(directory, policy, options.follow, at) if options.follow else None
    return policy, *_loaded(directory, policy, at), follow


def _loaded(directory: Path, policy: ServedPolicy, step: int) -> tuple[Params, int]:
    path = checkpoint.place_of(directory / session.CHECKPOINTS, step)
    run = saved.policy(policy.model, path, device=policy.device)
    return run.actor.params, run.actor.step


class FollowedRun:
    """A run whose newer checkpoints are looked for, at most every `seconds`.

    A checkpoint that cannot be read is reported once and tried again; meanwhile the weights stay as they are.
    """

    def __init__(self, directory: Path, policy: ServedPolicy, seconds: float, step: int) -> None:
        self._directory, self._policy, self._seconds = directory, policy, seconds
        self._step, self._looked, self._said = step, now(), ""

    def __call__(self) -> tuple[Params, int] | None:
        """Load the parameters of a newer checkpoint and the number of their updates; None if there is no newer one, or
        if the last look was less than `seconds` ago."""
        if now() - self._looked < self._seconds:
            return None
        self._looked = now()
        try:
            step = saved.newest(self._directory)
            if step is None or step <= self._step:
                return None
            found = _loaded(self._directory, self._policy, step)
        except Exception as error:  # a flipped bit, or a checkpoint that the run has removed meanwhile
            self._say(f"{self._directory}: a newer checkpoint could not be read: {words_of(error, 500)}")
            return None
        self._step = step
        return found

    def _say(self, text: str) -> None:
        if text != self._said:
            advice = f"answers go on with the weights of step {self._step}"
            print(f"{printable(text, 800)}; {advice}", file=sys.stderr, flush=True)
        self._said = text


def settings_of_model(options: ServeOptions, target: str) -> TrainSettings:
    """The settings for a model that does not come from a run."""
    model = ModelSettings(path=target, compute_dtype=options.compute_dtype)
    rollout = RolloutSettings(exact=options.exact, draft_tokens=options.draft_tokens or 0)
    return TrainSettings(model=model, rollout=rollout, device=options.device)


def bounds_of(options: ServeOptions, policy: ServedPolicy) -> Bounds:
    """The limits of a policy's server: tokens of a row, tokens of an answer, and concurrent requests. Raises UsageError
    if rows would be longer than the model allows."""
    config = policy.model.config
    most = longest_row(config.get_text_config()) or positions(config)
    asked = options.row_tokens or _LONGEST
    if options.row_tokens is not None and most is not None and asked > most:
        raise UsageError(f"--row-tokens {asked}: the model was made for rows of {most} tokens; give at most that")
    row = asked if most is None else min(asked, most)
    return Bounds(row_tokens=row, answer_tokens=options.max_tokens, requests=options.requests)


def sources_of(options: ServeOptions, policy: ServedPolicy, bounds: Bounds, target: str) -> Sources:
    """The parts that all answers of a policy share: texts, sampling, key, bounds and name."""
    sampling = policy.sampling.with_options(only(options, "temperature", "top_p"))
    return Sources(
        texts=policy.texts,
        sampling=attrs.evolve(sampling, n=1),
        key=Key(options.seed),
        bounds=bounds,
        model=options.name or Path(target).name,
    )


class EpisodeFiles:
    """Writer of episodes to disk, as rollouts: one file whenever `most` rows have been added, and one for the remaining
    rows at the end."""

    def __init__(self, directory: Path, pad_token_id: int, *, most: int = 1024) -> None:
        try:
            directory.mkdir(0o700, parents=True, exist_ok=True)
        except OSError as error:
            text = f"{(error.strerror or str(error)).lower()}; give a directory"
            raise UsageError(f"--record {printable(str(directory))}: {text}") from error
        self._directory, self._pad, self._most = directory, pad_token_id, most
        self._rows: list[tuple[str, EpisodeRow]] = []
        self._number = 1 + len(list(directory.glob("episodes_*.safetensors")))

    def add(self, name: str, rows: Sequence[EpisodeRow]) -> None:
        """Add an episode, and write a file if there are enough rows."""
        self._rows += [(name, row) for row in rows]
        if len(self._rows) >= self._most:
            self.close()

    def end(self, episodes: Episodes) -> None:
        """Add the episodes that are still held, and write the last file."""
        for name in episodes.names():
            self.add(name, episodes.take(name))
        self.close()

    def close(self) -> None:
        """Write the rows added since the last file."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        names = [name for name, _ in rows]
        groups = {name: number for number, name in enumerate(dict.fromkeys(names))}
        rollout = rollout_of_rows(
            [row for _, row in rows],
            pad_token_id=self._pad,
            groups=[groups[name] for name in names],
            columns={"ids": names},
        )
        path = self._directory / f"episodes_{self._number:06d}.safetensors"
        self._number += 1
        with private_files():
            batches.save(rollout, path)
        print(f"{len(rows)} rows: {printable(str(path))}", file=sys.stderr, flush=True)


def unrecorded(name: str, rows: Sequence[EpisodeRow]) -> None:
    """Drop an episode that is not to be recorded."""
    del name, rows
