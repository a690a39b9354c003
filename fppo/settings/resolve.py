"""Resolution of the settings that say "auto" on a machine: one place, and a pure function of the machine.

On a CPU passes are in float32, and vLLM captures no graphs. Kernels are in C++ where they are built in, for a run that
is long enough, or with `model.cpp`, if the model has places for them; else they are `sdpa`, `chunked` and the model's
own layers. Linear layers multiply by oneDNN where that is faster.
On a GPU of CUDA passes are in bfloat16 (parameters and moments stay float32), with `varlen` attention, `triton` for
log-probs and inside the layers, graphs of passes of few tokens, and a vLLM that captures graphs. Kernels that do not
run there give way to those that run everywhere; for attention and log-probs a line says why. On other accelerators
passes are in bfloat16, too, with the kernels that run everywhere. With `rollout.exact` all devices take the kernels of
`fppo_kernels.table.EXACT`. Old log-probs get their source here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from fppo.fields import hinder
from fppo.settings.learning import OldLogProbs
from fppo.settings.model import ModelSettings
from fppo.settings.rollout import VllmSettings
from fppo.settings.train import TrainSettings
from fppo_kernels.table import BUILTIN, DEFAULTS, EXACT, INSIDE

AUTO = "auto"
LAYERS = tuple(op for op in INSIDE if "eager" in BUILTIN[op])  # operations that the model's own code may compute
_PLAIN = {"attention": "sdpa", "decode_attention": "sdpa", "log_probs": "chunked"}  # run everywhere
_FAST = {"attention": "varlen", "decode_attention": "sdpa", "log_probs": "triton"}  # on a GPU
BY_DEVICE = ("varlen", "flash")  # attention that reads the lengths of rows on the device
_BFLOAT16 = (8, 0)  # the compute capability from which on GPUs multiply in bfloat16


@attrs.frozen(kw_only=True)
class Machine:
    """A machine: the kind of its device, a GPU's compute capability, and reasons against kernels, by "op/name".

    `compiles` (for `model.cpp = "auto"`): whether the run is long enough to compile kernels, or they are built in;
    `no_compiler`: why that is impossible; `unfit_build`: why those built in are not used. `onednn` (for `model.linear =
    "auto"`): whether oneDNN multiplies float32 matrices of the policy's width faster than torch.
    """

    device: str = "cpu"
    capability: tuple[int, int] = (0, 0)
    refusals: Mapping[str, str] = attrs.field(factory=dict)
    compiles: bool = False
    no_compiler: str | None = None
    unfit_build: str | None = None
    onednn: bool = False


CPU = Machine()


def compute_dtype(machine: Machine) -> tuple[str, list[str]]:
    """Choose the dtype of forward and backward passes; returns it, and lines on the choice."""
    if machine.device != "cuda" or machine.capability >= _BFLOAT16:
        return "float32" if machine.device == "cpu" else "bfloat16", []
    had = ".".join(map(str, machine.capability))
    said = f"bfloat16 takes compute capability 8.0, and this GPU has {had}; you may give float16"
    return "float32", [f"model.compute_dtype float32: {said}"]


def takes_cpp(model: ModelSettings, machine: Machine, dtypes: set[str]) -> tuple[bool, list[str]]:
    """Whether the run uses kernels in C++ on a CPU, for models that run in these dtypes; and lines on the choice."""
    if model.cpp != AUTO:
        return model.cpp, []
    wanted = machine.device == "cpu" and machine.compiles and "float16" not in dtypes
    lines = [] if machine.unfit_build is None else [f"kernels in C++: {machine.unfit_build}"]
    if not wanted or machine.no_compiler is None:
        return wanted, lines
    return False, [*lines, f"model.cpp false: {machine.no_compiler}; with kernels in C++ this run would be faster"]


def kernel(op: str, machine: Machine, dtypes: set[str], *, cpp: bool = False) -> tuple[str, list[str]]:
    """Choose the kernel for "attention", "decode_attention" or "log_probs" (`op`) of models that run in these dtypes;
    returns its name, and lines on the choice. On a CPU it is in C++ only if `cpp` is True."""
    plain, fast = _PLAIN[op], {"cpu": "cpp", "cuda": _FAST[op]}.get(machine.device)
    if fast is None or (machine.device == "cpu" and not cpp):
        return plain, []
    if machine.device != "cpu" and "float32" in dtypes:  # products are what counts, and the plain one's are exact
        return plain, []
    if (op == "log_probs" or fast == "cpp") and "float16" in dtypes:
        return plain, [f"model.{op} {plain}: {fast} does not compute in float16"]
    reason = machine.refusals.get(f"{op}/{fast}")
    return (fast, []) if reason is None else (plain, [f"model.{op} {plain}: {fast} {reason}"])


def layer_kernel(op: str, machine: Machine, dtypes: set[str], *, compiled: bool, cpp: bool = False) -> str:
    """Choose the kernel for an operation inside the layers, for models that run in these dtypes. `compiled`: the layers
    are compiled whole. On a CPU it is in C++ only if `cpp` is True."""
    on_cpu = machine.device == "cpu"
    fast, unfit = ("cpp", "float16") if on_cpu else ("triton", "float32")
    other = machine.device not in ("cpu", "cuda")
    plain = compiled or other or unfit in dtypes or (on_cpu and not cpp) or fast not in BUILTIN[op]
    return "eager" if plain or f"{op}/{fast}" in machine.refusals else fast


def with_exact(model: ModelSettings, machine: Machine) -> tuple[ModelSettings, list[str]]:
    """Replace "auto", and torch's linear layers, by the exact kernels of the machine's device, where they run. The
    lines say where they do not."""
    chosen, lines = dict[str, str](), list[str]()
    for op, name in EXACT.get(machine.device, {}).items():
        reason = machine.refusals.get(f"{op}/{name}")
        if getattr(model, op) == AUTO or (op == "linear" and model.linear == DEFAULTS[op]):
            chosen[op] = name if reason is None else DEFAULTS[op]
            lines += [f"model.{op} {DEFAULTS[op]}: {name} {reason}"] if reason is not None and op in _PLAIN else []
    return attrs.evolve(model, **chosen), lines


def linear_kernel(settings: TrainSettings, machine: Machine, dtypes: set[str], *, cpp: bool) -> str:
    """Choose the kernel for linear layers: oneDNN's if it is faster, with few rows in C++ if `cpp` is True; else
    torch's.

    Compiled layers keep torch's kernel, since the compiler cannot see into oneDNN's; so do adapters, which add to the
    result in place.
    """
    model = settings.model
    faster = machine.onednn and dtypes == {"float32"} and not model.compile_layers and not model.lora.used
    if not faster:
        return DEFAULTS["linear"]
    return "cpp" if cpp and "linear/cpp" not in machine.refusals else "onednn"


def resolved(settings: TrainSettings, machine: Machine) -> tuple[TrainSettings, list[str]]:
    """Replace every `auto` by its value on the machine; the lines say why a value is not the usual one.

    Settings without `auto` are returned as they are. `digest.every` is left out: it depends on the model.
    """
    model, lines = settings.model, []
    if model.compute_dtype == AUTO:
        name, said = compute_dtype(machine)
        model, lines = attrs.evolve(model, compute_dtype=name), [*lines, *said]
    critic = (settings.critic.compute_dtype or model.compute_dtype) if settings.algorithm.uses_critic else None
    dtypes = {model.compute_dtype, *([critic] if critic else [])}
    cpp, said = takes_cpp(model, machine, dtypes)
    model, lines = attrs.evolve(model, cpp=cpp), [*lines, *said]
    if settings.rollout.exact:
        model, said = with_exact(model, machine)
        lines = [*lines, *said]
    for op in _PLAIN:
        if getattr(model, op) == AUTO:
            read = op != "decode_attention" or settings.decodes
            name, said = kernel(op, machine, dtypes, cpp=cpp and read)
            model, lines = attrs.evolve(model, **{op: name}), [*lines, *said]
    if model.linear == AUTO:
        model = attrs.evolve(model, linear=linear_kernel(settings, machine, dtypes, cpp=cpp))
    inside = {op: layer_kernel(op, machine, dtypes, compiled=model.compile_layers, cpp=cpp) for op in LAYERS}
    model = attrs.evolve(model, **{op: name for op, name in inside.items() if getattr(model, op) == AUTO})
    if model.graphs == AUTO:
        on = machine.device == "cuda" and records(attrs.evolve(settings, model=model))
        model = attrs.evolve(model, graphs=on)
    rollout, judge = settings.rollout, settings.reward.judge
    if rollout.engine == "vllm":
        rollout = attrs.evolve(rollout, vllm=_vllm(rollout.vllm, machine))
    if judge.engine == "vllm":
        judge = attrs.evolve(judge, vllm=_vllm(judge.vllm, machine))
    reward = attrs.evolve(settings.reward, judge=judge)
    return attrs.evolve(settings, model=model, rollout=rollout, reward=reward), lines


def _vllm(section: VllmSettings, machine: Machine) -> VllmSettings:
    return attrs.evolve(section, eager=machine.device != "cuda") if section.eager == AUTO else section


def records(s: TrainSettings) -> bool:
    """Whether `model.graphs = "auto"` records passes on a GPU: if no setting prevents it, and the memory of graphs need
    not be free for others between updates."""
    shared = "vllm" in (s.rollout.engine, s.reward.judge.engine) or s.model.offload != "none"
    return s.model.attention in BY_DEVICE and not shared and not hindrances(s)


def hindrances(s: TrainSettings) -> list[tuple[str, Any, str]]:
    """Settings that prevent the recording of passes as CUDA graphs, as (path, value, reason)."""
    model = s.model
    own = model.attention not in ("auto", *BY_DEVICE) and ":" not in model.attention
    known = (
        ("device", s.device.partition(":")[0] not in (AUTO, "cuda"), "has no graphs"),
        ("rollout.ahead", s.rollout.ahead > 0, "runs other work on the GPU meanwhile"),
        ("model.remove_padding", not model.remove_padding, "runs rows of any width"),
        ("model.share_prompts", model.share_prompts is True, "lets rows share tokens"),
        ("model.checkpoint_layers", bool(model.checkpoint_layers), "computes layers again"),
        ("model.mlp_slice_tokens", model.mlp_slice_tokens is not None, "computes MLPs again"),
        ("model.compile_layers", model.compile_layers, "may compile a layer in any pass"),
        ("model.offload_activations", model.offload_activations, "moves memory in every pass"),
        ("model.attention", own, "plans on the host, by the lengths of rows"),
    )
    return hinder(s, known)


def old_log_probs_source(settings: TrainSettings) -> OldLogProbs:
    """The source of old log-probs; "auto" if every step checks whether the engine's suffice."""
    asked = settings.algorithm.old_log_probs
    if settings.rollout.exact:
        return "engine"
    if asked in ("pass", "engine", "update"):
        return asked
    if not passes_before_update(settings):
        return "update"
    return "auto" if asked == "auto" and not reasons_for_pass(settings) else "pass"


