"""The compiled log-probs keep the laws that the others keep in tests/laws; they take a while to compile."""

import pytest
import torch

from fppo.laws._search import check
from fppo.laws.kernels import _LOG_PROBS_LAWS, _log_probs_example
from fppo_kernels import table
from fppo_kernels.collectives import Axis

FEW = ((0, 2), (3, 5), (33, 1100))  # tokens, vocabulary: it compiles anew for many others
REASON = table.available("log_probs")["compiled"]


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_compiled_log_probs_keep_the_laws_in_float32():
    cases = (0, 6)  # without anything and with everything: each is compiled anew

    def example(rows, width, seed):
        return _log_probs_example((torch.float32,), "cpu", 2, rows, width, cases[seed])

    check(table.get("log_probs", "compiled"), _LOG_PROBS_LAWS, example, sizes=FEW, seeds=len(cases))


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_compiled_log_probs_refuse_a_split_vocabulary():
    kernel = table.get("log_probs", "compiled")
    with pytest.raises(ValueError, match="log_probs/chunked can"):
        kernel(torch.ones(1, 1), torch.ones(2, 1), torch.zeros(1, dtype=torch.int64), axis=Axis(2))
