"""The case to plan: a model on a mesh, with the sizes of a step; presets of models and accelerators."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import attrs
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from fppo._errors import did_you_mean
from fppo.models.adapted import Lora
from fppo.models.bases import check_cuts
from fppo.models.experts import expert_count
from fppo.models.flops import PEAKS
from fppo.models.load import find_directory, read_config
from fppo.models.model import build
from fppo.models.narrow import narrow
from fppo.models.quantised import Kind
from fppo.models.recompute import Recompute
from fppo.models.states import check_rows_whole
from fppo.models.vision import takes_images
from fppo.runtime.gguf_files import gguf_of
from fppo.runtime.mesh import DATA_AXES, SHARD_AXES, Mesh, Sharding
from fppo.settings.learning import OptimizerSettings
from fppo_kernels.collectives import Axis

GIB = 1024**3
NUMBERS = ("memory", "flops", "bandwidth", "node_bandwidth", "network_bandwidth", "per_node")  # that settings may give


@attrs.frozen
class Hardware:
    """One accelerator and its links; rates are peaks, in one direction."""

    name: str
    memory: float  # bytes that torch sees
    flops: float  # dense bfloat16 FLOP per second
    flops_float32: float
    bandwidth: float  # of device memory, bytes per second
    node_bandwidth: float  # bytes per second to the other GPUs of its node
    network_bandwidth: float  # bytes per second to other nodes
    host_bandwidth: float = 5.0e10  # bytes per second to or from host memory: PCIe 5 x16
    per_node: int = 8
    on_gpu: bool = True


KNOWN: Mapping[str, Hardware] = MappingProxyType(
    {
        # NVIDIA A100 80GB SXM data sheet; NVLink 3: 600 GB/s both ways; DGX A100: 8 x 200 Gb/s
        "a100-80": Hardware("a100-80", 79.2 * GIB, PEAKS["A100"], 1.95e13, 2.039e12, 3.0e11, 2.5e10, 2.5e10),
        # NVIDIA H100 SXM data sheet; NVLink 4: 900 GB/s both ways; DGX H100: 8 x 400 Gb/s
        "h100": Hardware("h100", 79.1 * GIB, PEAKS["H100"], 6.7e13, 3.35e12, 4.5e11, 5.0e10),
        # NVIDIA H200 SXM data sheet; links as in H100
        "h200": Hardware("h200", 139.8 * GIB, PEAKS["H200"], 6.7e13, 4.8e12, 4.5e11, 5.0e10),
        # NVIDIA DGX B200 data sheet, an eighth of it; NVLink 5: 1.8 TB/s both ways; 8 x 400 Gb/s
        "b200": Hardware("b200", 178.3 * GIB, PEAKS["B200"], 7.5e13, 7.7e12, 9.0e11, 5.0e10),
    }
)

# a few cores of a server, as measured for this project: an order of magnitude only
_CPU = Hardware("cpu", 0.0, 1.0e11, 1.0e11, 1.5e10, 1.0e9, 1.2e8, per_node=1 << 20, on_gpu=False)

# Memory of a GPU process besides tensors. The first three are usual sizes, not guarantees; the driver decides.
CONTEXT = int(0.6 * GIB)  # the CUDA context with torch's kernels
WORKSPACE = 96 << 20  # cuBLAS's workspace, one per stream: 32 MiB on Hopper and later
COMMUNICATOR = 256 << 20  # NCCL's buffers of one axis: 4 MiB for each of 16 to 32 channels, and its protocols
FRAGMENTS = 0.03  # fraction of temporary bytes that torch's allocator holds and cannot use
# Host memory of a process besides tensors. The first was measured (docs/results/measurements.md), the second is usual.
PROCESS = 450 << 20  # Python with torch (a build for CPUs), transformers and fppo
BUILT_FOR_GPUS = 295 << 20  # the additional memory of a build of torch for GPUs in a process without one
CUDA_PROCESS = int(2.5 * GIB)  # a process with CUDA's libraries loaded


def hardware_of(name: str, numbers: Mapping[str, float | None] = MappingProxyType({})) -> Hardware:
    """Look up an accelerator, with its numbers replaced by those given (`NUMBERS`); "custom" needs all of them.

    "cpu" has this machine's memory. Raises ValueError for an unknown name, and for a custom one that lacks numbers.
    """
    changes = {key: value for key, value in numbers.items() if value is not None}
    if name == "custom":
        missing = [f"--{key.replace('_', '-')}" for key in NUMBERS if key not in changes and key != "per_node"]
        if missing:
            raise ValueError(f"--gpu custom needs all of its numbers; missing: {', '.join(missing)}")
        return attrs.evolve(KNOWN["h100"], name=name, flops_float32=changes["flops"] / 15, **changes)
    if name == "cpu":
        memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        return attrs.evolve(_CPU, **{"memory": memory, **changes})
    if name not in KNOWN:
        raise ValueError(f"--gpu {name!r} is not known; {did_you_mean(name, [*KNOWN, 'cpu', 'custom'], cutoff=0.5)}")
    return attrs.evolve(KNOWN[name], **changes)


def overhead(hardware: Hardware, axes: int, transient: float) -> float:
    """Bytes of a process besides its tensors, with `axes` axes of several ranks and `transient` temporary bytes."""
    if not hardware.on_gpu:
        return 0.0
    return CONTEXT + WORKSPACE + COMMUNICATOR * axes + FRAGMENTS * transient


def pinned(size: int) -> int:
    """Bytes of pinned host memory that torch allocates for `size` bytes: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def _config(
    kind: Callable[..., PreTrainedConfig], sizes: tuple[int, ...], positions: int, theta: float, **more: Any
) -> PreTrainedConfig:
    """A config with widths, layers, heads and vocabulary from `sizes`; `more` are further fields of its kind."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    rotary = {"rope_type": "default", "rope_theta": theta}
    named = dict(zip((*names, "vocab_size"), sizes, strict=True))
    return kind(**named, max_position_embeddings=positions, rope_parameters=rotary, **more)


def _qwen(*sizes: int, tied: bool = False) -> PreTrainedConfig:
    return _config(Qwen2Config, sizes, 32_768, 1e6, rms_norm_eps=1e-6, tie_word_embeddings=tied)


def _qwen3(*sizes: int, tied: bool = False) -> PreTrainedConfig:
    more = {"head_dim": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied}
    return _config(Qwen3Config, (*sizes, 8, 151_936), 40_960, 1e6, **more)


def _llama(*sizes: int) -> PreTrainedConfig:
    return _config(LlamaConfig, (*sizes, 8, 128_256), 131_072, 5e5, tie_word_embeddings=False)


def _qwen_of_experts(hidden: int, inner: int, layers: int, heads: int) -> PreTrainedConfig:
    of_experts = {"moe_intermediate_size": inner, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
    sizes = (hidden, 3 * hidden, layers, heads, 4, 151_936)
    more = {"head_dim": 128, "tie_word_embeddings": False}
    return _config(Qwen3MoeConfig, sizes, 40_960, 1e6, **of_experts, **more)


def _quickstart() -> PreTrainedConfig:
    from fppo import quickstart

    return quickstart.small_model(len(quickstart.character_tokenizer())).config


PRESETS: Mapping[str, Callable[[], PreTrainedConfig]] = MappingProxyType(
    {
        "qwen2.5-0.5b": lambda: _qwen(896, 4864, 24, 14, 2, 151_936, tied=True),
        "qwen2.5-1.5b": lambda: _qwen(1536, 8960, 28, 12, 2, 151_936, tied=True),
        "qwen2.5-7b": lambda: _qwen(3584, 18_944, 28, 28, 4, 152_064),
        "qwen2.5-32b": lambda: _qwen(5120, 27_648, 64, 40, 8, 152_064),
        "qwen2.5-72b": lambda: _qwen(8192, 29_568, 80, 64, 8, 152_064),
        "llama-3.1-8b": lambda: _llama(4096, 14_336, 32, 32),
        "llama-3.1-70b": lambda: _llama(8192, 28_672, 80, 64),
        "llama-3.1-405b": lambda: _llama(16_384, 53_248, 126, 128),
        "qwen3-0.6b": lambda: _qwen3(1024, 3072, 28, 16, tied=True),
        "qwen3-1.7b": lambda: _qwen3(2048, 6144, 28, 16, tied=True),
        "qwen3-4b": lambda: _qwen3(2560, 9728, 36, 32, tied=True),
        "qwen3-8b": lambda: _qwen3(4096, 12_288, 36, 32),
        "qwen3-14b": lambda: _qwen3(5120, 17_408, 40, 40),
        "qwen3-32b": lambda: _qwen3(5120, 25_600, 64, 64),
        "qwen3-30b-a3b": lambda: _qwen_of_experts(2048, 768, 48, 32),
        "qwen3-235b-a22b": lambda: _qwen_of_experts(4096, 1536, 94, 64),
        "quickstart": _quickstart,
    }
)


def config_of(
    model: str, setting: str = "model.path", changes: Mapping[str, Any] = MappingProxyType({})
) -> tuple[str, PreTrainedConfig]:
    """The name and config of a directory with a config.json, of a GGUF file, or of a name in PRESETS, with `changes`.
    Nothing is downloaded.

    An owner before the name and "-instruct" after it are ignored. Raises ValueError for an unknown name; the error
    calls it by its `setting`.
    """
    try:
        packed = gguf_of(model)
        directory = Path(model) if packed is None else find_directory(model, weights=False)
    except ValueError as error:
        raise ValueError(f"--{setting}: {error}") from error
    if directory.is_dir():
        if not (directory / "config.json").exists():
            raise ValueError(f"--{setting}: {directory} has no config.json; give the directory of a Hugging Face model")
        config = read_config(directory, changes=changes)
        if takes_images(config):
            raise ValueError(
                f"--{setting}: fppo plan does not count vision towers yet; {directory} ({config.model_type}) has one"
            )
        return directory.name if packed is None else packed.stem, config
    name = model.rpartition("/")[2].lower().removesuffix("-instruct").removeprefix("meta-")
    if name not in PRESETS:
        raise ValueError(
            f"--{setting} {model!r}: there is no such directory, and no model of that name is known here; "
            f"{did_you_mean(name, PRESETS, cutoff=0.5)}; or give the directory of a model"
        )
    config = PRESETS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    return name, config


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """The config of a model with only its first `layers` layers."""
    config = copy.deepcopy(config)
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    if vars(config).get("layer_types"):  # Mamba's layers follow from their number
        changes["layer_types"] = list(config.layer_types)[:layers]  # type: ignore[attr-defined]
    for key, value in changes.items():
        setattr(config, key, value)
    return config


# the model that each stage runs, in the order of a step
ROLES: Mapping[str, str] = MappingProxyType(
    {
        "reward model": "reward model",
        "teacher": "teacher",
        "log-probs": "actor",
        "reference": "reference",
        "values": "critic",
        "update critic": "critic",
        "update actor": "actor",
    }
)
TRAINED = ("actor", "critic")


@attrs.frozen(kw_only=True)
class Role:
    """Overrides for one model of a case; None keeps the case's value."""

    tokens: int | None = None  # tokens of a pass: for the critic, of its update; for the reward model, of its only pass
    compute_dtype: str | None = None
    checkpoint_layers: Recompute | None = None
    offload: str | None = None
    optimizer: OptimizerSettings | None = None
    dtype: torch.dtype = torch.float32  # the dtype of its parameters


