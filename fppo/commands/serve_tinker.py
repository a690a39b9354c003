"""The command serve --tinker: models behind the tinker protocol, for training and sampling, and behind OpenAI's."""

from __future__ import annotations

import contextlib
import secrets
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers.utils import logging as transformers_logging

from fppo._errors import UsageError, printable
from fppo.assembly.texts import config_place, open_processor
from fppo.commands.options import ServeOptions
from fppo.commands.serve import (
    KEY,
    EpisodeFiles,
    bounds_of,
    ended_by_signals,
    say_failure,
    settings_of_model,
    sources_of,
    targets_of,
    unrecorded,
)
from fppo.data.images import ImageReader
from fppo.runs import session
from fppo.runs.serving import ServedPolicy, served_policy
from fppo.runtime.exports import private_files
from fppo.runtime.gguf_files import gguf_of
from fppo.serve.app import app_of, by_path
from fppo.serve.episodes import Episodes
from fppo.serve.loop import EngineLoop
from fppo.serve.openai import router_of
from fppo.serve.server import bound_socket, check_key, serving
from fppo.serve.service import Bounds, Service
from fppo.serve.tinker.journal import JournalError
from fppo.serve.tinker.routes import PREFIX, ClientFlags, tinker_app
from fppo.serve.tinker.runs import BaseModel
from fppo.serve.tinker.samples import SampleRules
from fppo.serve.tinker.service import ServedBase, TinkerService

START = "tml-"  # the prefix of all keys that tinker's client takes


def keys_of(options: ServeOptions, given: str | None) -> tuple[list[str], bool]:
    """The keys that tinker's clients may use: first the server's own, which is `given` or else new, then those of the
    file --keys; and whether the server's key is new. Raises UsageError for invalid keys or an unreadable file."""
    key = START + secrets.token_urlsafe(32) if given is None else given
    keys = [key]
    if options.keys is not None:
        try:
            lines = Path(options.keys).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--keys {options.keys}: {error}") from error
        _make_private(Path(options.keys))
        keys = [key, *(line.strip() for line in lines if line.strip() and not line.startswith("#"))]
    wrong = next((number for number, each in enumerate(keys) if not each.startswith(START) or len(each) < 8), None)
    if wrong is not None:
        place = f"key {wrong} of --keys {options.keys}" if wrong else "FPPO_API_KEY"
        raise UsageError(f"{place}: tinker's client takes keys of eight characters and more that begin with {START}")
    for number, each in enumerate(keys):
        check_key(each, f"key {number} of --keys {options.keys}" if number else KEY)
    return keys, given is None


