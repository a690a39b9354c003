"""Custom losses as data: what was traced runs as its function does, and what is not on the lists is refused by name."""

import math
import operator

import pytest
import torch
import torch.fx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.node import _get_qualified_name
from torch.nn import functional as F

from fppo.serve.tinker import graphs
from fppo.serve.tinker.graphs import custom_loss
from fppo.serve.tinker.operations import FUNCTIONS, METHODS, check_call

KINDS = {torch.dtype: "dtype", torch.device: "device", torch.memory_format: "memory_format"}


def encoded(x):
    """An argument in the protocol's form."""
    if isinstance(x, torch.fx.Node):
        return {"ref": x.name}
    if isinstance(x, float) and not math.isfinite(x):
        return {"float": str(x)}
    if isinstance(x, tuple):
        return {"tuple": [encoded(part) for part in x]}
    if isinstance(x, list):
        return [encoded(part) for part in x]
    if isinstance(x, dict):
        return {"dict": {key: encoded(part) for key, part in x.items()}}
    if isinstance(x, slice):
        return {"slice": [encoded(part) for part in (x.start, x.stop, x.step)]}
    if x is Ellipsis:
        return {"ellipsis": True}
    return {KINDS[type(x)]: str(x).removeprefix("torch.")} if type(x) in KINDS else x


def traced(fn):
    """The nodes of a function as plain data, as a client sends them."""
    nodes = []
    for node in torch.fx.symbolic_trace(fn).graph.nodes:
        target = node.target
        if node.op == "call_function":
            target = _get_qualified_name(target).replace("_operator.", "operator.")
        kwargs = {key: encoded(x) for key, x in node.kwargs.items()}
        nodes.append(
            {"op": node.op, "name": node.name, "target": str(target), "args": list(map(encoded, node.args))}
            | {"kwargs": kwargs}
        )
    return nodes


def reinforce(logprobs, advantages, old):
    """Clipped, with a KL term, and metrics."""
    ratio = torch.exp(torch.clamp(logprobs - old.detach(), -20.0, 20.0))
    clipped = ratio.clamp(0.8, max=1.2)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    kl = 0.1 * (logprobs - old) ** 2
    loss = (-gain + kl).sum()
    outside = (ratio != clipped).float().mean()
    return loss, {"custom/kl:sum": kl.sum(), "custom/outside:mean": outside}


def soft(logprobs, advantages, old):
    """Functions of torch.nn.functional, indexing, shapes, joins."""
    wide = torch.stack([logprobs, old], dim=-1)
    last = wide[..., 0][1:] * logprobs.shape[0]
    gate = F.softplus(-last) + F.logsigmoid(last) + F.relu(last) + F.gelu(last) * F.softmax(last, dim=0)
    held = torch.where(advantages > 0, logprobs, torch.zeros_like(logprobs))
    both = torch.cat([gate, held.masked_fill(old < -3, 0.0)], dim=0)
    best = both.max(dim=0)[0] + torch.logsumexp(both, 0) - both.abs().amax() / 3
    return best + both.mean() ** 2, {}


def sequence(logprobs, advantages, old):
    """A sequence's ratio, normalised by its length, and a mask."""
    mask = advantages != 0
    count = mask.sum().clamp(min=1)
    mean = ((logprobs - old) * mask).sum() / count
    return -(mean.exp() * (advantages * mask.to(torch.float32)).sum()) / logprobs.size(0), {"custom/ratio:mean": mean}


FNS = [reinforce, soft, sequence]


@pytest.mark.parametrize("fn", FNS)
@given(seed=st.integers(0, 2**20))
@settings(max_examples=10)
def test_a_graph_is_its_function_in_value_and_gradient(fn, seed):
    g = torch.Generator().manual_seed(seed)
    loss = custom_loss(fn.__name__, [("logprobs", 1), ("advantages", 1), ("old", 1)], traced(fn))
    own = torch.randn(5, generator=g) - 3, {name: torch.randn(5, generator=g) for name in ("advantages", "old")}
    results = []
    for run in (loss, lambda x, inputs: fn(x, inputs["advantages"], inputs["old"])):
        leaf = own[0].clone().requires_grad_()
        value, metrics = run(leaf, own[1])
        results.append((value.detach(), torch.autograd.grad(value, leaf)[0], metrics))
    torch.testing.assert_close(results[0], results[1], rtol=0.0, atol=0.0)


