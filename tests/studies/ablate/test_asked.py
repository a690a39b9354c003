"""What an ablation hands to its parts: each operation's own dtypes, shapes, laws and rates, in order."""

from __future__ import annotations

import math
import sys
from typing import Any

import attrs
import pytest
import torch

from fppo.laws._search import LawViolation
from fppo.studies.ablate import ablation, group, measure, operations, result
from fppo.studies.ablate.group import check_contract
from fppo_kernels import table as tables
from fppo_kernels.operation import operation_of
from fppo_kernels.table import Implementation
from tests.studies.ablate.test_rows import KERNELS, MACHINE, TOY, a_group, off, row, twice

CPU = torch.device("cpu")
COPY = attrs.evolve(TOY, name="copies", dtypes=(torch.float64, torch.float32), shape={"N": 4, "M": 2})
MATMUL = attrs.evolve(TOY, name="multiplies", bound="matmul", dtypes=(torch.float32, torch.bfloat16), shape={"N": 6})
TABLE = {"copies": {name: KERNELS[name] for name in ("twice", "off")}, "multiplies": {"twice": KERNELS["twice"]}}


@pytest.fixture
def asked(monkeypatch):
    """What the parts are called with, in order; a group has one row for each implementation."""
    kept: list[Any] = []

    def rates(known, place, dtypes):
        kept.append(("rates", place, dtypes))
        return attrs.evolve(known, matmul=dict.fromkeys(("x",), 1.0))

    def contract(case, implementation, dtype, device, *, limit):
        kept.append(("laws", case.name, implementation.fn, dtype, device, limit))
        return ("kept", f"{case.name} {dtype}")

    def group_of(base, implementations, contracts, *, progress):
        kept.append(("group", base, dict(implementations), dict(contracts)))
        rows = [row(name, op=base.case.name, shape=base.shape, dtype=str(base.dtype)) for name in implementations]
        return rows, base.case.name == "stops"

    monkeypatch.setattr(measure, "with_rates", rates)
    monkeypatch.setattr(measure, "host_of", lambda place: attrs.evolve(MACHINE, device=str(place)))
    monkeypatch.setattr(ablation, "check_contract", contract)
    monkeypatch.setattr(ablation, "measure_group", group_of)
    monkeypatch.setattr(operations, "default_of", lambda op, table, defaults: (op, table is TABLE, defaults))
    return kept


def test_every_operation_has_its_laws_and_groups_in_its_own_dtypes_and_shapes(asked):
    said: list[str] = []
    found = ablation.ablate(
        [COPY, MATMUL],
        shapes=[{"N": 3}, {"N": 5, "M": 7}],
        dtypes=["float32", "float64", "bfloat16"],
        repeats=4,
        law_seconds=0.25,
        defaults="defaults",
        table=TABLE,
        progress=said.append,
    )
    machine = attrs.evolve(MACHINE, device="cpu", matmul={"x": 1.0})
    assert (found.machine, found.interrupted) == (machine, False)
    shapes = {"copies": [{"N": 3, "M": 2}, {"N": 5, "M": 7}], "multiplies": [{"N": 3}, {"N": 5}]}
    dtypes = {"copies": (torch.float32, torch.float64), "multiplies": (torch.float32, torch.bfloat16)}
    expected: list[Any] = [("rates", CPU, (torch.float32, torch.bfloat16))]
    rows = []
    for case in (COPY, MATMUL):
        implementations = TABLE[case.name]
        for dtype in dtypes[case.name]:
            expected += [
                ("laws", case.name, implementation.fn, dtype, CPU, 0.25) for implementation in implementations.values()
            ]
            contracts = {name: ("kept", f"{case.name} {dtype}") for name in implementations}
            for shape in shapes[case.name]:
                base = group.MeasuredGroup(
                    case=case,
                    shape=shape,
                    dtype=dtype,
                    device=CPU,
                    repeats=4,
                    machine=machine,
                    default=(case.name, True, "defaults"),
                )
                expected.append(("group", base, implementations, contracts))
                rows += [(case.name, name, shape, str(dtype)) for name in implementations]
    assert asked == expected
    assert [(x.op, x.implementation, x.shape, x.dtype) for x in found.rows] == rows
    assert said == ["the rates of this machine"] + [
        f"{case.name} {str(dtype).removeprefix('torch.')} {name}: laws"
        for case in (COPY, MATMUL)
        for dtype in dtypes[case.name]
        for name in TABLE[case.name]
    ]


def test_the_rates_of_an_earlier_ablation_are_taken(asked):
    found = ablation.ablate(COPY, dtypes=["float64"], table=TABLE, machine=MACHINE)
    assert found.machine is MACHINE
    assert [name for name, *_ in asked] == ["laws", "laws", "group"]
    assert asked[0][-1] == 5.0
    with pytest.raises(ValueError, match="copies is ablated in float64, float32, not in"):
        ablation.ablate(COPY, dtypes=["bfloat16"], table=TABLE, machine=MACHINE)
    asked.clear()
    both = ablation.ablate([COPY, MATMUL], dtypes=["bfloat16"], table=TABLE, machine=MACHINE)  # one has none of it
    assert [x.op for x in both.rows] == ["multiplies"]


