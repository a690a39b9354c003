"""Muon: momentum whose matrices are made orthogonal before they are applied.

K. Jordan et al., 2024, https://kellerjordan.github.io/posts/muon; sizes and weight decay of J. Liu et al., 2025,
arXiv:2502.16982. As Jordan proposes, AdamW updates all that is not a matrix between hidden states: embeddings, heads,
norms, biases and convolutions. It also updates gates: a row of a router's gate is the vector of an expert, as a row of
a head is that of a token, and a gate of one row has no other row to be orthogonal to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from fppo.models.adapted import FACTORS
from fppo.models.model import Params
from fppo.runtime import fsdp
from fppo.runtime.mesh import Mesh, gather_over
from fppo.steps.optimizers import (
    AdamWState,
    Optimizer,
    UpdateCall,
    adamw_write,
    check_decays,
    clipped,
    decay_,
    init_adamw,
    zeros_like,
)
from fppo.steps.schedules import Schedule
from fppo.tree import replace, state
from fppo_kernels.adamw import adamw_
from fppo_kernels.shapes import Float

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of a quintic steep at 0, which converges only roughly to 1
ITERATIONS = 5
WHOLE_MATRICES = ("tensor", "expert")  # axes whose cuts of matrices are not supported
_NO_MATRICES = ("norm", "conv", "embed", "bias", "rel_pos", "A_log")  # parts of names of parameters and their modules
_TOGETHER = 1 << 26  # numbers of a stack that are orthogonalised together


@state
class MuonState:
    """The momentum of matrices and of stacks of matrices, and AdamW's state of all other parameters."""

    momentum: Params
    adamw: AdamWState


def is_hidden_matrix(name: str, param: Tensor) -> bool:
    """Whether a parameter, by its Hugging Face name, is a matrix [m, n] in a numbered layer, or a stack [E, m, n] of
    experts' matrices there; factors of adapters are matrices, too.

    False for embeddings and heads (outside the layers), gates, norms, convolutions, and parameters of one column.
    """
    words = name.removesuffix(FACTORS[0]).removesuffix(FACTORS[1]).split(".")
    inside = param.dim() in (2, 3) and param.shape[-1] > 1 and any(word.isdigit() for word in words)
    return inside and not is_gate(name) and not any(part in word for word in words[-2:] for part in _NO_MATRICES)


def is_gate(name: str) -> bool:
    """Whether a parameter is of a gate: a router of experts, or the gate of a shared expert."""
    return any(word in ("gate", "router") or word.endswith("_gate") for word in name.split("."))


