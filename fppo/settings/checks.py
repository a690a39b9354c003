"""What is wrong with a run's settings: every problem at once, each with its place, its value, and what to do."""

from __future__ import annotations

import re

from fppo.rollout.turns.tools import TOOLS
from fppo.settings.algorithm import AlgorithmSettings
from fppo.settings.checks_critic import critic_problems
from fppo.settings.checks_data import data_problems, has_held_out
from fppo.settings.checks_eval import eval_problems
from fppo.settings.checks_experts import expert_problems
from fppo.settings.checks_kl import kl_problems
from fppo.settings.checks_lora import lora_problems
from fppo.settings.checks_mesh import (
    context_axis_problems,
    expert_axis_problems,
    pipeline_problems,
    tensor_axis_problems,
)
from fppo.settings.checks_placement import placement_problems
from fppo.settings.checks_reward import FUNCTION, judge_on_ranks, reward_problems
from fppo.settings.checks_sampling import sampling_problems
from fppo.settings.checks_vllm import too_short, vllm_on_ranks, vllm_problems
from fppo.settings.component import part_problems, requires, signature_of, value_of
from fppo.settings.critic import CriticSettings
from fppo.settings.fields import wrong_values
from fppo.settings.graphs import graphs_problems
from fppo.settings.old_log_probs import old_log_probs_problems
from fppo.settings.problems import Problems, unread_section
from fppo.settings.problems import problem as _problem
from fppo.settings.problems import unread as _unread
from fppo.settings.sharing import sharing_problems
from fppo.settings.tables import CORRECTIONS, ESTIMATORS
from fppo.settings.texts import text_problems
from fppo.settings.train import ActorSettings, TrainSettings


def problems(settings: TrainSettings) -> list[str]:
    """Every problem as "section.setting = value: what is wrong; what to do"; none if the settings can run.

    Conflicts between fields are sought also where a single value is wrong, so that one run of the command names all.
    """
    rollout, algorithm = (_rollout, _turns, sampling_problems), (_algorithm, old_log_probs_problems)
    conflicts = (_run, _model, data_problems, *rollout, reward_problems, *algorithm, part_problems, expert_problems)
    lines = [*text_problems(settings), *(_problem(*wrong) for wrong in wrong_values(settings))]
    for conflict in conflicts:
        lines += conflict(settings)
    lines += _updates(settings, "actor", settings.actor)
    lines += eval_problems(settings, critic=uses_critic(settings))
    lines += lora_problems(settings, critic=uses_critic_model(settings))
    if uses_critic(settings):
        lines += [*critic_problems(settings), *_updates(settings, "critic", settings.critic)]
    lines += placement_problems(
        settings, critic=uses_critic(settings), reference=uses_reference(settings), on_mesh=_mesh
    )
    return list(dict.fromkeys(lines))


def mesh_problems(settings: TrainSettings, world: int) -> list[str]:
    """What keeps the settings from running as `world` processes."""
    mesh = settings.mesh
    others = mesh.others
    if world % others if mesh.shard is None else others * mesh.shard != world:
        axes = ", ".join(f"{name} {size or 'unset'}" for name, size in mesh.sizes(mesh.shard or 0).items())
        there = "there is 1 process" if world == 1 else f"there are {world} processes"
        fitting = f"--nproc {others * (mesh.shard or 1)}" if mesh.shard else f"--nproc {others} or a multiple of it"
        return [f"mesh: its axes ({axes}) do not multiply to the ranks: {there}; give {fitting}, or other axes"]
    return [*_mesh(settings, world)]


def _mesh(s: TrainSettings, world: int) -> Problems:
    if s.mesh.sequence > 1 and not s.model.remove_padding:
        yield _problem("mesh.sequence", s.mesh.sequence, "a sequence axis cuts packed rows; set model.remove_padding")
    yield from pipeline_problems(s)
    yield from context_axis_problems(s)
    if s.mesh.expert > 1:
        yield from expert_axis_problems(s, critic=uses_critic(s))
    if s.mesh.tensor > 1:
        yield from tensor_axis_problems(s, critic=uses_critic(s))
    if s.rollout.engine == "vllm":
        yield from vllm_on_ranks(s.rollout.vllm, "rollout.vllm", world)
    yield from judge_on_ranks(s, world)
    ranks = world // (s.mesh.pipeline * s.mesh.sequence * s.mesh.context * s.mesh.tensor)
    for name, section in (("actor", s.actor), ("critic", s.critic)):
        size = section.mini_batch_size or s.rollout.batch_size
        if size < ranks and (name == "actor" or uses_critic(s)):
            advice = f"give at least as many sequences as there are data ranks, {ranks}, or a longer mesh.context"
            yield _problem(f"{name}.mini_batch_size", size, f"some ranks would have nothing to do; {advice}")


