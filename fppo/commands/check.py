"""The work of `fppo check`, after its arguments are read: it looks at everything and starts nothing."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import attrs
from transformers.utils import logging as transformers_logging

from fppo._errors import printable
from fppo.assembly.announce import input_lines
from fppo.assembly.checks import TRAIN
from fppo.assembly.idle import idle_lines
from fppo.assembly.inputs import Inputs
from fppo.assembly.machine import resolved
from fppo.commands import output
from fppo.commands.needs import duration, no_fit, planned_needs
from fppo.commands.plan import planned_on
from fppo.data import PromptSet
from fppo.data.tokenizers import encode_after
from fppo.fields import Problem
from fppo.rewards.runner import RewardRunner
from fppo.settings import files
from fppo.settings.check import CheckSettings
from fppo.settings.places import free_bytes
from fppo.settings.plan import PlanSettings
from fppo.settings.resolve import said_of_old_log_probs
from fppo.settings.train import TrainSettings
from fppo.studies.plan import text as plans
from fppo.studies.plan.case import hardware_of
from fppo.studies.plan.needs import RunNeeds
from fppo.workers.sample import Sample

_TEXT = 600  # characters of a prompt or a ground truth that are shown
_ENDS = 12  # tokens that are shown of each end of a prompt


@attrs.frozen(kw_only=True)
class ShownPrompt:
    """A prompt as the model sees it, with what the rewards say of two responses to it."""

    id: str
    why: str  # why it is shown
    source: str
    text: str
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]  # the text of each token
    ground_truth: Any
    rewards: Mapping[str, Mapping[str, float | None]] = attrs.field(factory=dict)  # by response and function


@attrs.frozen(kw_only=True)
class Rewarded:
    """The rewards of the shown prompts: scores by prompt, response and function; texts of failures; names of rewards
    that were not called; and the seconds that all calls took."""

    scores: Sequence[Mapping[str, Mapping[str, float | None]]]
    failures: Sequence[str] = ()
    uncalled: Sequence[str] = ()  # functions of a whole rollout, and models
    seconds: float = 0.0


TRUTH, EMPTY = "the ground truth", "an empty response"


def check(
    settings: TrainSettings, known: Sequence[Problem], options: CheckSettings, *, where: str, ranks: int | None = None
) -> int:
    """Print all that can be known of a run before it starts, planned for `ranks` processes (None: as many as its mesh
    has). Messages name `where`, the file or run that the settings are from. Returns the exit status that
    `CheckSettings` describes. Raises SettingsError with every problem, those `known` first, and ValueError for an
    unknown GPU."""
    with output.shown(options.json) as show:
        return _check(settings, known, options, show, where=where, ranks=ranks)


def _check(
    settings: TrainSettings,
    known: Sequence[Problem],
    options: CheckSettings,
    show: output.Show,
    *,
    where: str,
    ranks: int | None,
) -> int:
    if options.gpu is not None:
        hardware_of(options.gpu)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    chosen, notes = resolved(settings)
    inputs = _opened(chosen, known, where)
    environment = settings.rollout.environment.used
    prompts = [] if environment else shown_prompts(inputs, options.prompts)
    rewarded = rewarded_prompts(prompts, inputs)
    prompts = [attrs.evolve(x, rewards=y) for x, y in zip(prompts, rewarded.scores, strict=True)]
    wanted = PlanSettings(gpu=options.gpu, gpus=ranks)
    wanted = wanted if options.gpu else planned_on(wanted, inputs.device)
    needs, sections, fits = planned_needs(settings, wanted, chosen, inputs)
    free = free_bytes(Path(settings.output_dir))
    faults = _faults(needs, free, rewarded) + ([] if fits else [no_fit(needs)] if needs else sections[-1:])
    plain = files.differing(chosen, resolved(TrainSettings(), inputs.device)[0])
    said = notes, said_of_old_log_probs(chosen), idle_lines(chosen)
    lines = [
        input_lines(inputs, plain, *said),
        sections if needs is None else needs_lines(needs, settings, free),
        ["the environment gives the prompts: none is shown here"] if environment else _lengths(inputs.prompts),
        *(prompt_lines(prompt) for prompt in prompts),
        _reward_lines(rewarded),
        [f"found: {fault}" for fault in faults] or [f"nothing is wrong with {where}; nothing was started"],
    ]
    words = "\n\n".join("\n".join(printable(line, 20_000, lines=True) for line in part) for part in lines if part)
    numbers = {
        "needs": None if needs is None else plans.plain(needs),
        "prompts": [attrs.asdict(prompt) for prompt in prompts],
        "failures": [*rewarded.failures],
        "faults": faults,
    }
    show(words, numbers)
    return 1 if faults else 0


def _opened(settings: TrainSettings, known: Sequence[Problem], where: str) -> Inputs:
    """Open what the settings name, except weights. Raises SettingsError, about the file or run `where`, with the
    problems already `known` and those found here in other settings."""
    found, inputs = list[str](), Inputs(settings=settings)
    try:
        inputs.need(*TRAIN)
    except files.SettingsError as error:
        before = {problem.path for problem in known}
        found = [text for text in error.problems if _place(text) not in before]
    except Exception:
        if not known:
            raise  # invalid settings may raise anything
    if known or found:
        raise files.SettingsError([*map(str, known), *found], source=where)
    return inputs


def _place(text: str) -> str:
    """The setting that a problem's text begins with."""
    return re.split(r": | = | '", text, maxsplit=1)[0]


