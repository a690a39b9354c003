"""What is wrong with the settings of experts' routers."""

from __future__ import annotations

from fppo.settings.problems import Problems, problem
from fppo.settings.train import TrainSettings


def expert_problems(s: TrainSettings) -> Problems:
    """What does not go together in the settings of experts."""
    experts, replay = s.actor.experts, s.algorithm.router_replay
    if experts.balance_coef > 0 and replay == "none":
        text = "it takes the loads of a whole mini-batch, as router_replay has them; give algorithm.router_replay"
        yield problem("actor.experts.balance_coef", experts.balance_coef, text)
    rates = {"bias_rate": experts.bias_rate, "balance_coef": experts.balance_coef, "z_coef": experts.z_coef}
    if s.model.compile_layers:
        text = "compiled layers do not tell what routers choose; leave out model.compile_layers"
        yield from (problem(f"actor.experts.{name}", x, text) for name, x in rates.items() if x > 0)
        if replay != "none":
            yield problem("algorithm.router_replay", replay, text)
    if replay == "rollout" and s.rollout.engine == "vllm" and s.rollout.from_ is None:
        text = "vLLM tells experts from its model runner V2 alone, for which fppo does not draw; "
        text += 'give "old_log_probs", or rollout.engine = "embedded"'
        yield problem("algorithm.router_replay", replay, text)