def graph(*nodes, output=None):
    """A graph of one input, whose last node is the loss."""
    first = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}
    last = output or {"tuple": [{"ref": nodes[-1]["name"] if nodes else "logprobs"}, {"dict": {}}]}
    return [first, *nodes, {"op": "output", "name": "output", "target": "output", "args": [last]}]


def call(target, *args, op="call_function", name="x", **kwargs):
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


P = {"ref": "logprobs"}
SUM = call("sum", P, op="call_method")


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        (graph(call("os.system", "ls")), "'os.system' is not on the list"),
        (graph(call("builtins.eval", "1")), "'builtins.eval' is not on the list"),
        (graph(call("torch.load", "f")), "'torch.load' is not on the list"),
        (graph(call("torch.zeros", 10**12)), "'torch.zeros' is not on the list"),
        (graph(call("torch.matmul", P, P)), "'torch.matmul' is not on the list"),
        (graph(call("torch.rand_like", P)), "'torch.rand_like' is not on the list"),
        (graph(call("torch.summ", P)), "did you mean torch.sum"),
        (graph(call("item", P, op="call_method")), "'item' is not on the list"),
        (graph(call("backward", P, op="call_method")), "'backward' is not on the list"),
        (graph(call("add_", P, 1, op="call_method")), "'add_' is not on the list"),
        (graph(call("numpy", P, op="call_method")), "'numpy' is not on the list"),
        (graph(call("repeat", P, 10**9, op="call_method")), "'repeat' is not on the list"),
        (graph(call("builtins.getattr", P, "__class__")), "attribute"),
        (graph(call("builtins.getattr", P, "data")), "attribute"),
        (graph(call("builtins.getattr", P, "grad_fn")), "attribute"),
        (graph(call("builtins.getattr", P, {"ref": "logprobs"})), "attribute"),
        (graph(call("torch.exp", P, out=P)), "keyword 'out'"),
        (graph(call("torch.nn.functional.relu", P, inplace=True)), "keyword 'inplace'"),
        (graph(call("torch.add", P, "text")), "takes no text"),
        (graph(call("to", P, {"device": "cuda:0"}, op="call_method")), "is not on the list"),
        (graph(call("to", P, {"dtype": "complex64"}, op="call_method")), "is not on the list"),
        (graph(call("torch.add", P, {"ref": "later"})), "'later', which does not come before"),
        (graph(call("torch.add", P, {"ref": "x"})), "'x', which does not come before"),
        (graph(call("torch.add", P, 2**70)), "integer above"),
        (graph(call("torch.add", P, "x" * 65)), "text of 65 characters"),
        (graph(call("torch.add", P, {"float": "1.5"})), "is not on the list"),
        ([graph()[0] | {"args": [1.0]}, *graph(SUM)[1:]], "an input has no default"),
        (graph({**SUM, "args": "logprobs"}), "args are a list"),
        (graph(call("torch.add", P, {"ref": "logprobs", "float": "inf"})), "a form that the protocol does not have"),
        (graph({"op": "call_module", "name": "m", "target": "m"}), "no modules"),
        (graph({"op": "get_attr", "name": "m", "target": "m"}), "captures no tensors"),
        (graph({"op": "call_lambda", "name": "m", "target": "m"}), "unknown kind"),
        (graph(SUM, SUM), "each once"),
        (graph(call("sum", P, op="call_method", name="__x__()")), "give names"),
        (graph(*[call("torch.exp", P, name=f"n{i}") for i in range(600)]), "give 2 to 512"),
        (graph(call("torch.sum", P, [[[[[[[[[[1]]]]]]]]]])), "nested more than 8"),
        (graph(call("torch.stack", [P] * 5000)), "more than 4096 arguments"),
        (graph(SUM, output={"ref": "x"}), r"must return \(loss, metrics\)"),
        (graph(SUM, output={"tuple": [1.0, {"dict": {}}]}), "its loss is no node"),
        (graph(SUM, output={"tuple": [{"ref": "x"}, {"dict": {"loss:sum": {"ref": "x"}}}]}), "metric 'loss:sum'"),
        (graph(SUM)[1:], "does not come before"),
        (graph(SUM)[:-1], "must end with its one output"),
        ([], "give 2 to 512"),
    ],
)
def test_what_is_not_on_the_lists_is_refused_before_it_runs(nodes, says):
    with pytest.raises(ValueError, match=says):
        custom_loss("mine", [("logprobs", 1)], nodes)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_numbers_that_json_has_not_are_written_by_name(number):
    added = call("torch.add", P, encoded(number))
    loss = custom_loss("mine", [("logprobs", 1)], graph(added, call("torch.sum", {"ref": "x"}, name="y")))
    assert loss(torch.zeros(3), {})[0].item() == pytest.approx(number, nan_ok=True)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ([("advantages", 1)], "logprobs first"),
        ([("logprobs", 0)], "1 or 2 of logprobs"),
        ([("logprobs", 1), ("logprobs", 1)], "different names"),
        ([("logprobs", 1), ("Big", 1)], "no lowercase name"),
        ([("logprobs", 1), ("old", 1)], "takes .'logprobs'., and its inputs are"),
    ],
)
def test_wrong_inputs_are_refused(inputs, says):
    with pytest.raises(ValueError, match=says):
        custom_loss("mine", inputs, graph(SUM))


