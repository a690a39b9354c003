"""Checks of the sampling of responses: by which engine, in how many turns, ahead, or from files."""

from __future__ import annotations

from collections.abc import Iterator

from fppo.fields import FUNCTION, Problem, Problems, cluster_problems, hinder, problem_at, unread_problems, value_at
from fppo.rollout.turns.tools import TOOLS
from fppo.rollout.vllm.options import conflicts
from fppo.settings.placement import places_of
from fppo.settings.rollout import EnvironmentSettings, VllmSettings
from fppo.settings.train import TrainSettings
from fppo_kernels.table import BUILTIN, DEFAULTS, EXACT

# vllm.LLM's keywords that are settings of ours, and those on which draws, weights and log-probs rest
_SETTINGS = {
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_rows",
    "kv_cache_memory_bytes": "cache_gb",
    "gpu_memory_utilization": "memory_share",
    "dtype": "dtype",
    "enforce_eager": "eager",
    "enable_prefix_caching": "prefix_cache",
    "enable_sleep_mode": "sleep",
    "tensor_parallel_size": "tensor_parallel",
    "weight_transfer_config": "transport",
}
_FIXED = (
    *("model", "tokenizer", "skip_tokenizer_init", "load_format", "generation_config", "trust_remote_code"),
    *("async_scheduling", "logits_processors", "worker_extension_cls", "speculative_config"),
)


def rollout_problems(s: TrainSettings) -> Problems:
    """The conflicts of the section rollout, with itself and with others."""
    yield from _engine(s)
    yield from _turns(s)
    yield from _sampling(s)
    if s.rollout.draft_tokens and s.algorithm.routed:
        text = "the experts of drafted tokens are not reported, and algorithm.router_replay = rollout reads them"
        text = f"{text}; leave one of them out"
        yield problem_at(s, "rollout.draft_tokens", text)
    if s.rollout.exact:
        yield from (problem_at(s, "rollout.exact", f"{text}; leave one of them out") for text in exact_hindrances(s))


