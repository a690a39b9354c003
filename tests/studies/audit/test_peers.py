"""Adapters ask trainers for what fppo's own functions compute: shown on small trainers that are right."""

from __future__ import annotations

import sys
from functools import partial
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fppo import advantages, losses
from fppo._errors import UsageError
from fppo.studies.audit import peers
from fppo.studies.audit.peers import adapters_of, agilerl, areal, areno, openrlhf, skyrl, trl, verl


def batch(seed):
    """A mini-batch in one piece, with the gradient's leaf first."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(5, 6, generator=draw) < 0.7
    mask[:, 0] = True
    old, more, third = (torch.randn(5, 6, generator=draw, dtype=torch.float64) for _ in range(3))
    return ((old + more).requires_grad_(), old, third, mask), {"pieces": 1, "whole": mask}


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


def test_an_entropy_bonus_is_its_term_alone(monkeypatch):
    """A mean over the tokens of the whole mini-batch, which is no policy gradient."""

    class Bonus:
        def _compute_loss(self, model, inputs):
            log_probs, entropies, _ = self._get_per_token_logps_and_entropies(model, inputs)
            loss = (log_probs * inputs["advantages"]).sum()  # whatever else there is
            assert self._entropy_bonus_enabled == (self.entropy_coef > 0)
            bonus = (entropies * inputs["completion_mask"]).sum() / inputs["num_items_in_batch"]
            return loss - self.entropy_coef * bonus * (self.loss_type == "dapo")

    monkeypatch.setitem(sys.modules, "trl.trainer.grpo_trainer", SimpleNamespace(GRPOTrainer=Bonus))
    found = trl.adapters()
    names = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "grpo, sequence (GSPO)", "luspo, sequence"]
    assert [(audited.name, audited.kind, audited.leave_out) for audited in found] == [
        *((name, "whole_loss", ()) for name in names),
        ("entropy bonus", "whole_loss", ("REINFORCE", "constants")),
    ]
    (leaf, *others), more = batch(5)
    bonus = found[-1].fn(leaf, *others, pieces=1, whole=torch.cat([more["whole"], more["whole"]]))
    expected = leaf.where(others[-1], 0.0).sum() / (2 * others[-1].sum())  # -log_probs are its entropies
    assert bonus.item() == pytest.approx(expected.item())


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


class Estimators:
    """GAE and estimators of groups as verl's documentation has them: rewards of tokens, and whitened advantages."""

    def compute_gae_advantage_return(self, rewards, values, mask, gamma, lam):
        assert mask[-2:].all()  # rows that whitening needs
        found = advantages.gae(rewards, values, mask.bool(), gamma=gamma, lam=lam)
        return advantages.whiten(found.advantages, mask.bool()), found.returns

    def get_adv_estimator_fn(self, name):
        def estimate(rewards, response_mask, index, config):
            assert config is CONFIG
            mask, scores = response_mask.bool(), rewards.sum(1)
            assert torch.equal(rewards, advantages.token_rewards(scores, mask))
            return getattr(advantages, name.removesuffix("_vectorized"))(scores, mask, torch.from_numpy(index))

        return estimate


CONFIG = SimpleNamespace()


