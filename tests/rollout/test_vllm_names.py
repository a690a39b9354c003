"""Which parameters go to vLLM together: what it fuses is loaded whole, or not at all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.rollout.sync import SyncError
from fppo.rollout.vllm.names import Names

LAYERS = ("l0", "l1")
PARTS = ("q", "k", "v", "o", "gate", "up", "down", "norm")
FUSED = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",), "norm": ("norm",)}
NAMES = Names(
    modules={f"{layer}.{module}": [f"{layer}.{x}" for x in own] for layer in LAYERS for module, own in FUSED.items()},
    places={},
    targets={f"{layer}.{x}": [f"{layer}.{x}"] for layer in LAYERS for x in PARTS},
)


@settings(max_examples=60)
@given(st.sets(st.sampled_from(sorted(NAMES.targets))))
def test_a_module_is_sent_whole_and_no_other_is(changed):
    sent = NAMES.with_fused(changed)
    assert set(sent) == {part for own in NAMES.modules.values() if changed & set(own) for part in own}
    assert sent == [name for name in NAMES.targets if name in sent]  # in the trainer's order
    NAMES.check(sent)


@pytest.mark.parametrize("part", ["q", "k", "v", "gate", "up"])
def test_a_fused_module_in_parts_is_refused(part):
    NAMES.check(NAMES.with_fused([f"l0.{part}"]))
    with pytest.raises(SyncError):
        NAMES.check([f"l0.{part}"])


def test_names_go_by_what_vllm_calls_them_and_a_stack_of_ours_is_several():
    """One parameter of the trainer, sent under two names, into two modules; and one that vLLM names otherwise."""
    names = Names(
        modules={"m.qkv": ["m.q", "m.k", "m.v"], "m.gate_up": ["m.gate", "m.up"]},
        places={"x.q": "m.q", "x.k": "m.k"},
        targets={"q": ["x.q"], "kv": ["x.k", "m.v"], "both": ["m.gate", "m.up"]},
    )
    assert names.with_fused(["q"]) == names.with_fused(["kv"]) == ["q", "kv"]
    assert names.with_fused(["both"]) == ["both"]
    assert names.with_fused([]) == []


def test_what_vllm_does_not_name_may_be_fused_with_anything_unnamed():
    names = Names(modules={"m.o": ["m.o"]}, places={}, targets={x: [x] for x in ("m.o", "m.a", "m.b", "m.c")})
    assert names.with_fused(["m.o"]) == [*names.targets]
    assert names.with_fused(["m.a"]) == ["m.a", "m.b", "m.c"]
