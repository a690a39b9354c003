"""Settings reach the run: each has a reader, and the program is what they say."""

import ast
import collections
import contextlib
import inspect
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import attrs
import pytest
import torch
from transformers import PreTrainedModel

import fppo
from fppo import advantages, losses, metrics, models, tree
from fppo.advantages import Advantages
from fppo.assembly import functions, learning, machine, texts
from fppo.assembly.checks import check_models
from fppo.assembly.inputs import Inputs
from fppo.assembly.parts import axes_at, check_kernels
from fppo.assembly.run import assemble
from fppo.key import Key
from fppo.models.inner import inner_of
from fppo.pipeline.checks import field
from fppo.pipeline.step import ppo_step
from fppo.quickstart import CHARACTERS, character_tokenizer, small_model
from fppo.rollout import Sampling
from fppo.runs import starts
from fppo.runtime.mesh import LOCAL
from fppo.settings import component, files, modules, tables
from fppo.settings.learning import AlgorithmSettings, LossSettings, OptimizerSettings
from fppo.settings.model import ModelSettings
from fppo.settings.placement import MeshSettings
from fppo.settings.rollout import RolloutSettings
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import from_function
from fppo.steps.train_state import init_state, optimizer_step
from fppo_kernels import _cpp, table
from fppo_kernels.table import Kernels, needs_cpp
from tests import tiny_run
from tests.models.families import CONFIGS, make
from tests.rewards.scorers import reward_model_of

PACKAGE = Path(fppo.__file__).parent
READERS = (
    "assembly",
    "runs",
    "commands",
    "rollout/vllm",
    "settings/files.py",
    "settings/checks*.py",
    "settings/placement.py",
)


def _attributes_read() -> set[str]:
    files = [file for name in READERS for file in PACKAGE.glob(name if "." in name else f"{name}/*.py")]
    trees = [ast.parse(file.read_text()) for file in files]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    named = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    sampling = {each.name for each in attrs.fields(Sampling)}  # read by the names that both have
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} | named | sampling


@pytest.mark.slow
def test_every_setting_has_a_reader():
    read = _attributes_read() | {path.rpartition(".")[2] for path in modules.KERNELS}
    names = [(path, path.rpartition(".")[2]) for path in files.paths()]
    assert [path for path, name in names if not {name, f"{name}_"} & read] == []  # from_: Python reserves its name


def test_the_program_has_the_settings_scalars(tmp_path):
    tiny_run.write_task(tmp_path)
    settings = tiny_run.settings(
        tmp_path,
        actor__kl_coef=0.3,
        actor__entropy_coef=0.01,
        algorithm__advantage__lam=0.5,
        rollout__temperature=0.7,
        critic__loss__clip=0.25,
        critic__warmup_steps=2,
    )
    with assemble(settings) as assembly:
        program = assembly.program
        terms = field(program.update_actor, "terms")
        assert (terms.kl_coef, terms.entropy_coef, terms.temperature) == (0.3, 0.01, 0.7)
        assert field(program.annotate, "passes").policy.temperature == 0.7
        assert field(program.update_critic, "loss_fn").keywords["clip"] == 0.25
        assert program.critic_warmup == 2
        assert field(program.update_actor, "old_log_probs") == "pass"  # two epochs
        assert assembly.run.ref is not None
        assert assembly.run.critic is not None


@pytest.mark.slow
@pytest.mark.parametrize(("warmup", "ratios"), [(0, range(12, 8, -1)), (2, (12, 9, 6, 3))])
def test_the_actors_rate_falls_over_its_own_updates(tmp_path, warmup, ratios):
    """Four updates in each of three steps; while the critic warms up there are none, and none is counted."""
    tiny_run.write_task(tmp_path)
    settings = tiny_run.settings(tmp_path, steps=3, critic__warmup_steps=warmup, critic__optimizer__schedule="linear")
    with assemble(settings) as assembly:
        run = assembly.run
        for _ in range(warmup + 1):
            run, _, report = ppo_step(run, program=assembly.program, draw=assembly.draw)
    rates = metrics.report(report)
    assert run.actor.step == 4
    assert rates["actor/lr"] == pytest.approx(sum(ratios) / 12 * 1e-3 / 4)
    assert rates["critic/lr"] == pytest.approx(1e-3 * (6 - 2 * warmup - 0.5) / 6)