def of_groups(seed):
    """Scores of two groups, whose rows have tokens between others that do not count, and their mask and groups."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(5, 6, generator=draw) < 0.6
    mask[:, 1] = True
    return torch.randn(5, generator=draw, dtype=torch.float64), mask, torch.tensor([7, 3, 7, 3, 7])


def test_a_right_verl_has_fppos_advantages(monkeypatch):
    core = Estimators()
    core.get_policy_loss_fn = lambda name: None
    workers = SimpleNamespace(PolicyLossConfig=SimpleNamespace, ActorConfig=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.core_algos", core)
    monkeypatch.setitem(sys.modules, "verl.workers.config", workers)
    monkeypatch.setitem(sys.modules, "verl.trainer.config", SimpleNamespace(AlgoConfig=lambda: CONFIG))
    found = {audited.name: audited for audited in verl.adapters()}
    names = ["geo_mean, token-mean", "kl_cov, token-mean", "clip_cov, token-mean", "vanilla, seq-mean-token-sum-norm"]
    assert [name for name in found if name in names] == names
    assert [found[name].reference for name in names] == [None] * 4
    groups = [name for name in found if name.startswith("estimator ")]
    assert groups == [f"estimator {name}" for name in verl.ESTIMATORS]
    for name in groups:
        audited = found[name]
        assert audited.kind == "advantages"
        assert (audited.group_rows, audited.tokens) == (2, 2 * ("plus_plus" in name))
        for seed in range(3):
            for ours, theirs in zip(audited.reference(*of_groups(seed)), audited.fn(*of_groups(seed)), strict=True):
                torch.testing.assert_close(theirs, ours)
    assert found["gae, before whitening"].kind == "gae"
    _same_gae(found["gae, before whitening"].fn)


def _same_gae(fn):
    for seed in range(3):
        (values, rewards, _, mask), _ = batch(seed)
        values, how = values.detach(), {"gamma": 0.9, "lam": 0.6}
        for ours, theirs in zip(advantages.gae(rewards, values, mask, **how), fn(rewards, values, mask, **how)):
            torch.testing.assert_close(theirs.where(mask, 0.0), ours)


# AReno, AReaL, SkyRL and AgileRL, whose modules are made here


def standing(monkeypatch, tmp_path, module, **functions):
    """Have a package with this module alone, whose functions are the given ones."""
    package, *inner = module.split(".")[:-1]
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    made = ModuleType(module)
    made.__dict__.update(functions)
    for name in [package, *(".".join([package, *inner[: n + 1]]) for n in range(len(inner)))]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, module, made)


def _of_pack(loss_fn, mode):
    def fn(pack, log_probs):
        shape = pack["packed_num_sequences"], -1
        names = ("packed_logprobs", "packed_advantages", "packed_response_mask")
        old, advantages, mask = (pack[name].view(shape) for name in names)
        assert pack["packed_seq_ids"].view(shape).eq(torch.arange(shape[0])[:, None]).all()
        each = loss_fn(log_probs.view(shape), old, advantages, mask)[0]
        return aggregated(each, mask, mode, tokens=mask.sum(), rows=len(mask)), {}

    return fn


def test_a_right_areno_agrees_with_every_reference(monkeypatch, tmp_path):
    functions = {
        "grpo_loss_fn": _of_pack(partial(losses.ppo_clip, dual_clip=None), "token-mean"),
        "gspo_loss_fn": _of_pack(partial(losses.gspo, clip_low=3e-4, clip_high=3e-4), "seq-mean-token-mean"),
        "ppo_loss_fn": _of_pack(losses.ppo_clip, "token-mean"),
    }
    standing(monkeypatch, tmp_path, "areno.api.backend.cuda.losses", **functions)
    found = areno.adapters()
    assert [audited.name for audited in found] == ["grpo", "gspo", "ppo"]
    assert [audited.name for audited in found if not agrees(audited)] == []
    (leaf, *others), more = batch(1)
    one, three = (found[0].fn(leaf, *others, **more | {"pieces": pieces}) for pieces in (1, 3))
    assert one.item() == pytest.approx(3 * three.item())  # the trainer divides by the number of packs


def test_a_right_areal_agrees_with_every_reference(monkeypatch, tmp_path):
    def ppo_actor_loss_fn(
        logprobs, proximal_logprobs, old_logprobs, advantages, eps_clip, loss_mask, c_clip=None, **how
    ):
        assert proximal_logprobs is old_logprobs
        seen.append((eps_clip, how))
        dual = {"dual_clip": c_clip}
        each = losses.ppo_clip(logprobs, old_logprobs, advantages, loss_mask, **dual)[0]
        return each.where(loss_mask, 0.0).sum() / loss_mask.count_nonzero(), {}

    def sapo_loss_fn(logprobs, old_logprobs, advantages, tau_pos, tau_neg, loss_mask):
        each = losses.sapo(logprobs, old_logprobs, advantages, loss_mask, tau_pos=tau_pos, tau_neg=tau_neg)[0]
        return each.where(loss_mask, 0.0).sum() / loss_mask.count_nonzero(), {}

    seen: list = []
    functions = {"ppo_actor_loss_fn": ppo_actor_loss_fn, "sapo_loss_fn": sapo_loss_fn}
    standing(monkeypatch, tmp_path, "areal.utils.functional.functional", **functions)
    found = {audited.name: audited for audited in areal.adapters()}
    own = ["ppo", "ppo, dual clip 3", "sapo"]
    assert [name for name, audited in found.items() if audited.reference is not None] == own
    assert [name for name in own if not agrees(found[name])] == []
    (leaf, *others), more = batch(2)
    found["ppo, sequence (GSPO)"].fn(leaf, *others, **more)
    assert seen[-1] == (0.2, {"importance_sampling_level": "sequence"})
    whole = torch.cat([more["whole"], more["whole"]])
    halves = [found["ppo"].fn(leaf, *others, pieces=2, whole=whole) for _ in range(2)]
    assert sum(halves).item() == pytest.approx(found["ppo"].fn(leaf, *others, **more).item())


def _summed(loss_fn):
    def fn(log_probs, old_log_probs, advantages, config, loss_mask):
        assert config.loss_reduction == "token_mean"
        return loss_fn(log_probs, old_log_probs, advantages, loss_mask.bool())[0].where(loss_mask > 0, 0.0).sum(), {}

    return fn


def test_a_right_skyrl_has_fppos_numbers(monkeypatch, tmp_path):
    def estimator(fn):
        return lambda rewards, mask, index: fn(rewards.sum(1), mask.bool(), torch.from_numpy(index))

    functions = {
        "apply_loss_reduction_to_advantages_minibatch": lambda advantages, mask, mode, size, most: (
            advantages / mask.sum()
        ),
        "ppo_policy_loss": lambda *given, loss_mask: _summed(
            partial(losses.ppo_clip, dual_clip=given[3].clip_ratio_c if "dual" in given[3].policy_loss_type else None)
        )(*given, loss_mask=loss_mask),
        "gspo_policy_loss": _summed(partial(losses.gspo, clip_low=0.2, clip_high=0.2)),
        "compute_policy_loss_cispo": _summed(partial(losses.cispo, clip_low=1e-15, clip_high=5.0)),
        "sapo_policy_loss": _summed(losses.sapo),
        "compute_gae_advantage_return": Estimators().compute_gae_advantage_return,
        **{f"compute_{x}_outcome_advantage": estimator(getattr(advantages, x)) for x in ("grpo", "rloo")},
        "compute_maxrl_advantage": estimator(advantages.maxrl),
        **dict.fromkeys(
            ("compute_policy_loss_clip_cov", "compute_policy_loss_kl_cov", "dppo_policy_loss", "ppo_critic_loss")
        ),
    }
    standing(monkeypatch, tmp_path, "skyrl.backends.skyrl_train.utils.ppo_utils", **functions)
    found = {audited.name: audited for audited in skyrl.adapters()}
    own = ["regular", "dual_clip", "gspo", "cispo", "sapo"]
    assert [x.name for x in found.values() if x.kind == "whole_loss" and x.reference is not None] == own
    assert [name for name in own if not agrees(found[name])] == []
    for name in ("grpo", "rloo", "maxrl"):
        audited = found[f"estimator {name}"]
        for ours, theirs in zip(audited.reference(*of_groups(4)), audited.fn(*of_groups(4)), strict=True):
            torch.testing.assert_close(theirs, ours)
    _same_gae(found["gae, before whitening"].fn)


class GroupTrainer:
    """Losses and advantages as AgileRL's documentation of its GRPO has them."""

    def _compute_policy_loss(self, mask, log_probs, old, reference, advantages, turns, level, objective):
        assert (self.beta, self.kl_clamp, self.off_policy_sequence_mask_threshold, turns) == (0.0, None, None, None)
        ratio = (log_probs - old).exp()
        if level == "trajectory":
            ratio = (((log_probs - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)).exp()
        each = clipped(ratio, advantages, 1 - self.clip_coef_min, self.clip_coef_max - 1)
        if objective == "cispo":
            each = -ratio.clamp(max=self.clip_coef_max).detach() * advantages * log_probs
        if self.loss_norm == "micro_batch":
            return ((each * mask).sum(1) / mask.sum(1)).mean(), None, None
        return (each * mask).sum() * self.gradient_accumulation_steps / self._window_action_tokens, None, None

    def _calculate_advantage(self, rewards):
        each = rewards.view(-1, self.group_size)
        scale = 1.0 if self.adv_norm == "mean_only" else each.std(1, keepdim=True) + 1e-6
        return ((each - each.mean(1, keepdim=True)) / scale).view(-1, 1)


class TokenTrainer:
    """AgileRL's PPO by the token, with the score at the last one."""

    def _ppo_policy_loss(self, log_probs, mask, old, reference, advantages, turns, count, granularity):
        assert (self.beta, count, granularity, turns.max().item()) == (0.0, 1, "token", 0)
        each = clipped((log_probs - old).exp(), advantages, self.clip_coef, self.clip_coef)
        return (each * mask).sum() / mask.sum(), {}

    def _ppo_value_loss(self, values, old, returns, mask, turns, count, granularity):
        near = old + (values - old).clamp(-self.clip_coef, self.clip_coef)
        each = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
        return 0.5 * self.vf_coef * (each * mask).sum() / mask.sum()

    def _compute_gae_returns_token(self, rewards, values, mask, lam):
        found, returns = advantages.gae(rewards, values, mask, gamma=self.gamma, lam=lam)
        return returns, found

    def _compute_token_rewards(self, mask, rewards, turns):
        return rewards * (mask & (mask.flip(1).cumsum(1).flip(1) == 1))


def test_a_right_agilerl_agrees_with_every_reference(monkeypatch, tmp_path):
    standing(monkeypatch, tmp_path, "agilerl.algorithms.grpo", GRPO=GroupTrainer)
    monkeypatch.setitem(sys.modules, "agilerl.algorithms.ppo_llm", SimpleNamespace(PPO=TokenTrainer))
    found = {audited.name: audited for audited in agilerl.adapters()}
    own = ["grpo", "grpo, micro_batch", "cispo", "ppo"]
    assert [x.name for x in found.values() if x.kind == "whole_loss" and x.reference is not None] == own
    assert [name for name in own if not agrees(found[name])] == []
    (leaf, *others), more = batch(1)
    part = {"pieces": 3, "whole": torch.cat([more["whole"]] * 2)}
    for name, times in {"grpo": 2, "ppo": 3}.items():  # grpo divides by the tokens of the whole window
        one, other = (found[name].fn(leaf, *others, **how) for how in (more, part))
        assert one.item() == pytest.approx(times * other.item())
    audited = found["advantages, mean_std"]
    torch.testing.assert_close(audited.fn(*of_groups(4))[0], audited.reference(*of_groups(4))[0])
    scores, mask, groups = of_groups(4)
    returns, _ = found["returns of one turn"].fn(scores, mask, groups)
    torch.testing.assert_close(returns, scores[:, None] * mask)
    _same_gae(found["gae, before whitening"].fn)


# OpenRLHF

LOSS = """
import torch

SEEN = []


class PolicyLoss:
    def __init__(self, dual_clip=None, token_level_loss=True, policy_loss_type="ppo"):
        self.dual_clip, self.by_token, self.kind = dual_clip, token_level_loss, policy_loss_type

    def __call__(self, log_probs, old, advantages, action_mask, batch_num_tokens, global_batch_size):
        SEEN.append(self.kind)
        ratio = (log_probs - old).exp()
        each = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        if self.dual_clip is not None:
            bound = -self.dual_clip * advantages
            each = torch.where(advantages < 0, torch.minimum(each, bound), each)
        if self.by_token:
            return (each * action_mask).sum() / batch_num_tokens, None
        return ((each * action_mask).sum(1) / action_mask.sum(1)).sum() / global_batch_size, None


class ValueLoss:
    def __init__(self, clip_eps):
        self.clip = clip_eps

    def __call__(self, values, old, returns, action_mask, batch_num_tokens, global_batch_size):
        near = old + (values - old).clamp(-self.clip, self.clip)
        each = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)
        return (each * action_mask).sum() / batch_num_tokens
"""
MAKER = """
from fppo import advantages
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.models.loss import PolicyLoss


class Experience:
    pass


class Maker:
    def get_advantages_and_returns(self, values, rewards, action_mask, gamma, lambd):
        return advantages.gae(rewards, values, action_mask, gamma=gamma, lam=lambd)
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A small OpenRLHF, whose packages do not import by themselves."""
    for name, text in (("models/loss", LOSS), ("trainer/ppo_utils/experience_maker", MAKER)):
        file = tmp_path / f"openrlhf/{name}.py"
        for folder in [*file.relative_to(tmp_path).parents][:-2]:
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / "__init__.py").write_text("raise ImportError('no GPU')")
        file.write_text(text)
    (tmp_path / "openrlhf/__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]:
        del sys.modules[name]


@pytest.mark.usefixtures("installed")
def test_a_right_openrlhf_agrees_with_every_reference():
    found = {audited.name: audited for audited in openrlhf.adapters()}
    own = ["PolicyLoss, tokens", "PolicyLoss, rows", "PolicyLoss, dual clip 3", "ValueLoss"]
    assert [*found] == [*own[:3], "PolicyLoss, gspo", "ValueLoss", "gae"]
    assert [name for name, audited in found.items() if audited.reference is not None] == own
    assert [name for name in own if not agrees(found[name])] == []
    assert [audited.kind for audited in found.values()] == [*["whole_loss"] * 4, "whole_value_loss", "gae"]
    seen = sys.modules["openrlhf.models.loss"].SEEN
    assert {*seen} == {"ppo"}
    (leaf, *others), more = batch(0)
    found["PolicyLoss, gspo"].fn(leaf, *others, **more)
    assert seen[-1] == "gspo"
    _same_gae(found["gae"].fn)


# any trainer


@pytest.mark.usefixtures("installed")
def test_a_trainer_that_is_installed_has_its_adapters_and_versions(monkeypatch):
    monkeypatch.setattr(metadata, "version", {"openrlhf": "0.1", "trl": "7", "torch": "2"}.__getitem__)
    found, versions = adapters_of("openrlhf")
    assert [audited.name for audited in found] == [audited.name for audited in openrlhf.adapters()]
    assert versions == ("openrlhf 0.1", "torch 2")
    monkeypatch.setitem(sys.modules, "trl.trainer.grpo_trainer", SimpleNamespace())
    with pytest.raises(UsageError, match=r"^trl: .*GRPOTrainer.*the release that docs/audit.md names, not for trl 7$"):
        adapters_of("trl")
    monkeypatch.setitem(sys.modules, "trl.trainer.grpo_trainer", None)
    with pytest.raises(UsageError, match=r"^trl 7 does not import: .*; it needs\n  pip install trl$"):
        adapters_of("trl")


def test_every_trainer_is_installed_by_its_own_name():
    assert [*peers.PEERS] == ["trl", "verl", "openrlhf", "areno", "areal", "skyrl", "agilerl"]
    for name, peer in peers.PEERS.items():
        assert (peer.module, peer.package) == (f"fppo.studies.audit.peers.{name}", name)
        assert peer.install[0].removeprefix("pip install ").removeprefix("--no-deps ").partition("==")[0] == name
