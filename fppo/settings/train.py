"""The settings of a run as nested frozen classes: what the command line shows and a settings file holds.

Each field carries the check of its own value; `checks` holds the checks between fields. An optional
setting is None unless given, so a file leaves it out. Only the command line reads these classes: library functions
take keywords.
"""

from __future__ import annotations

from typing import Literal

import attrs

from fppo._errors import did_you_mean
from fppo.data.examples import Fields
from fppo.devices import wrong_name
from fppo.fields import (
    MOST_ROWS,
    MOST_TOKENS,
    Table,
    above,
    at_least,
    at_most,
    below,
    module_function,
    nonempty,
    only,
    place,
    setting,
    temperature,
    word_or,
)
from fppo.runtime.remote import check_address
from fppo.settings.component import given, named
from fppo.settings.learning import ActorSettings, AlgorithmSettings, CriticSettings
from fppo.settings.model import ModelSettings
from fppo.settings.placement import MeshSettings, PlacementSettings
from fppo.settings.reward import RewardSettings
from fppo.settings.rollout import RolloutSettings
from fppo.settings.sft import SftSettings
from fppo.settings.tables import CURRICULA

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "swanlab")
LOGGERS = ("console", "jsonl", *TRACKERS)  # the first two are those of every run


@attrs.frozen(kw_only=True)
class CurriculumSettings:
    """How prompts are chosen by what is known of them, and any keywords of its function."""

    name: str = named("none", CURRICULA, "a curriculum")
    """none (every prompt once per epoch), learnability, easy_to_hard, mixture; or module:function for your own."""
    keywords: Table = given()

    @property
    def used(self) -> bool:
        """Whether a curriculum chooses the prompts."""
        return self.name != "none"


@attrs.frozen(kw_only=True)
class DataSettings:
    """Where prompts come from, and how a row becomes one."""

    path: tuple[str, ...] = setting((), place)
    """Prompts to train on: jsonl, csv or parquet files, or one name of the datasets library."""
    split: str = setting("train", nonempty("give the name of a split"))
    """The split to train on, where path is the name of a data set."""
    eval_path: tuple[str, ...] = setting((), place)
    """Held-out prompts, never trained on; none: no evaluation."""
    rows: str | None = setting(None, module_function)
    """In place of path, rows of your own: module:function, which returns or yields dicts."""
    eval_rows: str | None = setting(None, module_function)
    """In place of eval_path: module:function, which returns or yields dicts."""
    eval_split: str = setting("test", nonempty("give the name of a split"))
    """The split to evaluate on, where eval_path is the name of a data set."""
    stream: int | None = setting(None, at_least(1))
    """Of data sets by name, read the first so many rows as a stream, not downloaded whole; None: download all."""
    prompt: str = setting("prompt", nonempty("give a field of the rows, or a template with {field} in it"))
    """The field that holds the prompt, or a template like "Question: {question}\\nAnswer:"; \\n is a new line."""
    teacher_prompt: str | None = setting(None)
    """What a teacher reads in place of prompt: a field, a template, or module:function of responses; None: prompt."""
    teacher_prompt_tokens: int = setting(4096, at_least(1), at_most(MOST_TOKENS))
    """The longest of these, in tokens; longer ones are an error, but of a function they teach nothing."""
    chat: bool = setting(False)
    """Put the prompt, a text or a list of messages, through the tokenizer's chat template."""
    chat_template: str | None = setting(None, place)
    """A file with a chat template in place of the tokenizer's own; it is exported with the model."""
    chat_arguments: Table = setting(dict)
    """What the chat template gets beside messages, as {enable_thinking = false}."""
    images: str | None = setting(None)
    """The field with a prompt's image or images: paths, bytes, or images of the datasets library; needs chat."""
    videos: str | None = setting(None)
    """The field with a prompt's video or videos: files, directories or lists of frames, arrays; needs chat."""
    video_fps: float | None = setting(None, above(0))
    """How many frames of each second of a video the model sees; None: as many as its processor has by default."""
    video_frames: int | None = setting(None, at_least(1))
    """In place of video_fps, how many frames of a whole video the model sees; all of one that has fewer."""
    tools: str | None = setting(None, place)
    """A JSON file with a list of schemas of tools, which the chat template shows."""
    row_tools: str | None = setting(None)
    """The field with schemas of a row's own tools, a list or JSON text of one; rows without any have those of tools."""
    ground_truth: str = setting("answer")
    """The field that rewards compare with; prompt's own: its messages end with the answer; empty: there is none."""
    source: str | None = setting(None)
    """The field that names a row's data set, for results by source; None: the file's name."""
    pad_token: str | None = setting(None)
    """The token to pad with, for a tokenizer that has none of its own; padding is masked, so any will do."""
    max_prompt_tokens: int = setting(512, at_least(1), at_most(MOST_TOKENS))
    """The longest prompt, in tokens."""
    over_long: Literal["error", "drop", "truncate"] = setting("error")
    """What happens to longer prompts; truncate keeps the end of them. Both are counted."""
    may_change: bool = setting(False)
    """Go on from a checkpoint with other prompts, or other rows, than those that it was made with."""
    shuffle: bool = setting(True)
    """Draw a new order of the prompts in every epoch."""
    sampler: str | None = setting(None, module_function)
    """An order of your own: module:function of the prompt set, the epoch's number and a key, for indices of prompts."""
    curriculum: CurriculumSettings = setting(CurriculumSettings)
    """How prompts are chosen by what is known of them."""

    @property
    def teacher_field(self) -> str | None:
        """The field or template of a teacher's prompts; None for a function, or where a teacher has none."""
        return None if self.teacher_function is not None else self.teacher_prompt

    @property
    def teacher_function(self) -> str | None:
        """The function that makes a teacher's prompts from scored responses; None for a field or template, or none."""
        name = self.teacher_prompt
        return None if name is None or module_function(name) is not None else name

    @property
    def has_held_out(self) -> bool:
        """Whether there are prompts to evaluate on."""
        return bool(self.eval_path) or self.eval_rows is not None

    @property
    def fields(self) -> Fields:
        """The fields of a row that are read."""
        seen = only(self, "images", "videos") if self.chat else {}
        own = only(self, "prompt", "source", "chat")
        return Fields(**own, **seen, ground_truth=self.ground_truth or None, tools=self.row_tools)

    @property
    def seen(self) -> dict[str, str]:
        """The fields with images and with videos, by the settings that name them."""
        fields = {"data.images": self.images, "data.videos": self.videos}
        return {name: field for name, field in fields.items() if field is not None}


