"""Other packages' ways from hidden states [N, H], a head [V, H] and labels [N] to log-probs and entropy.

Each loader imports its package and returns the function; it raises ImportError where the package is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

Fn = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
SEQUENCE = 512  # tokens of a sequence, for functions that loop over the sequences of logits [B, T, V]


def _plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logs = torch.log_softmax((hidden @ weight.T).float(), -1)
    return logs.gather(1, labels[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def naive() -> Fn:
    """log_softmax, gather and the entropy of all logits at once."""
    return _plain


def naive_compiled() -> Fn:
    """The same under torch.compile."""
    return torch.compile(_plain)


def _sequences(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    length = SEQUENCE if len(labels) % SEQUENCE == 0 else len(labels)
    return (hidden @ weight.T).view(-1, length, len(weight)), labels.view(-1, length)


def verl_fused() -> Fn:
    """verl's linear layer and log-probs in one, 512 tokens at a time, by torch."""
    return import_module("verl.utils.experimental.torch_functional").FusedLinearForPPO(512, "torch")


def verl_logits() -> Fn:
    """What verl's actor computes from logits."""
    module = import_module("verl.utils.torch_functional")

    def fn(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits, targets = _sequences(hidden, weight, labels)
        log_probs, entropy = module.logprobs_from_logits(logits, targets), module.entropy_from_logits(logits)
        return log_probs.flatten(), entropy.flatten()

    return fn


def trl_logits() -> Fn:
    """What TRL's trainers compute from logits."""
    module = import_module("trl.trainer.utils")

    def fn(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, entropy = module.selective_log_softmax_and_entropy(*_sequences(hidden, weight, labels))
        return log_probs.flatten(), entropy.flatten()

    return fn


def trl_chunked() -> Fn:
    """What TRL's GRPOTrainer computes from hidden states: tiles of the logits, computed again in the backward pass."""
    module = import_module("trl.kernels.chunked_logprob")
    width = import_module("trl.trainer.utils")._CHUNKED_LOGPROB_CHUNK_SIZE

    def fn(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        wanted = ("log_probs", "entropy")
        out = module.ChunkedLogProbFunction.apply(hidden, weight, None, labels, 1.0, width, None, 1.0, wanted)
        return out[0], out[1]

    return fn


def liger_chunked() -> Fn:
    """Liger's log-prob of its chunked losses, by torch."""
    module = import_module("liger_kernel.chunked_loss.fused_linear_ppo")
    width = module._SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE

    def fn(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, None]:
        return module._ChunkedSelectiveLogProbFunction.apply(hidden, weight, labels, None, 1.0, width), None

    return fn


def cut_cross_entropy() -> Fn:
    """Apple's cut cross-entropy in its torch.compile form, which is what runs without a GPU."""
    function = import_module("cut_cross_entropy").linear_cross_entropy

    def fn(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, None]:
        return -function(hidden, weight, labels, reduction="none", impl="torch_compile"), None

    return fn


LOADERS: dict[str, Callable[[], Fn]] = {
    "naive": naive,
    "torch.compile(naive)": naive_compiled,
    "verl fused": verl_fused,
    "verl logits": verl_logits,
    "trl chunked": trl_chunked,
    "trl logits": trl_logits,
    "liger chunked": liger_chunked,
    "cce torch_compile": cut_cross_entropy,
}