ONCE = {
    "actor__epochs": 1,
    "actor__mini_batch_size": 8,
    "algorithm__kl__coef": 0.0,
    "algorithm__kl__controller": "fixed",
    "algorithm__kl__horizon": 10000,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (ONCE, "update"),
        (ONCE | {"actor__mini_batch_size": 4}, "pass"),
        (ONCE | {"algorithm__correction": "rollout"}, "pass"),
        (ONCE | {"algorithm__old_log_probs": "pass"}, "pass"),
        (ONCE | {"algorithm__old_log_probs": "engine"}, "engine"),
        ({}, "pass"),
        ({"algorithm__old_log_probs": "engine"}, "engine"),
    ],
)
def test_old_log_probs_come_from_the_update_when_that_makes_the_ratio_1_or_from_where_they_are_asked(
    tmp_path, changes, expected
):
    tiny_run.write_task(tmp_path)
    with assemble(tiny_run.settings(tmp_path, steps=1, **changes)) as assembly:
        _, experience, report = ppo_step(assembly.run, program=assembly.program, draw=assembly.draw)
    assert field(assembly.program.update_actor, "old_log_probs") == expected
    sources = [name.rpartition("/")[2] for name in report if name.startswith("training/old_log_probs/")]
    assert sources == [expected]
    mask = experience.response_mask
    by_engine = torch.equal(experience.old_log_probs[mask], experience.rollout_log_probs[mask])
    assert by_engine == (expected != "pass")
    assert ("timing_s/old_log_prob" in report) == ("training/rollout_probs_diff_mean" in report)  # whoever measures it


@pytest.mark.parametrize(
    ("changes", "expected"), [(None, (None, False)), (0.25, (2**28, False)), ("auto", (None, True))]
)
def test_the_embedded_engines_cache_is_bounded_as_the_settings_say(tmp_path, changes, expected):
    tiny_run.write_task(tmp_path)
    with assemble(tiny_run.settings(tmp_path, rollout__cache_gb=changes)) as assembly:
        engine = assembly.program.rollout.engine.engine
        assert (engine.cache_bytes, engine.halve_on_oom) == expected


def own_kernel(*args, **keywords):
    raise ValueError("the own kernel was called")


def own_advantage(rows, rewards):
    return Advantages(rewards + 2.0, rewards)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["model.attention", "model.log_probs", "algorithm.gae"])
def test_own_kernels_are_those_of_the_run(tmp_path, setting):
    tiny_run.write_task(tmp_path)
    given = setting.replace(".", "__")
    settings = tiny_run.settings(tmp_path, **{given: f"{__name__}:own_kernel"}, check=False)
    with assemble(settings) as assembly, pytest.raises(ValueError, match="the own kernel was called"):
        ppo_step(assembly.run, program=assembly.program, draw=assembly.draw)
    settings = tiny_run.settings(tmp_path, **{given: f"{__name__}:own_kernal"})
    with pytest.raises(ValueError, match=rf"{setting} .*did you mean 'own_kernel'"), assemble(settings):
        pass


@pytest.mark.slow
def test_a_step_builds_nothing(tmp_path, monkeypatch):
    """Losses, optimizers and models are built before the first step."""
    built = collections.Counter()

    def counted(owner, name):
        real = getattr(owner, name)

        def counting(*args, **keywords):
            built["model" if owner is PreTrainedModel else name] += 1
            return real(*args, **keywords)

        monkeypatch.setattr(owner, name, counting)

    counted(PreTrainedModel, "__init__")
    counted(functions, "bound")
    tiny_run.write_task(tmp_path)
    with assemble(tiny_run.settings(tmp_path, steps=1)) as assembly:
        assert min(built[name] for name in ("model", "bound")) > 0
        built.clear()
        ppo_step(assembly.run, program=assembly.program, draw=assembly.draw)
    assert built == {}


def test_an_own_estimator_is_called_with_rows_and_rewards(tmp_path):
    tiny_run.write_task(tmp_path)
    own = {"algorithm__advantage": f"{__name__}:own_advantage"}
    with assemble(tiny_run.settings(tmp_path, **own)) as assembly:
        _, experience, _ = ppo_step(assembly.run, program=assembly.program, draw=assembly.draw)
    mask = experience.response_mask
    assert torch.equal(experience.advantages[mask], experience.token_rewards[mask] + 2.0)


