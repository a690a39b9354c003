"""Settings: read strictly, checked as a whole, and written back as they were."""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fppo.settings import checks, files
from fppo.settings import train as train_settings
from fppo.settings.component import parts, signature_of
from fppo.settings.learning import DEFAULT_TOKEN_BUDGET
from fppo.settings.train import TrainSettings
from fppo.settings.values import RENAMED, read

BASE = {"model.path": "m", "data.path": ["a.jsonl"], "reward.functions": ["exact_match"]}


def make(changes: dict[str, Any] | None = None) -> TrainSettings:
    return files.replace(TrainSettings(), BASE | (changes or {}))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


MINIMAL = 'model.path = "m"\ndata.path = "a.jsonl"\nreward.functions = "exact_match"\n'


def test_the_defaults_run_once_model_data_and_reward_are_given():
    assert checks.problems(make()) == []
    missing = [p.path for p in checks.problems(TrainSettings())]
    assert missing == ["model.path", "data.path", "reward.functions"]


def test_a_file_and_overrides_make_settings(tmp_path):
    path = write(tmp_path, MINIMAL + "steps = 7\n[actor.optimizer]\nlr = 1\n")
    loaded = files.load(path, ["--actor.optimizer.lr", "1e-4", "--data.no-shuffle", "--rollout.top_k", "5"])
    assert loaded == make({"steps": 7, "actor.optimizer.lr": 1e-4, "data.shuffle": False, "rollout.top_k": 5})
    assert files.load(path).actor.optimizer.lr == 1.0


def test_one_setting_of_a_section_keeps_the_section_s_other_defaults(tmp_path):
    loaded = files.load(write(tmp_path, MINIMAL + "critic.optimizer.betas = [0.8, 0.99]\n"))
    assert loaded.critic.optimizer.lr == TrainSettings().critic.optimizer.lr == 1e-5


def test_every_problem_of_file_and_result_is_named_at_once(tmp_path):
    text = """
        steps = 10.5
        lr = 3
        [rollout]
        batch_size = 10
        n = 4
        temprature = 1
        [actor]
        mini_batch_size = 3
        micro_batch_size = 30
        token_budget = 200
        [actor.loss]
        name = "grpo"
        [algorithm]
        advantage = "gro"
        whiten = 1
    """
    with pytest.raises(files.SettingsError) as caught:
        files.load(write(tmp_path, text))
    places = {p.split(" = ")[0] for p in caught.value.problems}
    assert places == {
        *("steps", "lr", "model.path", "data.path", "reward.functions", "rollout.batch_size", "rollout.temprature"),
        *("actor.mini_batch_size", "actor.micro_batch_size", "actor.loss.name", "algorithm.advantage.name"),
        "algorithm.whiten",
    }
    message = str(caught.value)
    assert f"{len(caught.value.problems)} problems in {tmp_path / 'run.toml'}:" in message
    with pytest.raises(files.SettingsError, match=r"problems in .*run\.toml, with the flags:\n"):
        files.load(write(tmp_path, text), ["actor.lrr=1"])
    for hint in ("rollout.temperature?", "actor.optimizer.lr", "8 or 12", "mean grpo?", "one of the two"):
        assert hint in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = = 3", "line 1"),
        (f"seed = {1 << 64}", "seed = 18446744073709551616: must be 18446744073709551615 or less"),
        ("actor = 3", r"write \[actor\]"),
        ("[optimizer]\nlr = 3", "did you mean actor.optimizer or critic.optimizer|there are output_dir"),
        ("zzz = 3", "there are output_dir"),
        ('[placement]\nreference = "a"', "did you mean placement.roles.reference or model.lora.reference?"),
        ('[reward]\npath = "a"', "did you mean reward.model.path or reward.judge.path or model.path?"),
        ("steps = true", "whole number"),
        ('steps = "3"', "whole number"),
        ("model.path = 3", "must be text"),
        ('reward.weights = ["a"]', "a list, each a number"),
        ('log.loggers = ["consol"]', "did you mean console"),
        ('data.shuffle = "false"', "true or false"),
        ('critic.checkpoint_layers = "some"', "selective or true or false"),
        ("rollout.temperature = nan", "must be greater than 0"),
        ("rollout.temperature = inf", "must be finite"),
        ("rollout.top_p = 1.5", "1 or less"),
        ("rollout.min_p = 1.0", "less than 1"),
        ("eval.min_p = -0.1", "0 or more"),
    ],
)
def test_malformed_files_say_what_to_write(tmp_path, text, message):
    with pytest.raises(files.SettingsError, match=message):
        files.load(write(tmp_path, text))


