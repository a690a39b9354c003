"""Checks of a run's settings: every problem at once, each with its place, its value, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import attrs

from fppo.fields import Problem, Problems, name_of, problem_at, unread_problems, value_at, wrong_values
from fppo.settings.checks_data import data_problems, eval_problems, reward_problems
from fppo.settings.checks_places import mesh_rules, placement_problems
from fppo.settings.checks_rollout import rollout_problems
from fppo.settings.checks_sft import pass_problems, rate_problems
from fppo.settings.component import part_problems, signature_of, value_of
from fppo.settings.model import is_endpoint, named_paths, params_on_host
from fppo.settings.resolve import hindrances, passes_before_update, sharing_hindrances
from fppo.settings.tables import CORRECTIONS, ESTIMATORS, VALUE_HEADS
from fppo.settings.train import TrainSettings


def problems(settings: TrainSettings) -> list[Problem]:
    """Every problem, whose text is "section.setting = value: what is wrong; what to do"; none if the settings can run.

    Conflicts between fields are sought also where a single value is wrong, so that one run of the command names all.
    """
    found = [*text_problems(settings), *wrong_values(settings)]
    for rules in (
        *(_model, data_problems, rollout_problems, reward_problems, _algorithm, part_problems, _experts),
        *(partial(_updates, name="actor"), eval_problems, _lora, _critic, placement_problems),
    ):
        found += rules(settings)
    return [*{str(problem): problem for problem in found}.values()]


def mesh_problems(settings: TrainSettings, world: int) -> list[Problem]:
    """List the problems of running the settings as `world` processes."""
    mesh = settings.mesh
    others = mesh.others
    if others < 1 or (mesh.shard is not None and mesh.shard < 1):  # a size that its own check refuses
        return []
    if world % others if mesh.shard is None else others * mesh.shard != world:
        axes = ", ".join(f"{name} {size or 'unset'}" for name, size in mesh.sizes(mesh.shard or 0).items())
        there = "there is 1 process" if world == 1 else f"there are {world} processes"
        fitting = f"--nproc {others * (mesh.shard or 1)}" if mesh.shard else f"--nproc {others} or a multiple of it"
        text = f"its axes ({axes}) do not multiply to the ranks: {there}; give {fitting}, or other axes"
        return [Problem("mesh", attrs.NOTHING, text)]
    return [*mesh_rules(settings, world)]


def text_problems(settings: Any) -> Problems:
    """Yield a problem for each text that no path, file or tokenizer can hold: with a NUL character or half of a
    surrogate pair."""
    for path, text in _texts(settings, ""):
        if "\0" in text:
            yield Problem(path, text, "holds a NUL character, which no path and no text has; leave it out")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            kind = f"{text[error.start]!a} is half of a surrogate pair, or a byte that is not UTF-8"
            yield Problem(path, text, f"{kind}; write the whole character, or rename the file")


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield every text in a value, also in lists and tables, as (path of its setting, text)."""
    if isinstance(value, str):
        yield path, value
    elif attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            yield from _texts(getattr(value, field.name), f"{path}.{name_of(field)}".lstrip("."))
    elif isinstance(value, Mapping):
        for pair in value.items():
            for each in pair:
                yield from _texts(each, path)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each, path)


def _model(s: TrainSettings) -> Problems:
    for setting, on, found in (
        ("model.graphs", s.model.graphs, hindrances),
        ("model.share_prompts", s.model.share_prompts, sharing_hindrances),
    ):
        for path, value, why in found(s) if on is True else ():
            yield problem_at(s, setting, f"{path} = {value!r} {why}; leave one of them out")
    if s.model.compile_layers and s.model.mlp_slice_tokens is not None:
        yield problem_at(s, "model.mlp_slice_tokens", "compiled layers compute their MLPs whole; leave one of them out")
    if s.model.offload == "none" and s.critic.offload in (None, "none"):
        yield from unread_problems(s, ["model.moments_directory"], 'model.offload = "moments" or more')
    if not s.algorithm.uses_critic:
        yield from unread_problems(s, ["model.critic_path"], 'algorithm.advantage = "gae"')
    elif not s.uses_critic_model:
        names = ("compute_dtype", "checkpoint_layers", "offload", "micro_batch_size", "token_budget", "popart")
        yield from unread_problems(s, ["model.critic_path", *(f"critic.{x}" for x in names)], 'critic.reads = "tokens"')
    elif s.critic.ensemble > 1:
        text = 'its members read what the policy\'s pass finds: give critic.reads = "hidden" or "confidence"'
        yield problem_at(s, "critic.ensemble", text)
    if s.critic.ensemble == 1:
        yield from unread_problems(s, ["critic.leave_agreed", "critic.leave_disputed"], "critic.ensemble > 1")
    elif s.actor.entropy_coef == 0 and s.actor.entropy_control.target is None:
        yield from unread_problems(s, ["critic.leave_disputed"], "actor.entropy_coef != 0")
    if not s.uses_reference:
        readers = "a KL term; actor.kl_coef and algorithm.kl.coef are both 0"
        yield from unread_problems(s, ["model.ref_path", "model.ref_dtype", "model.ref_offload"], readers)
    yield from _teacher(s)


