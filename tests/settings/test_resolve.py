"""What "auto" comes to on each machine."""

import attrs
import pytest

from fppo.settings import checks, files, resolve
from fppo.settings.resolve import CPU, Machine
from fppo.settings.train import TrainSettings
from fppo_kernels.table import BUILTIN, EXACT

H100, A100, T4 = (Machine(device="cuda", capability=version) for version in ((9, 0), (8, 0), (7, 5)))
NOWHERE = {"attention/varlen": "has no softcap", "log_probs/triton": "triton is not installed"}


def on(machine, **changes):
    given = files.replace(TrainSettings(), {name.replace("__", "."): value for name, value in changes.items()})
    settings, lines = resolve.resolved(given, machine)
    model = settings.model
    return (model.compute_dtype, model.attention, model.log_probs), lines


@pytest.mark.parametrize(
    ("machine", "changes", "expected", "said"),
    [
        (CPU, {}, ("float32", "sdpa", "chunked"), []),
        (CPU, {"model__compute_dtype": "bfloat16"}, ("bfloat16", "sdpa", "chunked"), []),
        (H100, {}, ("bfloat16", "varlen", "triton"), []),
        (A100, {}, ("bfloat16", "varlen", "triton"), []),
        (H100, {"model__attention": "flex"}, ("bfloat16", "flex", "triton"), []),
        (H100, {"model__compute_dtype": "float32"}, ("float32", "sdpa", "chunked"), []),
        (H100, {"critic__compute_dtype": "float32"}, ("bfloat16", "sdpa", "chunked"), []),
        (H100, {"critic__compute_dtype": "float16"}, ("bfloat16", "varlen", "chunked"), ["triton does not compute in"]),
        (
            H100,
            {"critic__compute_dtype": "float32", "algorithm__advantage": "grpo"},
            ("bfloat16", "varlen", "triton"),
            [],
        ),
        (T4, {}, ("float32", "sdpa", "chunked"), ["bfloat16 takes compute capability 8.0, and this GPU has 7.5"]),
        (
            attrs.evolve(H100, refusals=NOWHERE),
            {},
            ("bfloat16", "sdpa", "chunked"),
            ["model.attention sdpa: varlen has no softcap", "model.log_probs chunked: triton triton is not installed"],
        ),
    ],
)
def test_each_machine_has_its_own(machine, changes, expected, said):
    found, lines = on(machine, **changes)
    assert found == expected
    assert len(lines) == len(said)
    assert all(part in line for part, line in zip(said, lines, strict=True))


@pytest.mark.parametrize(
    ("machine", "changes", "expected"),
    [
        (CPU, {}, "eager"),
        (H100, {}, "triton"),
        (H100, {"model.rms_norm": "liger"}, "triton"),
        (H100, {"model.compute_dtype": "float32"}, "eager"),
        (H100, {"model.compile_layers": True}, "eager"),
        (attrs.evolve(H100, refusals={"rotary/triton": "has no place in some model"}), {}, "triton"),
    ],
)
def test_operations_inside_the_layers(machine, changes, expected):
    settings, lines = resolve.resolved(files.replace(TrainSettings(), changes), machine)
    differ = {"rms_norm": changes["model.rms_norm"]} if "model.rms_norm" in changes else {}
    differ |= dict.fromkeys((key.partition("/")[0] for key in machine.refusals), "eager")
    wanted = {op: expected if expected in BUILTIN[op] else "eager" for op in resolve.LAYERS} | differ
    assert {op: getattr(settings.model, op) for op in resolve.LAYERS} == wanted
    assert not lines


def test_a_cpu_takes_kernels_in_cpp_where_it_is_asked_to():
    ops = ("attention", "decode_attention", "log_probs", *resolve.LAYERS)

    def kernels(machine=CPU, **changes):
        given = files.replace(TrainSettings(), {"model.cpp": True} | changes)
        settings, lines = resolve.resolved(given, machine)
        assert not [x for x in checks.problems(settings) if x.path.startswith("model.decode")]
        return {op: getattr(settings.model, op) for op in ops}, lines

    every = {op: "cpp" if "cpp" in BUILTIN[op] else "eager" for op in ops}
    assert kernels() == (every, [])
    assert kernels(**{"model.glu": "eager", "model.attention": "mine:fn"}) == (
        every | {"glu": "eager", "attention": "mine:fn"},
        [],
    )
    inside = dict.fromkeys(resolve.LAYERS, "eager")
    assert kernels(**{"model.compile_layers": True}) == (every | inside, [])
    assert kernels(**{"rollout.engine": "vllm"}) == (every | {"decode_attention": "sdpa"}, [])
    plain = {"attention": "sdpa", "decode_attention": "sdpa", "log_probs": "chunked"} | inside
    refusals = {f"{op}/cpp": "no C++ compiler is installed" for op in ops}
    found, lines = kernels(Machine(refusals=refusals))
    assert found == plain
    assert lines[0] == "model.attention sdpa: cpp no C++ compiler is installed"
    assert len(lines) == 3
    on_gpu = {"attention": "varlen", "decode_attention": "sdpa", "log_probs": "triton"}
    on_gpu |= {op: "triton" if "triton" in BUILTIN[op] else "eager" for op in resolve.LAYERS}
    assert kernels(H100) == (on_gpu, [])