def numbers(count):
    """Nodes that square a number of the graph's own again and again."""
    size = call("size", P, 0, op="call_method", name="n0")
    return [size, *(call("operator.mul", {"ref": f"n{i}"}, {"ref": f"n{i}"}, name=f"n{i + 1}") for i in range(count))]


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        (graph(), "its loss is torch.float32"),  # not summed
        (graph(call("torch.argmax", P)), "its loss is torch.int64"),
        (graph(call("size", P, 0, op="call_method")), "its loss is int"),
        (graph(call("torch.sum", P, 3)), "node x"),  # no such dimension
        (graph(*numbers(9)), "integer above 2"),
        (graph(*numbers(0), call("operator.pow", {"ref": "n0"}, 4000)), "power of integers"),
        (graph(call("operator.mul", [1, 2], 10**9)), "it takes tensors"),
        (graph(call("operator.getitem", P, [0] * 9)), "items at numbers"),
        (graph(call("torch.exp", {"dict": {}})), "it takes tensors"),
    ],
)
def test_what_fails_or_grows_in_a_run_is_an_error_that_names_the_node(nodes, says):
    loss = custom_loss("mine", [("logprobs", 1)], nodes)
    with pytest.raises(ValueError, match=says):
        loss(torch.randn(300), {})


X, ROWS = torch.zeros(4, 3), torch.tensor([0, 1, 1, 3, 2])


@pytest.mark.parametrize(
    ("target", "args", "count"),
    [
        ("operator.getitem", (X, ROWS), 15),
        ("operator.getitem", (X, X[:, 0] > 0), 12),
        ("operator.getitem", (X, (slice(0, 2), None, ...)), 12),
        ("operator.getitem", ((4, 3), 1), 0),
        ("torch.gather", (X, 0, ROWS[:, None]), 12),
        ("reshape", (X, (2, 6)), 12),
        ("torch.cat", ([X, X],), 24),
        ("torch.mul", (X[:, :1], X[0]), 12),
        ("torch.dot", (X[0], X[0]), 1),
        ("operator.mul", (3, 4), 0),
        ("builtins.getattr", (X, "shape"), 0),
    ],
)
def test_a_result_has_at_most_the_elements_that_were_counted(target, args, count):
    assert check_call(target, args, {}) == count
    result = (METHODS | FUNCTIONS)[target](*args)
    assert not isinstance(result, torch.Tensor) or result.numel() <= count


