"""The work of an operation is that of the tensors which its definition reads and writes, counted one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fppo_kernels.operation import filled, operation_of

SIZES = {"N": 10, "H": 8, "V": 33, "R": 3, "L": 7, "heads": 4, "kv_heads": 2, "head_dim": 6}
SIZES |= {"M": 12, "B": 3, "T": 8, "S": 6, "D": 2, "P": 100, "C": 9}
CPU = torch.device("cpu")
# the inputs that are read; and what the backward pass reads and writes beside them: inputs or outputs, once or twice
COUNTED = {
    "attention": (("query", "key", "value"), "inputs inputs outputs"),
    "decode_attention": (("query", "keys", "values"), None),
    "gae": (("rewards", "values", "mask"), None),
    "glu": (("gate", "up"), "inputs inputs outputs"),
    "layer_norm": (("x",), "inputs inputs outputs"),
    "rms_norm": (("x",), "inputs inputs outputs"),
    "add_rms_norm": (("x", "residual"), "inputs outputs"),
    "linear": (("x", "weight"), "inputs inputs outputs"),
    "rotary": (("query", "key"), "inputs outputs"),
    "all_to_all": (("x",), "inputs outputs"),
    "pad": (("x", "index"), None),
}


def drawn(name, dtype):
    operation = operation_of(name)
    shape = {size: SIZES[size] for size in operation.shape}
    return operation, operation.sized(shape, dtype, CPU), operation.cost(shape, dtype.itemsize)


def nbytes(tensors):
    return sum(x.nbytes for x in tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", COUNTED)
def test_bytes_are_those_of_the_tensors_read_and_written(name, dtype):
    operation, made, cost = drawn(name, dtype)
    if name == "all_to_all":
        outputs = [made.inputs["x"]]
    else:
        outputs = operation.call(operation.reference, made.inputs, made.extras, operation.outputs).values()
    names, backward = COUNTED[name]
    sizes = {"inputs": nbytes(made.inputs[each] for each in names), "outputs": nbytes(outputs)}
    forward = sizes["inputs"] + sizes["outputs"]
    assert cost.bytes_forward == forward
    if backward is not None:
        assert cost.bytes_total == forward + sum(sizes[each] for each in backward.split())
    elif name == "pad":  # of the gradient the real rows are read, by their index, and the gradient of these is written
        assert cost.bytes_total == forward + 2 * made.inputs["x"].nbytes + made.inputs["index"].nbytes
    else:
        assert cost.bytes_total is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bytes_of_other_kinds(dtype):
    operation, made, cost = drawn("unpad", dtype)
    packed = operation.reference(
        made.inputs["tokens"], made.inputs["attention_mask"], columns={"column": made.inputs["column"]}
    )
    column, written = packed.columns["column"], (packed.tokens, packed.positions, packed.labels, packed.index)
    read = nbytes((made.inputs["tokens"], made.inputs["attention_mask"], column))
    assert cost.bytes_forward == read + nbytes((*written, column))
    assert cost.bytes_total == cost.bytes_forward + column.nbytes + made.inputs["column"].nbytes
    _, made, cost = drawn("log_probs", dtype)
    matrices, rows = nbytes(made.inputs[each] for each in ("hidden", "weight")), len(made.inputs["labels"])
    assert cost.bytes_forward == matrices + made.inputs["labels"].nbytes + 2 * rows * 4  # two results in float32
    assert cost.bytes_total == cost.bytes_forward + 2 * matrices + 2 * rows * 4
    _, made, cost = drawn("adamw", dtype)
    params = nbytes(made.inputs["params"])
    assert all(nbytes(made.inputs[each]) == params for each in ("grads", "exp_avgs", "exp_avg_sqs"))
    assert (cost.bytes_forward, cost.bytes_total) == (4 * params + 3 * params, None)


def test_products_are_counted_by_their_factors():
    _, made, cost = drawn("linear", torch.float32)
    forward = 2 * made.inputs["x"].numel() * len(made.inputs["weight"])
    assert (cost.flops_forward, cost.flops_total) == (forward, 3 * forward)
    _, made, cost = drawn("log_probs", torch.float32)
    forward = 2 * made.inputs["hidden"].numel() * len(made.inputs["weight"])
    assert (cost.flops_forward, cost.flops_total) == (forward, 3 * forward)
    _, made, cost = drawn("attention", torch.float32)
    pairs = sum(1 for size in made.extras["lengths"].lengths for query in range(size) for key in range(query + 1))
    _, heads, width = made.inputs["query"].shape
    assert (cost.flops_forward, cost.flops_total) == (4 * heads * width * pairs, 12 * heads * width * pairs)


def test_drawn_inputs_are_normal_and_weights_keep_the_size_of_what_they_multiply():
    made = filled(CPU, torch.float64, (3,), {"eps": 1.0}, x=(500, 16), weight=(400, 16), bias=(7,))
    assert (made.extras, {name: tuple(x.shape) for name, x in made.inputs.items()}) == (
        {"eps": 1.0},
        {"x": (500, 16), "weight": (400, 16), "bias": (7,)},
    )
    assert all(isinstance(x, Tensor) and x.dtype == torch.float64 for x in made.inputs.values())
    assert abs(float(made.inputs["x"].std()) - 1.0) < 0.05
    assert abs(float(made.inputs["weight"].std()) - 0.25) < 0.02
    vector = filled(CPU, torch.float64, (3,), {}, weight=(4000,))
    assert abs(float(vector.inputs["weight"].std()) - 1.0) < 0.05
    assert made.weights.shape == (3,)
