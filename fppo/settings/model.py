"""The settings of which models a run has, and how they run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import attrs
import tyro

from fppo.fields import Table, above, at_least, at_most, none_or, nonempty, place, setting

Offload = Literal["none", "moments", "all", "optimizer_step"]


def params_on_host(offload: str) -> bool:
    """Whether a role with this `offload` keeps its parameters, too, in the host's memory between uses."""
    return offload in ("all", "optimizer_step")


@attrs.frozen(kw_only=True)
class LoraSettings:
    """Low-rank adapters, which are trained in place of the weights; policy, critic and reference share one base."""

    rank: int = setting(0, at_least(0))
    """The rank of the policy's adapter; 0: train all weights."""
    alpha: float = setting(16.0, above(0))
    """What an adapter's product is multiplied by, before scaling divides it."""
    scaling: Literal["standard", "rslora"] = setting("standard")
    """What divides alpha: the rank (standard), or its square root (rslora)."""
    targets: tuple[str, ...] = setting(("all-linear",), nonempty("give names of weights, or all-linear"))
    """The weights that have adapters: all-linear, ends of names, as q_proj, or patterns of whole names."""
    exclude: tuple[str, ...] = setting(())
    """Weights of the targets that have no adapters: ends of names, as down_proj, or patterns of whole names."""
    path: str | None = setting(None, place)
    """A directory with PEFT's files, whose adapter the policy starts from, with its rank, scale and targets."""
    reference: Literal["start", "base"] = setting("start")
    """What the policy is compared with, if it starts from path: the policy as it starts, or its base."""
    send: Literal["merged", "alone"] = setting("merged")
    """How the policy's adapter goes to vLLM: in merged weights, or alone, beside a base that is sent once."""
    base: Literal["float", "int8", "nf4"] = setting("float")
    """How the frozen base keeps the weights of its linear layers: as they are, or quantised by bitsandbytes."""
    critic_rank: int | None = setting(None, at_least(0))
    """The rank of the critic's adapter, else as the policy's; None: rank; 0: train all of the critic's weights."""
    critic_path: str | None = setting(None, place)
    """A directory with PEFT's files, whose adapter the critic starts from, with its rank, scale and targets."""

    @property
    def used(self) -> bool:
        """Whether the policy is trained by an adapter."""
        return self.rank > 0 or self.path is not None

    @property
    def of_critic(self) -> bool:
        """Whether a critic that is a model is trained by one."""
        return self.used and self.critic_rank != 0

    @property
    def reference_is_base(self) -> bool:
        """Whether the reference of an adapted policy without one of its own is the base, as a fresh adapter is too."""
        return self.path is None or self.reference == "base"


def _modules(names: tuple[str, ...]) -> str | None:
    right = all(re.fullmatch(r"\w+(\.\w+)*", name) for name in names)
    return None if right else "must be names of modules, as my_package.models"


def is_adapter(path: str) -> bool:
    """Whether a directory holds an adapter, by PEFT's file, and no whole model."""
    return Path(path, "adapter_config.json").is_file()


def is_endpoint(path: str) -> bool:
    """Whether the place of a teacher is an address."""
    return path.startswith(("http://", "https://"))


def whole_teachers(section: ModelSettings) -> dict[str, str]:
    """The directories of teachers by name that are whole models, without adapters and addresses."""
    named = ((name, x) for name, x in section.teachers.items() if isinstance(x, str))
    return {name: x for name, x in named if not is_adapter(x) and not is_endpoint(x)}


def named_paths(table: Mapping[str, object]) -> str | None:
    """The problem of a table that does not have a directory by each name; None without one."""
    right = all(name and isinstance(x, str) and x for name, x in table.items())
    return None if right else "must be directories by name, as {maths = 'runs/maths/model'}"