def test_a_missing_file_and_a_directory_are_named(tmp_path):
    with pytest.raises(files.SettingsError, match=r"nothing\.toml"):
        files.load(tmp_path / "nothing.toml")
    with pytest.raises(files.SettingsError, match="directory"):
        files.load(tmp_path)


def test_none_is_a_choice_where_a_setting_has_one_of_that_name():
    """A critic may stay on the device though model.offload puts the policy away; None says as model.offload does."""
    for words, value in ((["none"], "none"), (["None"], None), (["moments"], "moments")):
        begun = files.replace(TrainSettings(), {"critic.offload": "all", "model.offload": "all"})
        found, problems = files.override(begun, ["--critic.offload", *words])
        assert (found.critic.offload, problems) == (value, [])
    found, problems = files.override(TrainSettings(), ["--critic.compute-dtype", "none", "--model.offload", "none"])
    assert (found.critic.compute_dtype, found.model.offload, problems) == (None, "none", [])


def test_a_word_is_a_number_where_toml_or_a_plain_number_is_written():
    for word, number in (
        ("1e-6", 1e-6),
        (".5", 0.5),
        ("5.", 5.0),
        ("1E3", 1000.0),
        ("-inf", -math.inf),
        ("INF", math.inf),
    ):
        assert read(word) == number, word
    assert math.isnan(read("NaN"))
    for word in ("infinity", "-Infinity", "1e", "e5", "nano", "1 2"):
        assert read(word) == word


@pytest.mark.parametrize("behind", [["false"], ["=False"], ["no"], [], ["=true"], ["Yes"]])
def test_a_flag_takes_the_value_that_a_file_gives(behind):
    off = bool(behind) and behind[0].strip("=").lower() in ("false", "no")
    joined = bool(behind) and behind[0].startswith("=")
    for path in ("data.shuffle", "data.chat", "critic.checkpoint-layers"):
        if not behind and path.startswith("critic"):
            continue  # may be unset, so that it needs its value
        words = [f"--{path}{behind[0]}"] if joined else [f"--{path}", *behind]
        settings, problems = files.override(TrainSettings(), [*words, "--steps", "7"])
        assert not problems
        assert files.flat(files.to_dict(settings))[path.replace("-", "_")] is not off
        assert settings.steps == 7


def test_problems_of_flags_are_named_with_those_of_the_file(tmp_path):
    one = ["--steps", "1.5", "--rollout.bach-size", "8", "--data.shuffle", "maybe"]
    flags = [*one, "--actor.epochs", "1", "2", "--seed", "--eval.n", "4"]
    with pytest.raises(files.SettingsError) as error:
        files.load(write(tmp_path, MINIMAL + "critic.epochs = 0\n"), flags)
    named = [problem.split(":")[0] for problem in error.value.problems]
    assert {"steps = 1.5", "rollout.bach_size = 8", "data.shuffle = 'maybe'", "actor.epochs = '1 2'"} <= {*named}
    assert {"seed = ''", "critic.epochs = 0"} <= {*named}
    assert "did you mean rollout.batch_size?" in str(error.value)


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        ("--data.path a.jsonl b.jsonl", "data.path", ["a.jsonl", "b.jsonl"]),
        ("--data.path", "data.path", []),
        ("--reward.weights [1, 0.5]", "reward.weights", [1.0, 0.5]),
        ("--data.pad-token 5", "data.pad_token", "5"),
        ("--actor.entropy-coef -1e-3", "actor.entropy_coef", -1e-3),
        ("--rollout.top-k None", "rollout.top_k", None),
        ('--model.config {"a": [1]}', "model.config.a", [1]),
        ("--actor.loss sapo", "actor.loss.name", "sapo"),
        ("--actor.optimizer.betas 0.9 0.95", "actor.optimizer.betas", [0.9, 0.95]),
        ("--actor.optimizer.max-grad-norm none", "actor.optimizer.max_grad_norm", "none"),
        ("--actor.loss.name my:own --actor.loss.radius .5", "actor.loss.radius", 0.5),
        ("--critic.loss two_hot --critic.loss.low -1", "critic.loss.low", -1),
    ],
)
def test_words_are_values_of_their_settings(words, path, value):
    flag, _, behind = words.partition(" ")
    given = [flag, behind] if behind[:1] in ("[", "{") else words.split()
    settings, problems = files.override(TrainSettings(), given)
    assert not problems
    assert files.flat(files.to_dict(settings))[path] == value
    assert files.from_dict(files.tomllib.loads(files.to_toml(settings))) == settings


