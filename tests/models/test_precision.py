"""float64 stays float64, whatever a model's code asks for."""

from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest
import torch
from torch.nn import functional as F

from fppo import models
from fppo.key import Key
from fppo.models import lora
from fppo.models.model import float32_names
from fppo.models.precision import KeepDouble, NarrowDefault
from tests.models import families
from tests.models.test_lora import SPEC, logits, noisy


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


@pytest.mark.parametrize("targets", [(), ("q_proj",), ("embed_tokens", "lm_head")])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "opt", "deepseek_v3"])
def test_parameters_in_the_compute_dtype_are_what_a_pass_makes_of_them(name, targets):
    """With biases of norms, a tied head and one of its own, buffers that are state, and adapters, of the head too."""
    model, params = families.make(name, dtype=torch.float32, compute_dtype=torch.bfloat16)
    targets = tuple(t for t in targets if any(t in n.split(".") for n in params))
    if targets:
        model, params = lora.adapt(model, params, attrs.evolve(SPEC, targets=targets), key=Key(3))
        params = model.joined(noisy(params))
    narrow = models.in_compute_dtype(model, params)
    assert torch.equal(logits(narrow, model=model), logits(params, model=model))
    wide = {n for n, x in narrow.items() if x.dtype == torch.float32}
    head = {n for n in params if n.startswith(models.heads.vocabulary_head(model)[0])}
    kept = float32_names(model, torch.bfloat16)
    assert wide == kept | (head if set(targets) - {"q_proj"} else set())
    assert kept == ({n for n in params if ".gate." in n} if name == "deepseek_v3" else set())


def test_new_tensors_are_narrow_in_one_thread_alone():
    """torch's default dtype is that of the process, whose other threads may be in the middle of a pass."""
    with NarrowDefault(), ThreadPoolExecutor(1) as other:
        made = torch.empty(2), torch.log(torch.arange(1, 3)), torch.nn.Linear(2, 3).weight, torch.tensor([1.0])
        wide = torch.zeros(2, dtype=torch.float32), torch.arange(2.0, dtype=torch.float32).exp(), torch.ones(2).float()
        assert other.submit(lambda: torch.ones(2).dtype).result() == torch.get_default_dtype() == torch.float32
    assert [x.dtype for x in made] == [torch.bfloat16] * 4
    assert [x.dtype for x in wide] == [torch.float32] * 3
