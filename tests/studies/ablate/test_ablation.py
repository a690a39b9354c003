"""Ablations: every implementation has a row, and what is wrong with one stands in it."""

from __future__ import annotations

import json
import math

import attrs
import pytest
import torch

from fppo.commands.output import document
from fppo.laws import collectives, log_probs, temporal
from fppo.studies.ablate import ablate, chart, measure, operations
from fppo.studies.ablate import text as texts
from fppo.studies.ablate.evaluation import evaluate
from fppo.studies.ablate.group import check_contract
from fppo.studies.ablate.result import HostRates
from fppo_kernels import table as tables
from fppo_kernels.log_probs.reference import LogProbs, reference
from fppo_kernels.operation import operation_of
from fppo_kernels.table import Implementation, Kernels

SIZES = {"N": 10, "H": 8, "V": 33, "R": 3, "L": 7, "heads": 4, "kv_heads": 2, "head_dim": 4}
SIZES |= {"M": 12, "B": 3, "T": 8, "S": 6, "D": 2, "P": 100, "C": 9}
PLAIN = ["reference", "chunked"]  # those that need no compiler


def drops_entropy_gradient(*args, **keywords):
    out = reference(*args, **keywords)
    return LogProbs(out.log_probs, None if out.entropy is None else out.entropy.detach(), out.sum_squared)


def raises_on_many(hidden, *args, **keywords):
    if len(hidden) == SIZES["N"]:
        raise MemoryError("too many tokens\nand a second line")
    return reference(hidden, *args, **keywords)


def lacking(*args, entropy=False, sum_squared=False, **keywords):
    if entropy or sum_squared:
        raise ValueError("this kernel has no entropy")
    return reference(*args, **keywords)


def table():
    """Two of ours, one that cannot run, one that raises, one that has log-probs alone."""
    built = {name: tables.BUILTIN["log_probs"][name] for name in PLAIN}
    return {
        "log_probs": built
        | {
            "elsewhere": Implementation("no_such_module:fn", lambda: "needs a machine of another kind"),
            "raises": Implementation(raises_on_many),
            "broken": Implementation(drops_entropy_gradient),
            "lacking": Implementation(lacking, lacks=frozenset({"entropy", "sum_squared"})),
        }
    }


RATES = {"float64": 1e10, "float32": 1e10, "bfloat16": 1e10}
MACHINE = HostRates(device="a machine", threads=1, torch="0", matmul=RATES, copy=1e10)


def few_sizes(op):
    """The operation with laws on small examples."""
    found = operation_of(op)
    return attrs.evolve(found, sizes=found.sizes[:3])


def small(op, **keywords):
    sizes = {name: SIZES[name] for name in operations.case_of(op).shape}
    keywords = {"defaults": Kernels.named(log_probs="reference"), "machine": MACHINE} | keywords
    return ablate(op, shapes=[sizes], repeats=2, **{"law_seconds": 1e6} | keywords)


def few_examples(patch):
    """Has the laws of the operations whose examples are many and large tried on few and small ones."""
    patch.setattr(log_probs, "LARGE", (70, 200))
    patch.setattr(temporal, "SIZES", temporal.SIZES[:2])
    patch.setattr(temporal, "_LONG", temporal._LONG[:1])
    patch.setattr(collectives, "CASES", 2)


@pytest.mark.slow
def test_the_rates_are_measured():
    found = ablate("pad", shapes=[{"B": 2, "S": 3, "D": 2}], repeats=1, law_seconds=0, dtypes=["float32"])
    assert found.machine.copy > 1e8
    assert measure.matmul_rate(torch.float32, torch.device("cpu"), repeats=1) > 1e8


@pytest.fixture(scope="module")
def ablation():
    with pytest.MonkeyPatch.context() as patch:
        few_examples(patch)
        return small(few_sizes("log_probs"), dtypes=["float32"], table=table(), law_seconds=60)


def row(ablation, name):
    return next(r for r in ablation.rows if r.implementation == name)


@pytest.mark.slow
def test_each_implementation_has_a_row_that_says_how_it_went(ablation):
    assert [(r.implementation, r.status, r.contract) for r in ablation.rows] == [
        ("reference", "ok", "kept"),
        ("chunked", "ok", "kept"),
        ("elsewhere", "refused", "not checked"),
        ("raises", "error", "kept"),
        ("broken", "failed", "broken"),
        ("lacking", "ok", "not checked"),
    ]
    assert row(ablation, "elsewhere").reason == "needs a machine of another kind"
    assert row(ablation, "raises").reason == "it raised MemoryError: too many tokens"
    assert [r.implementation for r in ablation.rows if r.default] == ["reference"]
    assert not ablation.interrupted