def test_an_ablation_that_was_stopped_has_what_came_before(asked):
    stops = attrs.evolve(COPY, name="stops")
    own = {**TABLE, "stops": TABLE["copies"]}
    found = ablation.ablate([COPY, stops, MATMUL], dtypes=["float32", "float64"], table=own, machine=MACHINE)
    assert found.interrupted
    places = [(x.op, x.dtype) for x in found.rows]
    assert places == [
        *[("copies", "torch.float32")] * 2,
        *[("copies", "torch.float64")] * 2,
        *[("stops", "torch.float32")] * 2,
    ]


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


def check(monkeypatch, outcome, *, limit=9.0, dtype=torch.float64, **changes):
    """The contract where the check of laws has this outcome, and what it was called with."""
    kept: list[Any] = []

    def check_kernel(case, fn, **how):
        kept.append((case, how))
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome(fn) if callable(outcome) else outcome

    monkeypatch.setattr(group, "check_kernel", check_kernel)
    implementation = Implementation(twice, lacks=frozenset({"sum"}), reference=off, **changes)
    return check_contract(TOY, implementation, dtype, CPU, limit=limit), kept, implementation


def test_a_contract_is_that_of_the_laws_for_what_it_has(monkeypatch):
    found, kept, implementation = check(monkeypatch, True)
    assert found == ("kept", None)
    how = {"dtypes": (torch.float64,), "device": CPU, "lacks": frozenset({"sum"}), "reference": off}
    assert implementation.definition() is off
    assert kept == [(TOY, how)]
    found, _, _ = check(monkeypatch, False)
    assert found == ("not checked", "no law is made for what it lacks, or for this device")
    for limit in (0, -1.0):
        found, kept, _ = check(monkeypatch, True, limit=limit)
        assert (found, kept) == (("not checked", None), [])
    found, kept, _ = check(monkeypatch, True, refuse=lambda: "elsewhere")
    assert (found, kept) == (("not checked", None), [])
    found, _, _ = check(monkeypatch, ArithmeticError("it\noverflows"))
    assert found == ("not checked", "the laws could not be tried: ArithmeticError: it")
    with pytest.raises(KeyboardInterrupt):
        check(monkeypatch, KeyboardInterrupt())


def test_a_broken_law_is_named_with_its_reason_and_time_is_kept(monkeypatch):
    found, _, _ = check(monkeypatch, LawViolation("toy breaks it\n  on some batch\nmore", "values", {}))
    assert found == ("broken", 'breaks the law "values": on some batch')
    now = [0.0]
    monkeypatch.setattr(group.time, "perf_counter", lambda: now[0])

    def slow(fn):
        for _ in range(9):
            assert fn(torch.ones(1), torch.ones(1))["sum"].item() == 2.0
            now[0] += 1.0
        raise AssertionError("nobody stopped it")

    found, _, _ = check(monkeypatch, slow, limit=4.0)
    assert found == ("partly", "no law broken in 4 s, which were not enough to try all")
    assert now == [5.0]


def test_compiled_programs_of_the_laws_are_dropped(monkeypatch):
    dropped = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: dropped.append(1))
    monkeypatch.setitem(sys.modules, "torch._dynamo", torch)
    check(monkeypatch, True)
    check(monkeypatch, ArithmeticError())
    assert dropped == [1, 1]


# times, errors and rates


def test_a_first_forward_pass_is_made_before_those_that_are_timed(monkeypatch):
    """Without a backward pass to come some kernels compile anew."""
    timed, log = [False], []

    def seconds(fn, device):
        timed[0] = True
        fn()
        timed[0] = False
        return 1.0

    def kernel(x, y, *, wide=True):
        log.append((timed[0], x.requires_grad))
        return twice(x, y, wide=wide)

    monkeypatch.setattr(measure, "seconds", seconds)
    monkeypatch.setattr(measure, "peak_bytes", lambda fn, device: 1)
    own = {"mine": Implementation(kernel)}
    group.measure_group(a_group(repeats=2), own, {"mine": ("kept", None)}, progress=lambda text: None)
    assert [pair for pair in log if not pair[1]] == [(False, False), (True, False), (True, False)]
    assert log[-5:] == [(False, False), *[(True, False), (True, True)] * 2]


def test_an_error_is_the_largest_gap_and_nothing_hides_it():
    nan, inf = math.nan, math.inf
    for expected, actual, gap, relative in (
        ([0.0, 2.0], [0.5, 1.0], 1.0, 0.5),
        ([0.0, 0.0], [0.0, 0.25], 0.25, 0.25),
        ([1.0, 2.0], [nan, 2.0], inf, inf),
        ([1.0, 2.0], [1.0, inf], inf, inf),
        ([-inf, 2.0], [-inf, 1.0], 1.0, 0.5),
        ([-inf, 2.0], [inf, 2.0], inf, inf),
        ([], [], 0.0, 0.0),
    ):
        one, other = (torch.tensor(x, dtype=torch.float64) for x in (expected, actual))
        found = group._error("out", "x", one, other.float())
        assert found == result.Error(output="out", by="x", max_abs=gap, relative=relative)
    with pytest.raises(ValueError, match=r"out has the shape \[2\], expected \[1\]"):
        group._error("out", None, torch.ones(1), torch.ones(2))


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
