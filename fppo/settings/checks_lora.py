"""Which models have adapters, and what is wrong with the settings of these."""

from __future__ import annotations

from fppo.settings.lora import LoraSettings
from fppo.settings.problems import Problems, problem, unread
from fppo.settings.train import TrainSettings


def uses_lora(s: TrainSettings) -> bool:
    """Whether the policy is trained by an adapter."""
    return s.model.lora.rank > 0 or s.model.lora.path is not None


def critic_uses_lora(s: TrainSettings) -> bool:
    """Whether a critic that is a model is."""
    return uses_lora(s) and s.model.lora.critic_rank != 0


def shares_base(s: TrainSettings) -> bool:
    """Whether the critic's adapter stands on the policy's own base."""
    return critic_uses_lora(s) and s.model.critic_path in (None, s.model.path)


def reference_is_base(s: TrainSettings) -> bool:
    """Whether the reference of an adapted policy without one of its own is the base, which a fresh adapter is too."""
    return s.model.lora.path is None or s.model.lora.reference == "base"


def lora_problems(s: TrainSettings, *, critic: bool) -> Problems:
    """What does not go together with adapters, in a run whose critic is a model or that has none."""
    lora, default = s.model.lora, LoraSettings()
    if not uses_lora(s):
        for name in ("alpha", "scaling", "targets", "reference", "send", "base", "critic_rank"):
            yield from unread(f"model.lora.{name}", getattr(lora, name), getattr(default, name), "model.lora.rank > 0")
        return
    if lora.path is not None:
        for name in ("rank", "alpha", "scaling", "targets"):
            if (value := getattr(lora, name)) != getattr(default, name):
                yield problem(f"model.lora.{name}", value, f"the adapter in model.lora.path = {lora.path!r} says it")
    reader = "no model.ref_path" if lora.path is not None else "model.lora.path: a fresh adapter starts as the base"
    if lora.path is None or s.model.ref_path is not None:
        yield from unread("model.lora.reference", lora.reference, default.reference, reader)
    if not critic:
        yield from unread("model.lora.critic_rank", lora.critic_rank, None, "a critic that is a model")
    if s.rollout.engine != "vllm":
        yield from unread("model.lora.send", lora.send, default.send, 'rollout.engine = "vllm"')
    elif lora.send == "alone":
        reader = 'model.lora.send = "merged": of an adapter that goes alone all factors do'
        yield from unread("rollout.vllm.send", s.rollout.vllm.send, "all", reader)
    if s.model.compile_layers:
        yield problem("model.compile_layers", True, "compiled layers take no adapters yet; leave it or model.lora out")
    if s.model.offload == "all":
        text = "the base of adapters stays on the device; give moments, or leave it out"
        yield problem("model.offload", s.model.offload, text)
    if critic and critic_uses_lora(s) and s.critic.offload == "all":
        text = "the base of adapters stays on the device; give moments, or leave it out"
        yield problem("critic.offload", s.critic.offload, text)
    if s.model.ref_path is None:
        reader = "a reference of its own (model.ref_path): with adapters it stands on their base"
        yield from unread("model.ref_dtype", s.model.ref_dtype, "float32", reader)
        yield from unread("model.ref_offload", s.model.ref_offload, None, reader)
    if s.actor.experts.bias_rate > 0:
        text = "the biases of routers are in the frozen base of the adapter; leave it out"
        yield problem("actor.experts.bias_rate", s.actor.experts.bias_rate, text)