@pytest.mark.slow
def test_a_dropped_gradient_is_named_and_measured(ablation):
    broken = row(ablation, "broken")
    assert 'the law "gradient of entropy"' in broken.reason
    errors = {(e.output, e.by): e.relative for e in broken.errors}
    assert errors["entropy", "hidden"] == errors["entropy", "weight"] == 1.0
    assert errors["entropy", None] < 1e-5
    assert errors["log_probs", "weight"] < 1e-5
    assert broken.seconds_forward > 0
    assert broken.seconds_total > 0


@pytest.mark.slow
def test_a_kernel_that_lacks_outputs_is_measured_on_those_it_has(ablation):
    found = row(ablation, "lacking")
    assert {e.output for e in found.errors} == {"log_probs"}
    assert found.lacks == ("entropy", "sum_squared")


@pytest.mark.slow
def test_errors_are_those_of_the_numbers():
    """A kernel whose log-probs are off by a known amount, in float64, where nothing else is."""

    def shifted(*args, **keywords):
        out = reference(*args, **keywords)
        return LogProbs(out.log_probs + 0.25, *out[1:])

    two = {"shifted": Implementation(shifted), "reference": tables.BUILTIN["log_probs"]["reference"]}
    found = small("log_probs", dtypes=["float64"], table={"log_probs": two}, law_seconds=0)
    error = next(e for e in row(found, "shifted").errors if e.output == "log_probs" and e.by is None)
    assert error.max_abs == pytest.approx(0.25)
    inputs = operation_of("log_probs").sized(row(found, "shifted").shape, torch.float64, torch.device("cpu")).inputs
    largest = reference(*inputs.values()).log_probs.abs().max().item()
    assert error.relative == pytest.approx(0.25 / largest)
    assert row(found, "reference").worst[0] < 1e-12
    assert row(found, "reference").contract == "not checked"


@pytest.mark.slow
@pytest.mark.parametrize("op", operations.NAMES)
def test_every_operation_is_ablated_within_its_tolerance(op):
    names = PLAIN if op == "log_probs" else [n for n, reason in tables.available(op).items() if reason is None][:2]
    found = small(op, implementations=names, dtypes=operation_of(op).dtypes, law_seconds=0)
    tolerances = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 5e-2}
    assert {r.status for r in found.rows} == {"ok"}, [r.reason for r in found.rows]
    for r in found.rows:
        assert r.errors
        assert all(e.relative < tolerances[r.dtype] for e in r.errors), r
        assert r.cost.bytes_forward > 0
        assert r.fraction_forward is not None
        assert math.isfinite(r.fraction_forward)
    assert [r.default for r in found.rows].count(True) == len({r.dtype for r in found.rows})


@pytest.mark.slow
@pytest.mark.parametrize("op", operations.NAMES)
def test_every_operation_has_a_contract(op, monkeypatch):
    few_examples(monkeypatch)
    implementation = tables.BUILTIN[op]["reference" if op == "log_probs" else next(iter(tables.BUILTIN[op]))]
    found = check_contract(few_sizes(op), implementation, torch.float32, torch.device("cpu"), limit=math.inf)
    assert found == ("kept", None)


def test_laws_that_take_too_long_are_cut_short():
    case, slow = operation_of("log_probs"), Implementation(reference)
    contract, reason = check_contract(case, slow, torch.float32, torch.device("cpu"), limit=1e-6)
    assert contract == "partly"
    assert "no law broken" in reason


@pytest.mark.slow
def test_json_has_the_rows(ablation):
    read = json.loads(document(attrs.asdict(ablation)))
    assert [r["implementation"] for r in read["rows"]] == [r.implementation for r in ablation.rows]
    assert [r["reason"] for r in read["rows"]] == [r.reason for r in ablation.rows]
    assert read["rows"][0]["errors"][0]["max_abs"] == ablation.rows[0].errors[0].max_abs
    infinite = attrs.evolve(ablation.rows[0], seconds_forward=math.inf)
    changed = attrs.evolve(ablation, rows=(infinite,))
    assert json.loads(document(attrs.asdict(changed)))["rows"][0]["seconds_forward"] is None


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_and_hides_nothing(ablation, width):
    text = texts.table(ablation, width=width)
    assert max(map(len, text.splitlines())) <= width
    joined = " ".join(text.split())
    for what in ("FAILED", 'law "gradient of entropy"', "cannot run here: needs a machine of another kind"):
        assert what in joined
    assert "ERROR: it raised MemoryError: too many tokens" in joined
    assert "reference *" in joined
    assert "lacks entropy, sum_squared" in joined


