"""What an ablation makes of what it is asked for: each operation in its own dtypes and shapes, in order."""

from __future__ import annotations

import itertools
import math
from typing import Any

import attrs
import pytest
import torch

from fppo.studies.ablate import ablation, group, measure, operations, result
from fppo.studies.ablate.group import check_contract
from fppo_kernels import table as tables
from fppo_kernels.operation import Drawn, operation_of
from fppo_kernels.table import Implementation
from tests.studies.ablate.test_rows import KERNELS, MACHINE, TOY, a_group, row, twice

CPU = torch.device("cpu")
COPY = attrs.evolve(TOY, name="pad", dtypes=(torch.float64, torch.float32), shape={"N": 4, "M": 2})
MATMUL = attrs.evolve(TOY, name="log_probs", bound="matmul", dtypes=(torch.float32, torch.bfloat16), shape={"N": 4})
TABLE = {"pad": {name: KERNELS[name] for name in ("twice", "off")}, "log_probs": {"twice": KERNELS["twice"]}}


def ablated(ops, **how):
    """An ablation of operations of this file, without their laws."""
    return ablation.ablate(ops, **{"table": TABLE, "machine": MACHINE, "repeats": 1, "law_seconds": 0, **how})


def test_every_operation_has_its_groups_in_its_own_dtypes_and_shapes():
    said: list[str] = []
    asked = {"shapes": [{"N": 3}, {"N": 4, "M": 7}], "dtypes": ["float32", "float64", "bfloat16"]}
    found = ablated([COPY, MATMUL], **asked, progress=said.append)
    assert (found.machine, found.interrupted) == (MACHINE, False)
    shapes = {"pad": [{"N": 3, "M": 2}, {"N": 4, "M": 7}], "log_probs": [{"N": 3}, {"N": 4}]}
    dtypes = {"pad": ("float32", "float64"), "log_probs": ("float32", "bfloat16")}
    rows = [
        (case.name, name, shape, dtype)
        for case in (COPY, MATMUL)
        for dtype in dtypes[case.name]
        for shape, name in itertools.product(shapes[case.name], TABLE[case.name])
    ]
    assert [(x.op, x.implementation, x.shape, x.dtype) for x in found.rows] == rows
    assert [line for line in said if line.endswith("laws")] == [
        *[f"pad {dtype} {name}: laws" for dtype in dtypes["pad"] for name in TABLE["pad"]],
        *[f"log_probs {dtype} twice: laws" for dtype in dtypes["log_probs"]],
    ]


def test_an_operation_is_left_out_in_a_dtype_that_it_has_not_beside_others():
    with pytest.raises(ValueError, match="pad is ablated in float64, float32, not in"):
        ablated(COPY, dtypes=["bfloat16"])
    assert [x.op for x in ablated([COPY, MATMUL], dtypes=["bfloat16"]).rows] == ["log_probs"]


def test_an_ablation_that_was_stopped_has_what_came_before():
    def stops(*args, **how):
        raise KeyboardInterrupt

    table = {**TABLE, "gae": {"first": KERNELS["twice"], "second": Implementation(stops)}}
    own = attrs.evolve(COPY, name="gae")
    found = ablated([COPY, own, MATMUL], dtypes=["float32", "float64"], table=table)
    assert found.interrupted
    assert [(x.op, x.dtype) for x in found.rows] == [
        *([("pad", "float32")] * 2 + [("pad", "float64")] * 2 + [("gae", "float32")] * 2)
    ]
    assert [x.status for x in found.rows[-2:]] == ["ok", "interrupted"]


def test_own_implementations_join_those_of_the_table():
    own = {"mine": twice, "made": Implementation(twice, lacks=frozenset({"sum"}))}
    table = {"pad": tables.BUILTIN["pad"]}
    found = operations.extended([operation_of("pad")], own, table)
    assert list(found["pad"]) == [*table["pad"], "mine", "made"]
    assert found["pad"]["made"].lacks == {"sum"}
    assert found["pad"]["mine"].load() is twice
    assert operations.names_of("pad", own, found) == [*table["pad"], "mine", "made"]
    assert operations.names_of("pad", ["mine"], found) == ["mine"]
    assert operations.extended([operation_of("pad")], ["mine"], table) is table
    for name in ("QWEN2.5-7B-instruct", "Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"):
        assert operations.sizes_of(name) == operations.sizes_of("qwen2.5-7b")


# contracts


def test_a_contract_names_the_law_that_is_broken_or_why_none_was_tried():
    pad, plain = operation_of("pad"), tables.BUILTIN["pad"]["torch"].load()

    def contract(fn, *, limit=math.inf, **how):
        return check_contract(pad, Implementation(fn, **how), torch.float32, CPU, limit=limit)

    found, reason = contract(lambda *args, **how: plain(*args, **how) + 1.0)
    assert found == "broken"
    assert reason.startswith('breaks the law "')
    for limit in (0, -1.0):
        assert contract(plain, limit=limit) == ("not checked", None)
    assert contract(plain, refuse=lambda: "elsewhere") == ("not checked", None)
    broken = Implementation("no.such.module:fn")
    found = check_contract(pad, broken, torch.float32, CPU, limit=math.inf)
    assert found == ("not checked", "the laws could not be tried: ModuleNotFoundError: No module named 'no'")