@attrs.frozen(kw_only=True)
class EvalSettings:
    """How held-out prompts (data.eval_path) are answered and scored."""

    every: int = setting(0, at_least(0))
    """Steps between evaluations; 0: only before and after the training."""
    before: bool = setting(True)
    """Evaluate before the first step."""
    n: int = setting(1, at_least(1), at_most(MOST_ROWS))
    """Responses to each prompt."""
    temperature: float = setting(0.0, at_least(0), temperature)
    """The sampling temperature; 0: the likeliest token always."""
    top_k: int | None = setting(None, at_least(0))
    """As rollout.top_k; 0: all tokens; None: as there."""
    top_p: float | None = setting(None, above(0), at_most(1))
    """As rollout.top_p; None: as there."""
    min_p: float | None = setting(None, at_least(0), below(1))
    """As rollout.min_p; None: as there."""
    max_tokens: int | None = setting(None, at_least(1), at_most(MOST_TOKENS))
    """The longest response, in tokens; None: rollout.max_tokens."""
    stop: tuple[str, ...] | None = setting(None)
    """Texts that end a response, in place of rollout.stop; None: those."""
    max_prompts: int | None = setting(None, at_least(1))
    """The first so many prompts only; None: all."""
    exact_values: bool = setting(False)
    """Compare the critic with exact values on held-out prompts; the only reward is exact_match, or a game's score."""


@attrs.frozen(kw_only=True)
class CheckpointSettings:
    """When the whole state of the run is saved."""

    every: int = setting(50, at_least(0))
    """Steps between checkpoints; 0: only after the last step."""
    keep: int = setting(2, at_least(1))
    """How many of the last checkpoints stay on disk, and at checkpoint.remote."""
    remote: str | None = setting(None, check_address)
    """Where checkpoints and samples are copied to, an address of fsspec such as s3://bucket/run; None: nowhere."""