def _teacher(s: TrainSettings) -> Problems:
    """Yield the conflicts of a teacher with other settings."""
    names = ["model.teacher_path", "model.teacher_dtype", "model.teacher_offload"]
    if s.data.teacher_prompt is None:
        yield from unread_problems(s, ["data.teacher_prompt_tokens"], "data.teacher_prompt")
    yield from _several(s)
    if not s.actor.distill.used:
        yield from unread_problems(s, ["actor.distill.coef", "actor.distill.top"], "actor.distill.name")
    if not s.uses_teacher:
        readers = 'algorithm.advantage = "distill", or actor.distill'
        yield from unread_problems(s, [*names, "model.teachers", "model.teacher_decay", "data.teacher_prompt"], readers)
        return
    yield from _by_policy(s) if s.model.teacher_decay is not None else ()
    yield from _distributions(s) if s.actor.distill.used else ()
    if s.data.teacher_prompt is not None and (s.data.images or s.data.videos):
        yield problem_at(s, "data.teacher_prompt", "a teacher's prompts hold no images or videos; leave it out")
    if s.data.teacher_function is not None and not s.has_reward:
        text = "makes prompts from scores, and nothing scores the responses; give reward functions"
        yield problem_at(s, "data.teacher_prompt", text)
    if s.data.teacher_prompt is not None and s.rollout.environment.used:
        text = "the prompts are an environment's, and rows have none to take its place; leave it out"
        yield problem_at(s, "data.teacher_prompt", text)
    name = s.algorithm.advantage.name if s.algorithm.reads("teacher_log_probs") else "actor.distill"
    if s.model.teacher_path is None and s.loads_teacher and not s.model.teachers:
        text = f"is not set, and {name} holds the policy to it; give the name or directory of a Hugging Face model"
        yield problem_at(s, "model.teacher_path", text)
    scored = value_of(s.algorithm.advantage, ESTIMATORS, "score_coef")
    taught = s.algorithm.reads("teacher_log_probs")
    if (
        taught
        and s.algorithm.kl.coef > 0
        and not any(map(s.algorithm.reads, ("rows", "rewards", "scores", "outcomes")))
    ):
        text = f"{name} does not read the token rewards, where the penalty would be; give actor.kl_coef in its place"
        yield problem_at(s, "algorithm.kl.coef", text)
    if s.has_reward:
        return
    if scored:
        text = "nothing scores the responses; give reward functions, or leave it out"
        yield Problem("algorithm.advantage.score_coef", s.algorithm.advantage.keywords.get("score_coef"), text)
    if s.has_held_out and s.eval.temperature == 0:
        text = f"held-out responses are measured by their divergence from the teacher ({name}, no reward), which is "
        yield problem_at(s, "eval.temperature", f"{text}one of sampled responses; give 1.0, or reward functions")


