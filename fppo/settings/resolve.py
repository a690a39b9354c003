"""What the settings that say "auto" come to on a machine: one place, and a pure function of what the machine is.

On a CPU they are float32, `sdpa`, `chunked`, layers of the model's own code (with `model.cpp` kernels in C++ instead,
where the model has places for them), and a vLLM that starts at once. On a GPU
they are bfloat16 (parameters and moments stay float32), `varlen`, `triton` for log-probs and inside the layers, graphs
of passes of few tokens, and a vLLM that captures graphs; what does not run there gives way to what runs everywhere, for
attention and log-probs with a line that says why.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from fppo.settings import checks, graphs
from fppo.settings.train import ModelSettings, TrainSettings
from fppo.settings.vllm import VllmSettings
from fppo_kernels.table import BUILTIN, INSIDE

AUTO = "auto"
# operations inside the layers whose setting may say auto
LAYERS = tuple(op for op in INSIDE if getattr(attrs.fields(ModelSettings), op).default == AUTO)
_PLAIN = {"attention": "sdpa", "decode_attention": "sdpa", "log_probs": "chunked"}  # run everywhere
_FAST = {"attention": "varlen", "decode_attention": "sdpa", "log_probs": "triton"}  # on a GPU
_BFLOAT16 = (8, 0)  # the compute capability from which on GPUs multiply in bfloat16


@attrs.frozen(kw_only=True)
class Machine:
    """What decides: the kind of device, a GPU's compute capability, and why kernels do not serve here, by "op/name"."""

    device: str = "cpu"
    capability: tuple[int, int] = (0, 0)
    refusals: Mapping[str, str] = attrs.field(factory=dict)


CPU = Machine()


def compute_dtype(machine: Machine) -> tuple[str, list[str]]:
    """The dtype of forward and backward passes, and what to say of it."""
    if machine.device == "cpu" or machine.capability >= _BFLOAT16:
        return "float32" if machine.device == "cpu" else "bfloat16", []
    had = ".".join(map(str, machine.capability))
    said = f"bfloat16 takes compute capability 8.0, and this GPU has {had}; you may give float16"
    return "float32", [f"model.compute_dtype float32: {said}"]


def kernel(op: str, machine: Machine, dtypes: set[str], *, cpp: bool = False) -> tuple[str, list[str]]:
    """The kernel for "attention", "decode_attention" or "log_probs" of models that run in these dtypes, on a CPU one in
    C++ where `cpp` asks for it, and what to say of it."""
    plain, fast = _PLAIN[op], "cpp" if machine.device == "cpu" else _FAST[op]
    if machine.device == "cpu" and not cpp:
        return plain, []
    if machine.device != "cpu" and "float32" in dtypes:  # products are what counts, and the plain one's are exact
        return plain, []
    if (op == "log_probs" or fast == "cpp") and "float16" in dtypes:
        return plain, [f"model.{op} {plain}: {fast} does not compute in float16"]
    reason = machine.refusals.get(f"{op}/{fast}")
    return (fast, []) if reason is None else (plain, [f"model.{op} {plain}: {fast} {reason}"])


def layer_kernel(op: str, machine: Machine, dtypes: set[str], *, compiled: bool, cpp: bool = False) -> str:
    """The kernel for an operation inside the layers, which may be `compiled` whole."""
    on_cpu = machine.device == "cpu"
    fast, unfit = ("cpp", "float16") if on_cpu else ("triton", "float32")
    plain = compiled or unfit in dtypes or (on_cpu and not cpp) or fast not in BUILTIN[op]
    return "eager" if plain or f"{op}/{fast}" in machine.refusals else fast


def resolved(settings: TrainSettings, machine: Machine) -> tuple[TrainSettings, list[str]]:
    """The settings with a value for each that says auto, and why it is not the usual one where it is not.

    Settings without any are returned as they are. `digest.every` is not among them: it depends on the model.
    """
    model, lines = settings.model, []
    if model.compute_dtype == AUTO:
        name, said = compute_dtype(machine)
        model, lines = attrs.evolve(model, compute_dtype=name), [*lines, *said]
    critic = (settings.critic.compute_dtype or model.compute_dtype) if checks.uses_critic(settings) else None
    dtypes = {model.compute_dtype, *([critic] if critic else [])}
    for op in _PLAIN:
        if getattr(model, op) == AUTO:
            read = op != "decode_attention" or checks.decodes(settings)
            name, said = kernel(op, machine, dtypes, cpp=model.cpp and read)
            model, lines = attrs.evolve(model, **{op: name}), [*lines, *said]
    compiled, cpp = model.compile_layers, model.cpp
    inside = {op: layer_kernel(op, machine, dtypes, compiled=compiled, cpp=cpp) for op in LAYERS}
    model = attrs.evolve(model, **{op: name for op, name in inside.items() if getattr(model, op) == AUTO})
    if model.graphs == AUTO:
        on = machine.device == "cuda" and graphs.records(attrs.evolve(settings, model=model))
        model = attrs.evolve(model, graphs=on)
    rollout, judge = settings.rollout, settings.reward.judge
    if rollout.engine == "vllm":
        rollout = attrs.evolve(rollout, vllm=_vllm(rollout.vllm, machine))
    if judge.engine == "vllm":
        judge = attrs.evolve(judge, vllm=_vllm(judge.vllm, machine))
    reward = attrs.evolve(settings.reward, judge=judge)
    return attrs.evolve(settings, model=model, rollout=rollout, reward=reward), lines


def _vllm(section: VllmSettings, machine: Machine) -> VllmSettings:
    return attrs.evolve(section, eager=machine.device == "cpu") if section.eager == AUTO else section