def _make_private(path: Path) -> None:
    """Make a file of keys readable by its owner alone, and print that. Raises UsageError if the file's mode cannot be
    changed, such as for another user's file."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & 0o077:
        return
    try:
        path.chmod(mode & 0o700)
    except OSError as error:
        raise UsageError(f"--keys {path}: others than its owner can read it: chmod 600 {path}") from error
    print(f"--keys {printable(str(path))}: others could read it; now its owner alone can", file=sys.stderr, flush=True)


def served_base(options: ServeOptions, target: str, policy: ServedPolicy, bounds: Bounds) -> ServedBase:
    """A policy as a base model of the protocol, named as on the command line."""
    assert policy.params is not None
    directory = Path(target) if gguf_of(target) is None else config_place(target, target)
    base = BaseModel(
        name=target,
        model=policy.model,
        params=policy.params,
        tokenizer_id=str(directory.resolve()) if directory.is_dir() else target,
        limit=bounds.row_tokens,
        kernels=policy.engine.kernels,
    )
    rules = SampleRules(
        texts=policy.texts,
        stop_token_ids=policy.sampling.stop_token_ids,
        limit=bounds.row_tokens,
        seed=options.seed,
        images=_images(options, target, policy),
    )
    return ServedBase(base=base, engine=policy.engine, rules=rules, write_tokenizer=policy.tokenizer.save_pretrained)


def _images(options: ServeOptions, target: str, policy: ServedPolicy) -> ImageReader | None:
    """The reader of images of a model that takes them, if there is a processor beside it."""
    if policy.model.vision is None:
        return None
    settings = settings_of_model(options, target)
    try:
        processor, vision = open_processor(settings.model, settings.data)
    except ValueError as error:
        print(f"{target} answers without images: {printable(str(error), 300)}", file=sys.stderr, flush=True)
        return None
    return ImageReader(processor, vision.token, video=vision.video)


def serve(options: ServeOptions, environment: Mapping[str, str]) -> int:
    """Serve models until ctrl-C or SIGTERM; returns 0, or 1 if an engine or the training failed before.

    Raises UsageError, and ValueError for a key that no client can send.
    """
    keys, new = keys_of(options, environment.get(KEY))
    listener = bound_socket(options.host, options.port, public=options.public)
    with contextlib.closing(listener), private_files(), contextlib.ExitStack() as opened:
        transformers_logging.disable_progress_bar()
        targets = _models(options)
        policies = {name: served_policy(settings_of_model(options, name), begins=True) for name in targets}
        bounds = {name: bounds_of(options, policy) for name, policy in policies.items()}
        bases = {name: served_base(options, name, policy, bounds[name]) for name, policy in policies.items()}
        service = opened_store(options, bases)
        opened.callback(service.stop)
        ended = opened.enter_context(ended_by_signals())
        loops: dict[str, EngineLoop] = {}
        for name, policy in policies.items():
            assert policy.params is not None
            loops[name] = EngineLoop(policy.engine, policy.params, on_failure=say_failure).start()
            opened.callback(loops[name].stop)
        writer = None if options.record is None else EpisodeFiles(Path(options.record), _pad(policies, targets[0]))
        episodes = Episodes(
            bounds[targets[0]].recorded_tokens,
            on_dropped=unrecorded if writer is None else writer.add,
            on_forgotten=lambda names: openai.forget(names),
        )
        openai = Service(sources_of(options, policies[targets[0]], bounds[targets[0]], targets[0]), episodes)
        openai.attach(loops[targets[0]])
        service.start(loops)
        plain = app_of([router_of(openai, problem=service.problem)], key=keys[0], bounds=bounds[targets[0]])
        app = by_path(PREFIX, tinker_app(service, keys=keys, flags=ClientFlags(compress=options.compress)), plain)
        url = opened.enter_context(serving(app, listener))
        _say(options, openai.sources.model, url, keys, new=new)
        ended.wait()
        openai.attach(None)
        if writer is not None:
            writer.end(episodes)
    print("stopped", flush=True)
    return 0 if service.problem() is None else 1


def _models(options: ServeOptions) -> tuple[str, ...]:
    """The models to be served. Raises UsageError for one given twice, for a run, and for options of runs alone."""
    targets = targets_of(options)
    if len(set(targets)) < len(targets):
        raise UsageError(f"{', '.join(targets)}: a model is given twice")
    if options.step is not None or options.follow:
        raise UsageError("--tinker serves models, not runs: leave --step and --follow out")
    for target in targets:
        if (Path(target) / session.SETTINGS).exists():
            raise UsageError(f"{target} is a run: export it (fppo export {target} DIRECTORY), and serve that")
    return targets


def _pad(policies: Mapping[str, ServedPolicy], name: str) -> int:
    return policies[name].engine.pad_token_id


def _say(options: ServeOptions, model: str, url: str, keys: Sequence[str], *, new: bool) -> None:
    lines = [f"{', '.join(options.targets)} at {url} for tinker's clients, {model} at {url}/v1"]
    lines += [f"key: {keys[0]}"] if new else [f"key: that of {KEY}"]
    lines += [f"and {len(keys) - 1} of {options.keys}"] if len(keys) > 1 else []
    if options.public:
        lines.append("other machines may reach it, and nothing is encrypted")
    print("\n".join([*lines, "ctrl-C ends it"]), flush=True)


def opened_store(options: ServeOptions, bases: Mapping[str, ServedBase]) -> TinkerService:
    """Open the tinker service for these base models, which keeps its data in the directory --store. Raises UsageError
    if that directory cannot be used."""
    try:
        return TinkerService(Path(options.store), bases, joint=options.joint)
    except (OSError, JournalError) as error:
        raise UsageError(f"--store {printable(options.store)}: {error}; give another directory") from error