def said_of_old_log_probs(settings: TrainSettings) -> list[str]:
    """A line on the source of old log-probs that algorithm.old_log_probs = "auto" leads to, with the reason; empty for
    any other value."""
    if settings.algorithm.old_log_probs != AUTO:
        return []
    match old_log_probs_source(settings):
        case "update":
            text = "update: a batch has one update, whose own pass gives them"
        case "auto":
            text = "engine, held in every step against a pass over some of its rows"
        case _:
            text = f"pass: {'; '.join(reasons_for_pass(settings))}"
    return [f"algorithm.old_log_probs {text}"]


def has_equal_log_probs(settings: TrainSettings) -> bool:
    """Whether old and new log-probs of the actor's only update of a step are the same but for rounding."""
    s = settings
    if s.actor.updates(s.rollout.batch_size, s.rollout.n) > 1:
        return False
    return old_log_probs_source(s) in ("update", "pass") or s.rollout.exact or not engine_is_apart(s)


def engine_is_apart(settings: TrainSettings) -> list[str]:
    """Reasons why rows are not sampled from the policy that is updated; empty if the two differ by rounding alone."""
    rollout, reasons = settings.rollout, []
    if rollout.engine != "embedded":
        reasons.append(f"rollout.engine = {rollout.engine} is a copy of the policy, which computes otherwise")
    if settings.model.compute_dtype != "float32":
        reasons.append(f"model.compute_dtype = {settings.model.compute_dtype} rounds the engine's otherwise")
    if rollout.ahead or rollout.from_ is not None:
        reasons.append(f"rollout.{'ahead' if rollout.ahead else 'from'} trains on what an earlier policy sampled")
    return reasons


