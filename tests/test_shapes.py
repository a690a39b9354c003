"""The shapes in annotations are checked in these tests, by the hook of conftest.py."""

import pytest
import torch

from fppo import advantages, losses
from fppo_kernels.gae.scan import scan
from fppo_kernels.log_probs.reference import reference

jaxtyping = pytest.importorskip("jaxtyping")


def test_a_wrong_shape_is_seen_before_the_function_runs():
    x, mask = torch.zeros(2, 3), torch.ones(2, 4, dtype=torch.bool)
    for fn in (losses.ppo_clip, losses.value_loss):
        fn(x, x, x, x == 0)  # shapes that were right are not checked again, others are
        with pytest.raises(jaxtyping.TypeCheckError, match="mask"):
            fn(x, x, x, mask)
    with pytest.raises(jaxtyping.TypeCheckError, match="mask"):
        advantages.whiten(x, mask)
    with pytest.raises(jaxtyping.TypeCheckError, match="mask"):
        scan(x, x, mask)
    with pytest.raises(jaxtyping.TypeCheckError, match="weight"):
        reference(x, torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64))