@pytest.mark.parametrize(
    ("target", "args", "says"),
    [
        ("operator.getitem", (X, ROWS[None]), "an index has one dimension"),
        ("operator.getitem", (X, slice(0, ROWS[0])), "slices have whole numbers"),
        ("operator.getitem", (X, (0, "x")), "items at numbers, slices, None"),
        ("operator.getitem", ((4, 3), None), "a shape has items at numbers"),
        ("operator.getitem", ("text", 0), "items of tensors"),
        ("torch.cat", (X,), "it joins a list of tensors"),
        ("torch.stack", ([X, 1],), "it joins a list of tensors"),
        ("torch.add", (X, slice(0, 1)), "tensors and numbers"),
        ("torch.add", (X, {}), "tensors and numbers"),
        ("torch.zeros_like", (3,), "it takes tensors"),
    ],
)
def test_arguments_of_other_kinds_are_refused(target, args, says):
    with pytest.raises(ValueError, match=says):
        check_call(target, args, {})


def test_attributes_are_those_of_tensors():
    read = FUNCTIONS["getattr"]
    assert read(X, "shape") == (4, 3)
    assert read(X.max(0), "indices").shape == (3,)
    with pytest.raises(ValueError, match="attribute shape is one of tensors"):
        read((X,), "shape")


def test_results_are_bounded_before_they_are_made():
    column = call("operator.getitem", P, {"tuple": [{"slice": [None, None, None]}, None]}, name="column")
    pairs = call("operator.sub", {"ref": "column"}, P, name="pairs")
    loss = custom_loss("pairs", [("logprobs", 1)], graph(column, pairs, call("torch.sum", {"ref": "pairs"})))
    assert loss(torch.randn(100), {})[0].dim() == 0
    assert graphs.MOST_ELEMENTS < 10**5 * 10**5
    with pytest.raises(ValueError, match="node pairs"):
        loss(torch.randn(10**5), {})  # 40 GB


def test_results_of_all_nodes_are_bounded_together():
    """Three of some elements each are above the bound, though none is alone."""
    nodes = call("operator.neg", P, name="a"), call("operator.neg", {"ref": "a"}, name="b")
    loss = custom_loss("three", [("logprobs", 1)], graph(*nodes, call("torch.sum", {"ref": "b"})))
    some = graphs.MOST_ELEMENTS // 3
    assert loss(torch.zeros(()).expand(some), {})[0].item() == 0.0
    with pytest.raises(ValueError, match="node x"):
        loss(torch.zeros(()).expand(some + 9), {})


def test_a_rank_that_was_not_declared_is_an_error():
    loss = custom_loss("mine", [("logprobs", 2)], graph(SUM))
    assert loss(torch.randn(3, 2), {})[0].dim() == 0
    with pytest.raises(ValueError, match="declared rank 2"):
        loss(torch.randn(3), {})


def test_nothing_on_the_lists_writes_draws_or_leaves_torch():
    for name, fn in (*METHODS.items(), *FUNCTIONS.items()):
        assert not name.endswith("_") or name in ("operator.and_", "operator.or_"), name
        assert "rand" not in name
        assert fn is getattr(operator, name.rpartition(".")[2], None) or callable(fn)
    for name in ("item", "tolist", "numpy", "set_", "backward", "register_hook", "share_memory_", "storage", "repeat"):
        assert name not in METHODS


def test_the_sdk_s_own_encoding_is_read():
    sdk = pytest.importorskip("tinker.lib.public_interfaces.custom_loss")
    handle = sdk.trace_loss(soft, {"logprobs": 1, "advantages": 1, "old": 1}, "session")
    nodes = [node.model_dump() for node in sdk.encode_graph(handle).nodes]
    loss = custom_loss(handle.name, [(x.name, x.rank) for x in handle.inputs], nodes)
    inputs = torch.randn(3, 5)
    found = loss(inputs[0], {"advantages": inputs[1], "old": inputs[2]})
    assert found[0] == soft(*inputs)[0]
