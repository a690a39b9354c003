"""Rows of an ablation number by number, and the table, the picture and the file that show them."""

from __future__ import annotations

import json
import math
import time

import attrs
import pytest
import torch
from matplotlib.figure import Figure

from fppo.commands.output import document
from fppo.studies.ablate import chart, group, measure, operations, text
from fppo.studies.ablate.evaluation import evaluate, exact
from fppo.studies.ablate.group import MeasuredGroup, measure_group
from fppo.studies.ablate.result import Ablation, Error, HostRates, ResultRow, groups, shape_words
from fppo_kernels.operation import Drawn, Operation, OperationCost, operation_of
from fppo_kernels.table import BUILTIN, Implementation, Kernels


def twice(x, y, *, wide=True):
    """The definition: x y, and x + y if it is asked for."""
    return {"product": x * y} | ({"sum": x + y} if wide else {})


def off(x, y, *, wide=True):
    """A kernel with errors of known sizes: a product off by a quarter, and half of the gradient of the sum by y."""
    return {"product": x * y + 0.25} | ({"sum": x + 0.5 * y + 0.5 * y.detach()} if wide else {})


def narrow(x, y, *, wide=False):
    if wide:
        raise ValueError("no sums here")
    return {"product": x * y}


def breaks(x, y, *, wide=True):
    raise ArithmeticError("it overflows\nand more")


def call(kernel, inputs, keywords, outputs):
    found = kernel(*inputs.values(), wide="sum" in outputs)
    return {name: found[name] for name in outputs}


def sized(shape, dtype, device):
    x, y = (torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=dtype)[: shape["N"]] * scale for scale in (1.0, 4.0))
    return Drawn({"x": x, "y": y}, {}, torch.ones(2, shape["N"], dtype=dtype))


COST = OperationCost(bytes_forward=800, bytes_total=4000, flops_forward=600, flops_total=3000, words="as counted")
TOY = Operation(
    name="toy",
    call=call,
    reference=twice,
    outputs=("product", "sum"),
    leaves=("x", "y"),
    sloped=("product", "sum"),
    shape={"N": 4},
    sized=sized,
    cost=lambda shape, itemsize: attrs.evolve(COST, bytes_forward=50 * shape["N"] * itemsize),
    timed=("sum", "product"),
)
MACHINE = HostRates(device="a machine", threads=2, torch="0", matmul={"float32": 1e3, "float64": 2e3}, copy=4e3)
KERNELS = {
    "twice": Implementation(twice),
    "away": Implementation(twice, lambda: "it is elsewhere"),
    "off": Implementation(off),
    "narrow": Implementation(narrow, lacks=frozenset({"sum"})),
    "breaks": Implementation(breaks),
}
CONTRACTS = {
    "twice": ("kept", None),
    "away": ("not checked", None),
    "off": ("broken", 'breaks the law "values"'),
    "narrow": ("partly", "no law broken in 1 s"),
    "breaks": ("broken", "breaks it"),
}


