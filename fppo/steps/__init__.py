"""Steps: functions from state to state, composed of models, losses, kernels and a mesh.

In: a `TrainState` (parameters, optimizer state, number of updates) and an `Experience`. Out: the next state and
metrics; or, without gradients, log-probs, values and scores. Micro-batches, packing and meshes change no result.
Begin with `actor.UpdateActor`; `loop` has mini-batches and gradients, `forward` passes, `optimizers` the updates of
parameters.
"""

from fppo.steps.actor import DistillTerm, PolicyTerms, SelectiveLoss, UpdateActor
from fppo.steps.adamw_8bit import adamw_8bit
from fppo.steps.confidence import UpdateConfidence, confidence_values, init_confidence
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import compute_log_probs, compute_outputs, compute_values, forward_micro_batch
from fppo.steps.hidden import UpdateHidden, hidden_values, init_hidden
from fppo.steps.loop import Loop, Objective, update, weighted_sum
from fppo.steps.loss_scale import loss_scaled
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.muon import muon
from fppo.steps.optimizers import Optimizer, adamw, from_function, lion, sgd
from fppo.steps.outputs import Forward, TokenOutputs, Top
from fppo.steps.popart import UpdatePopart
from fppo.steps.schedules import schedule
from fppo.steps.scores import compute_reward_scores
from fppo.steps.supervised import Demonstrations, UpdateSupervised, demonstrations, imitate
from fppo.steps.train_state import Scale, TrainState, init_state, optimizer_step

__all__ = [
    "Demonstrations",
    "DistillTerm",
    "Forward",
    "Loop",
    "MicroBatching",
    "Objective",
    "Optimizer",
    "PolicyTerms",
    "Scale",
    "SelectiveLoss",
    "TokenOutputs",
    "Top",
    "TrainState",
    "UpdateActor",
    "UpdateConfidence",
    "UpdateCritic",
    "UpdateHidden",
    "UpdatePopart",
    "UpdateSupervised",
    "adamw",
    "adamw_8bit",
    "compute_log_probs",
    "compute_outputs",
    "compute_reward_scores",
    "compute_values",
    "confidence_values",
    "demonstrations",
    "forward_micro_batch",
    "from_function",
    "hidden_values",
    "imitate",
    "init_confidence",
    "init_hidden",
    "init_state",
    "lion",
    "loss_scaled",
    "muon",
    "optimizer_step",
    "schedule",
    "sgd",
    "update",
    "weighted_sum",
]
