"""Scale and soft cap of a model's logits, measured on its own code."""

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
    """Measure how a model's class turns its head's products into logits, whatever its config calls the factors.

    The class computes logits of a few numbers with a head of a single weight, 1. If it fails, products count as logits;
    `check_model` still compares the loaded model. Raises ValueError for logits that are not scaled or capped products.
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
    except Exception:  # a class may raise any exception for a base with no other outputs
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
        f"products {list(_POINTS)} of its head, which is neither a factor nor a soft cap"
    )


class _Outputs:
    """Outputs of a base model: hidden states alone."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Replaces a base model and returns fixed outputs."""

    def __init__(self, base: nn.Module, outputs: _Outputs) -> None:
        super().__init__()
        take_place(self, base)
        self._outputs = outputs

    def forward(self, *_: Any, **__: Any) -> _Outputs:
        return self._outputs


def _exchange(module: nn.Module, exchanged: dict[nn.Module, nn.Module]) -> None:
    """Replace the submodules of `module` that are keys of `exchanged` by their values."""
    for parent in list(module.modules()):
        parent._modules.update({name: exchanged[x] for name, x in parent._modules.items() if x in exchanged})