def _several(s: TrainSettings) -> Problems:
    """Yield what does not fit several teachers."""
    teachers, by, weights = s.model.teachers, s.model.teacher_by, s.model.teacher_weights
    if not teachers:
        yield from unread_problems(s, ["model.teacher_by", "model.teacher_weights"], "model.teachers")
        return
    if (wrong := named_paths(teachers)) is not None:
        yield problem_at(s, "model.teachers", wrong)
        return
    if s.model.teacher_path is not None:
        yield problem_at(s, "model.teacher_path", "model.teachers has several; give it a name there, or leave one out")
    if any(isinstance(x, str) and is_endpoint(x) for x in teachers.values()):
        yield from _endpoints(s)
    if by is not None:
        yield from unread_problems(s, ["model.teacher_weights"], "rows that have all teachers; leave out teacher_by")
    elif s.actor.distill.used and len(teachers) > 1:
        text = (
            "distributions of several teachers are not mixed; give model.teacher_by, or algorithm.advantage = distill"
        )
        yield problem_at(s, "actor.distill.name", text)
    numbers = [x for x in weights.values() if isinstance(x, (int, float)) and not isinstance(x, bool) and x >= 0]
    if (
        by is None
        and weights
        and ({*weights} != {*teachers} or len(numbers) < len(weights) or abs(sum(numbers) - 1) > 1e-6)
    ):
        yield problem_at(s, "model.teacher_weights", "give each of model.teachers a number of at least 0, 1 in all")


def _endpoints(s: TrainSettings) -> Problems:
    """Yield what does not fit teachers behind addresses."""
    if s.rollout.temperature != 1:
        yield problem_at(s, "rollout.temperature", "model.teachers has an address, whose log-probs are of 1; give 1")
    if s.actor.distill.used:
        yield problem_at(s, "actor.distill.name", "model.teachers has an address, which tells of sampled tokens alone")
    if s.mesh.least_ranks > 1:
        text = "model.teachers has an address, and each rank would ask it for all rows; give one rank"
        yield Problem("mesh", s.mesh.least_ranks, text)


def _by_policy(s: TrainSettings) -> Problems:
    """Yield what does not fit a policy that is its own teacher."""
    names = ("teacher_path", "teachers", "teacher_dtype", "teacher_offload")
    yield from unread_problems(s, [f"model.{x}" for x in names], "a teacher of its own; leave out model.teacher_decay")
    if not s.has_reward:
        yield problem_at(
            s, "model.teacher_decay", "only a reward tells how good its answers are; give reward functions"
        )
    if s.model.teacher_decay in (0, 1) and s.data.teacher_prompt is None:
        text = "it would read what the policy reads, and teach nothing new; give data.teacher_prompt"
        yield problem_at(s, "model.teacher_decay", text)
    if s.algorithm.router_replay != "none":
        text = "routers would have to choose for the teacher's prompts what they chose for the policy's; leave it out"
        yield problem_at(s, "algorithm.router_replay", text)


def _distributions(s: TrainSettings) -> Problems:
    """Yield what does not fit a divergence from distributions of a teacher."""
    pool = s.placement.roles.teacher
    for name, axes in (("mesh", s.mesh), (f"placement.pools.{pool}", s.placement.pools.get(pool))):
        if axes is not None and axes.tensor > 1:
            text = "actor.distill reads whole distributions, which a tensor axis cuts; give 1"
            yield Problem(f"{name}.tensor", axes.tensor, text)


def _algorithm(s: TrainSettings) -> Problems:
    a, part, source = s.algorithm, s.algorithm.advantage, s.algorithm.old_log_probs
    signature = signature_of(part.name, ESTIMATORS)
    decays = [value_of(part, ESTIMATORS, "lam_alpha") is not None, value_of(part, ESTIMATORS, "critic_lam") is not None]
    if signature is not None and ("kernel" not in signature.functions or decays == [True, False]):
        yield from unread_problems(s, ["algorithm.gae"], 'algorithm.advantage = "gae" with one decay for all rows')
    if a.reads("correction_weights"):
        level = value_of(a.correction, CORRECTIONS, "level")
        if level != "token" or value_of(a.correction, CORRECTIONS, "batch_normalize"):
            text = f"{part.name} traces the weights of single tokens: give rollout, with level = token"
            yield problem_at(s, "algorithm.correction.name", text)
    yield from _kl(s)
    yield from _entropy(s)
    if source == "update" and (reasons := passes_before_update(s)):
        text = f"they are needed before the update: {'; '.join(reasons)}; give pass, or leave it out"
        yield problem_at(s, "algorithm.old_log_probs", text)
    if source == "engine" and a.correction.name != "none":
        text = "algorithm.correction would compare the engine's with themselves, and all weights be 1; leave one out"
        yield problem_at(s, "algorithm.old_log_probs", text)