def test_a_cpu_takes_kernels_in_cpp_by_itself_for_a_run_that_is_long_enough():
    def found(machine, **changes):
        settings, lines = resolve.resolved(files.replace(TrainSettings(), changes), machine)
        return settings.model, lines

    long = Machine(compiles=True)
    assert found(long) == found(CPU, **{"model.cpp": True})
    assert found(long)[0].attention == "cpp"
    plain = found(CPU, **{"model.cpp": False})
    assert found(CPU) == plain
    assert found(long, **{"model.cpp": False}) == plain
    why = "no C++ compiler is installed"
    model, lines = found(attrs.evolve(long, no_compiler=why, refusals={"attention/cpp": why}))
    assert model == plain[0]
    assert lines == [f"model.cpp false: {why}; with kernels in C++ this run would be faster"]
    half = {"model.compute_dtype": "float16"}
    assert found(long, **half) == found(CPU, **half)
    assert found(H100)[0].cpp is False
    for machine in (CPU, long):  # a wheel's kernels for another torch
        told = ["kernels in C++: those built in are for torch 2.13.0"]
        unfit = attrs.evolve(machine, unfit_build="those built in are for torch 2.13.0")
        assert found(unfit) == (found(machine)[0], told)
        assert found(unfit, **{"model.cpp": False}) == plain


@pytest.mark.parametrize(("machine", "eager"), [(CPU, True), (H100, False)])
def test_a_vllm_that_runs_captures_graphs_on_a_gpu(machine, eager):
    changes = {"rollout.engine": "vllm", "reward.judge.engine": "vllm", "reward.judge.path": "m"}
    changes |= {"rollout.vllm.bucket_mb": 7, "reward.judge.vllm.max_rows": 9}
    given = files.replace(TrainSettings(), changes)
    settings, _ = resolve.resolved(given, machine)
    assert settings.rollout.vllm == attrs.evolve(given.rollout.vllm, eager=eager)
    assert settings.reward.judge.vllm == attrs.evolve(given.reward.judge.vllm, eager=eager)
    other, _ = resolve.resolved(TrainSettings(), machine)
    assert other.rollout == TrainSettings().rollout  # nothing reads it: a value would be a problem


@pytest.mark.parametrize(
    ("machine", "changes", "on", "problem"),
    [
        (H100, {}, True, None),
        (CPU, {"device": "cpu"}, False, "device = 'cpu' has no graphs"),
        (H100, {"model.compute_dtype": "float32"}, False, None),
        (H100, {"model.attention": "flex"}, False, "model.attention = 'flex' plans on the host, by the lengths"),
        (H100, {"model.attention": "mine:attend"}, False, None),
        (H100, {"model.checkpoint_layers": True}, False, "model.checkpoint_layers = True computes layers again"),
        (H100, {"model.mlp_slice_tokens": 64}, False, "model.mlp_slice_tokens = 64 computes MLPs again"),
        (H100, {"model.offload": "moments"}, False, None),
        (H100, {"rollout.engine": "vllm"}, False, None),
        (H100, {"rollout.ahead": 1}, False, "rollout.ahead = 1 runs other work on the GPU meanwhile"),
        (H100, {"model.graphs": False}, False, None),
    ],
)
def test_passes_of_few_tokens_are_graphs_on_a_gpu(machine, changes, on, problem):
    settings, lines = resolve.resolved(files.replace(TrainSettings(), changes), machine)
    assert settings.model.graphs is on
    assert not lines
    asked = files.replace(TrainSettings(), {**changes, "model.graphs": True})
    said = [x for x in map(str, checks.problems(asked)) if x.startswith("model.graphs = True: ")]
    assert [problem in line for line in said] == ([True] if problem else [])