@pytest.mark.slow
def test_the_chart_is_a_picture(ablation, tmp_path):
    chart.save(ablation, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing was measured"):
        chart.save(attrs.evolve(ablation, rows=()), tmp_path / "none.png")


def test_ctrl_c_gives_what_was_measured():
    calls = []

    def stops(*args, **keywords):
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return reference(*args, **keywords)

    one = {"log_probs": {"reference": Implementation(reference)}}
    found = small("log_probs", dtypes=["float64"], law_seconds=0, implementations={"stops": stops}, table=one)
    assert found.interrupted
    assert [r.status for r in found.rows] == ["ok", "interrupted"]
    assert "interrupted" in texts.table(found)


def test_the_default_is_the_runs_own():
    own = Kernels.named(log_probs="chunked")
    found = small("log_probs", dtypes=["float64"], implementations=PLAIN, defaults=own, law_seconds=0)
    assert [r.default for r in found.rows] == [False, True]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"op": "log_prob"}, "did you mean log_probs?.* attention"),
        ({"op": "log_probs", "implementations": ["chunkd"]}, "no kernel log_probs/chunkd; did you mean chunked"),
        ({"op": "log_probs", "dtypes": ["float16"]}, "no dtype 'float16'.* bfloat16"),
        ({"op": "gae", "dtypes": ["bfloat16"]}, "gae is ablated in float64, float32"),
        ({"op": "log_probs", "shapes": [{"M": 3}]}, "no size 'M'; log_probs has N, H, V"),
        ({"op": "log_probs", "shapes": [{"N": 0}]}, "1 or more, got N = 0"),
        ({"op": "log_probs", "repeats": 0}, "repeats must be 1"),
        ({"op": "log_probs", "implementations": {"chunked": reference}}, "in the table already"),
        ({"op": ["log_probs", "gae"], "implementations": {"mine": reference}}, "belong to one operation"),
        ({"op": "attention", "shapes": [{"heads": 3, "kv_heads": 2}]}, "must be a multiple of kv_heads = 2"),
        ({"op": "all_to_all", "shapes": [{"N": 3}]}, "all_to_all: N must be a multiple of 2, got N = 3"),
    ],
)
def test_mistakes_name_what_there_is(keywords, message):
    with pytest.raises(ValueError, match=message):
        ablate(**keywords, law_seconds=0)


def test_the_optimizer_is_measured_on_fresh_numbers():
    """The timed steps change what they are donated, and nothing of what errors are taken from."""
    case = operation_of("adamw")
    drawn = case.sized({"P": 50}, torch.float32, torch.device("cpu"))
    kept = [x.clone() for x in drawn.inputs["params"]]
    fn = tables.get("adamw", "torch")
    evaluate(case, fn, drawn, (), ())
    assert all(torch.equal(a, b) for a, b in zip(kept, drawn.inputs["params"], strict=True))
    assert not torch.equal(kept[0], drawn.inputs["donated"]["params"][0])


def test_models_give_sizes(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"hidden_size": 12, "vocab_size": 30, "num_attention_heads": 3, "num_key_value_heads": 1})
    )
    assert operations.sizes_of(str(tmp_path)) == {"H": 12, "V": 30, "heads": 3, "kv_heads": 1, "head_dim": 4}
    assert operations.sizes_of("Qwen/Qwen2.5-0.5B-Instruct") == operations.sizes_of("qwen2.5-0.5b")
    with pytest.raises(ValueError, match=r"did you mean qwen2.5-7b\?"):
        operations.sizes_of("qwen2.5-7")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="does not say hidden_size"):
        operations.sizes_of(str(tmp_path))


def test_numbers_of_a_table_are_short():
    assert [texts.share(x) for x in (None, 0.0123456, 0.5, 1.0, 12.34)] == ["-", "1.23 %", "50 %", "100 %", "1234 %"]
    assert [texts.size(x) for x in (0, 999, 1_500, 2_500_000, 10**10)] == ["0 B", "999 B", "1.5 kB", "2.5 MB", "10 GB"]