def _kl(s: TrainSettings) -> Problems:
    """Yield the conflicts of algorithm.kl, actor.kl_coef and actor.kl_kind."""
    kl, part = s.algorithm.kl, s.algorithm.advantage
    if kl.controller == "adaptive" and kl.coef == 0:
        text = "the adaptive controller multiplies coef, which is 0; give a first algorithm.kl.coef"
        yield problem_at(s, "algorithm.kl.controller", text)
    if kl.controller == "fixed":
        yield from unread_problems(s, ["algorithm.kl.target", "algorithm.kl.horizon"], "the adaptive controller")
    if kl.coef == 0:
        yield from unread_problems(s, ["algorithm.kl.kind"], "algorithm.kl.coef > 0")
    elif kl.kind not in ("k1", "k1+"):
        text = "is for losses: penalties of its value do not add up to the divergence's gradient; give k1"
        yield problem_at(s, "algorithm.kl.kind", text)
    for column, what in (("named_scores", "the reward's functions one by one"), ("step_rewards", "rewards of steps")):
        if kl.coef > 0 and s.algorithm.reads(column):
            text = f"{part.name} compares {what}, and would not see it; give actor.kl_coef in its place"
            yield problem_at(s, "algorithm.kl.coef", text)
    if s.actor.kl_coef == 0:
        yield from unread_problems(s, ["actor.kl_kind"], "actor.kl_coef > 0")
    elif s.actor.kl_kind == "k1":
        text = "its expected gradient is 0, which makes it no KL term; give k3, or k2, whose is the divergence's"
        yield problem_at(s, "actor.kl_kind", text)


def _entropy(s: TrainSettings) -> Problems:
    """Yield the conflicts of actor.entropy_control."""
    held, coef, place = s.actor.entropy_control, s.actor.entropy_coef, "actor.entropy_control"
    if held.target is None:
        names = [f"{place}.{name}" for name in ("unit", "rate", "damping", "low", "high")]
        yield from unread_problems(s, names, f"{place}.target")
    elif held.low >= held.high:
        yield problem_at(s, f"{place}.low", f"must be less than {place}.high = {held.high}")
    elif not held.low <= coef <= held.high:
        text = f"the controller begins with it: give {place}.low = {held.low} to {place}.high = {held.high}"
        yield problem_at(s, "actor.entropy_coef", text)


def _experts(s: TrainSettings) -> Problems:
    experts, replay = s.actor.experts, s.algorithm.router_replay
    if experts.balance_coef > 0 and replay == "none":
        text = "it takes the loads of a whole mini-batch, as router_replay has them; give algorithm.router_replay"
        yield problem_at(s, "actor.experts.balance_coef", text)
    if s.model.compile_layers:
        text = "compiled layers do not tell what routers choose; leave out model.compile_layers"
        names = [name for name, rate in attrs.asdict(experts).items() if rate > 0]
        yield from (problem_at(s, f"actor.experts.{name}", text) for name in names)
        if replay != "none":
            yield problem_at(s, "algorithm.router_replay", text)
    if replay == "rollout" and s.rollout.engine == "vllm" and s.rollout.from_ is None:
        text = "vLLM tells experts from its model runner V2 alone, for which fppo does not draw; "
        text += 'give "old_log_probs", or rollout.engine = "embedded"'
        yield problem_at(s, "algorithm.router_replay", text)