@attrs.frozen
class Pace:
    """Times of a step's parts relative to the formulas' times, as measured on a CPU (`plan.pace`)."""

    forward: float = 1.0  # passes without gradients
    update: float = 1.0  # passes with gradients
    optimizer: float = 1.0  # and what else an update does between its passes
    decode: float = 1.0  # steps of the embedded engine


@attrs.frozen(kw_only=True)
class PlannedSampling:
    """How the responses of a case are sampled: by which engine, with how many rows and bytes, and on which GPUs."""

    engine: Literal["embedded", "vllm"] = "embedded"
    sequences: int | None = None  # rows of a rollout, over all engines; None: those of an update
    n: int = 1  # responses to each prompt
    max_rows: int = 1024  # rows that decode together
    cache: float | None = None  # bytes of keys and values that an engine may hold
    share: float | None = None  # fraction of a GPU's memory that vLLM may take in all
    dtype: torch.dtype | None = None  # the dtype of vLLM's weights and computation; None: that of passes
    tensor: int = 1  # GPUs over which vLLM cuts the model
    apart: bool = False  # whether these GPUs are not the rank's own
    sleeps: bool = False  # whether the engine releases its memory between rollouts
    bucket: int = 256 << 20  # bytes of parameters that are sent to the engine at once
    shared: bool = False  # whether they are sent through memory shared by two processes
    pool: int | None = None  # the number of engines in a pool of their own


