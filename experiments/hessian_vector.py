"""The largest curvature of the policy loss, by Lanczos on Hessian-vector products: torch.func.jvp of torch.func.grad.

The first panel has the ends of the spectrum as iterations find them. The second holds the parabola that slope and
curvature foretell against the loss along the direction that curves most.
"""

import torch
import tyro
from answers.sampled import start
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad, jvp
from torch.nn.functional import normalize, pad

from fppo.key import Key
from fppo.steps import forward_micro_batch


def main(
    out: str = "hessian_vector.png", warm_up: int = 600, prompts: int = 32, iterations: int = 12, radius: float = 0.06
) -> float:
    """The largest curvature, per squared unit of distance."""
    params, sample, rows = start(Key(0), warm_up=warm_up, prompts=prompts)
    mask, sizes = rows.response_mask, [x.numel() for x in params.values()]

    def loss(x: Tensor) -> Tensor:
        tree = {name: part.view_as(params[name]) for name, part in zip(params, x.split(sizes), strict=True)}
        new = forward_micro_batch(tree, rows, forward=sample.forward).log_probs
        assert new is not None
        return -((new - rows.old_log_probs).exp() * rows.advantages).where(mask, 0.0).sum() / mask.sum()

    place = torch.cat([x.flatten() for x in params.values()])
    basis = normalize(torch.randn(1, len(place), generator=Key(1).generator()), dim=1)
    projected, ends = torch.zeros(0, 0, dtype=torch.float64), list[Tensor]()
    for _ in range(iterations):
        column = basis @ (product := jvp(grad(loss), (place,), (basis[-1],))[1])
        projected = pad(projected, (0, 1, 0, 1))  # the Hessian within the basis
        projected[-1], projected[:, -1] = column, column
        values, vectors = torch.linalg.eigh(projected)
        ends.append(values[[0, -1]])
        rest = product - column @ basis
        basis = torch.cat([basis, normalize(rest - (basis @ rest) @ basis, dim=0)[None]])
    top, at = vectors[:, -1].float() @ basis[:-1], torch.linspace(-radius, radius, 21)
    slope = grad(loss)(place) @ top
    measured = torch.stack([loss(place + x * top) - loss(place) for x in at])

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, iterations + 1), torch.stack(ends), "o-")
    left.set(title="ends of the Hessian's spectrum", xlabel="Hessian-vector products")
    right.plot(at, measured, "o", label="the loss")
    right.plot(at, slope * at + values[-1] * at**2 / 2, label="slope and curvature")
    right.set(title="change of the policy loss", xlabel="distance along the top direction")
    right.legend()
    figure.savefig(out)
    return values[-1].item()


if __name__ == "__main__":
    tyro.cli(main)
