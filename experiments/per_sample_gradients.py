"""The gradient of each response alone, by torch.func.vmap: how noisy a batch is, and which responses agree.

The noise scale tr(covariance) / |mean|^2 (McCandlish et al., 2018, arXiv:1812.06162) is the number of responses at
which noise is as large as the gradient. The second panel holds it against gradients of batches that are drawn.
"""

import torch
import tyro
from answers.sampled import start
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad, vmap

from fppo import losses, tree
from fppo.key import Key
from fppo.steps import forward_micro_batch

COLUMNS = ("tokens", "attention_mask", "response_mask", "old_log_probs", "advantages")


def main(out: str = "per_sample_gradients.png", warm_up: int = 600, prompts: int = 64, seed: int = 0) -> float:
    """The noise scale, in responses."""
    params, sample, rows = start(Key(seed), warm_up=warm_up, prompts=prompts)
    count, tokens = len(rows.row_ids), rows.response_mask.sum()

    def loss(params: dict[str, Tensor], columns: dict[str, Tensor]) -> Tensor:
        row = tree.replace(rows, **{name: x[None] for name, x in columns.items()})
        new = forward_micro_batch(params, row, forward=sample.forward).log_probs
        assert new is not None
        return losses.ppo_clip(new, row.old_log_probs, row.advantages, row.response_mask)[0].sum() / tokens

    found = vmap(grad(loss), in_dims=(None, 0))(params, {name: getattr(rows, name) for name in COLUMNS})
    each = count * torch.cat([x.flatten(1) for x in found.values()], 1)  # [rows, parameters]: their mean is the batch's
    dots = each @ each.T  # [rows, rows]
    whole = dots.mean().item()  # |mean|^2
    noise = (dots.trace().item() / count - whole) * count / (count - 1)  # the trace of the covariance
    signal = whole - noise / count
    sizes = [2**n for n in range(count.bit_length() - 1)]
    drawn = [
        torch.stack([dots[x][:, x].mean() for x in torch.rand(1000, count).argsort(1)[:, :n]]).mean() for n in sizes
    ]

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    order = rows.scores.argsort(stable=True)
    order = order[dots.diag()[order] > 0]  # a group whose scores are equal has no gradient
    unit = torch.nn.functional.normalize(each[order], dim=1)
    image = left.imshow(unit @ unit.T, cmap="RdBu", vmin=-1, vmax=1)
    left.set(title="cosines of the gradients of responses", xlabel="responses, wrong answers first")
    figure.colorbar(image, ax=left)
    right.loglog(sizes, drawn, "o", label="batches that are drawn")
    right.loglog(sizes, [signal + noise / n for n in sizes], label="noise scale")
    right.set(title=f"squared gradient of a batch; noise scale {noise / signal:.0f}", xlabel="responses in it")
    right.legend()
    figure.savefig(out)
    return noise / signal


if __name__ == "__main__":
    tyro.cli(main)
