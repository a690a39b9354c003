"""An exact engine's log-probs are those of a training pass, bit for bit; what breaks that is noticed and named."""

from functools import cache, partial

import attrs
import pytest
import torch
from torch.nn import functional as F

from fppo import laws, models
from fppo.key import Key
from fppo.models.lora import Lora, adapt
from fppo.rollout import decoder, drawn, embedded, exact
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.exact_probe import probe_exact
from fppo.runtime.fsdp import Sharding
from fppo.runtime.mesh import Mesh
from fppo.runtime.simulate import simulate
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.micro_batching import MicroBatching
from fppo_kernels.collectives import Axis
from fppo_kernels.linear.onednn import onednn, packed
from fppo_kernels.table import EXACT, Kernels, get, needs_cpp
from tests import tiny
from tests.models.families import make
from tests.rollout.test_embedded import make_prompts

pytestmark = pytest.mark.skipif(needs_cpp() is not None, reason="needs a C++ compiler")
FEW = {"sizes": ((1, 1), (2, 2), (3, 9)), "seeds": 2}


def kernels_for(model, **changes):
    """The exact ones, where the model has a place for them."""
    names = {
        op: name for op, name in EXACT["cpu"].items() if op not in exact.INSIDE or models.has_place(model.skeleton, op)
    }
    return attrs.evolve(Kernels.named(**names), **changes)


def engine_of(name, dtype=torch.float32, **changes):
    model, params = make(name, dtype=dtype)
    model = model if dtype == torch.float32 else attrs.evolve(model, compute_dtype=dtype)
    return EmbeddedEngine(model=model, kernels=kernels_for(model, **changes), pad_token_id=0, exact=True), params


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3", torch.float32),
        pytest.param("qwen2", torch.bfloat16, marks=pytest.mark.slow),
        *(
            pytest.param(name, torch.float32, marks=pytest.mark.slow)
            for name in ("llama", "mistral", "gemma2", "gpt2", "cohere", "gpt_neox")
        ),
    ],
    ids=str,
)
def test_engines_are_exact(name, dtype):
    laws.check_exact(*engine_of(name, dtype), **FEW)


def test_an_exact_engine_packs_no_weights(monkeypatch):
    engine, params = engine_of("qwen3")
    packs, made = [], decoder.decoder_of
    monkeypatch.setattr(decoder, "_PACKINGS", {onednn: lambda *weights: packs.append(weights) or packed(*weights)})
    monkeypatch.setattr(embedded, "decoder_of", lambda *args, **how: packs.append(how["packs"]) or made(*args, **how))
    ask = Ask(make_prompts(), Sampling(max_tokens=2), Key(0))
    engine.generate(params, ask)
    assert packs == [False]
    attrs.evolve(engine, exact=False).generate(params, ask)
    assert len(packs) > 2


@pytest.mark.parametrize("exact", [True, False])
def test_exact_attention_learns_where_rows_begin(exact):
    """Rows of equal padding have a bias as well: a kernel whose blocks begin at a row's first key has to know it."""
    engine, params = engine_of("qwen3")
    biases, kernel = [], engine.kernels.decode_attention

    def attend(*args, **how):
        biases.append(args[3])
        return kernel(*args, **how)

    engine = attrs.evolve(engine, exact=exact, kernels=attrs.evolve(engine.kernels, decode_attention=attend))
    engine.generate(params, Ask(make_prompts((4, 4)), Sampling(max_tokens=3, stop_token_ids=()), Key(0)))
    assert biases
    assert all((bias is not None) == exact for bias in biases)


@pytest.mark.slow
def test_threads_change_nothing():
    torch.set_num_threads(3)
    try:
        laws.check_exact(*engine_of("llama"), **FEW)
    finally:
        torch.set_num_threads(1)


def aside(op, name):
    """A built-in kernel as one of the user's, which no table knows."""
    kernel = get(op, name)
    return lambda *args, **keywords: kernel(*args, **keywords)