@attrs.frozen(kw_only=True)
class DigestSettings:
    """Which steps' digests are written, for fppo replay to compare with."""

    every: Literal["auto"] | int = setting("auto", word_or("auto", at_least(0)))
    """Steps between digests; 0: of steps with a checkpoint only, which always have one; auto: about 1 % of the time."""


def _observers(names: tuple[str, ...]) -> str | None:
    wrong = next((text for name in names if (text := module_function(name)) is not None), None)
    return "names an observer twice" if len(set(names)) < len(names) else wrong


def _loggers(names: tuple[str, ...]) -> str | None:
    unknown = next((name for name in names if ":" not in name and name not in LOGGERS), None)
    if len(set(names)) < len(names):
        return "names a logger twice"
    return None if unknown is None else f"no logger {unknown!r}; {did_you_mean(unknown, LOGGERS)} and module:function"


@attrs.frozen(kw_only=True)
class LogSettings:
    """Where numbers and samples go."""

    loggers: tuple[str, ...] = setting((), _loggers)
    """Where metrics go beside metrics.jsonl: tensorboard, wandb, trackio, mlflow, swanlab, or module:function."""
    alarms: bool = setting(True)
    """Print a line when the metrics first show that the run goes wrong; docs/guides/alarms.md lists the alarms."""
    observers: tuple[str, ...] = setting((), _observers)
    """Functions of your own that see every step, as module:function of a StepRecord; numbers they return are logged."""
    samples: Literal["all"] | int = setting("all", word_or("all", at_least(0)))
    """Responses of each step that are kept in the directory samples, token by token: all, or so many."""
    samples_gb: float = setting(1.0, above(0))
    """Most GB (1e9 bytes) of them; beyond, every second step is kept, then every fourth, and so on."""
    table_rows: int = setting(8, at_least(0))
    """Responses of a step that trackers show as a table, spread over its batch; 0: none."""
    table_every: int = setting(10, at_least(1))
    """Steps from one such table to the next; the first step has one, too."""
    profile_steps: tuple[int, ...] = setting((), lambda x: None if all(step > 0 for step in x) else "count from 1")
    """Steps whose traces, by torch's profiler, are written to the directory profiles."""
    memory_steps: tuple[int, ...] = setting((), lambda x: None if all(step > 0 for step in x) else "count from 1")
    """Steps whose memory, by stage and kind, is written to the directory memory."""
    project: str = setting("fppo", nonempty("give the name of a project"))
    """The project that a run belongs to in trackers; MLflow's experiment."""
    entity: str | None = setting(None)
    """The user or team that it belongs to in W&B, the workspace in SwanLab; None: your default one."""
    group: str | None = setting(None)
    """The group that it belongs to in W&B, trackio and SwanLab; a tag in MLflow."""