def orthogonalized(x: Float[Tensor, "*stack m n"]) -> Float[Tensor, "*stack m n"]:
    """Approximate U @ V.T of the singular value decomposition U @ S @ V.T of `x` [m, n], or of each matrix of a stack.
    The result's singular values are in about [0.7, 1.2], except those far below the norm of their matrix, which stay
    smaller.

    `ITERATIONS` of the Newton-Schulz polynomial a X + b (X X') X + c (X X')^2 X; in bfloat16, as the reference does it,
    for all but float64.
    """
    if x.dim() == 3:
        some = max(1, _TOGETHER // max(1, x[0].numel())) if len(x) else 1
        return torch.cat([_orthogonalized(each) for each in x.split(some)]) if len(x) else x
    return _orthogonalized(x[None])[0]


def _orthogonalized(x: Float[Tensor, "e m n"]) -> Float[Tensor, "e m n"]:
    a, b, c = COEFFICIENTS
    y = x if x.dtype == torch.float64 else x.bfloat16()
    y = y.mT if x.shape[1] > x.shape[2] else y
    y = y / y.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return (y.mT if x.shape[1] > x.shape[2] else y).to(x.dtype)


def muon(
    schedule: Schedule,
    *,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    max_grad_norm: float | None = 1.0,
    is_matrix: Callable[[str, Tensor], bool] = is_hidden_matrix,
    kernel: Callable[..., None] = adamw_,
) -> Optimizer:
    """Muon with Nesterov's momentum for the parameters that `is_matrix(name, parameter)` accepts, AdamW for the rest.

    A matrix [m, n] moves by 0.2 * sqrt(max(m, n)) times its orthogonalised momentum, which is as far as AdamW moves:
    one rate serves both. Each matrix of a stack [E, m, n] moves by itself. Matrices are as transformers stores them: a
    merged projection counts as one. On a mesh that cuts parameters each rank gathers the momentum of one matrix after
    the other, and orthogonalises it; stacks are cut between matrices. Raises ValueError for a mesh that cuts matrices
    otherwise. `Optimizer.says` counts the parameters of each.
    """
    check_decays(weight_decay=weight_decay, momentum=momentum)
    rest_ = adamw_write(schedule, betas=betas, eps=eps, weight_decay=weight_decay, kernel=kernel)

    def write_(params: Params, grads: Params, state: MuonState, call: UpdateCall) -> MuonState:
        _check(call.mesh)
        lr, matrices, skipped = schedule(call.step), list(state.momentum), call.skipped.bool()
        decay_([params[n] for n in matrices], lr * weight_decay, call.skipped)
        for name, shape in zip(matrices, _whole_shapes([params[n] for n in matrices], call.mesh), strict=True):
            old, grad = state.momentum[name], grads[name]
            grad = grad if call.scale is None else grad.div_(call.scale)
            new = torch.lerp(old, grad, 1 - momentum)
            move = _orthogonal_rows(torch.lerp(grad, new, momentum), shape, call.mesh)
            params[name].sub_(torch.where(skipped, 0.0, lr * 0.2 * max(shape[-2:]) ** 0.5 * move))
            old.copy_(torch.where(skipped, old, new))
        return replace(state, adamw=rest_(params, grads, state.adamw, call))

    def init(params: Params) -> MuonState:
        matrices = {name: p for name, p in params.items() if is_matrix(name, p)}
        rest = {name: p for name, p in params.items() if name not in matrices}
        return MuonState(momentum=zeros_like(matrices), adamw=init_adamw(rest))

    made = clipped(init, write_, max_grad_norm=max_grad_norm, schedule=schedule)
    return made._replace(kernel=kernel, says=partial(_says, is_matrix))


def _says(is_matrix: Callable[[str, Tensor], bool], params: Mapping[str, Tensor]) -> str:
    """The number of parameters that go to Muon and to AdamW, by their kinds."""
    kinds: dict[str, Counter[str]] = {"muon": Counter(), "adamw": Counter()}
    for name, x in params.items():
        layer = any(word.isdigit() for word in name.split("."))
        if is_matrix(name, x):
            kind = "matrices" if x.dim() == 2 else f"stacks of {len(x)} matrices"
            kinds["muon"][f"{kind} of adapters" if name.endswith(FACTORS) else kind] += 1
        elif is_gate(name):
            kinds["adamw"]["gates"] += 1
        else:
            kinds["adamw"]["vectors" if x.dim() < 2 else "others in layers" if layer else "embeddings and heads"] += 1
    words = {name: ", ".join(f"{n} {kind}" for kind, n in sorted(own.items())) for name, own in kinds.items()}
    return "; ".join(f"{name}: {text or 'nothing'}" for name, text in words.items())


def _check(mesh: Mesh) -> None:
    for name in WHOLE_MATRICES:
        if mesh[name].size > 1:
            raise ValueError(
                f"muon needs whole matrices, and the {name} axis of {mesh[name].size} ranks cuts them: use adamw or "
                "sgd, or give the ranks to other axes"
            )


def _whole_shapes(shards: list[Tensor], mesh: Mesh) -> list[torch.Size]:
    """The whole shapes of parameters whose first dimension is spread over the shard axis."""
    if not mesh.sharded or not shards:
        return [x.shape for x in shards]
    rows = gather_over(torch.tensor([len(x) for x in shards], device=shards[0].device), mesh, ["shard"]).sum(0)
    return [torch.Size((count, *x.shape[1:])) for count, x in zip(rows.tolist(), shards, strict=True)]


def _orthogonal_rows(x: Tensor, shape: torch.Size, mesh: Mesh) -> Tensor:
    """This rank's rows of the orthogonalised matrix, given its rows `x` of the matrix; or its matrices of a stack."""
    if not mesh.sharded or x.dim() == 3:
        return orthogonalized(x)
    matrix = fsdp.gather({"": x}, {"": shape}, mesh)[""]
    return orthogonalized(matrix)[slice(*fsdp.bounds(shape[0], mesh["shard"]))]
