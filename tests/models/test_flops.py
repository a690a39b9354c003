"""FLOPs from shapes equal a count of what runs."""

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from fppo import models
from fppo.key import Key
from fppo.models import flops, lora
from fppo.runtime.simulate import simulate
from fppo_kernels.padding import make_lengths
from fppo_kernels.table import Kernels
from tests.models.families import CONFIGS, make


@cache
def made(name):
    return make(name)[0]


def windows_of(model):
    """The window of each layer in tokens; None: all tokens before."""
    kinds = getattr(model.config, "layer_types", None) or ["sliding_attention"] * len(model.layers)
    window = getattr(model.config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in kinds]


@pytest.mark.parametrize("name", CONFIGS)
def test_matrix_products_equal_those_counted(name):
    model, params = make(name, dtype=torch.float32)
    model.skeleton.set_experts_implementation("eager")  # grouped products are not counted
    lengths = [4, 2, 5]
    kernels = Kernels.named(attention="eager")
    attend = models.packed_attention(kernels.attention, make_lengths(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hidden = models.hidden_states(model, params, torch.ones(11, dtype=torch.int64), positions, attend=attend)
        head = models.output_head(model, params)
        _ = hidden @ head.weight.T
    counted = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counted.items() if op is not torch.ops.aten.bmm)  # bmm: attention and rotations
    width = model.config.num_attention_heads * (getattr(model.config, "head_dim", None) or 4)
    visible = {None: 4 * 5 / 2 + 2 * 3 / 2 + 5 * 6 / 2, 3: (6 + 3) + 3 + (6 + 6)}
    pairs = sum(visible[window] for window in windows_of(model))
    assert flops.forward_flops(model, lengths) == products + 4 * width * pairs


def test_head_tokens_and_training():
    model, _ = make("qwen2")
    full, few = flops.forward_flops(model, [10]), flops.forward_flops(model, [10], head_tokens=3)
    assert full - few == 2 * 31 * 16 * 7
    assert flops.train_flops(model, [10]) == 3 * full


@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma2"])
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=5))
def test_shared_beginnings_are_not_computed_again(name, pieces):
    """Queries of a piece see all before it that their window lets them see, one by one."""
    model = made(name)
    shared, sizes = zip(*pieces, strict=True)
    lengths = [before + size for before, size in pieces]
    heads = model.config.num_attention_heads
    each = 4.0 * heads * (getattr(model.config, "head_dim", None) or model.config.hidden_size // heads)
    pairs = sum(
        min(place + 1, window or place + 1)
        for window in windows_of(model)
        for before, size in pieces
        for place in range(before, before + size)
    )
    products = 2.0 * (sum(flops.layer_weights(model)) * sum(sizes) + 7 * flops.head_weights(model))
    found = flops.forward_flops(model, lengths, head_tokens=7, shared=shared)
    assert found == pytest.approx(products + each * pairs, rel=1e-12)
    assert flops.train_flops(model, lengths, head_tokens=7, shared=shared) == 3 * found


def test_peaks_and_mfu():
    assert flops.peak_flops("NVIDIA H200") == flops.peak_flops("NVIDIA H100 80GB HBM3") == 9.89e14
    assert flops.peak_flops("NVIDIA H100 PCIe") == 7.56e14
    assert flops.peak_flops("NVIDIA H20") == 1.48e14
    assert flops.peak_flops("NVIDIA A100-SXM4-80GB") == 3.12e14
    assert flops.peak_flops("NVIDIA GB200") == 2.5e15
    assert flops.peak_flops(torch.device("cpu")) is None
    assert flops.mfu(1e15, 1.0, "Some Processor") is None
    assert flops.mfu(9.89e14, 2.0, "NVIDIA H200", devices=2) == pytest.approx(0.25)


def test_a_rank_of_a_tensor_axis_counts_the_whole_model():
    model, _ = make("qwen2")

    def count(mesh):
        return flops.forward_flops(models.place(model, mesh), [10, 3])

    assert simulate({"tensor": 2}, count) == [flops.forward_flops(model, [10, 3])] * 2


def test_an_adapter_spares_the_gradients_of_the_weights_below_it():
    """Of three products of each weight with the tokens that one alone, of equal size."""
    model, params = make("llama", dtype=torch.float32)
    adapted, _ = lora.adapt(model, params, lora.Lora(2, 4.0), key=Key(0))
    whole = [flops.forward_flops(x, [10, 3], head_tokens=7) for x in (model, adapted)]
    factors = sum(flops.layer_weights(adapted)) - sum(flops.layer_weights(model))
    assert whole[1] - whole[0] == 2 * 13 * factors > 0
    base = whole[0] - flops.attention_flops(model, [10, 3])
    found = flops.train_flops(adapted, [10, 3], head_tokens=7)
    assert found == 3 * whole[1] - base


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("head_tokens", [None, 7])
def test_training_an_adapter_leaves_out_the_products_for_gradients_of_frozen_weights(head, head_tokens):
    """A value head is trained whole; a vocabulary head is frozen; shared beginnings are computed once."""
    model, params = make("qwen2", head=head, dtype=torch.float32)
    adapted, _ = lora.adapt(model, params, lora.Lora(2, 4.0), key=Key(0))
    lengths, shared = [10, 6, 3], [2, 4, 0]
    tokens = sum(lengths) - sum(shared)
    base = {n: x.shape.numel() for n, x in params.items() if ".layers." in n and len(x.shape) > 1}
    vocabulary = params["model.embed_tokens.weight"].numel() * (tokens if head_tokens is None else head_tokens)
    forward = flops.forward_flops(adapted, lengths, head_tokens=head_tokens, shared=shared)
    spared = 2 * (sum(base.values()) * tokens + (vocabulary if head == "lm" else 0))
    assert flops.train_flops(adapted, lengths, head_tokens=head_tokens, shared=shared) == 3 * forward - spared
    head_weights = params["score.weight" if head == "value" else "model.embed_tokens.weight"].numel()
    assert flops.head_weights(adapted) == head_weights


def test_every_device_of_the_table_has_its_own_peak():
    for name, peak in flops.PEAKS.items():
        for said in (
            f"NVIDIA {name}",
            f"AMD Instinct {name} 80GB",
            name.lower(),
            f"NVIDIA-{name.replace(' ', ' SXM ')}-80",
        ):
            assert flops.peak_flops(said) == peak, said
        assert flops.peak_flops(f"X{name}9") is None


def test_the_window_of_all_layers_is_the_one_that_each_has():
    found = {name: flops.window_of_all(made(name)) for name in ("mistral", "qwen2", "gemma2", "gpt2")}
    assert found == {"mistral": made("mistral").config.sliding_window, "qwen2": None, "gemma2": None, "gpt2": None}
    assert found["mistral"] is not None