@attrs.frozen(kw_only=True)
class TrainSettings:
    """Everything that a run of `fppo train` depends on."""

    output_dir: str = setting("runs/fppo", nonempty("give a directory for what the run writes"), place)
    """The directory for everything that the run writes."""
    seed: int = setting(0, at_least(0), at_most(2**64 - 1))
    """What every random draw of the run follows from."""
    steps: int = setting(100, at_least(1))
    """Steps of the run: each samples one batch and updates on it."""
    module_dirs: tuple[str, ...] = setting((), place)
    """Where modules of module:function are sought too; none: beside the settings file, and the working directory."""
    resume: str = setting("auto", nonempty("give auto, never, must, or a checkpoint"), place)
    """auto: from the last checkpoint if there is one; must: or fail; never: start anew; or a checkpoint's directory."""
    device: str = setting("auto", wrong_name)
    """Where tensors live: auto (an accelerator if there is one), cpu, cuda or cuda:N (ROCm too), xpu, npu or mps."""
    check: bool = setting(True)
    """Put your own loss, estimator and kernels through a few laws before the run; it takes a fraction of a second."""
    model: ModelSettings = setting(ModelSettings)
    """Which models, and how they run."""
    data: DataSettings = setting(DataSettings)
    """Where prompts come from, and how a row becomes one."""
    rollout: RolloutSettings = setting(RolloutSettings)
    """How responses are sampled."""
    reward: RewardSettings = setting(RewardSettings)
    """How a response is scored."""
    algorithm: AlgorithmSettings = setting(AlgorithmSettings)
    """How scores become advantages."""
    actor: ActorSettings = setting(ActorSettings)
    """How the policy is updated."""
    critic: CriticSettings = setting(CriticSettings)
    """How the critic is updated."""
    sft: SftSettings = setting(SftSettings)
    """How fppo sft imitates responses; fppo train does not read it."""
    eval: EvalSettings = setting(EvalSettings)
    """How held-out prompts are answered and scored."""
    mesh: MeshSettings = setting(MeshSettings)
    """How the run is spread over processes."""
    placement: PlacementSettings = setting(PlacementSettings)
    """Which roles run elsewhere, and where."""
    checkpoint: CheckpointSettings = setting(CheckpointSettings)
    """When the whole state of the run is saved."""
    digest: DigestSettings = setting(DigestSettings)
    """Which steps' digests are written, for fppo replay to compare with."""
    log: LogSettings = setting(LogSettings)
    """Where numbers and samples go."""

    @property
    def has_held_out(self) -> bool:
        """Whether there are prompts to evaluate on: rows, or an environment's."""
        return self.data.has_held_out or self.rollout.environment.has_held_out

    @property
    def in_turns(self) -> bool:
        """Whether responses have turns that somebody answers."""
        return self.rollout.turns.respond is not None or self.rollout.environment.used

    @property
    def decodes(self) -> bool:
        """Whether an embedded engine answers anything: the policy's, or the judge's."""
        judge = self.reward.judge
        return self.rollout.engine != "vllm" or (judge.path is not None and judge.engine != "vllm")

    @property
    def uses_critic_model(self) -> bool:
        """Whether the run has a critic that is a model of its own."""
        return self.algorithm.uses_critic and self.critic.reads == "tokens"

    @property
    def actor_steps(self) -> int:
        """Steps in which the policy is updated, as far as settings know: none while the critic is fitted first."""
        if not self.algorithm.uses_critic:
            return self.steps
        return max(self.steps - self.critic.warmup_steps - self.critic.pretrain, 1)

    @property
    def has_reward(self) -> bool:
        """Whether anything scores responses: functions, a reward model, a judge, or an environment."""
        reward = self.reward
        models = reward.model.path is not None or reward.judge.path is not None
        return bool(reward.functions) or models or self.rollout.environment.used

    @property
    def uses_teacher(self) -> bool:
        """Whether the run needs a teacher: its estimator, or a term of the loss, reads what one says."""
        return self.algorithm.reads("teacher_log_probs") or self.actor.distill.used

    @property
    def loads_teacher(self) -> bool:
        """Whether the teacher is a model of its own, and not the policy."""
        return self.uses_teacher and self.model.teacher_decay is None

    @property
    def averages_policy(self) -> bool:
        """Whether the teacher is an average of the policy's past, which is part of the run's state."""
        return self.uses_teacher and self.model.teacher_decay not in (None, 0)

    @property
    def model_roles(self) -> set[str]:
        """The roles whose models read batches, but for a reference, which is in a pool or where the policy is."""
        roles = {
            "actor": True,
            "critic": self.uses_critic_model,
            "teacher": self.loads_teacher,
            "reward": self.reward.model.path is not None,
            "judge": self.reward.judge.path is not None,
        }
        return {role for role, is_used in roles.items() if is_used}

    @property
    def uses_reference(self) -> bool:
        """Whether the run needs a reference model."""
        return self.actor.kl_coef > 0 or self.algorithm.kl.coef > 0


def sized_for_sft(settings: TrainSettings) -> TrainSettings:
    """The settings of a training run whose passes over the policy are those of `fppo sft`, for choices by size."""
    sft = settings.sft
    return attrs.evolve(
        settings,
        data=attrs.evolve(settings.data, max_prompt_tokens=sft.max_tokens - 1),
        rollout=attrs.evolve(settings.rollout, batch_size=sft.batch_size, max_tokens=1, exact=False),
        actor=attrs.evolve(settings.actor, epochs=1, mini_batch_size=sft.batch_size),
    )
