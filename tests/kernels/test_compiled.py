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