def momentum_alone(schedule):
    """An optimizer of one's own, for a test below."""

    def update(params, grads, state, step):
        state = {name: 0.9 * m + grads[name] for name, m in state.items()}
        return {name: p - schedule(step) * state[name] for name, p in params.items()}, state

    return from_function(lambda params: tree.map(torch.zeros_like, params), update)


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["none", "moments", "all"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "muon", "tests.assembly.test_assembly:momentum_alone"])
def test_an_optimizer_by_name_trains_and_its_state_has_the_shapes_of_parameters(tmp_path, name, offload):
    tiny_run.write_task(tmp_path)
    changes = {"actor__optimizer__name": name, "model__offload": offload, "actor__optimizer__lr": 0.01}
    with assemble(tiny_run.settings(tmp_path, **changes)) as assembly:
        before = tree.digest(assembly.run.actor.params)
        shapes = {path for path in assembly.shapes if path.startswith(".actor.opt")}
        tensors = tree.leaves_with_paths(assembly.run.actor.opt)
        assert shapes == {f".actor.opt{path}" for path, x in tensors if x.dim()}
        after, _, report = ppo_step(assembly.run, program=assembly.program, draw=assembly.draw)
    assert metrics.report(report)["actor/skipped"] == 0
    assert all(before[path] != x for path, x in tree.digest(after.actor.params).items())


def no_optimizer(schedule):
    return schedule(0)


def test_an_optimizer_that_is_none_is_named():
    own = OptimizerSettings(name="tests.assembly.test_assembly:no_optimizer")
    with pytest.raises(ValueError, match=r"no_optimizer': it returned a float: .* from_function makes one"):
        functions.optimizer_of(own, 10, setting="actor.optimizer")


def test_the_schedule_spans_all_updates():
    keywords = {"max_grad_norm": "none", "weight_decay": 0.0, "eps": 1e-12}
    settings = OptimizerSettings(lr=1.0, schedule="linear", keywords=keywords)
    optimizer = functions.optimizer_of(settings, 10, setting="actor.optimizer")
    for step, moves in ((0, 1.0), (5, 0.5), (10, 0.0)):
        state = init_state({"w": torch.zeros(1)}, optimizer)
        grads = {"w": torch.full((1,), 1e3)}  # clipped or not, the first update moves by the rate
        after, report = optimizer_step(tree.replace(state, step=step), grads, optimizer=optimizer)
        assert metrics.report(report)["lr"] == moves
        assert -after.params["w"].item() == pytest.approx(moves, abs=1e-6)
        assert after.opt.mu["w"].item() == pytest.approx(100.0)  # not clipped


@pytest.mark.parametrize(
    ("first", "of_actor"), [({}, 40), ({"critic__warmup_steps": 3}, 28), ({"critic__pretrain": 4}, 24)]
)
def test_a_schedule_counts_the_updates_of_its_own_role(tmp_path, first, of_actor):
    """10 steps of 2 epochs of 2 mini-batches, and of 1 for the critic, which learns in all of them."""
    sizes = {"rollout__batch_size": 8, "actor__mini_batch_size": 4, "actor__epochs": 2, "critic__mini_batch_size": 8}
    settings = tiny_run.settings(tmp_path, steps=10, critic__epochs=2, **sizes, **first)
    where = {"offload": "none", "offload_activations": False, "moments_directory": None}
    how = partial(learning.learning_of, batch_size=8, n=1, **where)
    assert how("actor", settings.actor, steps=settings.actor_steps).updates == of_actor
    assert how("critic", settings.critic, steps=settings.steps).updates == 20


def test_losses_by_name_take_their_scalars():
    keywords = {"clip_low": 0.1, "ratio": 0.5}
    loss = functions.policy_loss(LossSettings(name="clip_cov", keywords=keywords))
    assert loss.loss_fn.keywords == {"clip_low": 0.1}
    assert loss.select_fn.keywords == {"ratio": 0.5, "clip_low": 0.1}