def test_a_part_by_another_name_has_no_keywords_of_the_old_one():
    settings, _ = files.override(make({"actor.loss.clip_low": 0.1}), ["--actor.loss.name", "gspo"])
    assert settings.actor.loss.keywords == {}
    settings, _ = files.override(make({"actor.optimizer.eps": 0.1}), ["--actor.optimizer", "sgd"])
    assert settings.actor.optimizer == make({"actor.optimizer.name": "sgd"}).actor.optimizer
    assert files.replace(make({"actor.loss.clip_low": 0.1}), {"actor.loss": "sapo"}).actor.loss.keywords == {}


CONFLICTS = [
    ({"rollout.batch_size": 10, "rollout.n": 4}, "rollout.batch_size"),
    ({"algorithm.advantage": "grpo"}, "rollout.n"),
    ({"algorithm.advantage": "rloo", "rollout.n": 2, "algorithm.advantage.lam": 0.9}, "algorithm.advantage.lam"),
    ({"algorithm.advantage": "rloo", "rollout.n": 2, "model.critic_path": "x"}, "model.critic_path"),
    ({"algorithm.advantage.scale": "none"}, "algorithm.advantage.scale"),
    ({"algorithm.advantage": "td"}, "algorithm.advantage.steps"),
    ({"actor.loss.clip_low": "a"}, "actor.loss.clip_low"),
    ({"actor.loss.clip_low": math.nan}, "actor.loss.clip_low"),
    ({"actor.optimizer.eps": 1e-300}, "actor.optimizer.eps"),
    ({"actor.mini_batch_size": 48}, "actor.mini_batch_size"),
    ({"critic.mini_batch_size": 48}, "critic.mini_batch_size"),
    ({"rollout.n": 8, "critic.mini_batch_size": 4, "critic.draw_by": "prompt"}, "critic.mini_batch_size"),
    ({"actor.micro_batch_size": 8, "actor.token_budget": 100}, "actor.micro_batch_size"),
    ({"actor.token_budget": 0}, "actor.token_budget"),
    ({"actor.micro_batch_size": 8, "actor.token_budget": "auto"}, "actor.micro_batch_size"),
    ({"actor.mini_batch_size": 8, "actor.micro_batch_size": 16}, "actor.micro_batch_size"),
    ({"actor.weight_mode": "seq-mean-token-sum-norm"}, "actor.horizon"),
    ({"actor.horizon": 100}, "actor.horizon"),
    ({"actor.loss.beta": 1.0}, "actor.loss.beta"),
    ({"actor.loss.name": "no_such"}, "actor.loss.name"),
    ({"actor.kl_kind": "k1"}, "actor.kl_kind"),
    ({"actor.kl_coef": 0.1, "actor.kl_kind": "k1"}, "actor.kl_kind"),
    ({"algorithm.kl.coef": 0.1, "algorithm.kl.kind": "k3"}, "algorithm.kl.kind"),
    ({"algorithm.kl.coef": 0.1, "algorithm.kl.kind": "k3+"}, "algorithm.kl.kind"),
    ({"algorithm.kl.coef": 0.1, "algorithm.advantage": "gdpo", "rollout.n": 4}, "algorithm.kl.coef"),
    (
        {"algorithm.advantage": "grpo", "rollout.n": 4, "algorithm.advantage.leave_one_out": True},
        "algorithm.advantage.leave_one_out",
    ),
    ({"model.ref_path": "x"}, "model.ref_path"),
    ({"algorithm.kl.controller": "adaptive"}, "algorithm.kl.controller"),
    ({"algorithm.kl.coef": 0.1, "algorithm.kl.target": 0.2}, "algorithm.kl.target"),
    ({"algorithm.correction.threshold": 3.0}, "algorithm.correction.threshold"),
    ({"algorithm.correction.name": "rolout"}, "algorithm.correction.name"),
    ({"steps": 5, "critic.warmup_steps": 5}, "critic.warmup_steps"),
    ({"steps": 5, "actor.optimizer.warmup_steps": 20}, "actor.optimizer.warmup_steps"),
    ({"critic.optimizer.min_lr_ratio": 0.1}, "critic.optimizer.min_lr_ratio"),
    ({"critic.optimizer.schedule": "exponential"}, "critic.optimizer.min_lr_ratio"),
    ({"actor.optimizer.name": "adam"}, "actor.optimizer.name"),
    ({"actor.optimizer.momentum": 0.9}, "actor.optimizer.momentum"),
    ({"critic.optimizer.name": "sgd", "critic.optimizer.betas": [0.9, 0.99]}, "critic.optimizer.betas"),
    ({"reward.functions": []}, "reward.functions"),
    ({"reward.functions": ["a b:c"]}, "reward.functions"),
    ({"reward.weights": [1.0, 2.0]}, "reward.weights"),
    ({"reward.functions": ["regular_expression"]}, "reward.arguments.regular_expression.pattern"),
    (
        {"reward.functions": ["regular_expression"], "reward.arguments.regular_expression.patern": "x"},
        "reward.arguments.regular_expression.patern",
    ),
    ({"reward.arguments.math_verify.timeout": 1}, "reward.arguments.math_verify"),
    ({"reward.arguments.exact_match": 1}, "reward.arguments.exact_match"),
    ({"reward.overlong_buffer": 256}, "reward.overlong_buffer"),
    ({"reward.overlong_penalty": 0.5}, "reward.overlong_penalty"),
    ({"data.prompt": "Question: {}"}, "data.prompt"),
    ({"data.prompt": "Question: {question"}, "data.prompt"),
    ({"data.eval_path": ["a.jsonl"]}, "data.eval_path"),
    ({"eval.every": 5}, "eval.every"),
    ({"eval.n": 4}, "eval.n"),
    ({"data.eval_path": ["b.jsonl"], "eval.n": 4}, "eval.temperature"),
    ({"device": "gpu"}, "device"),
    ({"log.loggers": ["jsonl", "jsonl"]}, "log.loggers"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "place"), CONFLICTS, ids=[c[1] + str(i) for i, c in enumerate(CONFLICTS)])