@pytest.mark.parametrize("machine", [CPU, H100, T4])
def test_what_is_resolved_stays(machine):
    """A run keeps its own settings, and goes on with them."""
    once, _ = resolve.resolved(TrainSettings(), machine)
    open_ = {name for name, value in attrs.asdict(once.model).items() if value == "auto"}
    assert open_ == {"share_prompts"}  # which rows decide, not the machine
    for other in (CPU, H100, T4):
        assert resolve.resolved(once, other) == (once, [])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "onednn"),
        ({"model.cpp": True}, "cpp"),
        ({"model.linear": "torch"}, "torch"),
        ({"model.linear": "mine:fn"}, "mine:fn"),
        ({"model.compute_dtype": "bfloat16"}, "torch"),
        ({"critic.compute_dtype": "bfloat16"}, "torch"),
        ({"critic.compute_dtype": "bfloat16", "algorithm.advantage": "grpo"}, "onednn"),
        ({"model.compile_layers": True}, "torch"),
        ({"model.lora.rank": 4}, "torch"),
    ],
)
def test_linear_layers_take_onednns_product_where_it_is_faster(changes, expected):
    given = files.replace(TrainSettings(), changes)
    assert resolve.resolved(given, Machine(onednn=True))[0].model.linear == expected
    other = expected if expected == changes.get("model.linear") else "torch"
    for machine in (CPU, Machine(compiles=True), attrs.evolve(H100, onednn=True)):
        assert resolve.resolved(given, machine)[0].model.linear == other
    exact = files.replace(given, {"rollout.exact": True})
    assert resolve.resolved(exact, CPU)[0].model.linear == (other if other == "mine:fn" else "onednn")


def test_exact_rollouts_take_the_kernels_that_are_exact_and_the_engines_log_probs():
    given = files.replace(TrainSettings(), {"rollout.exact": True, "model.rms_norm": "torch"})
    for machine in (CPU, H100):
        for dtype in ("auto", "float32"):
            settings, lines = resolve.resolved(files.replace(given, {"model.compute_dtype": dtype}), machine)
            expected = EXACT[machine.device]
            assert {op: getattr(settings.model, op) for op in expected} == {**expected, "rms_norm": "torch"}
            assert not lines
            assert resolve.old_log_probs_source(settings) == "engine"
            asked = attrs.evolve(settings, device=machine.device)
            assert [x for x in checks.problems(asked) if x.path == "rollout.exact" and "rms_norm" not in str(x)] == []


def test_exact_rollouts_say_which_kernels_do_not_run():
    given = files.replace(TrainSettings(), {"rollout.exact": True})
    machine = attrs.evolve(H100, refusals={f"{op}/fixed": "needs Triton" for op in ("attention", "log_probs")})
    machine = attrs.evolve(machine, refusals={**machine.refusals, "glu/triton": "has no place in some model"})
    settings, lines = resolve.resolved(given, machine)
    assert (settings.model.attention, settings.model.log_probs, settings.model.glu) == ("sdpa", "chunked", "eager")
    assert settings.model.decode_attention == settings.model.linear == "fixed"
    assert lines == ["model.attention sdpa: fixed needs Triton", "model.log_probs chunked: fixed needs Triton"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rollout.engine": "vllm"}, "rollout.engine = 'vllm' is a copy of the policy"),
        ({"rollout.ahead": 1}, "rollout.ahead = 1 trains on what an earlier policy sampled"),
        ({"device": "mps"}, "device = 'mps' has no exact kernels"),
        ({"device": "cuda:0", "model.attention": "cpp"}, "model.attention = 'cpp' is not exact, as fixed is"),
        ({"device": "cpu", "model.linear": "fixed"}, "model.linear = 'fixed' is not exact, as onednn is"),
        ({"model.compute_dtype": "float16"}, "model.compute_dtype = 'float16'"),
        ({"model.remove_padding": False}, "model.remove_padding = False"),
        ({"model.compile_layers": True}, "model.compile_layers = True"),
        ({"model.lora.rank": 4}, "model.lora = 'an adapter' is merged to decode"),
        ({"model.attention": "eager"}, "model.attention = 'eager' is not exact, as cpp or fixed is"),
        ({"model.linear": "float8"}, "model.linear = 'float8' is not exact, as onednn or fixed is"),
        ({"mesh.tensor": 2}, "mesh.tensor = 2 adds up in parts"),
        ({"mesh.context": 2, "mesh.ring": True}, "mesh.ring = True merges attention from parts"),
        ({"algorithm.correction.name": "rollout"}, "algorithm.correction = 'rollout' has nothing to weigh"),
        ({"algorithm.old_log_probs": "pass"}, "algorithm.old_log_probs = 'pass' asks for others"),
    ],
)
def test_what_cannot_go_with_exact_rollouts_is_refused_by_name(changes, text):
    settings = files.replace(TrainSettings(), {"rollout.exact": True, **changes})
    found = [x for x in checks.problems(settings) if x.path == "rollout.exact"]
    assert [text in str(x) for x in found] == [True]
    assert "leave one of them out" in str(found[0])
    assert not [x for x in checks.problems(files.replace(settings, {"rollout.exact": False})) if "exact" in str(x)]
