"""float64 all the way through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


class KeepDouble(TorchFunctionMode):
    """Inside this context a float64 tensor asked to become float32 stays float64.

    transformers' norms and softmax go through float32 whatever the parameters are, which would round a float64 pass to
    float32's precision; float64 is for checks of invariance, where that matters.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func is Tensor.to or func in _SOFTMAX:
                args = tuple(torch.float64 if x is torch.float32 else x for x in args)
                kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in kwargs.items()}
        return func(*args, **kwargs)
