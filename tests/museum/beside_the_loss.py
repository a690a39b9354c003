"""Failures beside the loss: log-probs of kernels, and what a resumed run forgets."""

import torch

from fppo import laws, tree
from fppo_kernels.log_probs.reference import reference

from .exhibit import Exhibit, raised


def of_log_probs(source, story, law, kernel):
    """An exhibit of a kernel for log-probs and entropy."""
    return raised(source, story, law, lambda: laws.check_kernel("log_probs", kernel, dtypes=(torch.float64,)))


def without_slope(hidden, weight, labels, **more):
    found = reference(hidden, weight, labels, **more)
    return found._replace(entropy=None if found.entropy is None else found.entropy.detach() + 0.0 * found.log_probs)


def logits_for_log_probs(hidden, weight, labels, **more):
    found = reference(hidden, weight, labels, **more)
    return found._replace(log_probs=(hidden * weight[labels]).sum(-1) + 0.0 * found.log_probs)


def no_temperature(hidden, weight, labels, *, temperature=1.0, **more):
    return reference(hidden, weight, labels, **more)


def after_the_softmax(hidden, weight, labels, *, temperature=1.0, **more):
    found = reference(hidden, weight, labels, **more)
    return found._replace(log_probs=found.log_probs / torch.as_tensor(temperature, dtype=found.log_probs.dtype))


def rolled_labels(hidden, weight, labels, **more):
    """The label after a shard's last token is the shard's own first."""
    first, second = labels.tensor_split(2)
    first = torch.cat([first[:-1], first[:1]]) if len(first) > 1 else first
    return reference(hidden, weight, torch.cat([first, second]), **more)


KERNELS = (
    of_log_probs(
        "trl#6625",
        "The backward pass of the chunked log-probs drops the entropy's gradient.",
        "gradient of entropy",
        without_slope,
    ),
    of_log_probs("verl#2656", "A fused kernel returns positive log-probs.", "range", logits_for_log_probs),
    of_log_probs("miles#68", "Log-probs of the trainer lack the temperature.", "values", no_temperature),
    of_log_probs("prime-rl#697", "Log-probs are divided by the temperature, not logits.", "values", after_the_softmax),
    of_log_probs("verl#6068", "Labels are shifted on the shard of a rank.", "values", rolled_labels),
)


def run(state):
    """A step with a learning rate from its counter, a draw from its key, and a controller of the penalty."""
    draw = torch.randn((), generator=torch.Generator().manual_seed(int(state["key"])), dtype=torch.float64)
    momentum = 0.9 * state["momentum"] + draw + state["cursor"]
    params = state["params"] - 0.1 * momentum * state["kl_coef"]
    return {
        "params": params,
        "momentum": momentum,
        "kl_coef": state["kl_coef"] * (1.0 + 0.1 * draw.tanh()),
        "key": state["key"] + 1,
        "cursor": state["cursor"] + 1,
    }


START = {
    "params": torch.zeros((), dtype=torch.float64),
    "momentum": torch.zeros((), dtype=torch.float64),
    "kl_coef": torch.tensor(0.2, dtype=torch.float64),
    "key": torch.tensor(7),
    "cursor": torch.tensor(0),
}


def forgotten(source: str, story: str, *leaves: str) -> Exhibit:
    """An exhibit of a checkpoint that does not hold some leaves: they begin anew."""

    def load(saved):
        return {**tree.copy(saved), **{name: START[name] for name in leaves}}

    return raised(source, story, "resume", lambda: laws.check_resume(run, START, save=tree.copy, load=load))


def one_more_draw(saved):
    return {**tree.copy(saved), "key": saved["key"] + 1}


RESUMES = (
    forgotten("verl#2653", "The adaptive coefficient of the penalty is not in the checkpoint.", "kl_coef"),
    forgotten("NeMo-RL#3171", "The optimizer's state of PPO is not restored.", "momentum"),
    forgotten("slime#1558", "A resumed run begins its rollouts at 0 again.", "cursor"),
    forgotten("ms-swift#9935", "The generator's state is overwritten when a run resumes.", "key"),
    raised(
        "Megatron-Bridge#5257",
        "Making an iterator draws once more, so that no resume has the same bits.",
        "resume",
        lambda: laws.check_resume(run, START, save=tree.copy, load=one_more_draw),
    ),
)

ROOM = (*KERNELS, *RESUMES)
