"""float64 stays float64, whatever a model's code asks for."""

import pytest
import torch
from torch.nn import functional as F

from fppo.models.precision import KeepDouble


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.type(torch.float32),
        lambda x: x.type(dtype=torch.float32),
        lambda x: F.softmax(x, -1, dtype=torch.float32),
    ],
)
def test_what_asks_for_float32_gets_float64(ask):
    x = torch.rand(3, dtype=torch.float64)
    with KeepDouble():
        assert ask(x).dtype == torch.float64
        assert ask(torch.rand(3)).dtype == torch.float32


def test_a_product_of_experts_leaves_rows_of_none_zero():
    x, weights = torch.rand(5, 3, dtype=torch.float64), torch.rand(2, 3, 4, dtype=torch.float64)
    with KeepDouble():
        out = F.grouped_mm(x, weights, offs=torch.tensor([1, 4], dtype=torch.int32))
    expected = torch.cat([x[:1] @ weights[0], x[1:4] @ weights[1], torch.zeros(1, 4, dtype=torch.float64)])
    torch.testing.assert_close(out, expected)
