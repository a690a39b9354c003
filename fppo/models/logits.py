"""What a model does to the products of its vocabulary head, measured on its own code."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fppo.models.precision import KeepDouble
from fppo.models.seams import take_place

_POINTS = (2.0**-60, 1.0, -3.0, 1e300)  # a slope at zero, two numbers of usual sizes, a limit
_ROUNDING = 1e-12


class LogitForm(NamedTuple):
    """logits = softcap * tanh(products * scale / softcap), without the tanh if softcap is None."""

    softcap: float | None = None
    scale: float = 1.0

    def __call__(self, products: Tensor) -> Tensor:
        scaled = products if self.scale == 1.0 else products * self.scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


@torch.no_grad()
def measure_logits(module: PreTrainedModel) -> LogitForm:
    """What the class of a model makes of its head's products, whatever its config calls the factors.

    The class computes logits of a few numbers, by a head of one weight that is 1. A class that fails there is taken to
    return its products; the check of a loaded model (`check_model`) has the last word. Raises ValueError for logits
    that are no scaled or capped products.
    """
    points = torch.tensor(_POINTS, dtype=torch.float64)
    one = nn.Linear(1, 1, bias=False, device="meta")  # draws no numbers
    one.weight = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))
    head, base = cast(nn.Module, module.get_output_embeddings()), cast(nn.Module, module.base_model)
    exchanged = {head: one, base: _Given(base, _Outputs(points[None, :, None]))}
    try:
        with KeepDouble():
            _exchange(module, exchanged)
            logits = module(input_ids=torch.zeros(1, len(points), dtype=torch.long)).logits[0, :, 0]
    except Exception:  # what a class raises for a base that returns nothing else may be anything
        return LogitForm()
    finally:
        _exchange(module, {new: old for old, new in exchanged.items()})
    small, one_, _, large = logits.tolist()
    linear = LogitForm(None, one_)
    capped = LogitForm(abs(large), small / _POINTS[0])
    for form in (linear, capped):
        if torch.allclose(form(points), logits, rtol=_ROUNDING, atol=0.0):
            return form
    raise ValueError(
        f"fppo cannot run model type {module.config.model_type!r}: {type(module).__name__} makes {logits.tolist()} of "
        f"products {list(_POINTS)} of its head, which is no factor and no soft cap"
    )


class _Outputs:
    """The outputs of a base model that computes hidden states and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Stands in a base model's place and returns the outputs it was made with."""

    def __init__(self, base: nn.Module, outputs: _Outputs) -> None:
        super().__init__()
        take_place(self, base)
        self._outputs = outputs

    def forward(self, *_: Any, **__: Any) -> _Outputs:
        return self._outputs


def _exchange(module: nn.Module, exchanged: dict[nn.Module, nn.Module]) -> None:
    """Puts the values of `exchanged` where its keys stand in `module`."""
    for parent in list(module.modules()):
        parent._modules.update({name: exchanged[x] for name, x in parent._modules.items() if x in exchanged})