@pytest.fixture
def clock(monkeypatch):
    """A clock of which each reading is later by a second more than the one before it: the first call takes 2 s, the
    next one 4; of one that raises the end is not read."""
    read = [0]

    def now():
        read[0] += 1
        return float(read[0] * (read[0] + 1) // 2)

    monkeypatch.setattr(time, "perf_counter", now)


def a_group(**changes):
    given = {"case": TOY, "shape": {"N": 4}, "dtype": torch.float64, "device": torch.device("cpu")}
    return MeasuredGroup(**(given | {"repeats": 3, "machine": MACHINE, "default": "off"} | changes))


def test_each_row_has_its_own_numbers(clock):
    said = []
    rows, interrupted = measure_group(a_group(), KERNELS, CONTRACTS, progress=said.append)
    assert not interrupted
    found = {row.implementation: row for row in rows}
    assert list(found) == list(KERNELS)
    assert {name: (row.status, row.contract, row.reason) for name, row in found.items()} == {
        "twice": ("ok", "kept", None),
        "away": ("refused", "not checked", "it is elsewhere"),
        "off": ("failed", "broken", 'breaks the law "values"'),
        "narrow": ("ok", "partly", "no law broken in 1 s"),
        "breaks": ("failed", "broken", "breaks it; at this shape it raised ArithmeticError: it overflows"),
    }
    for row in rows:
        assert (row.op, row.dtype, row.shape, row.default) == ("toy", "float64", {"N": 4}, row.implementation == "off")
        assert (row.bound, row.cost) == ("copy", attrs.evolve(COST, bytes_forward=1600))
        assert row.lacks == (("sum",) if row.implementation == "narrow" else ())
    # first calls of those that run, in order; then forward, and forward with backward, of each, three times
    assert [found[name].seconds_first for name in ("twice", "off", "narrow")] == [2.0, 4.0, 6.0]
    for place, name in enumerate(("twice", "off", "narrow")):
        row, forward = found[name], 9.0 + 2 * (6 + 2 * place)
        assert (row.seconds_forward, row.seconds_total, row.repeats) == (forward, forward + 2, 3)
        assert row.fraction_forward == pytest.approx(1600 / forward / 4e3)
        assert row.fraction_total == pytest.approx(4000 / (forward + 2) / 4e3)
        tensors = 3 if name == "narrow" else 4  # outputs, and gradients by both leaves
        assert row.peak_bytes is None or row.peak_bytes >= 0
        assert row.result_bytes == tensors * 32
    for name in ("away", "breaks"):
        row = found[name]
        assert (row.seconds_forward, row.seconds_total, row.seconds_first, row.repeats) == (None, None, None, 0)
        assert (row.fraction_forward, row.fraction_total, row.peak_bytes, row.errors) == (None, None, None, ())
    what = "toy float64"
    each = [f"{what} {name}: errors and memory" for name in ("twice", "off", "narrow", "breaks")]
    rounds = [f"{what}: times, round {number} of 3" for number in (1, 2, 3)]
    assert said == [f"{what}: the float64 reference", *each, *rounds]


def test_errors_are_the_largest_difference_alone_and_by_the_largest_number(clock):
    rows, _ = measure_group(a_group(), KERNELS, CONTRACTS, progress=lambda text: None)
    found = {row.implementation: {(e.output, e.by): (e.max_abs, e.relative) for e in row.errors} for row in rows}
    places = [(output, by) for output in ("product", "sum") for by in (None, "x", "y")]
    assert found["twice"] == dict.fromkeys(places, (0.0, 0.0))
    assert found["off"] == dict.fromkeys(places, (0.0, 0.0)) | {
        ("product", None): (0.25, 0.25 / 36),
        ("sum", "y"): (0.5, 0.5),
    }
    assert found["narrow"] == dict.fromkeys(places[:3], (0.0, 0.0))
    worst = {row.implementation: row.worst for row in rows}
    assert worst == {"twice": (0.0, 0.0), "off": (0.25 / 36, 0.5), "narrow": (0.0, 0.0), "away": (None, None)} | {
        "breaks": (None, None)
    }


def test_work_of_matmuls_is_counted_in_operations_of_the_dtype(clock):
    case = attrs.evolve(TOY, bound="matmul")
    (row,), _ = measure_group(
        a_group(case=case, repeats=1, default=None), {"twice": KERNELS["twice"]}, CONTRACTS, progress=lambda text: None
    )
    assert (row.seconds_forward, row.seconds_total, row.default) == (4.0, 6.0, False)
    assert (row.fraction_forward, row.fraction_total) == (600 / 4.0 / 2e3, 3000 / 6.0 / 2e3)
    unknown = attrs.evolve(MACHINE, matmul={"float32": 1.0})
    (row,), _ = measure_group(
        a_group(case=case, machine=unknown), {"twice": KERNELS["twice"]}, CONTRACTS, progress=lambda text: None
    )
    assert (row.fraction_forward, row.fraction_total) == (None, None)


def test_an_operation_without_leaves_has_no_backward_pass(clock):
    case = attrs.evolve(TOY, leaves=(), sloped=(), cost=lambda *_: attrs.evolve(COST, bytes_total=None))
    (row,), _ = measure_group(a_group(case=case), {"twice": KERNELS["twice"]}, CONTRACTS, progress=lambda text: None)
    assert (row.seconds_forward, row.seconds_total, row.fraction_total) == (6.0, None, None)
    assert {e.by for e in row.errors} == {None}


def test_an_evaluation_has_the_gradients_that_are_asked_for():
    drawn = sized({"N": 2}, torch.float64, torch.device("cpu"))
    drawn = Drawn(*drawn[:2], torch.tensor([[1.0, 2.0], [10.0, 20.0]], dtype=torch.float64))
    x, y = drawn.inputs.values()
    (a, b), (c, d) = drawn.weights
    both = evaluate(TOY, twice, drawn, ("product", "sum"), ("product", "sum"))
    assert {name: value.tolist() for name, value in both.values.items()} == {
        "product": (x * y).tolist(),
        "sum": (x + y).tolist(),
    }
    weights = {"product": torch.stack([a, b]), "sum": torch.stack([c, d])}
    assert both.gradients["x"].tolist() == (weights["product"] * y + weights["sum"]).tolist()
    assert both.gradients["y"].tolist() == (weights["product"] * x + weights["sum"]).tolist()
    one = evaluate(TOY, twice, drawn, ("product", "sum"), ("sum",))
    assert [g.tolist() for g in one.gradients.values()] == [[10.0, 20.0], [10.0, 20.0]]
    assert evaluate(TOY, twice, drawn, ("product",), ()).gradients == {}
    known = exact(TOY, drawn)
    assert {place: g.tolist() for place, g in known.gradients.items()} == {
        ("product", "x"): (weights["product"] * y).tolist(),
        ("product", "y"): (weights["product"] * x).tolist(),
        ("sum", "x"): [10.0, 20.0],
        ("sum", "y"): [10.0, 20.0],
    }
    parts = [Drawn({"x": x[i : i + 1], "y": y[i : i + 1]}, {}, drawn.weights[:, i : i + 1]) for i in range(2)]
    pieces = exact(attrs.evolve(TOY, split=lambda drawn: parts, shared=("y",)), drawn)
    assert pieces.values["sum"].tolist() == known.values["sum"].tolist()
    assert pieces.gradients["product", "x"].tolist() == known.gradients["product", "x"].tolist()
    assert pieces.gradients["product", "y"].tolist() == [float(known.gradients["product", "y"].sum())]


def test_what_is_measured_on_simulated_ranks_stays_on_the_cpu():
    of_ranks = operation_of("all_to_all")
    there = Implementation(twice)
    assert group.refusal(of_ranks, there, torch.device("cpu")) is None
    assert "run on the CPU" in str(group.refusal(of_ranks, there, torch.device("cuda")))
    assert group.refusal(TOY, there, torch.device("cuda")) is None
    drawn = of_ranks.sized({**of_ranks.shape, "N": 4, "heads": 4, "head_dim": 2}, torch.float64, torch.device("cpu"))
    names = of_ranks.outputs
    known = exact(of_ranks, drawn)
    for name, implementation in BUILTIN["all_to_all"].items():
        if implementation.refuse() is not None:
            continue
        found = evaluate(of_ranks, implementation.load(), drawn, names, names)
        for output in names:
            torch.testing.assert_close(found.values[output], known.values[output], msg=name)
        for leaf, gradient in found.gradients.items():
            torch.testing.assert_close(gradient, sum(known.gradients[output, leaf] for output in names), msg=name)


def row(name, **changes):
    given = {"op": "toy", "implementation": name, "dtype": "float32", "shape": {"N": 4000, "H": 2}, "default": False}
    given |= {"status": "ok", "cost": COST, "bound": "copy", "contract": "kept", "repeats": 3}
    return ResultRow(**(given | changes))


ERRORS = (
    Error(output="sum", by=None, max_abs=1.0, relative=1.25e-7),
    Error(output="sum", by="x", max_abs=0.0, relative=0.0),
)
FAST = row(
    "fast",
    default=True,
    errors=ERRORS,
    seconds_forward=2.5e-3,
    seconds_total=1.25,
    fraction_forward=0.125,
    fraction_total=1.5,
    peak_bytes=3 * 2**20,
    result_bytes=2**21,
)
BROKEN = row(
    "broken", status="failed", contract="broken", reason="breaks a law", errors=ERRORS[1:], seconds_forward=4e-6
)
AWAY = row("away", status="refused", contract="not checked", reason="needs a GPU", lacks=("sum",))
OTHER = row("fast", op="mul", bound="matmul", dtype="float64", status="error", reason="it raised")
ABLATION = Ablation(
    rows=(FAST, BROKEN, AWAY, OTHER), machine=attrs.evolve(MACHINE, matmul={"float32": 2.5e12}, copy=2e10)
)


def test_the_table_word_by_word():
    lines = text.table(ABLATION, width=110).splitlines()
    assert lines[:6] == [
        "a machine, 2 threads, torch 0; matmul float32 2,500 GFLOP/s, copy 20.0 GB/s",
        "",
        "toy  N=4,000 H=2  float32",
        "  must move 800 B forward, 4 kB with backward; results and gradients are 2 MiB of the peak",
        "  (as counted)",
        "",
    ]
    top, below, fast, broken = lines[6:10]
    assert top.split() == ["time", "of", "copy", "error", "of", "sum"]
    assert below.split() == [
        "laws",
        "forward",
        "and",
        "backward",
        "forward",
        "and",
        "backward",
        "peak",
        "MiB",
        "value",
        "d",
        "x",
    ]
    assert fast.split() == ["fast", "*", "kept", "2.5", "ms", "1.25", "s", "12.5", "%", "150", "%", "3", "1.2e-07", "0"]
    assert broken.split() == ["broken", "FAILED", "4", "us", "-", "-", "-", "-", "-", "0"]
    assert max(map(len, (top, fast, broken))) <= len(below)
    assert lines[10:] == [
        "  broken: FAILED: breaks a law",
        "  away: cannot run here: needs a GPU; lacks sum",
        "",
        "mul  N=4,000 H=2  float64",
        "  must move 800 B forward, 4 kB with backward; 600 FLOP forward, 3 kFLOP with backward",
        "  (as counted)",
        "",
        "  fast: ERROR: it raised",
        "",
        "* what Kernels.named() takes; fppo train chooses by machine and length, and says so",
    ]
    interrupted = attrs.evolve(ABLATION, rows=(AWAY, AWAY), interrupted=True)
    shown = text.table(interrupted, width=110)
    assert shown.endswith("\n\ninterrupted: what is above was measured before")
    assert "* what" not in shown
    bare = attrs.evolve(MACHINE, threads=1, matmul={}, copy=math.nan)
    assert text.table(attrs.evolve(ABLATION, rows=(), machine=bare)) == "a machine, 1 thread, torch 0;"
    before_any = attrs.evolve(ABLATION, rows=(), machine=bare, interrupted=True)
    ends = ["a machine, 1 thread, torch 0;", "", "interrupted: what is above was measured before"]
    assert text.table(before_any).splitlines() == ends


def test_columns_stand_under_their_headings():
    """Each cell ends where the heading of its column ends, in one block and in several."""
    for width in (110, 60):
        lines = [line for line in text.table(attrs.evolve(ABLATION, rows=(FAST,)), width=width).splitlines() if line]
        assert max(map(len, lines)) <= max(width, 75)
        heads = [i for i, line in enumerate(lines) if line.split()[:1] in (["laws"], ["forward"], ["peak"], ["value"])]
        shown = [cell for i in heads for cell in lines[i + 1].split("  ") if cell.strip()]
        names = [cell.strip() for cell in shown if cell.strip() != "fast *"]
        assert names == ["kept", "2.5 ms", "1.25 s", "12.5 %", "150 %", "3", "1.2e-07", "0"]
        for i in heads:
            assert len(lines[i + 1]) == len(lines[i])
            top = lines[i - 1]
            assert len(top) <= len(lines[i])
        assert len(heads) == (1 if width == 110 else 2)


def test_an_operation_is_explained_once():
    rows = (FAST, attrs.evolve(FAST, dtype="float64"), attrs.evolve(FAST, shape={"N": 1}))
    shown = text.table(attrs.evolve(ABLATION, rows=rows))
    assert shown.count("(as counted)") == 1
    assert [len(part) for part in groups(ABLATION.rows)] == [3, 1]
    assert [len(part) for part in groups(rows)] == [1, 1, 1]
    assert shape_words(FAST) == "N=4,000 H=2"


def test_times_have_three_digits():
    times = (None, 12.3456, 1.0, 0.01234, 1e-3, 9.99e-4, 1.234e-6, 4321.0)
    assert [text.seconds(x) for x in times] == [
        *("-", "12.3 s", "1 s", "12.3 ms", "1 ms", "999 us", "1.23 us", "4321 s")
    ]


def test_the_file_has_every_field():
    read = json.loads(document(attrs.asdict(ABLATION)))
    assert read["machine"] == attrs.asdict(ABLATION.machine)
    assert read["interrupted"] is False
    assert read["rows"] == json.loads(json.dumps([attrs.asdict(each) for each in ABLATION.rows]))
    numbers = {"seconds_forward": math.nan, "seconds_total": math.inf}
    odd = attrs.evolve(ABLATION, rows=(attrs.evolve(FAST, **numbers),), interrupted=True)
    read = json.loads(document(attrs.asdict(odd)))
    assert [read["rows"][0][name] for name in numbers] == [None, None]
    assert read["interrupted"] is True


def test_the_picture_has_the_numbers(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **named: kept.append(figure))
    chart.save(ABLATION, tmp_path / "x.png")
    (figure,) = kept
    times, errors, other, _ = figure.axes
    assert times.get_title("left") == "toy   N=4,000 H=2   float32"
    assert other.get_title("left") == "mul   N=4,000 H=2   float64"
    bars = [(bar.get_width(), round(bar.get_y() + bar.get_height() / 2, 6)) for bar in times.patches]
    assert bars == [(1.25, 0.19), (2.5e-3, -0.19), (4e-6, 1.0)]
    beside = [x.get_text() for x in times.texts]
    assert beside == ["1.25 s  150 %", "2.5 ms  12.5 %", "4 us", "cannot run here: needs a GPU"]
    assert [x.get_text() for x in times.get_yticklabels()] == ["fast *", "broken FAILED", "away"]
    assert [x.get_color() for x in times.get_yticklabels()] == ["black", chart.BAD, chart.GREY]
    assert times.get_xlabel() == "median, s; %: of this machine's copy rate"
    assert other.get_xlabel() == "median, s; %: of this machine's matmul rate"
    assert times.get_xlim() == (0.0, pytest.approx(1.25 * 1.3))
    assert [line.get_xydata().tolist() for line in errors.lines] == [[[1.25e-7, -0.16]]]
    assert sorted((x.get_text(), x.get_position()[1]) for x in errors.texts) == [("0", 0.16), ("0", 1.16)]
    assert errors.get_xlim() == (pytest.approx(1.25e-7 / 4), pytest.approx(1.25e-7 * 4))
    assert "a machine, torch 0, threads: 2" in [x.get_text() for x in figure.texts] + [figure.get_suptitle()]
    fast = attrs.evolve(FAST, seconds_forward=2e-4, seconds_total=8e-4)
    chart.save(attrs.evolve(ABLATION, rows=(fast,)), tmp_path / "x.png")
    assert kept[-1].axes[0].get_xlabel().startswith("median, us; ")
    assert [bar.get_width() for bar in kept[-1].axes[0].patches] == pytest.approx([800.0, 200.0])


def test_sizes_are_the_given_ones_and_else_the_operations_own():
    attention = operation_of("attention")
    (own,) = operations.shapes_of(attention, None, [attention])
    assert own == dict(attention.shape)
    given = [{"heads": 4, "kv_heads": 2}, {"heads": 4, "kv_heads": 2}, {"L": 3}]
    first, second = operations.shapes_of(attention, given, [attention])
    assert first == own | {"heads": 4, "kv_heads": 2}
    assert second == own | {"L": 3}
    pad = operation_of("pad")
    assert operations.shapes_of(pad, [{"heads": 2}], [pad, attention]) == [dict(pad.shape)]  # it has no heads
    with pytest.raises(ValueError, match=r"there is no size 'heads'; pad has B, S, D"):
        operations.shapes_of(pad, [{"heads": 2}], [pad])


def test_dtypes_are_those_that_the_operation_has():
    gae = operation_of("gae")
    assert operations.dtypes_of(gae, ["bfloat16", "float32", torch.float64, "float32"], one=False) == [
        *(torch.float32, torch.float64)
    ]
    assert operations.dtypes_of(gae, ["bfloat16"], one=False) == []


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"hidden_size": 12, "vocab_size": 30, "num_attention_heads": 3}, (12, 30, 3, 3, 4)),
        ({"hidden_size": 12, "vocab_size": 30, "num_attention_heads": 3, "head_dim": 8}, (12, 30, 3, 3, 8)),
        ({"n_embd": 12, "vocab_size": 30, "n_head": 2, "num_key_value_heads": 1}, (12, 30, 2, 1, 6)),
        (
            {"text_config": {"hidden_size": 8, "vocab_size": 9, "num_attention_heads": 2}, "hidden_size": 1},
            (8, 9, 2, 2, 4),
        ),
    ],
)
def test_sizes_of_a_model_are_those_of_its_config(tmp_path, config, sizes):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert tuple(operations.sizes_of(str(tmp_path)).values()) == sizes
    assert list(operations.sizes_of(str(tmp_path))) == ["H", "V", "heads", "kv_heads", "head_dim"]


def test_known_models_divide_as_models_do():
    for hidden, vocabulary, heads, kv_heads, size in operations.PRESETS.values():
        assert heads % kv_heads == 0 < vocabulary
        assert hidden == heads * size or hidden in (1024, 2304)  # those whose heads are wider or narrower


def test_the_default_is_the_implementation_that_a_run_has():
    assert operations.default_of("log_probs", BUILTIN, Kernels.named(log_probs="reference")) == "reference"
    only = {"log_probs": {"chunked": BUILTIN["log_probs"]["chunked"]}}
    assert operations.default_of("log_probs", only, Kernels.named(log_probs="reference")) is None


def test_the_memory_of_a_call_is_what_it_holds_beyond_what_was_there():
    kept = torch.ones(2**22)  # 16 MiB from before
    found = measure.peak_bytes(lambda: torch.ones(2**23).sum() + kept[0], torch.device("cpu"))
    if found is not None:
        assert 24 * 2**20 < found < 64 * 2**20