def _engine(s: TrainSettings) -> Problems:
    size, n = s.rollout.batch_size, s.rollout.n
    if n >= 1 and size % n:
        near = dict.fromkeys([max(size // n, 1) * n, (size // n + 1) * n])
        text = (
            f"must be a multiple of rollout.n = {n}, since it counts sequences; {' or '.join(map(str, near))} would do"
        )
        yield problem_at(s, "rollout.batch_size", text)
    if s.algorithm.reads("groups") and n == 1:
        text = f"algorithm.advantage = {s.algorithm.advantage.name!r} compares responses to one prompt; give 2 or more"
        yield problem_at(s, "rollout.n", text)
    if s.rollout.engine != "vllm":
        yield from unread_problems(s, ["rollout.vllm"], 'rollout.engine = "vllm"')
        return
    yield from vllm_problems(s, "rollout.vllm")
    yield from unread_problems(s, ["rollout.cache_gb"], "the embedded engine; give rollout.vllm.cache_gb")
    yield from unread_problems(s, ["rollout.draft_tokens"], "the embedded engine; vLLM drafts no tokens here")
    if not s.decodes and s.model.decode_attention != "sdpa":
        yield from unread_problems(s, ["model.decode_attention"], "the embedded engine")
    longest = "eval" if (s.eval.max_tokens or 0) > s.rollout.max_tokens else "rollout"
    needed = s.data.max_prompt_tokens + max(s.rollout.max_tokens, s.eval.max_tokens or 0)
    yield from too_short(s, "rollout.vllm", needed, f"data.max_prompt_tokens and {longest}.max_tokens")


def _environment(s: TrainSettings) -> Problems:
    """Yield the problems of an environment."""
    path = "rollout.environment"
    if s.rollout.turns.respond is not None:
        yield problem_at(s, f"{path}.name", "rollout.turns.respond is given too; who answers is one of the two")
    if s.algorithm.reads("baselines"):
        text = (
            f"{s.algorithm.advantage.name} samples one response more, in an episode of its own; take another estimator"
        )
        yield problem_at(s, f"{path}.name", text)
    if (s.data.path or s.data.rows is not None) and s.rollout.environment.episodes != EnvironmentSettings().episodes:
        yield problem_at(s, f"{path}.episodes", "data has the prompts; leave one of them out")
    yield from unread_problems(s, ["rollout.turns.failure"], "rollout.turns.respond")
    if s.rollout.environment.is_agent:
        yield from _agent(s)


def _agent(s: TrainSettings) -> Problems:
    """Yield the problems of an agent."""
    name = "rollout.environment.name"
    if s.mesh.least_ranks > 1:
        yield problem_at(s, name, "an agent is played on one rank; leave the mesh out")
    others = ("max_turns", "time_limit", "concurrency", "retries")
    names = [f"rollout.turns.{each}" for each in others] + ["rollout.environment.failure"]
    yield from unread_problems(s, names, "an environment; an agent has a time_limit and a concurrency of its own")


def _turns(s: TrainSettings) -> Problems:
    turns, name, path = s.rollout.turns, s.rollout.turns.respond, "rollout.turns.respond"
    if s.rollout.environment.used:
        yield from _environment(s)
    else:
        others = [f"rollout.environment.{x}" for x in ("episodes", "eval_episodes", "failure")]
        yield from unread_problems(s, others, "rollout.environment.name")
    if s.algorithm.group_by == "turn" and not (s.in_turns and s.algorithm.reads("groups")):
        text = "there are no turns to compare: it is for rollout.environment or rollout.turns.respond, and estimators"
        yield problem_at(s, "algorithm.group_by", f"{text} of groups, as grpo; leave it out")
    if turns.thinking == "drop" and s.in_turns:
        yield from (problem_at(s, "rollout.turns.thinking", text) for text in _drop_hindrances(s))
    if turns.turn_tokens is not None and s.in_turns and turns.turn_tokens > s.rollout.max_tokens:
        text = f"must be at most rollout.max_tokens = {s.rollout.max_tokens}, which bounds all turns together"
        yield problem_at(s, "rollout.turns.turn_tokens", text)
    if name is None:
        if not s.rollout.environment.used:
            yield from unread_problems(s, ["rollout.turns"], path)
        return
    if name not in TOOLS and not FUNCTION.fullmatch(name):
        yield problem_at(s, path, f"must be one of {sorted(TOOLS)}, or module:function")
    if turns.max_turns == 1:
        yield problem_at(s, "rollout.turns.max_turns", "respond would never be asked; give 2 or more")
    if name == "calculator" and not (s.rollout.stop or s.rollout.stop_token_ids):
        text = 'no turn would end with "=", which the calculator answers; give rollout.stop = ["="], or its token'
        yield problem_at(s, path, text)
    if s.rollout.from_ is not None and not s.has_held_out:
        yield problem_at(s, path, "rollout.from is given: nothing is sampled; leave it out")


def _drop_hindrances(s: TrainSettings) -> Iterator[str]:
    """Yield the settings with which turns cannot be rows of their own, and what to do."""
    text = "prompts of later turns are made anew from the messages so far"
    if not s.data.chat:
        yield f"{text}, by the chat template; give data.chat = true, or keep"
    if s.data.seen:
        yield f"{text}, without images and videos; give keep, or leave data.images and data.videos out"
    if s.data.row_tools is not None:
        yield f"{text}, without the tools of rows; give data.tools in place of data.row_tools, or keep"
    if s.eval.exact_values:
        yield "eval.exact_values knows a game as one row; give keep, or leave one of them out"


def _sampling(s: TrainSettings) -> Problems:
    """Yield the problems of responses sampled ahead, filtered, or read from files."""
    rollout, estimator = s.rollout, s.algorithm.advantage.name
    if not rollout.filter.groups:
        yield from unread_problems(s, ["rollout.filter.by", "rollout.filter.max_draws"], "rollout.filter.groups")
    elif rollout.n == 1:
        yield problem_at(s, "rollout.filter.groups", "rollout.n = 1: a single response has no other to equal; raise it")
    if rollout.ahead > s.steps:
        text = f"the run has {s.steps} steps, and batches of later ones would be made for nothing; give that or fewer"
        yield problem_at(s, "rollout.ahead", text)
    if rollout.interrupt:
        yield from (problem_at(s, "rollout.interrupt", text) for text in _uninterrupted(s))
    if rollout.from_ is None:
        return
    for name in (name for name in ("ahead", "save") if getattr(rollout, name)):
        yield problem_at(s, f"rollout.{name}", "rollout.from is given: nothing is sampled; leave one of them out")
    if s.algorithm.reads("baselines"):
        text = f"{estimator} samples a baseline for each prompt; take another estimator, or leave it out"
        yield problem_at(s, "rollout.from", text)


def _uninterrupted(s: TrainSettings) -> list[str]:
    """List the reasons why newer weights cannot enter a rollout under way."""
    texts = []
    if not s.rollout.ahead:
        texts.append("rollout.ahead = 0: nothing is sampled while weights change; give rollout.ahead = 1 or more")
    if s.in_turns:
        name = "rollout.environment" if s.rollout.environment.used else "rollout.turns.respond"
        texts.append(f"{name}: turns are not interrupted yet; leave one of them out")
    if s.algorithm.reads("baselines"):
        text = f"{s.algorithm.advantage.name} compares with a greedy response of one policy"
        texts.append(f"{text}; take another estimator, or leave it out")
    if s.algorithm.router_replay == "rollout":
        text = "each piece chooses experts anew"
        texts.append(f'algorithm.router_replay = "rollout": {text}; give "all", or leave it out')
    return texts


def exact_hindrances(s: TrainSettings) -> Iterator[str]:
    """Yield the settings with which the engine's log-probs would not be training's own, bit for bit, and why."""
    rollout, model, algorithm = s.rollout, s.model, s.algorithm
    device = s.device.partition(":")[0]
    tables = [EXACT[device]] if device in EXACT else EXACT.values()
    kernels = [(op, {names[op]: None for names in tables}, getattr(model, op)) for op in EXACT["cpu"]]
    known = (
        ("rollout.engine", rollout.engine != "embedded", "is a copy of the policy with other kernels"),
        ("rollout.ahead", rollout.ahead > 0, "trains on what an earlier policy sampled"),
        ("rollout.from", rollout.from_ is not None, "trains on what an earlier policy sampled"),
        ("device", device not in ("auto", *EXACT), "has no exact kernels"),
        ("model.compute_dtype", model.compute_dtype == "float16", "has no exact kernels"),
        ("model.remove_padding", not model.remove_padding, "runs padded rows, for which nothing is promised"),
        ("model.compile_layers", model.compile_layers, "makes programs for each number of rows"),
        ("model.mlp_slice_tokens", model.mlp_slice_tokens is not None, "cuts products otherwise than decoding does"),
        ("model.lora", model.lora.used, "is merged to decode, and runs beside its base in training"),
        ("placement", bool(places_of(s.placement)), "may run on other machines"),
        ("algorithm.correction.name", algorithm.correction.name != "none", "has nothing to weigh"),
        (
            "algorithm.old_log_probs",
            algorithm.old_log_probs not in (None, "engine"),
            "asks for others than the engine's",
        ),
        ("mesh.ring", s.mesh.ring and s.mesh.context > 1, "merges attention from parts"),
        *((f"mesh.{axis}", getattr(s.mesh, axis) > 1, "adds up in parts") for axis in ("tensor", "expert")),
        *(
            (
                f"model.{op}",
                own in BUILTIN[op] and own not in (*names, "auto", DEFAULTS[op]),
                f"is not exact, as {' or '.join(names)} is",
            )
            for op, names, own in kernels
        ),
    )
    named = {"model.lora": "an adapter", "placement": "other processes"}
    for path, value, why in hinder(s, known):
        yield f"{path.removesuffix('.name')} = {named.get(path, value)!r} {why}"


def vllm_problems(s: TrainSettings, path: str) -> Problems:
    """Yield the conflicts between the settings of a vLLM, whose section is at `path`."""
    section: VllmSettings = value_at(s, path)
    if section.memory_share is not None and section.cache_gb is not None:
        yield problem_at(s, f"{path}.cache_gb", "memory_share takes its place; leave one out")
    for name, value in section.extra.items():
        if name in _SETTINGS:
            yield Problem(f"{path}.extra.{name}", value, f"give {path}.{_SETTINGS[name]}")
        if name in _FIXED:
            text = "how weights come and tokens are drawn rests on it; leave it out"
            yield Problem(f"{path}.extra.{name}", value, text)
    yield from (problem._replace(path=f"{path}.{problem.path}") for problem in conflicts(section))
    yield from cluster_problems(s, f"{path}.cluster", ("local",))
    if section.host != "ray":
        yield from unread_problems(s, [f"{path}.cluster"], f'{path}.host = "ray"')
    if section.host == "local":
        names = ("restarts", "patience", "start_patience")
        yield from unread_problems(s, (f"{path}.{name}" for name in names), f'{path}.host = "process" or "ray"')


def too_short(s: TrainSettings, path: str, needed: int, names: str) -> Problems:
    """Yield a problem if the vLLM whose section is at `path` takes rows shorter than `needed` tokens, the longest
    prompt and response that the settings `names` allow."""
    length = value_at(s, path).max_model_len
    if length is not None and length < needed:
        yield problem_at(s, f"{path}.max_model_len", f"a prompt and its response may have {needed} tokens ({names})")


def vllm_on_ranks(s: TrainSettings, path: str, world: int) -> Problems:
    """Yield a problem if the vLLM whose section is at `path` cannot run beside each of `world` ranks."""
    if world > 1 and value_at(s, path).host == "local":
        text = 'in a process of several ranks vLLM does not start; give "process", for one of its own, or "ray"'
        yield problem_at(s, f"{path}.host", text)
