"""The compiled log-probs keep the laws that the others keep in tests/laws; they take a while to compile."""

from functools import partial

import pytest
import torch

from fppo.laws._kernels import example_of
from fppo.laws._search import check
from fppo.laws.kernels import laws_of
from fppo_kernels import table
from fppo_kernels.collectives import Axis
from fppo_kernels.log_probs import OPERATION

FEW = ((3, 5), (33, 1100))  # tokens, vocabulary: it compiles anew for many others, as for no tokens
REASON = table.available("log_probs")["compiled"]


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_compiled_log_probs_keep_the_laws_in_float32():
    for cases, sizes in (((0, 6), FEW), ((6,), ((0, 2),))):  # without anything, with everything: each is compiled anew
        example = partial(example_of, OPERATION, cases, (torch.float32,), "cpu", None)
        check(table.get("log_probs", "compiled"), laws_of(OPERATION), example, sizes=sizes, seeds=len(cases))


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_compiled_log_probs_refuse_a_split_vocabulary():
    kernel = table.get("log_probs", "compiled")
    with pytest.raises(ValueError, match="log_probs/chunked can"):
        kernel(torch.ones(1, 1), torch.ones(2, 1), torch.zeros(1, dtype=torch.int64), axis=Axis(2))


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_compiled_log_probs_of_bfloat16_are_sums_in_float32_on_a_cpu():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (33, 1100))
    labels = torch.arange(33)
    found = table.get("log_probs", "compiled")(hidden, weight, labels).log_probs
    exact = table.get("log_probs", "reference")(hidden.double(), weight.double(), labels).log_probs
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=3e-5)
