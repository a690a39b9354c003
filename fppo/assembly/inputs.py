"""The inputs of a run apart from its weights: each is opened once, at its first use, and one error names all that are
wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Self, TypeVar, overload

import attrs
import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from fppo import data
from fppo.assembly.environments import episode_prompts
from fppo.assembly.functions import Advantage, advantage_of, reward_of
from fppo.assembly.parts import device_of, kernels_of
from fppo.assembly.rows import Drawing, drawing_of, held_out_of, load_demonstrations, load_prompts
from fppo.assembly.texts import (
    chat_options,
    config_of,
    config_place,
    directory_of,
    eval_sampling_of,
    generation_config,
    judge_tokenizer_of,
    load_images,
    load_tokenizer,
    reward_tokenizer_of,
    sampling_of,
)
from fppo.data import DemonstrationSet, PromptSet
from fppo.data.problems import lines_of, together
from fppo.fleet import HERE, AnyGroup, Here, LocalGroup
from fppo.key import Key
from fppo.models.load import read_config
from fppo.rewards.functions import Reward, WeightedSum
from fppo.rewards.models import find_reward_model
from fppo.rollout.engine import Sampling
from fppo.runtime.mesh import LOCAL, Mesh
from fppo.settings import files
from fppo.settings.modules import kernels_named
from fppo.settings.train import TrainSettings
from fppo.workers.imports import import_modules, imported
from fppo_kernels.table import Kernels

T = TypeVar("T")
WRONG = (ValueError, OSError)  # errors that a user can fix
Check = Callable[[], object]  # raises them; or returns an iterator over more


class SeveralErrors(ValueError):
    """All errors of several checks, raised together: `errors` has each once, also from another SeveralErrors."""

    def __init__(self, errors: Sequence[Exception]) -> None:
        found = [x for error in errors for x in (error.errors if isinstance(error, SeveralErrors) else [error])]
        self.errors = list({id(x): x for x in found}.values())
        super().__init__("\n".join(map(str, self.errors)))


def attempt(checks: Iterable[Check]) -> None:
    """Make every check. Raises SeveralErrors with all errors that a user can fix; one of the iteration ends it."""
    errors: list[Exception] = []
    left = iter(checks)
    while True:
        try:
            more = next(left)()
            if isinstance(more, Iterator):
                attempt(more)
        except StopIteration:
            break
        except WRONG as error:
            errors.append(error)
    if errors:
        raise SeveralErrors(errors)


def or_none(get: Callable[[], T]) -> T | None:
    """The result of a function; None if it raises an error that a user can fix, which is named where it is needed."""
    try:
        return get()
    except WRONG:
        return None


class part(Generic[T]):
    """A property that is computed at its first use. If that raises an error, every use raises the same one."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self._name = compute, compute.__name__
        self.__doc__ = compute.__doc__

    def __call__(self, inputs: Inputs) -> T:
        """The property's value for these inputs, computed at its first use."""
        made = inputs.made
        if self._name not in made:
            try:
                made[self._name] = self._compute(inputs), None
            except WRONG as error:
                made[self._name] = None, error
        value, error = made[self._name]
        if error is not None:
            raise error
        return value

    @overload
    def __get__(self, inputs: None, owner: type) -> Self: ...
    @overload
    def __get__(self, inputs: Inputs, owner: type) -> T: ...
    def __get__(self, inputs: Inputs | None, owner: type) -> Self | T:
        return self if inputs is None else self(inputs)


