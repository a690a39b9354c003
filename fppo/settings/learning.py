"""The settings of how scores become advantages, and these updates of policy and critic."""

from __future__ import annotations

from decimal import Decimal
from typing import Literal

import attrs

from fppo.fields import Table, above, at_least, at_most, below, nonempty, setting, word_or
from fppo.settings.component import given, named, requires
from fppo.settings.model import Offload
from fppo.settings.tables import CORRECTIONS, DIVERGENCES, ESTIMATORS, OPTIMIZERS, POLICY_LOSSES, VALUE_HEADS

OldLogProbs = Literal["pass", "engine", "update", "auto"]
KlKind = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]
DEFAULT_TOKEN_BUDGET = 16384
MOST_MINI_BATCHES = 4  # of a batch, unless settings say how large they are
WeightMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@attrs.frozen(kw_only=True)
class KlRewardSettings:
    """A penalty in the token rewards for leaving the reference."""

    coef: float = setting(0.0, at_least(0))
    """The factor of the KL estimate taken off the token rewards; 0: none, and no reference model for it."""
    kind: KlKind = setting("k1")
    """The estimator of the KL divergence; k1, or k1+, which is the same in a reward: the others are for losses."""
    controller: Literal["fixed", "adaptive"] = setting("fixed")
    """Keep coef, or steer it to the target."""
    target: float = setting(0.1, above(0))
    """The KL per token that the adaptive controller steers to."""
    horizon: int = setting(10000, at_least(1))
    """Sequences over which the adaptive controller acts."""


@attrs.frozen(kw_only=True)
class CorrectionSettings:
    """The correction for the difference between the engine's log-probs and the trainer's, and any of its keywords."""

    name: str = named("none", CORRECTIONS, "a correction")
    """none, rollout (importance weights and rejection), or module:function for your own."""
    keywords: Table = given()


@attrs.frozen(kw_only=True)
class AdvantageSettings:
    """The estimator of advantages, and any of its keywords."""

    name: str = named("gae", ESTIMATORS, "an estimator")
    """Its name, gae (PPO's), turn_gae, td and vtrace with a critic; or module:function for your own."""
    keywords: Table = given()


@attrs.frozen(kw_only=True)
class AlgorithmSettings:
    """How scores become advantages."""

    advantage: AdvantageSettings = setting(AdvantageSettings)
    """The estimator of advantages."""
    group_by: Literal["prompt", "turn"] = setting("prompt")
    """Estimators of groups compare responses to one prompt, or the turns of the same number in these."""
    gae: str = setting("scan", nonempty("give the name of a kernel for gae, as scan"))
    """The kernel for gae with one decay for all rows: scan, loop, cpp (for CPUs); or module:function."""
    whiten: bool | None = setting(None)
    """Give advantages mean 0 and variance 1 over the whole batch; None: with a critic, and where the estimator does."""
    kl: KlRewardSettings = setting(KlRewardSettings)
    """A penalty in the token rewards for leaving the reference."""
    old_log_probs: OldLogProbs | None = setting(None)
    """From a pass before the update, the engine, or the update; auto: the cheapest sound one; None: update or pass."""
    correction: CorrectionSettings = setting(CorrectionSettings)
    """What is done about the difference between the engine's log-probs and the trainer's."""
    router_replay: Literal["none", "rollout", "old_log_probs", "all"] = setting("none")
    """Have the update choose the experts of the rollout, or of the pass for old log-probs (all: the reference, too)."""

    def reads(self, column: str) -> bool:
        """Whether the estimator of advantages cannot do without this column of a batch."""
        return requires(self.advantage, ESTIMATORS, column)

    @property
    def uses_critic(self) -> bool:
        """Whether the run trains a critic."""
        return self.reads("values")

    @property
    def routed(self) -> bool:
        """Whether rollouts hold the experts that routers chose."""
        return self.router_replay == "rollout"


@attrs.frozen(kw_only=True)
class OptimizerSettings:
    """The optimizer, its learning rate, and any keywords of its function."""

    name: str = named("adamw", OPTIMIZERS, "an optimizer")
    """Its name; or module:function, called with the schedule (update's number -> rate) for an Optimizer."""
    lr: float = setting(1e-6, above(0))
    """The peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "exponential", "wsd"] = setting("constant")
    """How the rate falls to the run's end; exponential: by one factor each update; wsd: in the last fifth alone."""
    warmup_steps: int = setting(0, at_least(0))
    """Updates over which the rate rises, skipped ones not counted; the first is not 0."""
    warmup_ratio: float = setting(0.0, at_least(0), below(1))
    """In place of warmup_steps, these as a part of the model's updates in the run, rounded down."""
    min_lr_ratio: float = setting(0.0, at_least(0), at_most(1))
    """Where the rate ends, as a part of lr; exponential needs one above 0."""
    num_cycles: int = setting(1, at_least(1))
    """How often the rate falls from its peak to its end, in cycles of equal length (cosine)."""
    keywords: Table = given()

    def warmup(self, updates: int) -> int:
        """The updates of the warm-up, in a run of `updates` updates."""
        return self.warmup_steps or int(Decimal(str(self.warmup_ratio)) * updates)