def test_the_text_of_a_setting_names_its_kernels():
    source = inspect.getsource(ModelSettings) + inspect.getsource(AlgorithmSettings)
    for setting, names in modules.KERNELS.items():
        text = re.search(rf'    {setting.partition(".")[2]}: str = .*\n    """(.*)"""', source)[1]
        assert set(names) <= set(re.findall(r"\w+", text)), setting


def test_every_part_of_the_library_is_a_setting_by_its_name():
    """What scripts find in `advantages` and `losses` by its return type, settings find by its name."""

    def public(module, returned):
        functions = [x for x in map(partial(getattr, module), module.__all__) if inspect.isfunction(x)]
        return {f"{fn.__module__}:{fn.__name__}" for fn in functions if fn.__annotations__["return"] == returned}

    kinds = {kind: found for kind, found in vars(tables).items() if kind.isupper() and isinstance(found, Mapping)}
    named = {kind: [path for each in found.values() for path in each] for kind, found in kinds.items()}
    by_turn = {"fppo.advantages.by_turn:by_turn"}  # by algorithm.group_by
    assert set(named["ESTIMATORS"]) == public(advantages, "Advantages") - by_turn
    assert set(named["VALUE_HEADS"]) == public(losses, "ValueHead")
    assert set(named["CORRECTIONS"]) == public(losses, "Correction")
    of_policy = {path for path in public(losses, "tuple[Tokens, Metrics]") if ".value:" not in path}
    by_entropy = {"fppo.losses.selection:select_entropy"}  # by actor.top_entropy_share
    selections = {path for path in public(losses, "Mask") if "select_" in path} - by_entropy
    assert set(named["POLICY_LOSSES"]) == of_policy | selections
    assert {f"{fn.__module__}:{name}" for name, fn in losses.POLICY_LOSSES.items()} == {
        path for (path, *more) in tables.POLICY_LOSSES.values() if not more
    }
    assert {path.partition(":")[2] for path in named["OPTIMIZERS"]} == {"adamw", "adamw_8bit", "sgd", "lion", "muon"}
    del kinds["REWARDS"]  # some are decorated
    for found in kinds.values():  # so that help and checks know their keywords
        assert all(component.signature_of(name, found) is not None for name in found)


