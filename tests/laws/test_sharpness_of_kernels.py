"""The laws of kernels see each output and each gradient that is off by little, in each call and each place."""

import math
from functools import partial

import attrs
import pytest
import torch

from fppo import laws
from fppo.laws import adamw, kernels, log_probs
from fppo.laws._kernels import example_of
from fppo.laws._search import LawExample
from fppo.laws.adamw import AdamWScalars
from fppo.laws.kernels import laws_of
from fppo_kernels.adamw import reference_
from fppo_kernels.attention.eager import eager as attention
from fppo_kernels.decode_attention.eager import eager as decode
from fppo_kernels.glu.eager import eager as glu
from fppo_kernels.log_probs.reference import reference
from fppo_kernels.operation import operation_of
from tests.laws.test_sharpness import LITTLE, Once, reason

GLU, LOG_PROBS = operation_of("glu"), operation_of("log_probs")
OUTPUTS = ("log_probs", "entropy", "sum_squared")
ALWAYS = lambda *x, **how: True  # noqa: E731


def law_of(op, name):
    return {law.name: law for law in laws_of(op)}[name]


def drawn(op, rows=4, width=3, number=0, dtype=torch.float64):
    return example_of(op, (number,), (dtype,), "cpu", None, rows, width, 0)


def slope(x, amount=LITTLE):
    """0 with a gradient of `amount`."""
    return amount * (x - x.detach()).sum()


def of_glu(part, when=ALWAYS, amount=LITTLE):
    def kernel(gate, up, *, activation):
        out = glu(gate, up, activation=activation)
        if not when(gate, up):
            return out
        if part == "result":
            return out + torch.tensor(amount, dtype=out.dtype)
        return out + slope({"gate": gate, "up": up}[part], amount)

    return kernel


@pytest.mark.parametrize("part", ["result", "gate", "up"])
def test_values_and_gradients_are_those_of_the_definition_to_the_tolerance(part):
    """Relative to the largest number, or 1, in each dtype; a gradient here is the sum of an output's weights."""
    law = law_of(GLU, "values" if part == "result" else "gradients")
    for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        example = drawn(GLU, dtype=dtype)._replace(weights=torch.full((4, 3), 1 / 12, dtype=dtype))
        assert reason(law, glu_of, example) is None
        expected = kernels.results(GLU, glu_of, example)["result"].abs().max()
        largest = max(1.0, float(expected)) if part == "result" else 1.0
        if part != "result":
            grads = kernels.gradients(GLU, glu_of, example)
            largest = max(1.0, float(grads[part].abs().max()))
        for factor, seen in ((3.0, True), (0.3, False)):
            found = reason(law, of_glu(part, amount=factor * bound * largest), example)
            assert (found is not None) == seen, (dtype, factor)
            assert not seen or ("the result" if part == "result" else f"the gradient by {part}") in (found or "")
    for other in {"values", "gradients"} - {law.name}:
        if part != "result":
            assert reason(law_of(GLU, other), of_glu(part), drawn(GLU)) is None


def glu_of(gate, up, *, activation):
    return glu(gate, up, activation=activation)


def test_a_reference_of_one_s_own_is_what_a_kernel_is_held_to():
    moved = of_glu("result", amount=1e-3)
    laws.check_kernel("glu", moved, reference=moved, dtypes=(torch.float64,))
    with pytest.raises(laws.LawViolation):
        laws.check_kernel("glu", moved, dtypes=(torch.float64,))


@pytest.mark.parametrize(("part", "of"), [("gate", "gate"), ("up", "up")])
def test_a_gradient_taken_alone_is_that_taken_with_others(part, of):
    alone = lambda gate, up: gate.requires_grad + up.requires_grad == 1  # noqa: E731
    law = law_of(GLU, "frozen")
    assert f"the gradient by {part} alone" in (reason(law, of_glu(part, alone), drawn(GLU)) or "")
    assert reason(law, glu_of, drawn(GLU)) is None