def test_each_conflict_is_named_by_its_setting(changes, place):
    problems = checks.problems(make(changes))
    assert place in [p.path for p in problems]
    with pytest.raises(files.SettingsError, match=place):
        files.check(make(changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm.advantage": "grpo", "rollout.n": 8, "actor.kl_coef": 0.001, "model.ref_path": "x"},
        {"algorithm.advantage": "remax"},
        {"algorithm.advantage": "reinforce_plus_plus", "algorithm.advantage.gamma": 0.99},
        {"actor.micro_batch_size": 5, "critic.token_budget": 4096},
        {"actor.micro_batch_size": 5, "actor.token_budget": 0},
        {"actor.loss.name": "clip_cov", "actor.loss.clip_low": 0.1, "actor.loss.ratio": 0.01},
        {"actor.loss.name": "my.losses:mine"},
        {"actor.optimizer.name": "muon", "actor.optimizer.momentum": 0.9, "critic.optimizer.name": "my.own:optimizer"},
        {"actor.loss.clip_high": float("inf"), "critic.loss.clip": "none"},
        {"actor.weight_mode": "seq-mean-token-sum-norm", "actor.horizon": 256},
        {"data.path": ["org/set"], "data.eval_path": ["org/set"]},
        {"data.prompt": "Question: {question}\nAnswer in {{}}:"},
        {
            "algorithm.correction.name": "rollout",
            "algorithm.correction.reject": "token_k1,seq_max_k3",
            "algorithm.correction.reject_threshold": "2.0,1.0",
        },
    ],
)
def test_settings_that_agree_pass(changes):
    assert files.check(make(changes)) == make(changes)