@attrs.frozen(kw_only=True, eq=False)
class Inputs:
    """The inputs that settings name, apart from weights, each opened at its first use.

    One that cannot be opened raises ValueError or OSError when it is used; `need` names all such problems at once.
    """

    settings: TrainSettings
    mesh: Mesh = LOCAL
    trains: bool = True  # else the policy is only evaluated, and there is no critic and no reference
    pads: bool = True  # whether prompts are padded, so that the tokenizer needs a padding token
    own_kernels: Kernels | None = None  # in place of those that the settings name
    own_device: torch.device | None = None  # likewise
    own_tokenizer: PreTrainedTokenizerBase | None = None  # likewise
    own_rewards: Mapping[str, Reward] = attrs.field(factory=dict)  # by name, in place of importing these
    made: dict[str, Any] = attrs.field(factory=dict, init=False, repr=False)  # by part: value and error, one of them

    def need(self, *parts: Callable[[Inputs], object]) -> Self:
        """Open these parts, and make the checks among them. Raises SettingsError that names all problems, each once."""
        try:
            import_modules(self.settings.model.import_, self.settings.module_dirs)
        except ValueError as error:
            raise files.SettingsError([str(error)]) from error
        try:
            attempt(partial(each, self) for each in parts)
        except SeveralErrors as several:
            found = together(several.errors)
            lines = [x.problems if isinstance(x, files.SettingsError) else lines_of(x) for x in found]
            raise files.SettingsError([line for each in lines for line in each]) from several.errors[0]
        return self

    @part
    def device(self) -> torch.device:
        """The device that models work on."""
        return self.own_device or device_of(self.settings.device, self.settings.placement)

    @part
    def kernels(self) -> Kernels:
        """The kernels of a training step: those that settings name, or `own_kernels` if given."""
        return self.own_kernels or kernels_of(kernels_named(self.settings))

    @part
    def advantage(self) -> Advantage:
        """The function that makes the advantage estimator."""
        return advantage_of(self.settings.algorithm, self.kernels)

    @part
    def rewards(self) -> WeightedSum:
        """The rewards by functions."""
        section, most = self.settings.reward, self.settings.rollout.max_tokens
        if not section.functions:
            return WeightedSum(())
        return reward_of(section, {}, max_tokens=most, own=self.own_rewards)

    @part
    def loggers(self) -> Mapping[str, Callable[..., Any]]:
        """The user's own loggers, by name."""
        return {name: imported(name, "log.loggers") for name in self.settings.log.loggers if ":" in name}

    @part
    def observers(self) -> Mapping[str, Callable[..., Any]]:
        """The user's observers, by name."""
        return {name: imported(name, "log.observers") for name in self.settings.log.observers}

    @part
    def config(self) -> PreTrainedConfig:
        """The policy's config."""
        return config_of(self.settings.model, config_place(self.settings.model.path, "model.path"))

    @part
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer."""
        if self.own_tokenizer is not None:
            return self.own_tokenizer
        return load_tokenizer(self.settings.model, self.settings.data, pads=self.pads)

    @part
    def reward_config(self) -> PreTrainedConfig:
        """The reward model's config."""
        section, remote = self.settings.reward.model, self.settings.model.trust_remote_code
        path = section.path or ""
        directory_of(path, "reward.model.path")  # whose errors name the setting
        directory, _ = find_reward_model(path, label=section.label, trust_remote_code=remote)
        return read_config(directory, trust_remote_code=remote)

    @property
    def scores_chats(self) -> bool:
        """Whether the reward model reads chats: as its section says, or as the data does."""
        chat = self.settings.reward.model.chat
        return self.settings.data.chat if chat is None else chat

    @part
    def reward_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The reward model's tokenizer; None if it reads the policy's tokens as they are."""
        configs = {"policy": self.config, "reward model": self.reward_config}
        how = {"chat": self.scores_chats, "trust_remote_code": self.settings.model.trust_remote_code}
        return reward_tokenizer_of(self.settings.reward.model, self.tokenizer, configs, **how)

    @part
    def judge_config(self) -> PreTrainedConfig:
        """The judge's config."""
        directory = config_place(self.settings.reward.judge.path or "", "reward.judge.path")
        return read_config(directory, trust_remote_code=self.settings.model.trust_remote_code)

    @part
    def judge_tokenizer(self) -> PreTrainedTokenizerBase:
        """The judge's tokenizer."""
        section, remote = self.settings.reward.judge, self.settings.model.trust_remote_code
        directory = config_place(section.path or "", "reward.judge.path")
        return judge_tokenizer_of(directory, chat=section.chat, trust_remote_code=remote)

    @part
    def images(self) -> data.ImageReader | None:
        """The reader of prompts with images and videos; None without any."""
        return load_images(self.settings.model, self.settings.data, self.tokenizer)

    @property
    def texts(self) -> Any:
        """The processor, which has the tokenizer too, of a model that takes images; else the tokenizer."""
        return self.tokenizer if self.images is None else self.images.processor

    @part
    def generation(self) -> GenerationConfig:
        """The policy's generation config, which is exported with it."""
        directory = config_place(self.settings.model.path, "model.path")
        chat = chat_options(self.settings.data) if self.settings.data.chat else None
        return generation_config(directory, self.config, self.tokenizer, chat=chat)

    @part
    def sampling(self) -> Sampling:
        """How responses are sampled in training."""
        return self._by_generation(partial(sampling_of, self.settings.rollout, self.tokenizer))

    @part
    def eval_sampling(self) -> Sampling:
        """How held-out prompts are answered."""
        like, sections = or_none(lambda: self.sampling), (self.settings.eval, self.settings.rollout)
        return self._by_generation(partial(eval_sampling_of, *sections, self.tokenizer, like=like))

    def _by_generation(self, make: Callable[[GenerationConfig], Sampling]) -> Sampling:
        """Make a sampling from the generation config. If the config is wrong, its error is raised only after `make` has
        run with a default config, so that an error of `make` itself comes first."""
        made = make(or_none(lambda: self.generation) or GenerationConfig())
        _ = self.generation
        return made

    @part
    def prompts(self) -> PromptSet:
        """The prompts to train on: rows of data or, without any, empty ones that the environment fills."""
        rows, environment = self.settings.data, self.settings.rollout.environment
        if environment.used and not rows.path and rows.rows is None:
            return episode_prompts(environment.episodes, self.tokenizer)
        return load_prompts(rows, self.tokenizer, self.images)

    @part
    def held_out(self) -> PromptSet | None:
        """The prompts to evaluate on: rows of data, or empty ones that the environment fills; None without either."""
        rows, environment, most = self.settings.data, self.settings.rollout.environment, self.settings.eval.max_prompts
        if environment.has_held_out:
            count = environment.eval_episodes
            return episode_prompts(count if most is None else min(count, most), self.tokenizer)
        if not rows.has_held_out:
            return None
        found = load_prompts(held_out_of(rows), self.tokenizer, self.images)
        return found if most is None or most >= len(found) else data.select(found, range(most))

    @part
    def drawing(self) -> Drawing:
        """How prompts are drawn."""
        s = self.settings
        drafts = s.rollout.draft_tokens > 0 and not s.in_turns
        return drawing_of(s.data, self.prompts, Key(s.seed).fold("data"), drafts=drafts)

    @part
    def demonstrations(self) -> DemonstrationSet:
        """The demonstrations to imitate."""
        return load_demonstrations(self.settings.data, self.settings.sft, self.tokenizer)

    @part
    def held_out_demonstrations(self) -> DemonstrationSet | None:
        """The held-out demonstrations; None without any."""
        rows, most = self.settings.data, self.settings.eval.max_prompts
        if not rows.has_held_out:
            return None
        found = load_demonstrations(held_out_of(rows), self.settings.sft, self.tokenizer)
        return attrs.evolve(found, rows=found.rows[:most], ids=found.ids[:most], sources=found.sources[:most])


def made_on(group: AnyGroup, here: Here, make: Callable[[Here, Inputs], T], inputs: Inputs, *, label: str) -> T:
    """Make a part of a run from its inputs: `here` for the group of this process, else on the ranks of `group`, which
    open inputs of their own; then the result is a handle to what stays there. `label` names the call in a trace."""
    if isinstance(group, LocalGroup):
        return make(here, inputs)
    unopened = Inputs(settings=inputs.settings, own_tokenizer=inputs.tokenizer)
    return group.call(_make, HERE, make, unopened, stays=True, label=label)


def _make(here: Here, make: Callable[[Here, Inputs], T], unopened: Inputs) -> T:
    """Make a part of a run on a rank of a group."""
    transformers_logging.disable_progress_bar()  # the controller reports progress
    return make(here, attrs.evolve(unopened, mesh=here.mesh, own_device=here.device).need())
