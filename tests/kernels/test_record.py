"""Kernels are looked up by name once; what does not exist or cannot run says why."""

import attrs
import pytest

from fppo_kernels import table
from fppo_kernels.table import Kernels


def test_named_kernels():
    kernels = Kernels.named(attention="eager", log_probs="chunked")
    assert kernels.attention is table.get("attention", "eager")
    assert kernels.log_probs is table.get("log_probs", "chunked")
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        kernels.attention = kernels.gae  # type: ignore[misc]


def test_an_unknown_name_is_told_the_others():
    with pytest.raises(ValueError, match=r"no kernel attention/fast; there are \['cpp', 'eager', 'flash', 'flex'"):
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