@pytest.mark.parametrize("part", ["result", "gate", "up"])
def test_a_second_call_of_a_kernel_has_equal_values_and_gradients(part):
    law, graded = law_of(GLU, "purity"), lambda gate, up: gate.requires_grad
    assert reason(law, glu_of, drawn(GLU)) is None
    again = Once()
    when = again if part == "result" else lambda *x: graded(*x) and again()
    found = reason(law, of_glu(part, when, 1e-14 if part == "result" else 1e-12), drawn(GLU)) or ""
    words = (
        "a second call gave another result: the result"
        if part == "result"
        else f"another gradient: the gradient by {part}"
    )
    assert words in found


@pytest.mark.parametrize("place", [0, 1])
def test_a_kernel_that_changes_an_argument_is_seen_also_where_it_only_takes_a_gradient(place):
    def kernel(*inputs, activation):
        out = glu(*inputs, activation=activation)
        if inputs[0].requires_grad:
            return out
        inputs[place].data[0, 0] += 1e-9
        return out

    example = drawn(GLU)
    found = law_of(GLU, "purity").breach(kernel, example, torch.Generator())
    assert found == f"it changed its argument {('gate', 'up')[place]}"


@pytest.mark.parametrize("kind", ["value", "gradient"])
@pytest.mark.parametrize("name", ["gate", "up"])
@pytest.mark.parametrize(("reads", "seen"), [((0, 1), True), ((1, 2), True), ((0, 3), True), ((2, 3), False)])
def test_a_row_that_reads_another_is_seen_at_two_cuts(reads, seen, name, kind):
    """Rows before the second, and the first half, of those after."""
    own, other = reads

    def kernel(gate, up, *, activation):
        out, x = glu(gate, up, activation=activation), {"gate": gate, "up": up}[name]
        more = torch.zeros_like(out)
        more[own] = 1e-12 * x[other].detach() if kind == "value" else slope(x[other], 1e-30)
        return out + more

    found = reason(law_of(GLU, "rows apart"), kernel, drawn(GLU))
    assert (found is not None) == seen
    words = "see those from there on: the result there" if kind == "value" else f"reaches {name} of those from there on"
    assert not seen or words in (found or "")