@attrs.frozen(kw_only=True)
class ExpertSettings:
    """How the routers of a mixture of experts are trained; the loads of experts are reported anyway."""

    bias_rate: float = setting(0.0, at_least(0))
    """How far an update moves the routers' biases towards equal loads (DeepSeek-V3 and the like); 0: they stay."""
    balance_coef: float = setting(0.0, at_least(0))
    """The factor of a loss that is least where the loads of experts are equal; it needs algorithm.router_replay."""
    z_coef: float = setting(0.0, at_least(0))
    """The factor of the squared logsumexp of the routers' logits, which keeps them small."""


@attrs.frozen(kw_only=True)
class EntropyControlSettings:
    """A controller that moves entropy_coef so that the policy keeps an entropy."""

    target: float | None = setting(None, above(0))
    """The entropy per token to hold, in nats or as a part of the first step's (unit); None: entropy_coef stays."""
    unit: Literal["nats", "start"] = setting("nats")
    """What target is in: nats, or parts of the entropy of the first step."""
    rate: float = setting(0.2, above(0))
    """How far asinh(entropy_coef / 0.003) moves in a step, for each unit of log(target / entropy)."""
    damping: float = setting(20.0, at_least(0))
    """How many such moves the last step's entropy adds, against swings."""
    low: float = setting(0.0)
    """The least entropy_coef; below 0 it may be a penalty."""
    high: float = setting(1.0)
    """The largest entropy_coef."""


@attrs.frozen(kw_only=True)
class LossSettings:
    """The policy loss, and any of its keywords."""

    name: str = named("ppo_clip", POLICY_LOSSES, "a policy loss")
    """Its name, or module:function for your own."""
    keywords: Table = given()


TokenBudget = Literal["auto"] | int | None


def passes_of(sequences: int | None, tokens: TokenBudget) -> tuple[int | None, int | None]:
    """(sequences, tokens) per pass, of which one is None, from settings that may give one of them."""
    if sequences:
        return sequences, None
    return None, DEFAULT_TOKEN_BUDGET if tokens in (None, "auto") else tokens


def _own_first(cls: type, fields: list[attrs.Attribute]) -> list[attrs.Attribute]:
    """The fields of the class itself before those of the class that it extends."""
    return sorted(fields, key=lambda field: field.name not in cls.__annotations__)


