"""The settings of a run as nested frozen classes: what the command line shows and a settings file holds.

Each field carries the check of its own value; `checks` holds the checks between fields. An optional
setting is None unless given, so a file leaves it out. Only the command line reads these classes: library functions
take keywords.
"""

from __future__ import annotations

from typing import Literal

import attrs

from fppo._errors import did_you_mean
from fppo.settings.algorithm import AlgorithmSettings, KlKind
from fppo.settings.component import given, named
from fppo.settings.critic import CriticSettings
from fppo.settings.experts import ExpertSettings
from fppo.settings.fields import (
    MOST_ROWS,
    MOST_TOKENS,
    Table,
    above,
    at_least,
    at_most,
    nonempty,
    setting,
    temperature,
)
from fppo.settings.lora import LoraSettings
from fppo.settings.mesh import MeshSettings
from fppo.settings.optimizer import OptimizerSettings, WeightMode
from fppo.settings.placement import PlacementSettings
from fppo.settings.reward import RewardSettings
from fppo.settings.rollout import RolloutSettings
from fppo.settings.tables import POLICY_LOSSES

LOGGERS = ("console", "jsonl", "tensorboard", "wandb")  # the first two are those of every run


@attrs.frozen(kw_only=True)
class ModelSettings:
    """Which models, and how they run."""

    path: str = setting("", nonempty("give the name or directory of a Hugging Face model"))
    """The policy to train: the name or directory of a Hugging Face model."""
    critic_path: str | None = setting(None)
    """Where the critic's weights come from; None: the policy's own weights with a new value head."""
    ref_path: str | None = setting(None)
    """The reference that KL terms hold the policy to; None: the policy as it was at the start."""
    tokenizer: str | None = setting(None)
    """Where the tokenizer is; None: in path."""
    config: Table = setting(dict)
    """What differs from the config.json of these models, as {max_position_embeddings = 8192}."""
    lora: LoraSettings = setting(LoraSettings)
    """Low-rank adapters in place of trained weights."""
    ref_dtype: Literal["float32", "bfloat16"] = setting("float32")
    """The dtype the reference is kept in; bfloat16 halves its memory, and it then runs in that too."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto")
    """The dtype of all passes, auto: bfloat16 on GPUs; float16 scales the loss. Master weights are always float32."""
    forward_token_budget: int | None = setting(None, at_least(1))
    """Tokens per pass without a gradient (old log-probs, reference, values, rewards); None: as the actor's."""
    checkpoint_layers: Literal["selective"] | bool = setting(False)
    """Recompute each layer in the backward pass: less memory, more time; selective: all of it but its attention."""
    compile_layers: bool = setting(False)
    """Run layers as programs of torch.compile (not in engines), made when first needed, in seconds to minutes."""
    graphs: Literal["auto"] | bool = setting("auto")
    """Run passes of few tokens by one launch each, as CUDA graphs; auto: on a GPU, where memory is not kept short."""
    freeze_vision: bool = setting(False)
    """Leave the vision tower and projector of a model that takes images as they are, in actor and critic."""
    trust_remote_code: bool = setting(False)
    """Let a model directory run its own Python code."""
    offload: Literal["none", "moments", "all"] = setting("none")
    """Keep the optimizer's moments, or them and all parameters, in the host's memory between uses (GPUs)."""
    ref_offload: bool | None = setting(None)
    """Keep the reference in the host's memory between uses (GPUs); None: where offload is all."""
    offload_activations: bool = setting(False)
    """Keep what is saved for the backward pass in the host's memory until then (GPUs)."""
    remove_padding: bool = setting(True)
    """Run on packed sequences instead of padded rows."""
    cpp: bool = setting(False)
    """On a CPU, take kernels in C++ for what says auto; they are compiled when first needed, in seconds."""
    attention: str = setting("auto", nonempty("give the name of an attention kernel, as sdpa, or auto"))
    """The kernel for attention over packed rows: auto, sdpa, eager, cpp, flash, varlen, flex; or module:function."""
    decode_attention: str = setting("auto", nonempty("give the name of a kernel for attention in decoding, or auto"))
    """The embedded engine's kernel for attention of one token: auto, sdpa, eager, cpp (CPUs); or module:function."""
    log_probs: str = setting("auto", nonempty("give the name of a log-prob kernel, as chunked, or auto"))
    """The kernel for log-probs, entropy: auto, chunked, cpp, reference, compiled, liger, triton; or module:function."""
    linear: str = setting("torch", nonempty("give the name of a kernel for linear layers, as torch"))
    """The kernel for linear layers: torch, onednn (for CPUs), float8 (8-bit products, GPUs); or module:function."""
    rms_norm: str = setting("auto", nonempty("give the name of a kernel for RMSNorm, as eager, or auto"))
    """The kernel for RMSNorm: auto, eager (the model's own code), torch, cpp, liger, triton; or module:function."""
    add_rms_norm: str = setting("auto", nonempty("give the name of a kernel for RMSNorm of a sum, as eager, or auto"))
    """The kernel for RMSNorm of a sum: auto, eager (the model's own code), cpp, liger, triton; or module:function."""
    layer_norm: str = setting("auto", nonempty("give the name of a kernel for LayerNorm, as eager, or auto"))
    """The kernel for LayerNorm: auto, eager (the model's own code), torch, liger; or module:function."""
    rotary: str = setting("auto", nonempty("give the name of a kernel for rotary positions, as eager, or auto"))
    """The kernel for rotary positions: auto, eager (the model's own code), cpp, liger, triton; or module:function."""
    glu: str = setting("auto", nonempty("give the name of a kernel for gated activations, as eager, or auto"))
    """The kernel for gated activations: auto, eager (the model's own code), cpp, liger, triton; or module:function."""