def changed(kind: Any) -> st.SearchStrategy[Any]:
    text = st.text(st.characters(codec="utf-8"), max_size=8)
    simple = {bool: st.booleans(), int: st.integers(-9, 9), float: st.floats(allow_nan=False), str: text}
    if kind in simple:
        return simple[kind]
    if getattr(kind, "__origin__", None) is dict:
        leaf = text | st.integers(-9, 9) | st.booleans() | st.floats(allow_nan=False)
        return st.dictionaries(
            text, leaf | st.lists(leaf, max_size=2) | st.dictionaries(text, leaf, max_size=2), max_size=3
        )
    arguments = [a for a in getattr(kind, "__args__", ()) if a is not Ellipsis]
    if getattr(kind, "__origin__", None) is tuple:
        return st.lists(changed(arguments[0]), max_size=3)
    if arguments and isinstance(arguments[0], str | int):
        return st.sampled_from(arguments)
    return st.one_of([st.none() if a is type(None) else changed(a) for a in arguments])


@given(st.data())
def test_toml_gives_the_settings_back(data):
    kinds = files.paths()
    names = data.draw(st.lists(st.sampled_from(sorted(kinds)), max_size=6, unique=True))
    drawn = files.replace(TrainSettings(), {name: data.draw(changed(kinds[name])) for name in names})
    text = files.to_toml(drawn)
    assert files.from_dict(files.tomllib.loads(text)) == drawn
    assert files.from_dict(files.to_dict(drawn)) == drawn


WORD = st.text("xyz 1.", min_size=1, max_size=6)


def of_flags(kind: Any) -> st.SearchStrategy[Any]:
    """A value that flags can give; texts look like none of the other kinds' words."""
    arguments = [a for a in getattr(kind, "__args__", ()) if a is not Ellipsis]
    if kind is str:
        return WORD
    if kind in (bool, int, float):
        return changed(kind)
    if getattr(kind, "__origin__", None) is dict:
        return st.dictionaries(st.text("ab", min_size=1), st.integers(-9, 9) | WORD | st.booleans(), max_size=2)
    if getattr(kind, "__origin__", None) is tuple:
        return st.lists(of_flags(arguments[0]), max_size=3)
    if arguments and isinstance(arguments[0], str | int):
        return st.sampled_from(arguments)
    return st.one_of([st.none() if a is type(None) else of_flags(a) for a in arguments])


def flag_words(value: Any) -> list[str]:
    """The words behind a flag that stand for a value."""
    if isinstance(value, list):
        return [word for each in value for word in flag_words(each)]
    if isinstance(value, dict):
        return [json.dumps(value)]
    return [str(value).lower() if isinstance(value, bool) else str(value)]


@given(st.data())
def test_flags_give_the_values_that_a_file_gives(data):
    """Whatever the kind of a setting, and however its sections' other settings stand."""
    kinds = files.paths()
    names = data.draw(st.lists(st.sampled_from(sorted(kinds)), min_size=20, max_size=40, unique=True))
    values = {name: data.draw(of_flags(kinds[name])) for name in names}
    words = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", *flag_words(value))]
    found, problems = files.override(TrainSettings(), words)
    assert problems == []
    assert found == files.replace(TrainSettings(), values)


def test_saved_settings_load_equal(tmp_path):
    files.save(make({"steps": 3}), tmp_path / "settings.toml")
    assert files.load(tmp_path / "settings.toml") == make({"steps": 3})


def test_every_setting_has_one_line_of_help():
    tree = ast.parse(inspect.getsource(train_settings))
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        assert ast.get_docstring(cls)
        for field, after in zip(cls.body, [*cls.body[1:], None]):
            if isinstance(field, ast.AnnAssign) and ast.unparse(field.value or field) != "given()":
                name = ast.unparse(field.target)
                assert isinstance(after, ast.Expr), f"{cls.name}.{name} has no help"
                help_text = ast.literal_eval(after.value)
                assert isinstance(help_text, str)
                assert "\n" not in help_text


def test_optional_settings_are_none_by_default():
    """A TOML file cannot hold None, so None has to mean the same as leaving the setting out."""
    values = files.to_dict(TrainSettings())
    for path, kind in files.paths().items():
        value: Any = values
        for name in path.split("."):
            value = value[name]
        assert (type(None) in getattr(kind, "__args__", ())) == (value is None), path