def counting(result, rows):
    """Log-probs that depend on how many there are."""
    return result._replace(log_probs=result.log_probs * (1 + 1e-6 * rows))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "kernel"),
    [
        ("decode_attention", aside("decode_attention", "sdpa")),
        ("attention", aside("attention", "eager")),
        ("linear", lambda x, weight, bias=None: F.linear(x, weight, bias)),
        (
            "log_probs",
            lambda hidden, *args, **how: counting(get("log_probs", "cpp")(hidden, *args, **how), len(hidden)),
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_kernels_that_add_up_in_other_orders_break_the_law(op, kernel):
    engine, params = engine_of("qwen3")
    engine = attrs.evolve(engine, kernels=attrs.evolve(engine.kernels, **{op: kernel}))
    with pytest.raises(laws.LawViolation, match="log-probs differ, as that of token"):
        laws.check_exact(engine, params, **FEW)


def test_an_engine_that_is_not_exact_breaks_the_law():
    engine, params = engine_of("qwen3")
    usual = attrs.evolve(engine, exact=False, kernels=Kernels.named())
    with pytest.raises(laws.LawViolation, match='breaks the law "one pass"'):
        laws.check_exact(usual, params, **FEW)


def test_log_probs_are_computed_for_many_tokens_at_once_or_few(monkeypatch):
    engine, params = engine_of("qwen3")
    ask = Ask(make_prompts(), Sampling(n=2, max_tokens=7, stop_token_ids=(5,)), Key(3))
    whole = engine.generate(params, ask)
    calls = []
    kernel = engine.kernels.log_probs
    counted = lambda hidden, *args, **how: calls.append(len(hidden)) or kernel(hidden, *args, **how)  # noqa: E731
    monkeypatch.setattr(drawn, "_SCORED", 20)
    parts = attrs.evolve(engine, kernels=attrs.evolve(engine.kernels, log_probs=counted)).generate(params, ask)
    assert torch.equal(parts.rollout_log_probs, whole.rollout_log_probs)
    assert len(calls) > 2
    assert sum(calls) >= int(whole.response_mask.sum())


@cache
def deep():
    """A model of four layers with its parameters, made outside of the ranks, which share torch's generator."""
    model = models.build(tiny.config(num_hidden_layers=4, num_key_value_heads=4))
    return model, {name: 3 * x for name, x in models.init_params(model, Key(0)).items()}


def passes(mesh, *, ring=False):
    """The log-probs of rows on every rank, by exact kernels in float32."""
    model, params = deep()
    if mesh.axes:
        mesh = attrs.evolve(mesh, sharding=Sharding() if mesh["shard"].size > 1 else None, ring=ring)
    placed = models.place(model, mesh)
    own, forward = models.own_params(placed, params, mesh), Forward(placed, kernels_for(model), mesh)
    rows = tiny.experience(3, 9, prompt=40, response=30, dtype=torch.float32)
    found = compute_log_probs(own, rows, forward=forward, micro_batching=MicroBatching(size=4))
    return found.where(rows.response_mask, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("axis", exact.KEEPS_BITS)
def test_a_table_says_which_axes_of_a_mesh_keep_bits(axis):
    """Of an expert axis it says what models with experts do, which no engine takes that is exact."""
    (alone,) = simulate({}, passes)
    if axis == "expert":
        return
    found = simulate({"context" if axis == "ring" else axis: 2}, partial(passes, ring=axis == "ring"))
    equal = all(torch.equal(x, alone) for x in found)
    assert equal == exact.KEEPS_BITS[axis]
    for x in found:
        torch.testing.assert_close(x, alone, rtol=0, atol=1e-5)


def test_the_probe_takes_what_is_exact_and_names_what_is_not():
    model, _ = make("qwen2")
    kernels = kernels_for(model)
    probe_exact(model, kernels)
    for op, other in (
        ("linear of ", lambda x, weight, bias=None: F.linear(x, weight, bias)),
        ("decode_attention", aside("decode_attention", "sdpa")),
        ("log_probs", aside("log_probs", "reference")),
        ("rms_norm", lambda x, weight, *, eps, offset=0.0: x * weight + x.mean()),
    ):
        with pytest.raises(ValueError, match=rf"^rollout\.exact: {op}.* gives a row other bits beside other rows"):
            probe_exact(model, attrs.evolve(kernels, **{op.split()[0]: other}))


def test_what_cannot_be_exact_is_refused_by_name():
    model, params = make("qwen2")
    how = {"pad_token_id": 0, "exact": True}
    with pytest.raises(ValueError, match=r"kernel attention/sdpa adds up .* \(give model\.attention = 'cpp'\)"):
        EmbeddedEngine(model=model, kernels=Kernels.named(), **how)
    adapted, _ = adapt(model, params, Lora(rank=2, alpha=1.0), key=Key(0))
    with pytest.raises(ValueError, match="an adapter is merged to decode"):
        EmbeddedEngine(model=adapted, kernels=kernels_for(model), **how)
    experts, _ = make("qwen3_moe")
    with pytest.raises(ValueError, match="'qwen3_moe' has experts"):
        EmbeddedEngine(model=experts, kernels=kernels_for(model), **how)

    def on(mesh: Mesh) -> None:
        EmbeddedEngine(model=model, kernels=kernels_for(model), mesh=mesh, **how)

    with pytest.raises(ValueError, match="a tensor axis of 2 ranks adds up in parts"):
        simulate({"tensor": 2}, on)


@pytest.mark.parametrize(
    ("changes", "mesh", "why"),
    [
        ({}, {}, []),
        ({"stateful": (0,)}, {}, ["layers of model type 'qwen2' carry states"]),
        ({"routers": ("r",)}, {}, ["model type 'qwen2' has experts"]),
        ({"vision": True}, {}, ["model type 'qwen2' takes images"]),
        ({"frozen": True}, {}, ["an adapter is merged to decode"]),
        ({"compile_layers": True}, {}, ["compiled layers are programs"]),
        ({"mlp_slice_tokens": 64}, {}, ["MLPs in slices of tokens cut products"]),
        ({}, {"context": 2}, []),
        ({}, {"ring": True}, []),
        ({}, {"context": 2, "ring": True}, ["a context axis of 2 ranks merges attention"]),
        ({}, {"tensor": 2, "expert": 4}, ["a tensor axis of 2 ranks adds up", "a expert axis of 4 ranks adds up"]),
    ],
)
def test_each_thing_that_keeps_an_engine_from_being_exact_is_said(changes, mesh, why, monkeypatch):
    model, ring = make("qwen2")[0], mesh.get("ring", False)
    monkeypatch.setattr(type(model), "text_of", lambda model, skeleton: skeleton)
    axes = {name: Axis(size) for name, size in mesh.items() if name != "ring"}
    kernels = Kernels.named(**EXACT["cpu"])
    found = [*exact.hindrances(attrs.evolve(model, **changes), kernels, Mesh(axes, ring=ring))]
    assert [text.startswith(start) for text, start in zip(found, why, strict=True)] == [True] * len(why)