def _lora(s: TrainSettings) -> Problems:
    """Yield the conflicts of other settings with adapters."""
    lora, critic = s.model.lora, s.uses_critic_model
    if not lora.used:
        names = ("alpha", "scaling", "targets", "exclude", "reference", "send", "base")
        names += ("critic_rank", "critic_path")
        yield from unread_problems(s, (f"model.lora.{name}" for name in names), "model.lora.rank > 0")
        return
    if lora.path is not None:
        text = f"the adapter in model.lora.path = {lora.path!r} says it"
        names = ("rank", "alpha", "scaling", "targets", "exclude")
        found = unread_problems(s, (f"model.lora.{name}" for name in names), "")
        yield from (problem._replace(text=text) for problem in found)
    reader = "no model.ref_path" if lora.path is not None else "model.lora.path: a fresh adapter starts as the base"
    if lora.path is None or s.model.ref_path is not None:
        yield from unread_problems(s, ["model.lora.reference"], reader)
    if not critic:
        names = ("critic_rank", "critic_path")
        yield from unread_problems(s, (f"model.lora.{name}" for name in names), "a critic that is a model")
    elif lora.critic_path is not None and lora.critic_rank is not None:
        text = f"the adapter in model.lora.critic_path = {lora.critic_path!r} says it; leave it out"
        yield problem_at(s, "model.lora.critic_rank", text)
    if s.rollout.engine != "vllm":
        yield from unread_problems(s, ["model.lora.send"], 'rollout.engine = "vllm"')
    elif lora.send == "alone":
        reader = 'model.lora.send = "merged": of an adapter that goes alone all factors do'
        yield from unread_problems(s, ["rollout.vllm.send"], reader)
    if s.model.compile_layers:
        yield problem_at(s, "model.compile_layers", "compiled layers take no adapters yet; leave it or model.lora out")
    text = "the base of adapters stays on the device; give moments, or leave it out"
    if params_on_host(s.model.offload):
        yield problem_at(s, "model.offload", text)
    if critic and lora.of_critic and s.critic.offload is not None and params_on_host(s.critic.offload):
        yield problem_at(s, "critic.offload", text)
    if s.model.ref_path is None:
        reader = "a reference of its own (model.ref_path): with adapters it stands on their base"
        yield from unread_problems(s, ["model.ref_dtype", "model.ref_offload"], reader)
    if s.actor.experts.bias_rate > 0:
        text = "the biases of routers are in the frozen base of the adapter; leave it out"
        yield problem_at(s, "actor.experts.bias_rate", text)


def _critic(s: TrainSettings) -> Problems:
    """Yield the conflicts among the settings of the critic's training, if there is a critic."""
    critic, signature = s.critic, signature_of(s.critic.loss.name, VALUE_HEADS)
    if not s.algorithm.uses_critic:
        return
    if signature is not None and "bins" in signature.keywords:
        yield from unread_problems(s, ["critic.popart"], "heads of one output, as critic.loss = mse or huber")
    if not critic.pretrain:
        yield from unread_problems(s, ["critic.pretrain_patience", "critic.pretrain_rise"], "critic.pretrain > 0")
    elif critic.warmup_steps:
        text = f"critic.pretrain = {critic.pretrain} is given too, and fits the critic first as well; give one of them"
        yield problem_at(s, "critic.warmup_steps", text)
    elif critic.pretrain >= s.steps:
        text = f"the policy might never be updated in {s.steps} steps; give fewer than steps"
        yield problem_at(s, "critic.pretrain", text)
    if critic.freeze and not (s.model.critic_path or critic.pretrain or critic.warmup_steps):
        text = "it would stay as it is drawn; give model.critic_path, critic.pretrain or critic.warmup_steps"
        yield problem_at(s, "critic.freeze", text)
    if critic.warmup_steps >= s.steps:
        text = f"the actor would never be updated in {s.steps} steps; give fewer than steps"
        yield problem_at(s, "critic.warmup_steps", text)
    yield from _updates(s, "critic")


def _updates(s: TrainSettings, name: str) -> Problems:
    """Yield the problems of batch sizes, weight mode, warm-up and schedule of the actor or the critic (`name`)."""
    section, size = value_at(s, name), s.rollout.batch_size
    mini = section.mini_batch(size, s.rollout.n)
    if mini >= 1 and size % mini:
        text = f"must divide rollout.batch_size = {size}; both count sequences"
        yield problem_at(s, f"{name}.mini_batch_size", text)
    if section.draw_by == "prompt" and mini % s.rollout.n:
        text = f"must be a multiple of rollout.n = {s.rollout.n}, the rows of a prompt, with {name}.draw_by = prompt"
        yield problem_at(s, f"{name}.mini_batch_size", text)
    yield from pass_problems(s, name, "rollout.max_tokens")
    if section.micro_batch_size and section.micro_batch_size > mini:
        yield problem_at(s, f"{name}.micro_batch_size", f"must be at most the mini-batch of {mini} sequences")
    steps, updates = s.actor_steps if name == "actor" else s.steps, section.updates(size, s.rollout.n)
    words = f"the run's {steps * updates} updates ({steps} steps of {updates})"
    yield from rate_problems(section.optimizer, f"{name}.optimizer", steps * updates, words)
    if section.optimizer.schedule == "constant":
        reader = "the linear, cosine, exponential and wsd schedules"
        yield from unread_problems(s, [f"{name}.optimizer.min_lr_ratio"], reader)