# times, errors and rates


def test_a_first_forward_pass_is_made_before_those_that_are_timed():
    """Without a backward pass to come some kernels compile anew."""
    log = []

    def kernel(x, y, *, wide=True):
        log.append(x.requires_grad)
        return twice(x, y, wide=wide)

    own = {"mine": Implementation(kernel)}
    group.measure_group(a_group(repeats=2), own, {"mine": ("kept", None)}, progress=lambda text: None)
    assert log[-5:] == [False, *[False, True] * 2]


def test_an_error_is_the_largest_gap_and_nothing_hides_it():
    nan, inf = math.nan, math.inf

    def measured(expected, actual):
        """The row of a kernel that gives these numbers."""
        known = torch.tensor(expected, dtype=torch.float64)
        drawn = Drawn({"x": known, "y": known}, {}, torch.ones(1, len(known)))
        alone = {"outputs": ("product",), "timed": ("product",), "leaves": (), "sloped": ()}
        reference = lambda x, y, *, wide: {"product": x}  # noqa: E731
        case = attrs.evolve(TOY, reference=reference, sized=lambda *_: drawn, **alone)
        fn = Implementation(lambda x, y, *, wide: {"product": torch.tensor(actual)})
        (row,), _ = group.measure_group(a_group(case=case), {"k": fn}, {"k": ("kept", None)}, progress=len)
        return row

    for expected, actual, gap, relative in (
        ([0.0, 2.0], [0.5, 1.0], 1.0, 0.5),
        ([0.0, 0.0], [0.0, 0.25], 0.25, 0.25),
        ([1.0, 2.0], [nan, 2.0], inf, inf),
        ([1.0, 2.0], [1.0, inf], inf, inf),
        ([-inf, 2.0], [-inf, 1.0], 1.0, 0.5),
        ([-inf, 2.0], [inf, 2.0], inf, inf),
        ([], [], 0.0, 0.0),
    ):
        error = result.Error(output="product", by=None, max_abs=gap, relative=relative)
        assert measured(expected, actual).errors == (error,)
    assert measured([1.0], [1.0, 1.0]).reason == "it raised ValueError: product has the shape [2], expected [1]"


def test_a_rate_is_that_of_the_median_call_after_a_warm_up(monkeypatch):
    """The faster of torch's ways counts."""
    monkeypatch.setattr(measure, "COPIED", 10)
    monkeypatch.setattr(measure, "WIDTH", {"cpu": 3})
    calls: list[Any] = []
    times = {0: [100.0, 4.0, 2.0, 8.0], 1: [50.0, 1.0, 0.5, 2.0]}
    ways: list[str] = []

    def seconds(fn, device):
        fn()
        place = fn.__code__.co_firstlineno
        ways.append(place)
        number = list(dict.fromkeys(ways)).index(place)
        calls.append((number, device))
        return times[number][ways.count(place) - 1]

    monkeypatch.setattr(measure, "seconds", seconds)
    if torch.backends.mkldnn.is_available():
        assert measure.matmul_rate(torch.float32, CPU, repeats=3) == 2 * 27 / 1.0
        assert calls == [(0, CPU)] * 4 + [(1, CPU)] * 4
    calls.clear()
    ways.clear()
    assert measure.matmul_rate(torch.float64, CPU, repeats=3) == 2 * 27 / 4.0
    calls.clear()
    ways.clear()
    assert measure.copy_rate(CPU, repeats=3) == 2 * 40 / 4.0
    assert calls == [(0, CPU)] * 4


def test_each_size_of_a_known_model_is_as_it_was_published():
    """Of a model card each: hidden size, vocabulary, heads, heads of keys, size of a head."""
    sizes = {name: tuple(operations.sizes_of(name).values()) for name in operations.PRESETS}
    assert sizes == {
        "qwen2.5-0.5b": (896, 151936, 14, 2, 64),
        "qwen2.5-1.5b": (1536, 151936, 12, 2, 128),
        "qwen2.5-3b": (2048, 151936, 16, 2, 128),
        "qwen2.5-7b": (3584, 152064, 28, 4, 128),
        "qwen3-0.6b": (1024, 151936, 16, 8, 128),
        "qwen3-8b": (4096, 151936, 32, 8, 128),
        "llama-3.2-1b": (2048, 128256, 32, 8, 64),
        "llama-3.1-8b": (4096, 128256, 32, 8, 128),
        "gemma-2-2b": (2304, 256000, 8, 4, 256),
        "gpt2": (768, 50257, 12, 12, 64),
    }


def test_rows_of_one_place_are_a_group_whatever_stands_between():
    rows = [row("a"), row("b", shape={"N": 1}), row("c"), row("d", dtype="float64"), row("e", op="other"), row("f")]
    assert [[x.implementation for x in each] for each in result.groups(rows)] == [
        *(["a", "c", "f"], ["b"], ["d"], ["e"])
    ]
