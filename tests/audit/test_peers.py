"""Adapters ask trainers for what fppo's own functions compute: shown on small trainers that are right."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch

from fppo import losses
from fppo.audit.peers import trl, verl


def batch(seed):
    """A mini-batch in one piece, with the gradient's leaf first."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(5, 6, generator=draw) < 0.7
    mask[:, 0] = True
    old, more, third = (torch.randn(5, 6, generator=draw, dtype=torch.float64) for _ in range(3))
    return ((old + 0.5 * more).requires_grad_(), old, third, mask), {"pieces": 1, "whole": mask}


def agrees(audited):
    """Whether a function and its reference have one loss and one gradient, on several batches."""
    for seed in range(4):
        (leaf, *others), more = batch(seed)
        found, expected = (fn(leaf, *others, **more) for fn in (audited.fn, audited.reference))
        grads = [torch.autograd.grad(loss, leaf)[0] for loss in (found, expected)]
        close = [torch.allclose(*pair, rtol=1e-9, atol=1e-12) for pair in ((found, expected), grads)]
        if not all(close):
            return False
    return True


def clipped(ratio, advantages, low, high):
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def gate(ratio, advantages, positive, negative):
    tau = torch.full_like(advantages, negative).masked_fill(advantages > 0, positive)
    return -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau


# TRL


class Trainer:
    """Each loss of a micro-batch as TRL's documentation has it."""

    def _compute_loss(self, model, inputs):
        log_probs, _, _ = self._get_per_token_logps_and_entropies(model, inputs)
        mask, advantages = inputs["completion_mask"].to(log_probs), inputs["advantages"]
        ratio = (log_probs - inputs["old_per_token_logps"]).exp()
        assert (self.importance_sampling_level, self.beta, self.entropy_coef) == ("token", 0.0, 0.0)
        if self.loss_type == "sapo":
            each = gate(ratio, advantages, self.args.sapo_temperature_pos, self.args.sapo_temperature_neg)
        elif self.loss_type == "cispo":
            each = -ratio.clamp(max=self.epsilon_high).detach() * advantages * log_probs
        else:
            each = clipped(ratio, advantages, self.epsilon_low, self.epsilon_high)
        total, steps = (each * mask).sum(), self.current_gradient_accumulation_steps
        if self.loss_type in ("grpo", "sapo"):
            return ((each * mask).sum(1) / mask.sum(1)).mean() / steps
        if self.loss_type == "bnpo":
            return total / mask.sum() / steps
        if self.loss_type == "dr_grpo":
            return total / (len(mask) * self.max_completion_length) / steps
        return total / (inputs["num_items_in_batch"] / self.accelerator.num_processes)


def test_a_right_trl_agrees_with_every_reference(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl.trainer.grpo_trainer", SimpleNamespace(GRPOTrainer=Trainer))
    found = {audited.name: audited for audited in trl.adapters()}
    own = [name for name, audited in found.items() if audited.reference is not None]
    assert own == ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"]
    assert [name for name in own if not agrees(found[name])] == []


def test_the_losses_of_trl_by_sequence_are_run_so(monkeypatch):
    class Seen:
        def _compute_loss(self, model, inputs):
            seen.append((self.loss_type, self.importance_sampling_level))
            return torch.zeros(())

    seen: list[tuple[str, str]] = []
    monkeypatch.setitem(sys.modules, "trl.trainer.grpo_trainer", SimpleNamespace(GRPOTrainer=Seen))
    (leaf, *others), more = batch(0)
    of_rows = [audited for audited in trl.adapters() if "sequence" in audited.name]
    for audited in of_rows:
        audited.fn(leaf, *others, **more)
    assert [audited.name for audited in of_rows] == ["grpo, sequence (GSPO)", "luspo, sequence"]
    assert seen == [("grpo", "sequence"), ("luspo", "sequence")]


# verl

TOKEN_LOSSES = {
    "vanilla": losses.ppo_clip,
    "gspo": lambda *tokens: losses.gspo(*tokens, clip_low=0.2, clip_high=0.2),
    "sapo": losses.sapo,
    "gpg": losses.gpg,
    "cispo": losses.cispo,
    "dro": lambda *tokens: losses.dro(*tokens, beta=0.1),
    "dppo_tv": lambda *tokens: losses.dppo_tv(*tokens, max_ratio=3.0),
    "dppo_kl": lambda *tokens: losses.dppo_kl(*tokens, max_ratio=3.0),
}
BY_ROWS = ("gspo", "sapo")  # whatever mode they are given


def aggregated(each, mask, mode, *, tokens, rows):
    each, lengths = each.where(mask, 0.0), mask.sum(1)
    return {
        "token-mean": each.sum() / tokens,
        "token-sum": each.sum(),
        "seq-mean-token-sum": each.sum() / rows,
        "seq-mean-token-mean": (each.sum(1) / lengths).sum() / rows,
        "seq-mean-token-sum-norm": each.sum() / mask.shape[1] / rows,
    }[mode]


class Core:
    """Policy losses and the value loss of a micro-batch as verl's documentation has them."""

    def __init__(self):
        self.asked = set()

    def get_policy_loss_fn(self, name):
        def fn(old, log_probs, advantages, mask, *, loss_agg_mode, config):
            self.asked.add(f"{name}, {loss_agg_mode}")
            info = config.global_batch_info
            each = TOKEN_LOSSES[name](log_probs, old, advantages, mask)[0]
            mode = "seq-mean-token-mean" if name in BY_ROWS else loss_agg_mode
            sizes = {"tokens": info["batch_num_tokens"], "rows": info["global_batch_size"]}
            return aggregated(each, mask, mode, **sizes), {}

        return fn

    def compute_value_loss(self, values, returns, old, mask, clip, mode, *, batch_num_tokens, global_batch_size):
        near = old + (values - old).clamp(-clip, clip)
        each = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)
        return aggregated(each, mask, mode, tokens=batch_num_tokens, rows=global_batch_size), 0.0


def test_a_right_verl_agrees_with_every_reference_of_a_whole_loss(monkeypatch):
    core = Core()
    workers = SimpleNamespace(
        PolicyLossConfig=lambda **how: SimpleNamespace(**how),
        ActorConfig=lambda **how: SimpleNamespace(**how, global_batch_info={}),
    )
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.core_algos", core)
    monkeypatch.setitem(sys.modules, "verl.workers.config", workers)
    monkeypatch.setitem(sys.modules, "verl.trainer.config", SimpleNamespace(AlgoConfig=SimpleNamespace))
    found = [audited for audited in verl.adapters() if audited.kind.startswith("whole")]
    own = [audited for audited in found if audited.reference is not None]
    modes = {"gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean"}
    names = [f"{name}, {modes.get(name, 'token-mean')}" for name in TOKEN_LOSSES]
    names += [f"vanilla, {mode}" for mode in ("token-sum", "seq-mean-token-sum", "seq-mean-token-mean")]
    assert [audited.name for audited in own] == [*names, "value loss, token-mean"]
    assert [audited.name for audited in own if not agrees(audited)] == []
    assert core.asked == {*names}