@attrs.frozen(kw_only=True)
class DataSettings:
    """Where prompts come from, and how a row becomes one."""

    path: tuple[str, ...] = setting(())
    """Prompts to train on: jsonl, csv or parquet files, or one name of the datasets library."""
    split: str = setting("train", nonempty("give the name of a split"))
    """The split to train on, where path is the name of a data set."""
    eval_path: tuple[str, ...] = setting(())
    """Held-out prompts, never trained on; none: no evaluation."""
    rows: str | None = setting(None)
    """In place of path, rows of your own: module:function, which returns or yields dicts."""
    eval_rows: str | None = setting(None)
    """In place of eval_path: module:function, which returns or yields dicts."""
    eval_split: str = setting("test", nonempty("give the name of a split"))
    """The split to evaluate on, where eval_path is the name of a data set."""
    prompt: str = setting("prompt", nonempty("give a field of the rows, or a template with {field} in it"))
    """The field that holds the prompt, or a template like "Question: {question}\\nAnswer:"; \\n is a new line."""
    chat: bool = setting(False)
    """Put the prompt, a text or a list of messages, through the tokenizer's chat template."""
    chat_template: str | None = setting(None)
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
    tools: str | None = setting(None)
    """A JSON file with a list of schemas of tools, which the chat template shows."""
    row_tools: str | None = setting(None)
    """The field with schemas of a row's own tools, a list or JSON text of one; rows without any have those of tools."""
    ground_truth: str = setting("answer")
    """The field that holds what a reward compares with; empty: there is none."""
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
    sampler: str | None = setting(None)
    """An order of your own: module:function of the prompt set, the epoch's number and a key, for indices of prompts."""

    @property
    def seen(self) -> dict[str, str]:
        """The fields with images and with videos, by the settings that name them."""
        fields = {"data.images": self.images, "data.videos": self.videos}
        return {name: field for name, field in fields.items() if field is not None}


@attrs.frozen(kw_only=True)
class LossSettings:
    """The policy loss, and any of its keywords."""

    name: str = named("ppo_clip", POLICY_LOSSES, "a policy loss")
    """Its name, or module:function for your own."""
    keywords: Table = given()