def uses_critic_model(settings: TrainSettings) -> bool:
    """Whether the run has a critic that is a model of its own."""
    return uses_critic(settings) and settings.critic.reads == "tokens"


def decodes(s: TrainSettings) -> bool:
    """Whether an embedded engine answers anything: the policy's, or the judge's."""
    judge = s.reward.judge
    return s.rollout.engine != "vllm" or (judge.path is not None and judge.engine != "vllm")


def uses_critic(settings: TrainSettings) -> bool:
    """Whether the run trains a critic."""
    return requires(settings.algorithm.advantage, ESTIMATORS, "values")


def uses_reference(settings: TrainSettings) -> bool:
    """Whether the run needs a reference model."""
    return settings.actor.kl_coef > 0 or settings.algorithm.kl.coef > 0


def _run(s: TrainSettings) -> Problems:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", s.device) and s.device:
        yield _problem("device", s.device, "must be auto, cpu, cuda or cuda:N")
    if len(set(s.log.loggers)) < len(s.log.loggers):
        yield _problem("log.loggers", list(s.log.loggers), "names a logger twice")


def _model(s: TrainSettings) -> Problems:
    yield from graphs_problems(s)
    yield from sharing_problems(s)
    if not uses_critic(s):
        yield from _unread("model.critic_path", s.model.critic_path, None, 'algorithm.advantage = "gae"')
    elif not uses_critic_model(s):
        yield from _unread("model.critic_path", s.model.critic_path, None, 'critic.reads = "tokens"')
        for name in ("compute_dtype", "checkpoint_layers", "offload", "micro_batch_size", "token_budget"):
            yield from _unread(f"critic.{name}", getattr(s.critic, name), None, 'critic.reads = "tokens"')
        yield from _unread("critic.popart", s.critic.popart, 0, 'critic.reads = "tokens"')
    elif s.critic.ensemble > 1:
        text = 'its members read what the policy\'s pass finds: give critic.reads = "hidden" or "confidence"'
        yield _problem("critic.ensemble", s.critic.ensemble, text)
    if s.critic.ensemble == 1:
        for name in ("leave_agreed", "leave_disputed"):
            yield from _unread(f"critic.{name}", getattr(s.critic, name), 0, "critic.ensemble > 1")
    elif s.actor.entropy_coef == 0:
        yield from _unread("critic.leave_disputed", s.critic.leave_disputed, 0, "actor.entropy_coef != 0")
    if not uses_reference(s):
        readers = "a KL term; actor.kl_coef and algorithm.kl.coef are both 0"
        yield from _unread("model.ref_path", s.model.ref_path, None, readers)
        yield from _unread("model.ref_dtype", s.model.ref_dtype, "float32", readers)
        yield from _unread("model.ref_offload", s.model.ref_offload, None, readers)