FORMS = {
    "a number": (lambda x: 1.0, "the result is float, expected a Tensor"),
    "a row less": (lambda x: x[1:], "it returned float64 [3, 3], expected float64 [4, 3]"),
    "float32": (lambda x: x.float(), "it returned float32 [4, 3], expected float64 [4, 3]"),
    "nan": (lambda x: x * torch.nan, "the result is not finite"),
    "inf": (lambda x: x + torch.inf, "the result is not finite"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_result_of_another_form_is_named(name):
    change, words = FORMS[name]
    assert reason(law_of(GLU, "shape"), lambda *x, **how: change(glu(*x, **how)), drawn(GLU)) == words


def of_log_probs(change, when=ALWAYS):
    """The definition, with outputs changed by `change(name, output, hidden, weight)`."""

    def kernel(hidden, weight, labels, *, entropy=False, sum_squared=False, **how):
        out = reference(hidden, weight, labels, entropy=entropy, sum_squared=sum_squared, **how)
        if not when(entropy=entropy, sum_squared=sum_squared, hidden=hidden, weight=weight):
            return out
        return out._make(
            None if x is None else change(name, x, hidden, weight) for name, x in zip(OUTPUTS, out, strict=True)
        )

    return kernel


def one(part, amount=LITTLE):
    return lambda name, x, hidden, weight: x + amount if name == part else x


@pytest.mark.parametrize("part", OUTPUTS)
@pytest.mark.parametrize("asked", [(False, False), (True, False), (False, True)])
def test_an_output_is_the_same_whichever_others_are_asked_for(asked, part):
    entropy, sum_squared = asked
    when = lambda **x: (x["entropy"], x["sum_squared"]) == asked  # noqa: E731
    found = reason(law_of(LOG_PROBS, "outputs asked for"), of_log_probs(one(part), when), drawn(LOG_PROBS))
    given = part == "log_probs" or {"entropy": entropy, "sum_squared": sum_squared}[part]
    assert (found is not None) == given
    assert not given or f"with entropy={entropy} and sum_squared={sum_squared}, " in (found or "")


V = 3
BOUNDS = {
    "log_probs above 0": ("log_probs", 1e-12, True),
    "log_probs of 0": ("log_probs", 0.0, False),
    "entropy below 0": ("entropy", -2e-9, True),
    "entropy near 0": ("entropy", -5e-10, False),
    "entropy of log V": ("entropy", math.log(V) + 5e-10, False),
    "entropy above": ("entropy", math.log(V) + 2e-9, True),
    "squares below 1 / V": ("sum_squared", 1 / V - 2e-9, True),
    "squares of 1 / V": ("sum_squared", 1 / V - 5e-10, False),
    "squares of 1": ("sum_squared", 1 + 5e-10, False),
    "squares above 1": ("sum_squared", 1 + 2e-9, True),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_outputs_of_log_probs_are_in_their_ranges(name):
    part, value, seen = BOUNDS[name]
    put = lambda n, x, *_: torch.where(torch.arange(len(x)) == 2, value, x) if n == part else x  # noqa: E731
    found = reason(law_of(LOG_PROBS, "range"), of_log_probs(put), drawn(LOG_PROBS))
    assert (found is not None) == seen
    assert not seen or (found or "").startswith(f"{part}[2] is ")


@pytest.mark.parametrize("by", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("part", OUTPUTS)
def test_the_gradient_of_each_output_by_each_input_has_its_law(part, by):
    def kernel(hidden, weight, labels, *, bias, **how):
        out = reference(hidden, weight, labels, bias=bias, **how)
        x = getattr(out, part)
        return (
            out
            if x is None
            else out._replace(**{part: x + slope({"hidden": hidden, "weight": weight, "bias": bias}[by])})
        )

    example = drawn(LOG_PROBS, number=1)
    for law in laws_of(LOG_PROBS):
        if law.name.startswith("gradient of"):
            found = reason(law, kernel, example)
            assert (found is not None) == (law.name in (f"gradient of {part}", "gradient of all outputs")), law.name
            assert found is None or f"the gradient by {by}" in found


@pytest.mark.parametrize("by", ["hidden", "weight"])
def test_a_frozen_head_or_body_changes_no_gradient(by):
    when = lambda **x: x["hidden"].requires_grad + x["weight"].requires_grad == 1  # noqa: E731
    change = lambda n, x, hidden, weight: x + slope({"hidden": hidden, "weight": weight}[by])  # noqa: E731
    found = reason(law_of(LOG_PROBS, "frozen head"), of_log_probs(change, when), drawn(LOG_PROBS))
    assert f"the gradient by {by} alone" in (found or "")


def test_large_examples_are_as_large_and_as_exact_as_they_say():
    dtypes = (torch.float32, torch.bfloat16)
    for seed in range(4):
        example = log_probs.sums_example(dtypes, "cpu", 4096, 4, seed)
        hidden, weight, labels = example.inputs.values()
        assert hidden.dtype == dtypes[seed // 2]
        assert not (hidden @ weight.T).any()
        assert (len(hidden), len(weight)) == ((1, 4096) if seed % 2 == 0 else (4096, 4))
        assert bool(hidden.any()) != bool(weight.any())
        assert len(labels) == len(hidden)
        assert example.weights[0].eq(1).all()
        assert not example.weights[1:].any()
    assert log_probs.SUM_TOLERANCES[torch.bfloat16] == 2**-8
    assert log_probs.SUM_TOLERANCES[torch.float32] == 1e-4
    rows, width = log_probs.LARGE
    assert rows > 1024
    assert width > 8192
    example = log_probs.large_example((torch.float32,), "cpu", 2, 300, 700, 0)
    hidden, weight, labels = example.inputs.values()
    logits = hidden @ weight.T
    peaks = logits.argmax(1)
    borders = {column for column in range(700) if column % 64 in (0, 63)}
    assert borders <= {*peaks.tolist()}
    assert len({*peaks.tolist()}) == 300
    assert torch.equal(logits, logits.round())
    assert {bin(a ^ b).count("1") for a, b in zip(peaks.tolist(), labels.tolist(), strict=True)} == {0, 1, 2}
    assert logits.softmax(1).amax(1).min() > 0.8
    assert {*example.weights.flatten().tolist()} == {-2.0, -1.0, 0.0, 1.0, 2.0}
    assert example.weights.shape == (3, 300)


def test_sums_over_a_large_example_are_rounded_once():
    (law,) = kernels.bound(log_probs.SUM_LAWS, LOG_PROBS)
    example = log_probs.sums_example((torch.bfloat16,), "cpu", 256, 4, 1)
    assert reason(law, of_log_probs(lambda n, x, *_: x), example) is None
    for by in ("hidden", "weight"):
        at = log_probs.sums_example((torch.bfloat16,), "cpu", 256, 4, 0 if by == "hidden" else 1)
        for part, seen in (("log_probs", True), ("entropy", False)):
            scaled = lambda n, x, h, w, p=part: 0.98 * x + (0.02 * x).detach() if n == p else x  # noqa: E731
            assert (reason(law, of_log_probs(scaled), at) is not None) == seen, by


ATTENTION = operation_of("attention")


def of_attention(own, other, name, kind):
    """Attention whose query `own` reads the query, key or value `other` of the packed row, in value or gradient."""

    def kernel(query, key, value, *, lengths, **how):
        out, x = (
            attention(query, key, value, lengths=lengths, **how),
            {"query": query, "key": key, "value": value}[name],
        )
        more = torch.zeros_like(out)
        more[own] = 1e-12 * x[other, 0, 0].detach() if kind == "value" else slope(x[other], 1e-30)
        return out + more

    return kernel


def packed(*lengths):
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(sum(lengths), 1, 2, generator=generator).double() for name in ("query", "key", "value")}
    extras = {"lengths": torch.tensor(lengths), "scale": torch.tensor(0.7).double()}
    return LawExample(inputs, extras, torch.randn(sum(lengths), 1, 2, generator=generator).double())


@pytest.mark.parametrize("kind", ["value", "gradient"])
@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize(
    ("law", "own", "other", "words"),
    [
        ("sequences apart", 0, 5, "sequence 0 sees the others"),
        ("sequences apart", 6, 1, "sequence 1 sees the others"),
        ("sequences apart", 4, 0, None),
        ("causal", 0, 1, "tokens before place 1"),
        ("causal", 1, 2, "tokens before place 2"),
        ("causal", 3, 4, "tokens before place 4"),
        ("causal", 0, 4, "tokens before place 1"),
        ("causal", 4, 3, None),
        ("causal", 4, 4, None),
    ],
)
def test_a_token_that_reads_what_it_must_not_is_seen(law, own, other, words, name, kind):
    """Of sequences of 5 and 3 tokens."""
    found = reason(law_of(ATTENTION, law), of_attention(own, other, name, kind), packed(5, 3))
    assert found is None if words is None else found is not None
    if words:
        assert words in (found or "")
        assert (f"the gradient reaches their {name}" if kind == "gradient" else "the result there") in (found or "")


def test_keys_before_the_first_query_have_places_of_their_own():
    from fppo.laws import attention as of_attention_laws

    example = packed(2, 3)
    example = example._replace(extras={**example.extras, "key_lengths": torch.tensor([4, 3])})
    (sequence, place), (of_key, of_keys) = of_attention_laws._places(example)
    assert sequence.tolist() == [0, 0, 1, 1, 1]
    assert place.tolist() == [2, 3, 0, 1, 2]
    assert of_key.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert of_keys.tolist() == [0, 1, 2, 3, 0, 1, 2]


DECODE = operation_of("decode_attention")


def cache():
    generator = torch.Generator().manual_seed(0)
    inputs = {"query": torch.randn(3, 2, 4, generator=generator).double()}
    inputs |= {name: torch.randn(3, 1, 6, 4, generator=generator).double() for name in ("keys", "values")}
    bias = torch.zeros(3, 6).double()
    bias[1, 2] = -torch.inf
    extras = {"start": torch.tensor(1), "end": torch.tensor(5), "scale": torch.tensor(0.7).double(), "bias": bias}
    return LawExample(inputs, extras, torch.ones(3, 2, 4).double())


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize(
    ("row", "column", "seen"), [(0, 0, True), (2, 5, True), (1, 2, True), (1, 3, False), (0, 4, False)]
)
def test_a_column_that_a_row_does_not_see_changes_nothing(row, column, seen, name):
    def kernel(query, keys, values, bias=None, **how):
        x = {"keys": keys, "values": values}[name]
        return decode(query, keys, values, bias, **how) + 1e-12 * x[row, 0, column, 0].nan_to_num(5.0)

    assert (reason(law_of(DECODE, "unseen columns"), kernel, cache()) is not None) == seen


@pytest.mark.parametrize("name", ["query", "keys", "values"])
def test_a_row_of_decoding_changes_nothing_in_another(name):
    def kernel(query, keys, values, bias=None, **how):
        x = {"query": query, "keys": keys, "values": values}[name]
        return decode(query, keys, values, bias, **how) + 1e-12 * x[2].sum()

    assert "row 0" in (reason(law_of(DECODE, "rows apart"), kernel, cache()) or "")


FIELDS = ("parameter", "first moment", "second moment")
PLAIN = AdamWScalars(weight_decay=0.3)


def of_adamw(part, name, when, amount=1e-6):
    """The reference, but for one number of a parameter's state after calls for which `when(step, found_inf)` holds."""

    def kernel(params, grads, mu, nu, steps, *, found_inf=None, **how):
        reference_(params, grads, mu, nu, steps, found_inf=found_inf, **how)
        lists = {"parameter": params, "first moment": mu, "second moment": nu, "count": steps}
        number = ("matrix", "vector", "number").index(name) if len(params) > 1 else 0
        inf = found_inf is not None and bool(found_inf == 1)
        if when(int(steps[0]), inf, params):
            lists[part][number].view(-1)[-1].add_(amount)

    return kernel


@pytest.mark.parametrize("name", ["matrix", "vector", "number"])
@pytest.mark.parametrize("part", FIELDS)
@pytest.mark.parametrize("step", [3, 5])
def test_every_number_of_every_step_of_adamw_is_the_textbook_s(step, part, name):
    example = adamw.example((torch.float64,), "cpu", 2, 3, 0)
    law = partial(adamw.is_textbook, case=PLAIN)
    assert law(reference_, example, torch.Generator()) is None
    wrong = of_adamw(part, name, lambda count, *x: count == step)
    found = law(wrong, example, torch.Generator()) or ""
    assert f"after step {step - 2}, " in found
    assert f"the {part} {name!r}" in found


@pytest.mark.parametrize("name", ["matrix", "vector", "number"])
@pytest.mark.parametrize("part", [*FIELDS, "count"])
def test_a_skipped_step_and_the_others_in_the_list_change_no_bit(part, name):
    example = adamw.example((torch.float64,), "cpu", 2, 3, 0)
    wrong = of_adamw(part, name, lambda count, inf, params: inf, 1e-14 if part != "count" else 1.0)
    found = adamw.keeps_skipped(wrong, example, torch.Generator(), case=PLAIN) or ""
    assert f"with found_inf=1, the {part} of {name!r}" in found
    assert adamw.keeps_skipped(reference_, example, torch.Generator(), case=PLAIN) is None
    if part == "count":
        wrong = of_adamw(part, name, lambda *x: True, 1.0)
        assert "steps are" in (adamw.is_textbook(wrong, example, torch.Generator(), case=PLAIN) or "")
    if part == "parameter":
        wrong = of_adamw(part, name, lambda count, inf, params: len(params) > 1, 1e-14)
        found = adamw._alone(wrong, example, torch.Generator(), case=PLAIN) or ""
        assert f"the parameter {name!r}" in found
        assert "as alone" in found


@pytest.mark.slow
def test_steps_of_adamw_are_tried_with_every_scalar():
    seen = []

    def kernel(params, grads, mu, nu, steps, *, lr, grad_scale=None, found_inf=None, **how):
        number = lr.item() if isinstance(lr, torch.Tensor) else lr
        flags = (grad_scale is not None and grad_scale.item(), found_inf is not None and found_inf.item())
        seen.append(
            (
                number,
                isinstance(lr, torch.Tensor),
                how["betas"],
                how["eps"],
                how["weight_decay"],
                flags,
                params[0].dtype,
            )
        )
        if found_inf is not None and found_inf == 1:
            assert all(g.isinf().all() for g in grads)
        reference_(params, grads, mu, nu, steps, lr=lr, grad_scale=grad_scale, found_inf=found_inf, **how)

    laws.check_adamw(kernel)
    assert {x[:2] for x in seen} == {(0.1, False), (0.01, False), (0.1, True)}
    assert {x[2] for x in seen} == {(0.9, 0.999), (0.5, 0.9), (0.0, 0.95)}
    assert {x[3] for x in seen} == {1e-8, 0.1}
    assert {x[4] for x in seen} == {0.0, 0.3, 0.1}
    assert {x[5] for x in seen} >= {(False, False), (4.0, False), (0.375, 0.0), (False, 0.0), (4.0, 1.0), (False, 1.0)}
    assert {x[6] for x in seen} == {torch.float64, torch.float32}
    first = adamw._start(adamw.example((torch.float32,), "cpu", 2, 3, 0))
    assert all(m.any() and n.gt(0).all() for m, n in zip(first.exp_avgs, first.exp_avg_sqs, strict=True))
    assert [float(x) for x in first.steps] == [2.0] * 3
    example = adamw.example((torch.float32,), "cpu", 2, 3, 0)
    grads = [torch.cat([g.flatten() for g in adamw._grads(example, step)]) for step in range(adamw.STEPS)]
    assert len(grads) == 3
    assert not torch.equal(grads[0], grads[1])


def test_a_kernel_is_called_with_what_it_has_and_its_dtypes():
    seen = []

    def kernel(gate, up, *, activation):
        seen.append((activation, gate.dtype))
        return glu(gate, up, activation=activation)

    assert laws.check_kernel("glu", kernel, lacks=["gelu"], dtypes=(torch.float32, torch.bfloat16))
    assert {*seen} >= {(a, d) for a in ("silu", "gelu_tanh") for d in (torch.float32, torch.bfloat16)}
    assert "gelu" not in {a for a, _ in seen}
    assert torch.float16 not in {d for _, d in seen}
    assert not laws.check_kernel(attrs.evolve(GLU, needed=frozenset({"silu"})), kernel, lacks=["silu"])
    assert [law.name for law in laws_of(GLU)] == ["shape", "purity", "rows apart", "values", "gradients", "frozen"]
    names = [law.name for law in laws_of(LOG_PROBS)]
    assert names == [
        "shape", "purity", "outputs asked for", "range", "frozen head", "values",
        *(f"gradient of {x}" for x in (*OUTPUTS, "all outputs")),
    ]  # fmt: skip
