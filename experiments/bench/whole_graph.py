"""Loss and gradient of a model on shards: layer by layer, with compiled layers, and compiled as a whole.

    python experiments/bench/whole_graph.py                           # 2 processes, inductor; some minutes
    python experiments/bench/whole_graph.py --sizes 16M --rows 16     # more work for the same collectives
    python experiments/bench/whole_graph.py --sizes tiny --backend aot_eager --repeats 1   # no compiler, to try it out

All compute the same sum of log-probs of the same rows (no padding) and its gradient, in gloo processes of one thread
each, float32, in turn in the same processes. "layers" is fppo's own pass: it gathers each layer in one collective where
it is used, forward and again backward, while the layer before it runs. "compiled layers" has each of its layers run as
a program of torch.compile. "one graph" is what SimpleFSDP does (arXiv:2411.00284): one function that gathers its
parameters by collectives that torch.compile sees, each on its own and those of layers again in the backward pass,
compiled without graph breaks into a graph forward and one backward; "bucketed" has inductor's passes put collectives
together.

The table has medians of the slowest rank's seconds and of the ranks' mean seconds on the processor, as ratios to
"layers" run by run; the largest peak of memory of a rank; and the collectives of a pass with what a rank sends in them.
The exit status is 1 if a gradient differs from that of "layers" by more than 1e-5 of the largest one, or if there is a
graph break.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import torch
import torch.distributed as dist
from bench_tools import header, once, row
from fsdp import SIZES, llama, on_ranks, rows_of, timed
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor import config as inductor
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.utils import run_and_get_code
from torch.distributed import _functional_collectives as functional
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fppo import batch as batches
from fppo import models
from fppo.batch import Experience
from fppo.grad import value_and_grad
from fppo.key import Key
from fppo.models.model import Model, Params
from fppo.models.seams import AttentionLayer
from fppo.runtime import fsdp
from fppo.runtime.mesh import Mesh
from fppo.runtime.watch import watched, wire_bytes
from fppo.steps.forward import Forward, forward_micro_batch
from fppo_kernels.log_probs.reference import reference
from fppo_kernels.table import Kernels

LAYERS, COMPILED, GRAPH, BUCKETED = "layers", "compiled layers", "one graph", "one graph, bucketed"
LARGEST = 1e-5  # difference of a gradient from that of LAYERS, over the largest gradient
BUCKETS = {"bucket_all_gathers_fx": "all", "bucket_reduce_scatters_fx": "all"}
WHOLE = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}  # as `wire_bytes` names it
CALL = r"_c10d_functional\.(?:all_gather|reduce_scatter)\w*\.default\("  # of a collective in inductor's programs
Gradient = Callable[[Params], tuple[Tensor, Params]]


class Task(NamedTuple):
    """A model, this rank's rows and the mesh."""

    model: Model
    rows: Experience
    mesh: Mesh


def by_layers(task: Task) -> Gradient:
    """What an update runs for a micro-batch."""
    forward = Forward(task.model, kernels=Kernels.named(log_probs="reference"), mesh=task.mesh)

    def loss(params: Params) -> Tensor:
        log_probs = forward_micro_batch(params, task.rows, forward=forward).log_probs
        assert log_probs is not None
        return -log_probs.sum()

    return value_and_grad(loss)