@attrs.frozen(kw_only=True)
class Case:
    """A step to plan. Every data rank runs `micro_batches` passes of `tokens` tokens, in sequences of `length`. A stage
    may have passes of another size (`at`), over the same sequences."""

    name: str
    config: PreTrainedConfig
    hardware: Hardware
    mesh: Mapping[str, int] = attrs.field(factory=dict)  # ranks by axis, from `runtime.mesh.AXES`
    virtual_stages: int = 1  # stages on each rank of the pipeline
    pipeline_rank: int = 0  # the pipeline rank that is planned
    in_turn: bool = False  # whether each backward pass runs right after its forward pass
    ring: bool = False  # whether keys and values travel around the context axis
    load: float = 1.0  # tokens of the planned rank's experts, relative to the mean over the expert axis
    sharding: Sharding = attrs.field(factory=Sharding)
    tokens: int = 16384
    length: int = 4096
    response: float = 0.5  # the fraction of a sequence that is response
    micro_batches: int = 4
    budget: int | None = None  # the most distinct tokens of a pass, if `tokens` is that of equal passes
    together: float = 1.0  # rows that share a prompt in an update, whose passes compute it once
    forward_together: float = 1.0  # the same in passes without gradients
    critic: bool = False
    reference: bool = False
    reward_model: PreTrainedConfig | None = None  # its config; it reads the policy's tokens
    teacher: PreTrainedConfig | None = None
    lora: Lora | None = None  # the actor's adapter, on a frozen base
    critic_lora: Lora | None = None  # the critic's adapter, on the same base
    lora_base: Kind | None = None  # the code of the base's linear layers, if quantised
    compute_dtype: torch.dtype | None = torch.bfloat16
    checkpoint_layers: Recompute = False
    mlp_slice_tokens: int | None = None  # tokens that an MLP computes at a time, and again in the backward pass
    log_probs: str = "chunked"
    packs: bool = False  # whether the embedded engine packs small weights, for oneDNN's products on a CPU
    graphs: bool = False  # whether passes of few tokens are recorded as CUDA graphs, where possible
    optimizer: OptimizerSettings = attrs.field(factory=OptimizerSettings)
    offload: str = "none"  # the state on the host, as model.offload has it
    offload_activations: bool = False  # whether activations wait on the host for the backward pass
    moments_in_files: bool = False  # whether what the host keeps of optimizers is in files
    dtype: torch.dtype = torch.float32  # the dtype of parameters
    forward_tokens: int | None = None  # tokens of a pass without gradients, if not `tokens`
    roles: Mapping[str, Role] = attrs.field(factory=dict)  # overrides for the critic, the reference, ...
    only: tuple[str, ...] | None = None  # for a pool: the roles in it; stages and state of others are not planned
    sampling: PlannedSampling | None = None  # None: the rollout is not planned
    pace: Pace = Pace()  # of the machine at hand, if it was measured
    columns: float = 0.0  # bytes of a batch in host memory, which the controller holds too
    full: bool = False  # run every layer instead of extrapolating from a few

    def size(self, axis: str) -> int:
        """The number of ranks on an axis."""
        return self.mesh.get(axis, 1)

    @property
    def models(self) -> dict[str, PreTrainedConfig]:
        """Configs of the case's models that may differ in shape, by the models' names in messages."""
        own = {self.name: self.config, "the reward model": self.reward_model, "the teacher": self.teacher}
        return {name: config for name, config in own.items() if config is not None}

    @property
    def shards(self) -> int:
        """The number of ranks over which dense parameters are sharded."""
        return math.prod(map(self.size, SHARD_AXES))

    @property
    def cuts(self) -> bool:
        """Whether any rank lacks parts of dense parameters."""
        return self.shards * self.size("tensor") * self.size("pipeline") > 1

    @property
    def groups(self) -> int:
        """The number of a rank's process groups: one for each axis of several ranks, and one for shard and expert
        together."""
        return sum(size > 1 for size in self.mesh.values()) + (self.size("expert") > 1)

    def has(self, role: str) -> bool:
        """Whether a role ("actor", "critic", "reference", "reward model", "teacher") is planned."""
        return self.only is None or role in self.only

    def at(self, stage: str) -> Case:
        """The case with the overrides of a stage (`ROLES`): passes, dtypes, recomputation and placement of its
        model."""
        role = self.roles.get(ROLES[stage], Role())
        updates = stage.startswith("update")
        together, budget = (self.together, None) if updates else (self.forward_together, self.forward_tokens)
        if stage in ("update critic", "reward model"):
            budget = role.tokens or budget
        most = attrs.evolve(self, together=together).most_rows(budget)
        rows, passes = balanced(self.rows * self.micro_batches, most)
        named = role.compute_dtype
        compute = self.compute_dtype if named is None else None if named == "float32" else getattr(torch, named)
        again = self.checkpoint_layers if role.checkpoint_layers is None else role.checkpoint_layers
        return attrs.evolve(
            self,
            tokens=rows * self.length if rows != self.rows else self.tokens,
            micro_batches=passes,
            together=together,
            compute_dtype=compute,
            checkpoint_layers=again,
            offload=role.offload or self.offload,
            optimizer=role.optimizer or self.optimizer,
            dtype=role.dtype,
            forward_tokens=None,
            roles={},
        )

    def at_rest(self, role: str) -> Case:
        """The case with the overrides of a role's parameters between stages."""
        return self.at(f"update {role}" if role in TRAINED else role)

    @property
    def bubble(self) -> float:
        """Time in which pipeline ranks wait for each other, relative to the time in which they work: (p - 1) / (v
        m)."""
        return (self.size("pipeline") - 1) / (self.virtual_stages * max(1, self.micro_batches))

    @property
    def in_flight(self) -> int:
        """The most micro-batches of one stage whose activations the planned pipeline rank holds at once: those before
        its first backward pass, and that one (1F1B and interleaved, arXiv:2104.04473)."""
        if self.in_turn:
            return 1
        ranks, virtual = self.size("pipeline"), self.virtual_stages
        after = ranks - self.pipeline_rank - 1
        return 1 + min(after if virtual == 1 else 2 * after + (virtual - 1) * ranks, virtual * self.micro_batches - 1)

    @property
    def world(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def data_ranks(self) -> int:
        return math.prod(map(self.size, DATA_AXES))

    @property
    def rows(self) -> int:
        """The number of sequences in a pass."""
        return max(1, self.tokens // self.length)

    def distinct(self, rows: int) -> int:
        """The number of distinct tokens in `rows` rows, if each `self.together` rows share a prompt."""
        prompts = math.ceil(rows / self.together)
        return prompts * (self.length - self.response_tokens) + rows * self.response_tokens

    def most_rows(self, budget: int | None = None) -> int:
        """The most rows of a pass with at most `budget` distinct tokens (None: as many tokens as the case's own passes
        may have). 0 if a single row has more."""
        if self.together == 1:
            return (budget or self.tokens) // self.length
        budget = budget or self.budget or self.tokens
        rows = budget // self.length
        while rows and self.distinct(rows + 1) <= budget:
            rows += 1
        return rows

    @property
    def shared(self) -> list[int]:
        """Lengths of the prompts in a pass that are not computed, since another row of the pass shares them."""
        return [self.length - self.response_tokens] * (self.rows - math.ceil(self.rows / self.together))

    @property
    def computed(self) -> float:
        """The fraction of a pass's tokens that is computed; below 1 if rows share prompts."""
        return 1 - sum(self.shared) / (self.rows * self.length)

    @property
    def response_tokens(self) -> int:
        """The number of response tokens in a sequence."""
        return min(self.length - 1, max(1, round(self.length * self.response)))

    @property
    def mini_batch(self) -> int:
        """The number of sequences in an optimizer update, over all data ranks."""
        return self.rows * self.micro_batches * self.data_ranks


def with_sequences(case: Case, sequences: int) -> Case:
    """Change the number of sequences in an update, over all ranks, with as few passes of equal size as its tokens
    allow."""
    rows, passes = balanced(-(-sequences // case.data_ranks), case.most_rows())
    return attrs.evolve(case, tokens=max(2, rows * case.length), micro_batches=passes)


def balanced(sequences: int, most: int) -> tuple[int, int]:
    """Divide `sequences` into as few passes of equal size as possible, each of at most `most` sequences (at least 1).
    Returns the sequences of a pass and the number of passes."""
    passes = -(-sequences // min(max(1, most), sequences))
    return -(-sequences // passes), passes


def divisors(number: int) -> list[int]:
    """All divisors of a number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def problems(case: Case) -> list[str]:
    """List the problems of a case, one line each."""
    wrong, sequence, tensor = [], case.size("sequence"), case.size("tensor")
    for name, config in case.models.items():
        try:
            check_rows_whole(config, case.mesh)
        except ValueError as error:
            wrong.append(f"--mesh: {name}: {error}")
            continue
        if sequence == tensor == 1:
            continue
        try:
            heads = (config if tensor == 1 else narrow(config, tensor)).num_attention_heads
        except ValueError as error:
            wrong.append(f"--mesh.tensor {tensor}: {name}: {error}")
            continue
        if heads % sequence:
            works = ", ".join(map(str, divisors(heads)))
            left = f" on each rank of --mesh.tensor {tensor}" if tensor > 1 else ""
            wrong.append(
                f"--mesh.sequence {sequence}: {name} has {heads} attention heads{left}, which it does not divide; "
                f"these sizes do: {works}"
            )
    stages, layers = case.size("pipeline") * case.virtual_stages, case.config.num_hidden_layers
    if stages > layers:
        words = f"--mesh.pipeline {case.size('pipeline')}"
        words += f" --mesh.virtual-stages {case.virtual_stages}" if case.virtual_stages > 1 else ""
        wrong.append(f"{words}: {case.name} has {layers} layers, fewer than the {stages} stages")
    if case.virtual_stages > 1 and case.size("pipeline") == 1:
        wrong.append(f"--mesh.virtual-stages {case.virtual_stages}: they are stages of the ranks of a --mesh.pipeline")
    if sequence > 1 and case.size("context") > 1:
        wrong.append(
            f"--mesh.context {case.size('context')}: --mesh.sequence {sequence} cuts the same rows; give one of them"
        )
    wrong += _expert_problems(case)
    if case.lora_base is not None and tensor > 1 and not wrong:
        try:
            check_cuts(build(case.config), case.lora_base, Mesh({name: Axis(size) for name, size in case.mesh.items()}))
        except ValueError as error:
            wrong.append(f"--model.lora.base {case.lora_base}: {error}")
    if case.length > case.tokens:
        wrong.append(f"length {case.length}: a pass of {case.tokens} tokens holds no such sequence")
    if case.length < 2:
        wrong.append(f"length {case.length}: a sequence has a token of prompt and one of response at least")
    return wrong


def _expert_problems(case: Case) -> list[str]:
    """List the problems of the expert axis, one line each."""
    ranks, wrong = case.size("expert"), []
    if ranks == 1:
        return []
    if case.load > ranks:
        wrong.append(
            f"--expert-load {case.load:g}: where one of the {ranks} ranks of --mesh.expert has all tokens, that is "
            f"{ranks} times the mean"
        )
    for name, config in case.models.items():
        count = expert_count(config)
        if not count:
            wrong.append(f"--mesh.expert {ranks}: {name} is {config.model_type!r}, which has no experts to cut")
        elif count % ranks:
            works = ", ".join(map(str, divisors(count)))
            wrong.append(
                f"--mesh.expert {ranks}: {name} has {count} experts, which it does not divide; these sizes do: {works}"
            )
    return wrong