def test_replace_leaves_the_old_settings_and_names_unknown_ones():
    old = make()
    assert files.replace(old, {"actor.optimizer.lr": 0.5}).actor.optimizer.lr == 0.5
    assert old == make()
    with pytest.raises(files.SettingsError, match=r"actor\.optimizer"):
        files.replace(old, {"actor.optimiser.lr": 0.5})


def test_micro_batching_is_by_size_or_by_budget():
    assert make().actor.passes == (None, DEFAULT_TOKEN_BUDGET)
    assert make({"actor.micro_batch_size": 4}).actor.passes == (4, None)
    assert make({"actor.token_budget": 100}).actor.passes == (None, 100)
    assert make({"actor.token_budget": "auto"}).actor.passes == (None, DEFAULT_TOKEN_BUDGET)
    assert make().actor.mini_batch(64, 1) == 16
    assert make({"actor.mini_batch_size": 32}).actor.mini_batch(64, 1) == 32


@pytest.mark.parametrize(
    "name",
    [
        *("actor.loss.name", "algorithm.advantage", "model.attention", "model.log_probs", "rollout.turns.respond"),
        "model.decode_attention",
        *("actor.optimizer.name", "critic.optimizer.name", "reward.functions"),
        *(
            "model.linear",
            "model.rms_norm",
            "model.add_rms_norm",
            "model.layer_norm",
            "model.rotary",
            "model.glu",
            "algorithm.gae",
        ),
    ],
)
def test_whoever_names_a_function_of_ones_own_remembers_where_it_is_sought(tmp_path, name):
    value = '["mine:fn"]' if name == "reward.functions" else '"mine:fn"'
    (tmp_path / "run.toml").write_text(f"{name} = {value}\n")
    settings, _ = files.examined(tmp_path / "run.toml")
    assert settings.module_dirs[0] == str(tmp_path)


@pytest.mark.parametrize("old", RENAMED)
def test_the_former_name_of_a_setting_is_an_error_that_says_the_name_it_has_now(tmp_path, old):
    """And the new one is a setting, or a keyword of one of the functions that its section may name."""
    with pytest.raises(files.SettingsError) as caught:
        files.load(write(tmp_path, f"{MINIMAL}{old} = 1\n"), [])
    assert f"{old} = 1: it is called {RENAMED[old]} now" in caught.value.problems
    keywords = {
        f"{path}.{name}"
        for path, _, table in parts(TrainSettings())
        for function in table
        if (signature := signature_of(function, table)) is not None
        for name in signature.keywords
    }
    known = {*files.paths(), *keywords, "reward.arguments.regular_expression.pattern"}
    names = re.findall(r"[a-z_]+(?:\.[a-z_]+)+", RENAMED[old])
    assert names
    assert set(names) <= known


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"actor.loss.clip_low": 0.1}, {}, {"actor.loss.clip_low": (0.1, None)}),  # back to the function's own
        ({}, {"actor.loss.clip_low": 0.1}, {"actor.loss.clip_low": (None, 0.1)}),
        (
            {"actor.loss.clip_low": 0.1, "steps": 3},
            {"actor.loss.clip_low": 0.3, "steps": 3},
            {"actor.loss.clip_low": (0.1, 0.3)},
        ),
        ({"steps": 3, "resume": "off"}, {"steps": 5}, {"steps": (3, 5)}),
    ],
)
def test_changes_are_all_that_either_has_and_the_other_has_not(before, now, expected):
    assert files.changes(files.to_dict(make(before)), make(now)) == expected


@pytest.mark.parametrize("resume", ["never", "runs/other/checkpoints/step_00000003", "auto"])
def test_a_run_that_is_named_goes_on_however_it_began(tmp_path, resume):
    files.save(make({"resume": resume, "output_dir": str(tmp_path)}), tmp_path / "settings.toml")
    assert files.examined(tmp_path / "settings.toml")[0].resume == resume
    assert files.examined(tmp_path / "settings.toml", run=tmp_path)[0].resume == "auto"
    assert files.examined(tmp_path / "settings.toml", ["--resume", "never"], run=tmp_path)[0].resume == "never"
