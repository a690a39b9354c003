"""Losses by the names of tinker's protocol: sums over tokens, never means.

With p the log-prob of a target under the run's weights, q `logprobs`, A `advantages`, w `weights` and r = exp(p - q),
each per target, a request's loss is the sum over its targets of

| name                | per target                                       | config, with defaults                     |
|---------------------|--------------------------------------------------|-------------------------------------------|
| cross_entropy       | -w p                                             | none                                      |
| importance_sampling | -A r                                             | none                                      |
| ppo                 | -min(A r, A clip(r, low, high))                  | clip_low_threshold 0.8, ..._high_... 1.2  |
| cispo               | -A sg(clip(r, low, high)) p                      | those of ppo                              |
| dro                 | -A p + beta / 2 (p - q)^2                        | beta 0.05                                 |
| gspo                | ppo's with r = exp(mean of p - q over the datum) | those of ppo, 1 - 3e-4 and 1 + 4e-4       |
| stable_reinforce    | -A sg(min(r, 2)) p + kl_coeff / 2 (p - q)^2      | kl_coeff 0                                |
| custom              | a graph's number for each datum (`graphs`)       | none; the server knows graphs by loss_id  |

sg is a constant to the gradient. The log-ratio is clamped to +-20, but in dro not, and in gspo to at most 10.
Thresholds may also come per target, as inputs of the same names. The functions are those of `fppo.losses`, where a
target of no effect (w = 0, A = 0) is masked: its q may be anything.

dro has its quadratic term at every target, also where A = 0, as the service documents it: give q = p, or leave such
tokens out. gspo takes its mean over `sequence_ratio_mask`, by default where A is not 0; an advantage outside the mask
is refused. The service does not publish stable_reinforce; this one is REINFORCE with truncated importance weights
(arXiv:1802.01561, with a bound of 2), whose q are those recorded at sampling (`provenance`), on sampled tokens alone.
The published formulas: https://tinker-docs.thinkingmachines.ai/losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType

import attrs
from torch import Tensor

from fppo import losses
from fppo._errors import nearest
from fppo.serve.tinker.graphs import CustomLoss
from fppo.shapes import Mask, Tokens

INPUTS = (  # of data, in the protocol, besides target_tokens; "mask" is the cookbook's own, and no loss reads it
    *("weights", "logprobs", "advantages", "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask"),
    *("sampled", "mask"),
)
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
TRUNCATED = 2.0  # the largest importance weight of stable_reinforce
Columns = Mapping[str, Tensor]  # inputs of rows by name, each [B, N]
Config = Mapping[str, float]


@attrs.frozen
class Loss:
    """A loss by its name in the protocol, with its config; `graph` is the function of a loss "custom".

    Raises ValueError for unknown names and config, for numbers out of range, and for "custom" without a graph.
    """

    name: str
    config: Config = attrs.field(factory=dict)
    graph: CustomLoss | None = None

    def __attrs_post_init__(self) -> None:
        if self.name == "custom":
            if self.graph is None:
                raise ValueError("loss 'custom' needs the graph of a loss that was created before: give its loss_id")
            return
        if self.graph is not None:
            raise ValueError(f"loss {self.name!r} takes no graph: give the loss 'custom'")
        if self.name not in LOSSES:
            raise ValueError(_unknown(f"loss {self.name!r}", self.name, (*LOSSES, "custom")))
        defaults = LOSSES[self.name].config
        for key, value in self.config.items():
            if key not in defaults:
                raise ValueError(_unknown(f"{self.name}'s config {key!r}", key, defaults))
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{self.name}: {key} = {value}: give a finite number, 0 or more")
        full = self.full_config
        if LOW in full and not 0 <= full[LOW] <= full[HIGH]:
            raise ValueError(f"{self.name}: {LOW} = {full[LOW]}, {HIGH} = {full[HIGH]}: give the lower one first")

    @property
    def full_config(self) -> Config:
        """The config with the defaults of what is not given."""
        return {**LOSSES[self.name].config, **self.config} if self.name in LOSSES else {}

    @property
    def needs(self) -> tuple[str, ...]:
        """The inputs that every datum must have."""
        return LOSSES[self.name].needs if self.graph is None else self.graph.input_names

    @property
    def takes(self) -> tuple[str, ...]:
        """The inputs that the loss reads."""
        return (*self.needs, *(() if self.graph is not None else LOSSES[self.name].may))

    @property
    def flat(self) -> bool:
        """Whether data may have only one target for each position."""
        return self.graph is None and LOSSES[self.name].flat

    def counts(self, columns: Columns) -> Mask | None:
        """Where log-probs have an effect on the loss [B, N]; None: everywhere."""
        return None if self.graph is not None else LOSSES[self.name].counts(columns, self.full_config)

    def per_token(self, log_probs: Tokens, columns: Columns, real: Mask) -> Tokens:
        """The loss per target [B, N] of rows with targets where `real` is True; 0 elsewhere."""
        rule, config = LOSSES[self.name], self.full_config
        counts = rule.counts(columns, config)
        mask = real if counts is None else real & counts
        return rule.per_token(log_probs, columns, mask, config)


@attrs.frozen
class LossRule:
    """A loss of the table: the inputs that it needs and that it `may` read, its formula, where log-probs count, the
    default config, and whether data have one target for each position (`flat`)."""

    needs: tuple[str, ...]
    per_token: Callable[[Tokens, Columns, Mask, Config], Tokens]
    counts: Callable[[Columns, Config], Mask | None]
    config: Config = attrs.field(factory=dict)
    may: tuple[str, ...] = ()
    flat: bool = False


def _cross_entropy(log_probs: Tokens, columns: Columns, mask: Mask, config: Config) -> Tokens:
    del config
    return (-columns["weights"] * log_probs.where(mask, 0.0)).where(mask, 0.0)


def _importance_sampling(log_probs: Tokens, columns: Columns, mask: Mask, config: Config) -> Tokens:
    del config
    unclipped = {"clip_low": 1.0, "clip_high": math.inf, "dual_clip": None}
    return losses.ppo_clip(log_probs, columns["logprobs"], columns["advantages"], mask, **unclipped)[0]


def _bounds(columns: Columns, config: Config) -> dict[str, Tensor]:
    """The clip range of the ratio, as distances to 1 that `fppo.losses` takes, [B, N]."""
    like = columns["advantages"]
    low, high = (columns.get(name, like.new_full((), config[name])) for name in (LOW, HIGH))
    return {"clip_low": 1.0 - low, "clip_high": high - 1.0}


def _ppo(log_probs: Tokens, columns: Columns, mask: Mask, config: Config) -> Tokens:
    clip = _bounds(columns, config)
    return losses.ppo_clip(log_probs, columns["logprobs"], columns["advantages"], mask, dual_clip=None, **clip)[0]


def _cispo(log_probs: Tokens, columns: Columns, mask: Mask, config: Config) -> Tokens:
    return losses.cispo(log_probs, columns["logprobs"], columns["advantages"], mask, **_bounds(columns, config))[0]


def _dro(log_probs: Tokens, columns: Columns, mask: Mask, config: Config) -> Tokens:
    beta = log_probs.new_full((), config["beta"])
    return losses.dro(log_probs, columns["logprobs"], columns["advantages"], mask, beta=beta)[0]


def _gspo(log_probs: Tokens, columns: Columns, mask: Mask, config: Config) -> Tokens:
    return losses.gspo(log_probs, columns["logprobs"], columns["advantages"], mask, **_bounds(columns, config))[0]


def _stable_reinforce(log_probs: Tokens, columns: Columns, mask: Mask, config: Config) -> Tokens:
    old, bounded = columns["logprobs"], {"clip_low": 1.0, "clip_high": TRUNCATED - 1.0}
    policy = losses.cispo(log_probs, old, columns["advantages"], mask, **bounded)[0]
    if not config["kl_coeff"]:
        return policy
    return policy + config["kl_coeff"] * losses.kl_estimate(log_probs, old, "k2", mask=mask)


def _nonzero(name: str, columns: Columns, config: Config) -> Mask:
    del config
    return columns[name] != 0


def _ratio_mask(columns: Columns, config: Config) -> Mask:
    del config
    given = columns.get("sequence_ratio_mask")
    return columns["advantages"] != 0 if given is None else given != 0


def _everywhere(columns: Columns, config: Config) -> None:
    del columns, config


def _sampled(columns: Columns, config: Config) -> Mask:
    return columns["sampled"] != 0 if config["kl_coeff"] else columns["advantages"] != 0


_POLICY = ("logprobs", "advantages")
_CLIP = MappingProxyType({LOW: 0.8, HIGH: 1.2})
_ADVANTAGES = partial(_nonzero, "advantages")
LOSSES: Mapping[str, LossRule] = MappingProxyType(
    {
        "cross_entropy": LossRule(("weights",), _cross_entropy, partial(_nonzero, "weights")),
        "importance_sampling": LossRule(_POLICY, _importance_sampling, _ADVANTAGES),
        "ppo": LossRule(_POLICY, _ppo, _ADVANTAGES, _CLIP, (LOW, HIGH)),
        "cispo": LossRule(_POLICY, _cispo, _ADVANTAGES, _CLIP, (LOW, HIGH)),
        "dro": LossRule(_POLICY, _dro, _everywhere, {"beta": 0.05}),
        "gspo": LossRule(
            _POLICY, _gspo, _ratio_mask, {LOW: 1 - 3e-4, HIGH: 1 + 4e-4}, (LOW, HIGH, "sequence_ratio_mask"), flat=True
        ),
        "stable_reinforce": LossRule((*_POLICY, "sampled"), _stable_reinforce, _sampled, {"kl_coeff": 0.0}, flat=True),
    }
)


def first_problem(loss: Loss, columns: Columns, real: Mask) -> tuple[int, str] | None:
    """The first number that the loss cannot take, as its flat index in the columns [B, N] and a text; None if all are
    right. A custom loss takes any."""
    if loss.graph is not None:
        return None
    found: list[tuple[Mask, str]] = []
    counts = loss.counts(columns)
    effective = real if counts is None else real & counts
    for name in loss.takes:
        if name in columns:
            within = real if name in ("weights", "advantages", "sequence_ratio_mask", "sampled") else effective
            found.append((within & ~columns[name].isfinite(), f"{name} that is not finite"))
            if name in (LOW, HIGH):
                found.append((effective & (columns[name] < 0), f"{name} below 0"))
    if loss.flat:
        inside = effective if loss.name == "gspo" else columns["sampled"] != 0
        what = "sequence_ratio_mask" if loss.name == "gspo" else "sampled tokens"
        found.append((real & (columns["advantages"] != 0) & ~inside, f"an advantage outside its {what}"))
    return next(((int(where.flatten().nonzero()[0]), text) for where, text in found if where.any()), None)


def _unknown(noun: str, name: str, choices: Collection[str]) -> str:
    near = nearest(name, choices)
    return f"unknown {noun}{f'; did you mean {near!r}?' if near else ''} It knows {', '.join(choices) or 'none'}"