@pytest.mark.parametrize(
    ("sinks_in", "dtype", "missing"),
    [("lm", "bfloat16", "sinks"), ("value", "bfloat16", "sinks"), ("none", "float32", "float32")],
)
def test_a_kernel_that_lacks_what_a_model_needs_is_refused_before_any_work(
    tmp_path, monkeypatch, sinks_in, dtype, missing
):
    tiny_run.write_task(tmp_path)
    write_config(tmp_path, "gpt_oss")  # no weights are there to be read
    path = {"lm": "path", "value": "critic_path"}.get(sinks_in)
    changes = {f"model__{path}": str(tmp_path / "gpt_oss"), "model__tokenizer": str(tmp_path / "start")} if path else {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = tiny_run.settings(
        tmp_path, model__attention="varlen", model__compute_dtype=dtype, device="cpu", **changes, **tiny_run.NO_KL
    )
    words = rf"attention/varlen has no {missing}, which is needed; there are \['eager'"
    with pytest.raises(ValueError, match=words):
        Inputs(settings=settings).need(check_models)


def write_config(directory, name):
    """The config of a model whose attention has needs of its own, with the tokens of tiny runs."""
    config = type(CONFIGS[name]).from_dict(
        {**CONFIGS[name].to_dict(), "vocab_size": len(character_tokenizer(CHARACTERS))}
    )
    config.save_pretrained(directory / name)
    return config


@pytest.mark.slow
def test_kernels_inside_the_layers_are_those_of_the_settings(tmp_path):
    tiny_run.write_task(tmp_path)
    settings = tiny_run.settings(tmp_path, model__linear="onednn", model__rms_norm="torch")
    with assemble(settings) as assembly:
        forward = field(assembly.program.annotate, "passes").policy.forward
        engine = assembly.program.rollout.engine
    assert inner_of(forward.kernels) == inner_of(Kernels.named(linear="onednn", rms_norm="torch"))
    assert engine.engine.kernels is forward.kernels


def test_kernels_that_have_no_place_in_a_model_are_refused_before_any_work(tmp_path):
    settings = tiny_run.settings(tmp_path, model__rms_norm="torch")
    with pytest.raises(ValueError, match=r"'gpt2': fppo knows no RMSNorm in GPT2Model .* leave rms_norm as it is"):
        check_kernels(modules.kernels_named(settings), models.build(CONFIGS["gpt2"]), settings.mesh)


def test_a_run_compiles_kernels_where_it_is_long_and_goes_on_without_where_that_fails(tmp_path, monkeypatch):
    tiny_run.write_task(tmp_path)
    names = dict.fromkeys(("cpp", "attention", "log_probs"), "auto")
    names = {f"model.{name}": value for name, value in names.items()}
    given = files.replace(tiny_run.settings(tmp_path), names | {"rollout.max_tokens": 100})
    policy = small_model(len(character_tokenizer(CHARACTERS)), width=16, layers=1)
    steps = int(1e13 / machine.work_of(policy, 1, given.data, given.rollout, given.actor))
    why = "glu/_numbers.cpp does not compile here: CppCompileError: error: x"
    found_by_compiler: list[str | None] = [None, why]
    monkeypatch.setattr(table, "needs_cpp", lambda: None)
    monkeypatch.setattr(_cpp, "failure", lambda: found_by_compiler.pop(0))

    def found(steps):
        settings, said = machine.resolved(attrs.evolve(given, steps=steps), torch.device("cpu"))
        return settings.model.cpp, settings.model.attention, said

    assert found(steps) == (False, "sdpa", [])
    assert len(found_by_compiler) == 2  # nothing was compiled
    assert found(steps + 1) == (True, "cpp", [])
    said = f"model.cpp false: {why}; with kernels in C++ this run would be faster"
    assert found(steps + 1) == (False, "sdpa", [said])


def without_key_lengths(query, key, value, *, lengths, scale, window, softcap, sinks): ...


def test_a_kernel_that_a_context_axis_cannot_use_is_refused_by_name(tmp_path):
    own = {"model__attention": f"{__name__}:without_key_lengths"}
    model = models.build(CONFIGS["llama"])
    names = modules.kernels_named(tiny_run.settings(tmp_path, **own))
    for axes in (MeshSettings(), MeshSettings(context=2, ring=True)):
        check_kernels(names, model, axes)
    with pytest.raises(ValueError, match=r"test_assembly:without_key_lengths has no key_lengths, which is needed"):
        check_kernels(names, model, MeshSettings(context=2))
    for pool in ({}, {"ring": True}):
        pools = {"placement__pools": {"a": {"ranks": 2, "context": 2, **pool}}, "placement__roles__actor": "a"}
        placed = tiny_run.settings(tmp_path, **own, **pools)
        check_kernels(names, model, axes_at(placed.placement, "critic", placed.mesh))  # which is here
        with contextlib.nullcontext() if pool else pytest.raises(ValueError, match="has no key_lengths"):
            check_kernels(names, model, axes_at(placed.placement, "actor", placed.mesh))


def test_a_reward_model_is_asked_too(tmp_path, monkeypatch):
    tiny_run.write_task(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    judge = models.build(write_config(tmp_path, "gemma2"), "value")
    models.save(judge, models.init_params(judge, Key(0)), tmp_path / "judge")
    settings = tiny_run.settings(tmp_path, model__attention="varlen", reward__model__path=str(tmp_path / "judge"))
    with pytest.raises(ValueError, match="attention/varlen has no float32 and no softcap"):
        reward_model_of(settings, texts.load_tokenizer(settings.model, settings.data))


@pytest.mark.skipif(needs_cpp() is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("name", "inside"), [("qwen2", "cpp"), ("gpt2", "eager")])
def test_kernels_in_cpp_are_taken_where_a_model_has_places_for_them(tmp_path, monkeypatch, name, inside):
    monkeypatch.setattr(_cpp, "failure", lambda: None)  # tests of the kernels compile them
    tiny_run.write_task(tmp_path)
    models.save(*make(name), tmp_path / name)
    auto = dict.fromkeys(("attention", "decode_attention", "log_probs", "rms_norm", "add_rms_norm", "rotary"), "auto")
    named = {f"model.{op}": kernel for op, kernel in auto.items()}
    given = files.replace(tiny_run.settings(tmp_path), named | {"model.path": str(tmp_path / name), "model.cpp": True})
    settings, said = machine.resolved(given, torch.device("cpu"))
    actual = {op: getattr(settings.model, op) for op in auto}
    assert actual == dict.fromkeys(auto, inside) | dict.fromkeys(("attention", "decode_attention", "log_probs"), "cpp")
    assert not said


def test_a_gpu_takes_the_kernels_that_its_models_can_use(tmp_path, monkeypatch):
    """A stand-in for a GPU: what is printed, kept, and said where a run goes on elsewhere."""
    tiny_run.write_task(tmp_path)
    given = files.replace(
        tiny_run.settings(tmp_path), {f"model.{name}": "auto" for name in ("compute_dtype", "attention", "log_probs")}
    )
    on_cpu, said = machine.resolved(given, torch.device("cpu"))
    assert (on_cpu, said) == (tiny_run.settings(tmp_path), [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    on_gpu, said = machine.resolved(given, torch.device("cuda"))
    assert (on_gpu.model.compute_dtype, on_gpu.model.attention) == ("bfloat16", "varlen")
    assert [line.split(":")[0] for line in said] in ([], ["model.log_probs chunked"])  # where triton is not installed
    write_config(tmp_path, "gemma2")
    soft = files.replace(given, {"model.path": str(tmp_path / "gemma2")})
    other, said = machine.resolved(soft, torch.device("cuda"))
    assert other.model.attention == "sdpa"
    assert "model.attention sdpa: varlen has no softcap" in said
    (tmp_path / "run").mkdir()
    assert starts.record(on_cpu, 0) == {}
    assert starts.record(on_gpu, 3)["model.attention"] == ("sdpa", "varlen")
    assert starts.load(tmp_path / "run").model == on_gpu.model


@pytest.mark.parametrize(("epochs", "size", "watched"), [(1, 8, True), (2, 8, False), (1, 4, False), (2, 4, False)])
def test_one_update_a_step_is_compared_with_the_engine_and_several_are_not(epochs, size, watched):
    loop = Loop(mini_batch_size=size, micro_batching=MicroBatching(size=4), epochs=epochs)
    rollout = RolloutSettings(batch_size=8, gap="stop")
    assert (learning.update_watch(rollout, "float32", loop) is not None) is watched
    assert learning.update_watch(attrs.evolve(rollout, gap="off"), "float32", loop) is None


def test_a_ratio_warms_up_over_that_part_of_each_models_own_updates(tmp_path):
    """Half of the actor's four, which come after the critic's own steps, and a third of the critic's six."""
    tiny_run.write_task(tmp_path)
    rates = {"actor__optimizer__warmup_ratio": 0.5, "critic__optimizer__warmup_ratio": 0.34}
    with assemble(tiny_run.settings(tmp_path, steps=3, critic__warmup_steps=2, **rates)) as assembly:
        run, logged = assembly.run, []
        for _ in range(3):
            run, _, report = ppo_step(run, program=assembly.program, draw=assembly.draw)
            logged.append(metrics.report(report))
    assert logged[2]["actor/lr"] == pytest.approx(1e-3 * (1 / 3 + 2 / 3 + 1 + 1 / 2) / 4)  # a linear schedule
    assert [each["critic/lr"] for each in logged] == pytest.approx([1e-3 / 2, 1e-3, 1e-3])


def test_a_rate_has_the_numbers_of_its_section():
    section = OptimizerSettings(lr=0.5, schedule="linear", warmup_steps=1, min_lr_ratio=0.2)
    optimizer = functions.optimizer_of(section, 5, setting="actor.optimizer")
    state = init_state({"w": torch.zeros(2)}, optimizer)
    rates = []
    for step in (0, 1, 3, 5):
        _, _, report = optimizer.update(state.params, {"w": torch.ones(2)}, state.opt, step, mesh=LOCAL, donate=False)
        rates.append(metrics.report(report)["lr"])
    assert rates == pytest.approx([0.25, 0.5, 0.3, 0.1])
    again = functions.rate_of(OptimizerSettings(lr=0.5, schedule="cosine", min_lr_ratio=0.2, num_cycles=2), 4)
    assert [again(step) for step in range(5)] == pytest.approx([0.5, 0.3, 0.5, 0.3, 0.1])