def _rollout(s: TrainSettings) -> Problems:
    size, n = s.rollout.batch_size, s.rollout.n
    if n >= 1 and size % n:
        near = [max(size // n, 1) * n, (size // n + 1) * n]
        text = f"must be a multiple of rollout.n = {n}, since it counts sequences; {_choices(near)} would do"
        yield _problem("rollout.batch_size", size, text)
    if requires(s.algorithm.advantage, ESTIMATORS, "groups") and n == 1:
        text = f"algorithm.advantage = {s.algorithm.advantage.name!r} compares responses to one prompt; give 2 or more"
        yield _problem("rollout.n", n, text)
    if s.rollout.engine != "vllm":
        yield from unread_section(s.rollout.vllm, "rollout.vllm", 'rollout.engine = "vllm"')
    else:
        yield from vllm_problems(s.rollout.vllm, "rollout.vllm")
        yield from _unread(
            "rollout.cache_gb", s.rollout.cache_gb, None, "the embedded engine; give rollout.vllm.cache_gb"
        )
        if not decodes(s) and s.model.decode_attention != "sdpa":
            yield from _unread("model.decode_attention", s.model.decode_attention, "auto", "the embedded engine")
        longest = "eval" if (s.eval.max_tokens or 0) > s.rollout.max_tokens else "rollout"
        needed = s.data.max_prompt_tokens + max(s.rollout.max_tokens, s.eval.max_tokens or 0)
        names = f"data.max_prompt_tokens and {longest}.max_tokens"
        yield from too_short(s.rollout.vllm, "rollout.vllm", needed, names)


def _turns(s: TrainSettings) -> Problems:
    turns, name = s.rollout.turns, s.rollout.turns.respond
    if name is None:
        yield from unread_section(turns, "rollout.turns", "rollout.turns.respond")
        return
    if name not in TOOLS and not FUNCTION.fullmatch(name):
        yield _problem("rollout.turns.respond", name, f"must be one of {sorted(TOOLS)}, or module:function")
    if turns.max_turns == 1:
        yield _problem("rollout.turns.max_turns", 1, "respond would never be asked; give 2 or more")
    if turns.turn_tokens is not None and turns.turn_tokens > s.rollout.max_tokens:
        text = f"must be at most rollout.max_tokens = {s.rollout.max_tokens}, which bounds all turns together"
        yield _problem("rollout.turns.turn_tokens", turns.turn_tokens, text)
    if name == "calculator" and not (s.rollout.stop or s.rollout.stop_token_ids):
        text = 'no turn would end with "=", which the calculator answers; give rollout.stop = ["="], or its token'
        yield _problem("rollout.turns.respond", name, text)
    if s.rollout.from_ is not None and not has_held_out(s):
        yield _problem("rollout.turns.respond", name, "rollout.from is given: nothing is sampled; leave it out")


def _choices(numbers: list[int]) -> str:
    return " or ".join(str(n) for n in dict.fromkeys(numbers))


def _algorithm(s: TrainSettings) -> Problems:
    a, default = s.algorithm, TrainSettings().algorithm
    signature = signature_of(a.advantage.name, ESTIMATORS)
    alone = value_of(a.advantage, ESTIMATORS, "lam_alpha") is None
    if signature is not None and ("kernel" not in signature.functions or not (alone or _has_critic_lam(a))):
        readers = 'algorithm.advantage = "gae" with one decay for all rows'
        yield from _unread("algorithm.gae", a.gae, default.gae, readers)
    if requires(a.advantage, ESTIMATORS, "correction_weights"):
        level = value_of(a.correction, CORRECTIONS, "level")
        if level != "token" or value_of(a.correction, CORRECTIONS, "batch_normalize"):
            text = f"{a.advantage.name} traces the weights of single tokens: give rollout, with level = token"
            yield _problem("algorithm.correction.name", a.correction.name, text)
    yield from kl_problems(s)


def _has_critic_lam(algorithm: AlgorithmSettings) -> bool:
    return value_of(algorithm.advantage, ESTIMATORS, "critic_lam") is not None


def _updates(s: TrainSettings, name: str, section: ActorSettings | CriticSettings) -> Problems:
    """Batch sizes, weights and warm-up of the actor or the critic."""
    size = s.rollout.batch_size
    mini = size if section.mini_batch_size is None else section.mini_batch_size
    if mini >= 1 and size % mini:
        text = f"must divide rollout.batch_size = {size}; both count sequences"
        yield _problem(f"{name}.mini_batch_size", section.mini_batch_size, text)
    if section.micro_batch_size and section.token_budget:
        text = f"{name}.token_budget = {section.token_budget} is given too; give one of the two, 0 turns the other off"
        yield _problem(f"{name}.micro_batch_size", section.micro_batch_size, text)
    if section.token_budget == 0 and not section.micro_batch_size:
        text = f"{name}.micro_batch_size is off too; give one of the two"
        yield _problem(f"{name}.token_budget", section.token_budget, text)
    if section.micro_batch_size and section.micro_batch_size > mini:
        text = f"must be at most the mini-batch of {mini} sequences"
        yield _problem(f"{name}.micro_batch_size", section.micro_batch_size, text)
    if section.weight_mode == "seq-mean-token-sum-norm":
        if section.horizon is None:
            text = f'{name}.weight_mode = "seq-mean-token-sum-norm" divides by it; give one, as rollout.max_tokens'
            yield _problem(f"{name}.horizon", None, text)
    else:
        reader = f'{name}.weight_mode = "seq-mean-token-sum-norm"'
        yield from _unread(f"{name}.horizon", section.horizon, None, reader)
    yield from _warmup(s, name, section, updates=-(-size // max(mini, 1)) * max(section.epochs, 1))


def _warmup(s: TrainSettings, name: str, section: ActorSettings | CriticSettings, *, updates: int) -> Problems:
    steps = s.steps
    if name == "critic" and s.critic.warmup_steps >= steps:
        text = f"the actor would never be updated in {steps} steps; give fewer than steps"
        yield _problem("critic.warmup_steps", s.critic.warmup_steps, text)
    elif name == "actor" and uses_critic(s):
        steps = max(steps - s.critic.warmup_steps - s.critic.pretrain, 1)
    total = steps * updates
    if section.optimizer.warmup_steps >= total:
        text = f"must be less than the run's {total} updates ({steps} steps of {updates})"
        yield _problem(f"{name}.optimizer.warmup_steps", section.optimizer.warmup_steps, text)
    if section.optimizer.schedule == "constant":
        reader = "the linear, cosine, exponential and wsd schedules"
        yield from _unread(f"{name}.optimizer.min_lr_ratio", section.optimizer.min_lr_ratio, 0.0, reader)
    elif section.optimizer.schedule == "exponential" and not section.optimizer.min_lr_ratio:
        text = "the exponential schedule falls by a factor and never comes to 0; give a part of lr, as 0.01"
        yield _problem(f"{name}.optimizer.min_lr_ratio", 0.0, text)
