"""Types of tensors for annotations, as `Float[Tensor, "n h"]`, and the letters for their sizes.

b rows, s positions of a row, n tokens of a packed row, m those that are not padding, r sequences plus 1, h width of the
hidden states, v words of this rank's vocabulary, q query heads, k key heads, d width of a head, e width of a value
head. Programs do not check them; the tests do, by jaxtyping's import hook (tests/conftest.py).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING or find_spec("jaxtyping"):
    from jaxtyping import Bool, Float, Int, Shaped
else:
    Bool = Float = Int = Shaped = Annotated

__all__ = ["Bool", "Float", "Int", "Shaped"]