def attend(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
    """Causal attention of rows [B, S, heads, D] without padding."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale, enable_gqa=True).transpose(1, 2)


class Gather:
    """Makes whole parameters of shards by collectives that torch.compile sees; their backward is a reduce-scatter."""

    def __init__(self, model: Model, mesh: Mesh) -> None:
        axis = mesh["shard"]
        assert axis.group is not None
        self.shapes, self.group, self.ranks = model.shapes, axis.group, axis.size

    def __call__(self, shards: Mapping[str, Tensor], *, again: bool) -> Params:
        """If `again` the backward pass gathers them anew, and no whole one is kept."""
        call = partial(checkpoint, self._whole, use_reentrant=False) if again else self._whole
        return {name: call(name, x) for name, x in shards.items()}  # type: ignore[misc]

    def _whole(self, name: str, shard: Tensor) -> Tensor:
        rows = self.shapes[name][0]
        if less := -(-rows // self.ranks) - len(shard):  # the last ranks may have fewer rows
            shard = F.pad(shard, (0, 0) * (shard.dim() - 1) + (0, less))
        whole = functional.all_gather_single(shard, 0, self.group)
        return whole if len(whole) == rows else whole[:rows]


def as_one(task: Task, backend: Callable[..., Any]) -> Gradient:
    """The same as one function that torch.compile sees whole."""
    model, gather, tokens = task.model, Gather(task.model, task.mesh), task.rows.tokens
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    constants, targets = dict(model.constants_on(tokens.device)), tokens[:, 1:].flatten()
    starts = [f"{model.prefix}{path}." for path in model.layers]

    def loss(shards: Params) -> Tensor:
        def apply_layer(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            own = {name: x for name, x in shards.items() if name.startswith(starts[index])}
            inner = {name.removeprefix(starts[index]): x for name, x in gather(own, again=True).items()}
            return functional_call(layer, inner, args, dict(kwargs), tie_weights=False)

        outside = gather({name: x for name, x in shards.items() if model.layer_of(name) is None}, again=False)
        base = {name.removeprefix(model.prefix): x for name, x in outside.items()}
        keywords = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
        keywords |= {"attend": attend, "apply_layer": apply_layer}
        out = functional_call(model.skeleton, {**base, **constants}, (), keywords, tie_weights=False)
        states = out.last_hidden_state[:, :-1].flatten(0, 1)
        return -reference(states, outside["model.embed_tokens.weight"], targets)[0].sum()

    return value_and_grad(torch.compile(loss, fullgraph=True, dynamic=False, backend=backend))


class Backend:
    """A backend of torch.compile that counts the collectives of each graph that it compiles."""

    def __init__(self, name: str, ranks: int) -> None:
        self.name, self.ranks, self.graphs = name, ranks, list[dict[str, int]]()

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if self.name == "inductor":
            return compile_fx(graph, inputs, inner_compile=self._compiled)
        partition = min_cut_rematerialization_partition  # as inductor does it
        return aot_autograd(fw_compiler=self._as_it_is, partition_fn=partition)(graph, inputs)

    def calls(self) -> int:
        """The collectives of all graphs."""
        return sum(graph[name] for graph in self.graphs for name in WHOLE)

    def _compiled(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Any:
        self._count(graph)
        return compile_fx_inner(graph, inputs, **keywords)

    def _as_it_is(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self._count(graph)
        return make_boxed_func(graph.forward)

    def _count(self, graph: torch.fx.GraphModule) -> None:
        counted = dict.fromkeys([*WHOLE, "bytes"], 0)
        for node in graph.graph.nodes:
            name = getattr(node.target, "_schema", None) and node.target._schema.name.removeprefix("_c10d_functional::")
            if name in WHOLE:
                tensor = node.meta["val"] if WHOLE[name] == "all_gather" else node.args[0].meta["val"]
                counted[name] += 1
                counted["bytes"] += wire_bytes(WHOLE[name], tensor.nbytes, self.ranks)
        self.graphs.append(counted)


def difference(grads: Params, expected: Params) -> float:
    """The largest one on any rank, over the largest gradient of all ranks."""
    most = torch.stack([(grads[name] - x).abs().max() for name, x in expected.items() if len(x)]).max()
    scale = torch.stack([x.abs().max() for x in expected.values() if len(x)]).max()
    for number in (most, scale):
        dist.all_reduce(number, dist.ReduceOp.MAX)
    return float(most / scale)


def first(gradient: Gradient, params: Params, backend: Backend | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The gradient of the first run, which compiles, and what was compiled."""
    counters.clear()
    if backend is None:
        return {"grads": gradient(params)[1]}
    with inductor.patch(settings) if settings else nullcontext():
        (_, grads), programs = run_and_get_code(gradient, params)
    calls = [len(re.findall(CALL, code)) for code in programs]
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    sent = sum(graph["bytes"] for graph in backend.graphs)
    made = {"captured": graphs, "breaks": breaks, "graphs": backend.graphs}
    return made | {"grads": grads, "bytes": sent, "calls": sum(calls) or backend.calls()}


def ways(task: Task, name: str) -> dict[str, tuple[Gradient, Backend | None, dict[str, Any]]]:
    """By name, what computes the gradient, the backend that compiles all of it, and settings of inductor."""
    ranks = task.mesh["shard"].size
    made: dict[str, tuple[Gradient, Backend | None, dict[str, Any]]] = {LAYERS: (by_layers(task), None, {})}
    if name == "inductor":
        made[COMPILED] = by_layers(task._replace(model=attrs.evolve(task.model, compile_layers=True))), None, {}
    backends = {GRAPH: ({}, Backend(name, ranks))}
    if name == "inductor":
        backends[BUCKETED] = BUCKETS, Backend(name, ranks)
    return made | {way: (as_one(task, backend), backend, patch) for way, (patch, backend) in backends.items()}


def compare(mesh: Mesh, size: str, count: int, backend: str, repeats: int) -> dict[str, Any]:
    """All ways: what they compute, their times in turn, their memory."""
    config, axis = llama(size), mesh["shard"]
    model, (seen, watch) = models.build(config), watched(mesh)
    rows = batches.rows(rows_of(axis.size, config.vocab_size, count), range(axis.rank * count, (axis.rank + 1) * count))
    params = fsdp.shard(models.init_params(model, Key(0)), mesh)
    made, results = ways(Task(model, rows, mesh), backend), dict[str, Any]()
    by_layers(Task(model, rows, seen))(params)
    calls, size_sent, _ = watch.traffic()["shard"]
    for name, (gradient, compiler, settings) in made.items():
        start = time.perf_counter()
        results[name] = {"calls": calls, "bytes": size_sent} | first(gradient, params, compiler, settings)
        results[name]["first"] = time.perf_counter() - start
    expected = results[LAYERS]["grads"]
    for each in results.values():
        each["difference"] = difference(each.pop("grads"), expected)
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for _ in range(repeats):
        for name, (gradient, _, _) in made.items():
            runs[name].append(timed(partial(gradient, params)))
    for name, (gradient, _, _) in made.items():
        dist.barrier()
        peak = torch.tensor(once(partial(gradient, params), per=False).peak_mib)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        results[name] |= {"runs": runs[name], "MiB": float(peak)}
    return results


def shown(size: str, results: dict[str, Any]) -> str:
    """A table."""
    times = ("s", "ratio", "processor s", "ratio")
    lines = [header(size, *times, "peak MiB", "difference", "first s", "collectives", "MiB sent")]
    for name, each in results.items():
        both = [statistics.median(run[i] for run in each["runs"]) for i in (0, 1)]
        pairs = list(zip(each["runs"], results[LAYERS]["runs"], strict=True))
        ratios = [statistics.median(run[i] / base[i] for run, base in pairs) for i in (0, 1)]
        times = [f"{x:.{digits}f}" for pair in zip(both, ratios, strict=True) for x, digits in zip(pair, (3, 2))]
        told = [f"{each['MiB']:.0f}", f"{each['difference']:.1g}", f"{each['first']:.0f}"]
        told += [f"{each['calls']}", f"{each['bytes'] / 2**20:.1f}"]
        lines.append(row(name, *times, *told))
    graphs = {name: each for name, each in results.items() if "graphs" in each}
    lines += [f"{n}: {e['captured']} graph, {e['breaks']} graph breaks: {e['graphs']}" for n, e in graphs.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", default=["16M"], choices=SIZES)
    parser.add_argument("--rows", type=int, default=4, help="of a rank, of 128 tokens each")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args()
    every: dict[str, Any] = {}
    for size in options.sizes:
        work = partial(compare, size=size, count=options.rows, backend=options.backend, repeats=options.repeats)
        every[size] = on_ranks(options.ranks, work)[0]
        print(shown(size, every[size]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(every, indent=1))
    each = [result for results in every.values() for result in results.values()]
    sys.exit(any(not result["difference"] <= LARGEST or result.get("breaks") for result in each))


if __name__ == "__main__":
    main()