@attrs.frozen(kw_only=True)
class UpdateSettings:
    """How a batch becomes updates, of the policy as of the critic."""

    weight_mode: WeightMode = setting("token-mean")
    """How per-token losses are weighted into one."""
    horizon: int | None = setting(None, at_least(1))
    """The constant length that seq-mean-token-sum-norm divides by."""
    epochs: int = setting(1, at_least(1))
    """Passes over the batch in a step."""
    mini_batch_size: int | None = setting(None, at_least(1))
    """Sequences per optimizer update; it must divide rollout.batch_size; None: a quarter of them."""
    draw_by: Literal["row", "prompt"] = setting("row")
    """What mini-batches are drawn by: rows, or prompts with all of their rows, which are then computed once."""
    micro_batch_size: int | None = setting(None, at_least(0))
    """Sequences per forward and backward pass; 0 or None: split by token_budget."""
    token_budget: TokenBudget = setting(None, word_or("auto", at_least(0)))
    """Tokens per forward and backward pass; auto: at most 16384, as many as fit; None: 16384, or micro_batch_size."""

    @property
    def passes(self) -> tuple[int | None, int | None]:
        """(sequences, tokens) per forward and backward pass; one of them is None."""
        return passes_of(self.micro_batch_size, self.token_budget)

    def mini_batch(self, batch_size: int, n: int) -> int:
        """Sequences per optimizer update, of a batch with `n` responses to each prompt.

        Where settings do not say, a batch has four mini-batches, or as many fewer as divide it into equal ones, of
        whole prompts where these are drawn.
        """
        if self.mini_batch_size is not None:
            return self.mini_batch_size
        drawn = batch_size // max(n, 1) if self.draw_by == "prompt" else batch_size
        return batch_size // next(parts for parts in range(MOST_MINI_BATCHES, 0, -1) if drawn % parts == 0)

    def updates(self, batch_size: int, n: int) -> int:
        """Optimizer updates that a batch of so many sequences becomes, `n` for each prompt."""
        return -(-batch_size // max(self.mini_batch(batch_size, n), 1)) * max(self.epochs, 1)


@attrs.frozen(kw_only=True)
class DistillSettings:
    """A divergence from a teacher's distribution of each token, as a term of the loss, and any of its keywords."""

    name: str = named("none", DIVERGENCES, "a divergence")
    """none, reverse_kl, forward_kl, jensen_shannon (GKD's, with beta); or module:function for your own."""
    coef: float = setting(1.0, above(0))
    """The factor of the term; the policy loss is beside it."""
    top: Literal["all"] | int = setting(100, word_or("all", at_least(1)))
    """It is of the teacher's so many most probable tokens, and all others as one; or of all tokens."""
    keywords: Table = given()

    @property
    def used(self) -> bool:
        """Whether there is such a term."""
        return self.name != "none"


@attrs.frozen(kw_only=True, field_transformer=_own_first)
class ActorSettings(UpdateSettings):
    """How the policy is updated."""

    loss: LossSettings = setting(LossSettings)
    """The policy loss."""
    entropy_coef: float = setting(0.0)
    """The factor of the entropy bonus; with entropy_control.target that of the first step."""
    entropy_control: EntropyControlSettings = setting(EntropyControlSettings)
    """A controller that moves entropy_coef so that the policy keeps an entropy."""
    entropy_quantiles: bool = setting(False)
    """Report the entropy that 10, 50 and 90 % of a mini-batch's tokens do not exceed."""
    top_entropy_share: float = setting(1.0, above(0), at_most(1))
    """The share of a mini-batch's tokens, those of highest entropy, that the policy loss is of; 1: all."""
    kl_coef: float = setting(0.0, at_least(0))
    """The factor of a KL term in the loss; 0: none, and no reference model for it."""
    kl_kind: KlKind = setting("k3")
    """The estimator of that KL term: k2 and those with + have its own gradient, k3 that of KL(reference || policy)."""
    distill: DistillSettings = setting(DistillSettings)
    """A divergence from a teacher's distributions, beside the policy loss."""
    positive_nll_coef: float = setting(0.0, at_least(0))
    """The factor of the mean of -log-prob over the tokens of responses with a positive outcome, VAPO's."""
    experts: ExpertSettings = setting(ExpertSettings)
    """How the routers of a mixture of experts are trained."""
    optimizer: OptimizerSettings = setting(OptimizerSettings)
    """The optimizer and its learning rate."""


@attrs.frozen(kw_only=True)
class ValueHeadSettings:
    """Loss that fits the critic to the returns, with the head that goes with it, and any of its keywords."""

    name: str = named("mse", VALUE_HEADS, "a value loss")
    """Its name; hl_gauss, two_hot and quantile have a head of several outputs; or module:function for your own."""
    keywords: Table = given()


@attrs.frozen(kw_only=True, field_transformer=_own_first)
class CriticSettings(UpdateSettings):
    """How the critic is updated; there is one if the estimator of algorithm.advantage reads values."""

    reads: Literal["tokens", "confidence", "hidden"] = setting("tokens")
    """The tokens, as a model of its own; or, without one, how sure the policy is of them, or its hidden states."""
    privileged: int = setting(0, at_least(0))
    """The most tokens of the ground truth that it knows, and the policy does not: a model reads them; 0: none."""
    ensemble: int = setting(1, at_least(1))
    """How many small ones, each of its own share of the prompts, whose mean is the value (confidence, hidden)."""
    leave_agreed: float = setting(0.0, at_least(0), below(1))
    """The share of tokens, those in which the ensemble agrees most, that the policy does not learn from (AsyPPO)."""
    leave_disputed: float = setting(0.0, at_least(0), below(1))
    """The share of tokens, those in which the ensemble disagrees most, that have no entropy bonus (AsyPPO)."""
    loss: ValueHeadSettings = setting(ValueHeadSettings)
    """What fits it to the returns, with the head that goes with it."""
    popart: float = setting(0.0, at_least(0), at_most(1))
    """The share of a step in the mean and deviation of returns, the units it learns in (mse, huber); 0: it has none."""
    warmup_steps: int = setting(0, at_least(0))
    """Steps at the start in which only the critic is updated."""
    pretrain: int = setting(0, at_least(0))
    """In place of warmup_steps, the most steps that fit it to fresh rollouts of the policy as it is."""
    pretrain_patience: int = setting(3, at_least(1))
    """They end once the variance that it explains of rollouts it has not seen has not risen for so many steps."""
    pretrain_rise: float = setting(0.01, at_least(0))
    """What counts as a rise of that."""
    freeze: bool = setting(False)
    """Leave it as it is once the policy is updated: as it was loaded, warmed up or pretrained."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = setting(None)
    """The dtype of its forward and backward passes; None: model.compute_dtype."""
    checkpoint_layers: Literal["selective"] | bool | None = setting(None)
    """Recompute each of its layers in the backward pass; None: as model.checkpoint_layers."""
    offload: Offload | None = setting(None)
    """What of it to keep in the host's memory, as model.offload has it (GPUs); None: as model.offload."""
    optimizer: OptimizerSettings = attrs.field(factory=lambda: OptimizerSettings(lr=1e-5))
    """The optimizer and its learning rate."""