def shown_prompts(inputs: Inputs, count: int) -> list[ShownPrompt]:
    """The first prompt, the shortest, the longest and the next ones, `count` in all."""
    prompts = inputs.prompts
    lengths = [len(tokens) for tokens in prompts.tokens]
    chosen = {0: "the first"}
    for why, of in (("the shortest", min), ("the longest", max)):
        chosen.setdefault(lengths.index(of(lengths)), why)
    for number in range(len(prompts)):
        chosen.setdefault(number, "the next")
        if len(chosen) >= max(count, 3):
            break
    return [_shown(prompts, number, why, inputs.tokenizer) for number, why in list(chosen.items())[:count]]


def _shown(prompts: PromptSet, number: int, why: str, tokenizer: Any) -> ShownPrompt:
    tokens = prompts.tokens[number]
    return ShownPrompt(
        id=prompts.ids[number],
        why=why,
        source=prompts.sources[number],
        text=tokenizer.decode(tokens),
        tokens=tokens,
        pieces=tuple(tokenizer.decode([token]) for token in tokens),
        ground_truth=prompts.ground_truths[number],
    )


def rewarded_prompts(prompts: Sequence[ShownPrompt], inputs: Inputs) -> Rewarded:
    """Call each reward function on two responses to each prompt: its ground truth, if it has one, and an empty
    response.

    Reward models and judges are not loaded, and functions of a whole rollout are not called. Raises SettingsError for a
    function that returns no score.
    """
    section = inputs.settings.reward
    models = {"reward.model": section.model.path, "reward.judge": section.judge.path}
    uncalled = [name for name, path in models.items() if path is not None]
    if not section.functions or not prompts:
        return Rewarded(scores=[{} for _ in prompts], uncalled=uncalled)
    calls = [(i, words) for i, x in enumerate(prompts) for words in (TRUTH, EMPTY)[x.ground_truth is None :]]
    samples = [_sample(prompts[i], words, inputs) for i, words in calls]
    limits = {"time_limit": section.time_limit, "batch_limit": section.batch_time_limit}
    runner_of = partial(RewardRunner, inputs.rewards, workers=1, **limits)
    with _quiet(logging.getLogger("fppo.rewards")), runner_of() as runner:  # failures are reported below
        start = time.perf_counter()
        try:
            results = runner.run(samples)
        except ValueError as error:
            raise files.SettingsError([f"reward.functions: {error}"]) from error
        seconds = time.perf_counter() - start
        uncalled += [term.name for term in runner.terms if term.kind == "tensor"]
    scores: list[dict[str, dict[str, float | None]]] = [{} for _ in prompts]
    for number, (i, words) in enumerate(calls):
        failed = {x.term for x in results.failures if x.number == number}
        each = {name: None if name in failed else column[number] for name, column in results.scores.items()}
        scores[i][words] = each
    failures = [
        f"{x.term} failed on {calls[x.number][1]} of {prompts[calls[x.number][0]].id}: {printable(x.text, 500)}"
        for x in results.failures
    ]
    return Rewarded(scores=scores, failures=failures, uncalled=uncalled, seconds=seconds)


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Silence a logger below errors for as long as the context lasts."""
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _sample(prompt: ShownPrompt, words: str, inputs: Inputs) -> Sample:
    """Make a sample whose response is the prompt's ground truth or, if `words` is `EMPTY`, an empty text, followed by a
    stop token."""
    truth, tokenizer = prompt.ground_truth, inputs.tokenizer
    text: Any = tokenizer.decode(list(prompt.tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    response = "" if words == EMPTY else truth if isinstance(truth, str) else json.dumps(truth)
    number = inputs.prompts.ids.index(prompt.id)
    return Sample(
        prompt=text,
        response=response,
        ground_truth=truth,
        source=prompt.source,
        extras=inputs.prompts.extras[number],
        prompt_tokens=prompt.tokens,
        response_tokens=(
            *encode_after(tokenizer, response, text),
            *inputs.sampling.stop_token_ids[:1],
        ),
        finish="stop",
    )


def _faults(needs: RunNeeds | None, free: float, rewarded: Rewarded) -> list[str]:
    """List the reasons for which the run would fail later."""
    faults = []
    if needs is not None and needs.disk > free:
        faults.append(f"the run writes up to {_gb(needs.disk)}, and {_gb(free)} are free")
    faults += [text for text in rewarded.failures if f"failed on {TRUTH}" in text]
    return faults


def needs_lines(needs: RunNeeds, settings: TrainSettings, free: float) -> list[str]:
    """Lines on the memory, time and disk that a run needs; `free` is the free space on the disk in bytes."""
    share = needs.memory / needs.available
    fits = "fits" if needs.fits else "does not fit (docs/guides/memory.md)"
    return [
        f"memory    {_gib(needs.memory)} of {_gib(needs.available)} a rank ({share:.0%}): it {fits}; "
        f"{needs.ranks:,} x {needs.gpu}; a process of the host {_gib(needs.host)}",
        f"time      about {duration(needs.step)} a step, {duration(needs.run)} for {settings.steps:,} steps, with "
        f"prompts of {needs.prompt:,} tokens and responses of all {needs.response:,}, {_basis(needs)}; without rewards "
        "by functions, evaluations and files",
        f"disk      up to {_gb(needs.disk)}: {settings.checkpoint.keep} checkpoints of {_gb(needs.checkpoint)} and one "
        f"under way, a model of {_gb(needs.model)}, samples; {_gb(free)} are free",
    ]


def _basis(needs: RunNeeds) -> str:
    if needs.pace is not None:
        return "at the pace of a miniature that was run here"
    return "at a few cores' usual rates" if needs.gpu == "cpu" else f"at usual parts of the peak of a {needs.gpu}"


def _gib(size: float) -> str:
    return f"{plans.gib(size)} GiB"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.3g} GB" if size >= 1e8 else f"{size / 1e6:,.3g} MB"


def _lengths(prompts: PromptSet) -> list[str]:
    lengths = sorted(map(len, prompts.tokens))
    long = lengths[int(0.99 * (len(lengths) - 1))]
    return [
        f"lengths   of prompts, in tokens: {lengths[0]:,} to {lengths[-1]:,}, median {median(lengths):,g}, "
        f"99 % up to {long:,}"
    ]


def prompt_lines(prompt: ShownPrompt) -> list[str]:
    """A prompt for a terminal: text and tokens, with marks in place of control characters, and its rewards."""
    source = "" if prompt.source and prompt.id.startswith(prompt.source) else f", source {prompt.source}"
    lines = [
        f"prompt {printable(prompt.id, 200)}, {prompt.why}, {len(prompt.tokens):,} tokens{printable(source, 100)}",
        f"  text    {_quoted(prompt.text)}",
        f"  tokens  {tokens_line(prompt.tokens, prompt.pieces)}",
        *([] if prompt.ground_truth is None else [f"  truth   {_quoted(prompt.ground_truth)}"]),
    ]
    for words, scores in prompt.rewards.items():
        each = ", ".join(f"{name} {'failed' if x is None else f'{x:g}'}" for name, x in scores.items())
        lines.append(f"  reward  of {words}: {printable(each, 400)}")
    return lines


def _quoted(value: Any) -> str:
    return printable(json.dumps(value, ensure_ascii=False, default=str), _TEXT)


def tokens_line(tokens: Sequence[int], pieces: Sequence[str]) -> str:
    """Token ids with their texts in one line. A repeated token is shown once with its count, and a long line is cut in
    the middle."""
    runs = [(token, len(list(group))) for token, group in groupby(tokens)]
    texts = dict(zip(tokens, pieces, strict=True))
    shown = [
        f"{token} {printable(json.dumps(texts[token], ensure_ascii=False), 60)}{f' x {n:,}' if n > 1 else ''}"
        for token, n in runs
    ]
    if len(shown) > 2 * _ENDS:
        shown[_ENDS:-_ENDS] = [f"... ({len(shown) - 2 * _ENDS:,} more)"]
    return " | ".join(shown)


def _reward_lines(rewarded: Rewarded) -> list[str]:
    lines = [f"  {text}" for text in rewarded.failures]
    lines += [f"  not called here: {', '.join(rewarded.uncalled)}"] if rewarded.uncalled else []
    calls = sum(len(each) for x in rewarded.scores for each in x.values())
    if calls:
        lines.insert(0, f"rewards   {calls} calls in {duration(rewarded.seconds)}, with the start of a worker")
    same = [
        name
        for name in (rewarded.scores[0].get(TRUTH, {}) if rewarded.scores else ())
        if all(x[TRUTH][name] == x[EMPTY][name] for x in rewarded.scores if TRUTH in x)
    ]
    lines += [f"  {', '.join(same)}: the ground truth scores as nothing does, if that is meant"] if same else []
    return lines
