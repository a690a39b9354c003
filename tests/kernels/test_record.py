"""Kernels are looked up by name once; what does not exist or cannot run says why."""

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo_kernels import table
from fppo_kernels.operation import side_by_side
from fppo_kernels.table import Kernels


def test_named_kernels():
    kernels = Kernels.named(attention="eager", log_probs="chunked")
    assert kernels.attention is table.get("attention", "eager")
    assert kernels.log_probs is table.get("log_probs", "chunked")
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        kernels.attention = kernels.gae  # type: ignore[misc]


def test_an_unknown_name_is_told_the_others():
    with pytest.raises(
        ValueError, match=r"no kernel attention/fast; there are \['cpp', 'eager', 'fixed', 'flash', 'flex'"
    ):
        Kernels.named(attention="fast")
    with pytest.raises(ValueError, match="no operation 'softmax'"):
        table.get("softmax", "fast")


def test_a_registered_kernel_is_found_and_its_refusal_told():
    fast = table.Implementation(lambda: None, lambda: "no GPU here")
    extended = table.register("attention", "fast", fast)
    assert table.available("attention", table=extended)["fast"] == "no GPU here"
    assert "fast" not in table.available("attention")
    with pytest.raises(
        ValueError, match=r"attention/fast cannot run here: no GPU here; there are \[.*'eager', .*'sdpa'"
    ):
        Kernels.named(attention="fast", table=extended)
    with pytest.raises(ValueError, match="is in the table already"):
        table.register("attention", "fast", fast, table=extended)


@pytest.mark.parametrize(
    ("results", "found"),
    [((torch.ones(2, 3),), "1 results"), ([torch.ones(2, 3)] * 3, "3 results"), (torch.ones(2, 3), "a Tensor")],
)
def test_another_number_of_results_is_not_compared(results, found):
    """For example a rotary kernel that returns the query alone."""
    assert side_by_side((torch.ones(2, 3), torch.zeros(2, 1)), "query", "key").sum(0).tolist() == [2.0, 2.0, 2.0, 0.0]
    with pytest.raises(ValueError, match=rf"the kernel returned {found}, expected \(query, key\)"):
        side_by_side(results, "query", "key")


def test_all_that_is_available():
    everything = table.available()
    assert set(everything) == {field.name for field in attrs.fields(Kernels)}
    assert everything["log_probs"] == table.available("log_probs")
    assert everything["attention"]["sdpa"] is None


def test_what_a_kernel_lacks_is_told_with_those_that_have_it():
    plain = table.Implementation(lambda: None, lacks=frozenset({"window", "sinks"}))
    extended = table.register("attention", "plain", plain)
    assert table.get("attention", "plain", needs={"softcap"}, table=extended) is plain.fn
    with pytest.raises(
        ValueError, match=r"attention/plain has no window, which is needed; there are \[.*'eager'.*'sdpa'\]"
    ):
        table.get("attention", "plain", needs={"window", "softcap"}, table=extended)


FEATURES = st.sets(st.sampled_from(["sinks", "float16", "softcap"]))


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from("abc"), st.tuples(st.booleans(), FEATURES), min_size=1), FEATURES, st.data())
def test_a_kernel_is_given_where_it_runs_and_has_what_is_needed(kinds, needs, data):
    """Otherwise those that could be given are named, with the reason."""
    made, functions = {}, {name: object() for name in kinds}
    for name, (refused, lacks) in kinds.items():
        refuse = (lambda: "needs more") if refused else (lambda: None)
        made = table.register("op", name, table.Implementation(functions[name], refuse, frozenset(lacks)), table=made)
    name = data.draw(st.sampled_from([*kinds, "d"]))
    assert table.available("op", table=made) == {x: "needs more" if no else None for x, (no, _) in kinds.items()}
    able = sorted(x for x, (refused, lacks) in kinds.items() if not refused and not lacks & needs)
    if name in able:
        assert table.get("op", name, needs=sorted(needs), table=made) is functions[name]
        return
    with pytest.raises(ValueError) as told:
        table.get("op", name, needs=sorted(needs), table=made)
    if name == "d":
        assert str(told.value) == f"no kernel op/d; there are {sorted(kinds)}"
    elif kinds[name][0]:
        assert str(told.value) == f"kernel op/{name} cannot run here: needs more; there are {able}"
    else:
        missing = " and no ".join(sorted(kinds[name][1] & needs))
        assert str(told.value) == f"kernel op/{name} has no {missing}, which is needed; there are {able}"


def test_an_implementation_is_known_by_its_function_or_its_name():
    eager = table.BUILTIN["attention"]["eager"]
    found = table.get("attention", "eager")
    assert eager.load() is found
    assert eager.is_of(found)
    assert not eager.is_of(table.get("attention", "sdpa"))
    assert table.Implementation(found).is_of(found)
    assert eager.definition() is None
    own = table.BUILTIN["linear"]["float8"].definition()
    assert (own.__module__, own.__name__) == ("fppo_kernels.linear.float8_reference", "reference")
    assert table.Implementation(found, reference=found).definition() is found