@attrs.frozen(kw_only=True)
class ModelSettings:
    """Which models, and how they run."""

    path: str = setting("", nonempty("give the name or directory of a Hugging Face model"), place)
    """The policy to train: the name or directory of a Hugging Face model, a GGUF file, or smol (SmolLM2-135M)."""
    critic_path: str | None = setting(None, place)
    """Where the critic's weights come from; None: the policy's own weights with a new value head."""
    ref_path: str | None = setting(None, place)
    """The reference that KL terms hold the policy to; None: the policy as it was at the start."""
    teacher_path: str | None = setting(None, place)
    """The teacher that algorithm.advantage = "distill" holds the policy to, of the same tokenizer, of any size."""
    teacher_decay: float | None = setting(None, at_least(0), at_most(1))
    """In place of teacher_path: the policy, averaged; the part that a step keeps. 0: as it is, 1: as at the start."""
    teachers: Table = setting(dict)
    """In place of teacher_path several by name: models, adapters on path's weights, or http://HOST/v1#MODEL of vLLM."""
    teacher_by: str | None = setting(None, none_or(nonempty("give a field of the rows, or module:function")))
    """Which of them a row has: a field with its name, source, or module:function of the row; None: all, by weights."""
    teacher_weights: Table = setting(dict)
    """Where each row has all of them, the weight of each by name, 1 in all; none: equal ones."""
    tokenizer: str | None = setting(None, place)
    """Where the tokenizer is; None: in path."""
    config: Table = setting(dict)
    """What differs from the config.json of these models, as {max_position_embeddings = 8192}."""
    lora: LoraSettings = setting(LoraSettings)
    """Low-rank adapters in place of trained weights."""
    ref_dtype: Literal["float32", "bfloat16"] = setting("float32")
    """The dtype the reference is kept in; bfloat16 halves its memory, and it then runs in that too."""
    teacher_dtype: Literal["float32", "bfloat16"] = setting("float32")
    """The dtype the teacher is kept in; bfloat16 halves its memory, and it then runs in that too."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto")
    """The dtype of all passes, auto: bfloat16 on GPUs; float16 scales the loss. Master weights are always float32."""
    forward_token_budget: int | None = setting(None, at_least(1))
    """Tokens per pass without a gradient (old log-probs, reference, teacher, values, rewards); None: as the actor's."""
    checkpoint_layers: Literal["selective"] | bool = setting(False)
    """Recompute each layer in the backward pass: less memory, more time; selective: all of it but its attention."""
    mlp_slice_tokens: int | None = setting(None, at_least(1))
    """Tokens that an MLP computes at a time, and again in the backward pass: less memory in long rows; None: all."""
    compile_layers: bool = setting(False)
    """Run layers as programs of torch.compile (not in engines), made when first needed, in seconds to minutes."""
    graphs: Literal["auto"] | bool = setting("auto")
    """Run passes of few tokens by one launch each, as CUDA graphs; auto: on a GPU, where memory is not kept short."""
    freeze_vision: bool = setting(False)
    """Leave the vision tower and projector of a model that takes images as they are, in actor and critic."""
    trust_remote_code: bool = setting(False)
    """Let a model directory run its own Python code."""
    import_: Annotated[tuple[str, ...], tyro.conf.arg(name="import")] = setting((), _modules, name="import")
    """Modules imported in every process before it builds a model, as those that register classes with AutoConfig."""
    offload: Offload = setting("none")
    """In the host's memory between uses (GPUs): moments; parameters, too; or both, and the optimizer works there."""
    moments_directory: str | None = setting(None, place)
    """A directory on a disk for files with what offload keeps of optimizers, also the critic's; None: in memory."""
    ref_offload: bool | None = setting(None)
    """Keep the reference in the host's memory between uses (GPUs); None: where offload keeps the policy there."""
    teacher_offload: bool | None = setting(None)
    """Keep the teacher in the host's memory between uses (GPUs); None: where offload keeps the policy there."""
    offload_activations: bool = setting(False)
    """Keep what is saved for the backward pass in the host's memory until then (GPUs)."""
    remove_padding: bool = setting(True)
    """Run on packed sequences instead of padded rows."""
    share_prompts: Literal["auto"] | bool = setting("auto")
    """Compute what rows begin with alike, as a prompt, once per pass; auto: where it saves a tenth of the tokens."""
    cpp: Literal["auto"] | bool = setting("auto")
    """On a CPU, have kernels in C++ for what says auto, compiled once; auto: if built in, or where the run is long."""
    attention: str = setting("auto", nonempty("give the name of an attention kernel, as sdpa, or auto"))
    """The kernel for packed attention: auto, sdpa, eager, cpp, flash, varlen, flex, fixed; or module:function."""
    decode_attention: str = setting("auto", nonempty("give the name of a kernel for attention in decoding, or auto"))
    """The embedded engine's kernel for attention: auto, sdpa, eager, cpp (CPUs), fixed (GPUs); or module:function."""
    log_probs: str = setting("auto", nonempty("give the name of a log-prob kernel, as chunked, or auto"))
    """The kernel for log-probs: auto, chunked, cpp, reference, compiled, liger, triton, fixed; or module:function."""
    linear: str = setting("auto", nonempty("give the name of a kernel for linear layers, as torch, or auto"))
    """Linear layers: auto, torch; onednn, cpp, bfloat16 (on CPUs); float8, fixed (on GPUs); or module:function."""
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

    @property
    def shares_base(self) -> bool:
        """Whether the critic's adapter stands on the policy's own base."""
        return self.lora.of_critic and self.critic_path in (None, self.path)