@attrs.frozen(kw_only=True)
class ActorSettings:
    """How the policy is updated."""

    loss: LossSettings = setting(LossSettings)
    """The policy loss."""
    entropy_coef: float = setting(0.0)
    """The factor of the entropy bonus."""
    kl_coef: float = setting(0.0, at_least(0))
    """The factor of a KL term in the loss; 0: none, and no reference model for it."""
    kl_kind: KlKind = setting("k3")
    """The estimator of that KL term: k2 and those with + have its own gradient, k3 that of KL(reference || policy)."""
    positive_nll_coef: float = setting(0.0, at_least(0))
    """The factor of the mean of -log-prob over the tokens of responses with a positive outcome, VAPO's."""
    weight_mode: WeightMode = setting("token-mean")
    """How per-token losses are weighted into one."""
    horizon: int | None = setting(None, at_least(1))
    """The constant length that seq-mean-token-sum-norm divides by."""
    epochs: int = setting(1, at_least(1))
    """Passes over the batch in a step."""
    mini_batch_size: int | None = setting(None, at_least(1))
    """Sequences per optimizer update; it must divide rollout.batch_size; None: all of them."""
    micro_batch_size: int | None = setting(None, at_least(0))
    """Sequences per forward and backward pass; 0 or None: split by token_budget."""
    token_budget: int | None = setting(None, at_least(0))
    """Tokens per forward and backward pass; None: 16384, unless micro_batch_size is given."""
    experts: ExpertSettings = setting(ExpertSettings)
    """How the routers of a mixture of experts are trained."""
    optimizer: OptimizerSettings = setting(OptimizerSettings)
    """The optimizer and its learning rate."""


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
    """How many of the last checkpoints stay on disk."""


@attrs.frozen(kw_only=True)
class DigestSettings:
    """Which steps' digests are written, for fppo replay to compare with."""

    every: Literal["auto"] | int = setting("auto", lambda x: None if x == "auto" else at_least(0)(x))
    """Steps between digests; 0: of steps with a checkpoint only, which always have one; auto: about 1 % of the time."""


def _loggers(names: tuple[str, ...]) -> str | None:
    unknown = next((name for name in names if ":" not in name and name not in LOGGERS), None)
    return None if unknown is None else f"no logger {unknown!r}; {did_you_mean(unknown, LOGGERS)} and module:function"


@attrs.frozen(kw_only=True)
class LogSettings:
    """Where numbers and samples go."""

    loggers: tuple[str, ...] = setting((), _loggers)
    """Where metrics go beside the console and metrics.jsonl: tensorboard, wandb, or module:function for your own."""
    samples_per_step: int = setting(4, at_least(0))
    """Responses per step that are written to samples.jsonl."""
    profile_steps: tuple[int, ...] = setting((), lambda x: None if all(step > 0 for step in x) else "count from 1")
    """Steps whose traces, by torch's profiler, are written to the directory profiles."""
    project: str = setting("fppo", nonempty("give the name of a W&B project"))
    """The project that a run belongs to in W&B."""
    entity: str | None = setting(None)
    """The user or team that it belongs to in W&B; None: your default one."""
    group: str | None = setting(None)
    """The group that it belongs to in W&B."""


@attrs.frozen(kw_only=True)
class TrainSettings:
    """Everything that a run of `fppo train` depends on."""

    output_dir: str = setting("runs/fppo", nonempty("give a directory for what the run writes"))
    """The directory for everything that the run writes."""
    seed: int = setting(0, at_least(0), at_most(2**64 - 1))
    """What every random draw of the run follows from."""
    steps: int = setting(100, at_least(1))
    """Steps of the run: each samples one batch and updates on it."""
    module_dirs: tuple[str, ...] = setting(())
    """Where modules of module:function are sought too; none: beside the settings file, and the working directory."""
    resume: str = setting("auto", nonempty("give auto, never, must, or a checkpoint"))
    """auto: from the last checkpoint if there is one; must: or fail; never: start anew; or a checkpoint's directory."""
    device: str = setting("auto", nonempty("give auto, cpu or cuda"))
    """Where tensors live: auto (a GPU if there is one), cpu, cuda or cuda:N."""
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