def reasons_for_pass(settings: TrainSettings) -> list[str]:
    """Reasons why the engine's log-probs cannot replace the policy's own; empty if the two may differ by rounding
    alone."""
    algorithm, reasons = settings.algorithm, engine_is_apart(settings)
    if algorithm.correction.name != "none":
        reasons.append("algorithm.correction compares the two")
    if algorithm.reads("sum_squared_probs"):
        reasons.append(f"{algorithm.advantage.name} needs a pass anyway")
    if algorithm.reads("values") and settings.critic.reads != "tokens":
        reasons.append(f"critic.reads = {settings.critic.reads} needs a pass anyway")
    return reasons


def passes_before_update(s: TrainSettings) -> list[str]:
    """Reasons why old log-probs must be known before the update; empty if the update's own pass can give them.

    The update's own pass suffices if the ratio of new to old log-probs stays 1, and nothing else needs the old ones.
    """
    correction, reasons = s.algorithm.correction, []
    size, n = s.rollout.batch_size, s.rollout.n
    if (updates := s.actor.updates(size, n)) > 1:
        how = f"actor.epochs = {s.actor.epochs} and actor.mini_batch_size = {s.actor.mini_batch(size, n)}"
        reasons.append(f"{how} make {updates} updates of a batch")
    if s.algorithm.kl.coef > 0:
        reasons.append("algorithm.kl.coef puts their KL to the reference into the rewards")
    if correction.name != "none":
        reasons.append("algorithm.correction compares them with the engine's")
    if s.algorithm.reads("log_probs"):
        reasons.append(f"{s.algorithm.advantage.name} estimates advantages with them")
    return reasons


def sharing_hindrances(s: TrainSettings) -> list[tuple[str, Any, str]]:
    """Settings that prevent rows from sharing the computation of their prompt, as (path, value, reason)."""
    known = (
        ("model.remove_padding", not s.model.remove_padding, "runs padded rows as they are"),
        ("mesh.context", s.mesh.context > 1, "deals the packed row in blocks"),
        ("algorithm.router_replay", s.algorithm.router_replay != "none", "replays what routers chose for each row"),
    )
    return hinder(s, known)
