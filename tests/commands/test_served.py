"""Servers are put together from their flags, and exports from their runs: stand-ins note what each part is given."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from transformers import PreTrainedConfig

from fppo.commands import serve, serve_tinker
from fppo.commands.options import ServeOptions
from fppo.key import Key
from fppo.rollout.engine import Sampling
from fppo.runs import saved
from fppo.runtime.mesh import LOCAL
from fppo.serve.service import Bounds
from fppo.settings import files
from tests import tiny_run

simple = SimpleNamespace


@pytest.fixture
def parts(monkeypatch):
    """The parts of both servers, each of which notes what it is given, in order; ctrl-C comes at once."""
    noted: list[Any] = []

    def note(name, result=None):
        def call(*given, **named):
            noted.append((name, given, named))
            return result(*given, **named) if callable(result) else result

        return call

    def policy(settings, *, begins):
        noted.append(("policy", settings.model.path, begins, settings.device))
        return simple(
            params=f"params {settings.model.path}",
            engine=simple(pad_token_id=len(settings.model.path), kernels="k"),
            model=simple(config=PreTrainedConfig(), vision=None),
            sampling=Sampling(max_tokens=3, stop_token_ids=(5,)),
            texts="texts",
            tokenizer=simple(save_pretrained="write"),
        )

    class Loop:
        failure = None

        def __init__(self, engine, params, **named):
            self.name = params
            assert named.pop("on_failure") is serve.say_failure
            noted.append(("loop", engine.pad_token_id, params, named))

        def start(self):
            noted.append(("start", self.name))
            return self

        def stop(self):
            noted.append(("stop", self.name))

    class Serving:
        def __init__(self, sources, episodes):
            self.sources, self.attached = sources, []
            noted.append(("service", sources, episodes))

        def attach(self, loop):
            noted.append(("attach", None if loop is None else loop.name))

        def forget(self, names):
            noted.append(("forget", names))

    @contextlib.contextmanager
    def ended():
        event = threading.Event()
        event.set()
        yield event

    @contextlib.contextmanager
    def serving(app, listener):
        noted.append(("serving", app, listener.name))
        yield "http://here"

    listener = simple(name="listener", close=lambda: noted.append(("closed",)))
    held = {}

    def episodes(tokens, **named):
        held.update(named, tokens=tokens)
        return "episodes"

    stubs = {
        "bound_socket": note("socket", listener),
        "served_policy": policy,
        "EngineLoop": Loop,
        "Service": Serving,
        "Episodes": episodes,
        "app_of": note("app", lambda routers, **named: ("app", routers, tuple(named.values()))),
        "router_of": lambda service, **named: f"router {service.sources.model}",
        "ended_by_signals": ended,
        "serving": serving,
    }
    for room in (serve, serve_tinker):
        for name, stub in stubs.items():
            monkeypatch.setattr(room, name, stub)
    monkeypatch.setattr(serve, "_loaded", lambda directory, policy, step: (f"params of {step}", 10 * step))
    return noted, held


def of(noted, *names):
    return [each for each in noted if each[0] in names]


@pytest.mark.parametrize("given", [None, "a-key"])
def test_a_model_is_served_under_its_key(parts, capsys, given):
    noted, held = parts
    options = ServeOptions(targets=("a/bc",), host="0.0.0.0", port=3, public=True, max_tokens=7)
    environment = {} if given is None else {serve.KEY: given}
    assert serve.serve(options, environment) == 0
    assert of(noted, "socket") == [("socket", ("0.0.0.0", 3), {"public": True})]
    assert of(noted, "loop") == [("loop", 4, "params a/bc", {"version": 0, "newer": None})]
    (_, (routers,), named) = of(noted, "app")[0]
    assert routers == ["router bc"]
    assert named["bounds"] == Bounds(row_tokens=4096, answer_tokens=7, requests=options.requests)
    assert given is None or named["key"] == given
    order = [each[:2] for each in of(noted, "start", "attach", "stop", "serving", "closed")]
    assert [name for name, *_ in order] == ["start", "attach", "serving", "attach", "stop", "stop", "closed"]
    assert [each[1] for each in of(noted, "attach")] == ["params a/bc", None]
    assert held["tokens"] == Bounds().recorded_tokens
    assert held["on_dropped"] is serve.unrecorded
    held["on_forgotten"](["x"])
    assert noted[-1] == ("forget", ["x"])
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "bc at http://here/v1",
        f"key: {named['key']}" if given is None else "key: that of FPPO_API_KEY",
        *("other machines may reach it, and nothing is encrypted", "ctrl-C ends it", "stopped"),
    ]


def test_a_run_is_served_from_its_checkpoint_and_followed(parts, tmp_path, monkeypatch):
    noted, _ = parts
    (tmp_path / "settings.toml").touch()
    settings = tiny_run.settings(tmp_path, device="cuda")  # where it was trained
    monkeypatch.setattr(serve.starts, "load", lambda directory: settings)
    monkeypatch.setattr(serve.saved, "newest", lambda directory, step=None: step or 6)
    monkeypatch.setattr(
        serve.saved, "bare", lambda settings: attrs.evolve(settings, model=attrs.evolve(settings.model, path="bare"))
    )
    options = ServeOptions(targets=(str(tmp_path),), step=4, follow=2.5, device="cpu")
    assert serve.serve(options, {}) == 0
    assert of(noted, "policy") == [("policy", "bare", False, "cpu")]
    ((_, pad, params, named),) = of(noted, "loop")
    assert (pad, params, named["version"]) == (4, "params of 4", 40)
    follow = named["newer"]
    assert (follow._directory, follow._seconds, follow._step) == (tmp_path, 2.5, 4)
    for wrong in ({"step": 1}, {"follow": 1.0}):
        with pytest.raises(serve.UsageError, match="is no run: leave --step and --follow out"):
            serve.serve(ServeOptions(targets=("a/b",), **wrong), {})
    for wrong in ({"exact": True}, {"compute_dtype": "bfloat16"}):
        with pytest.raises(serve.UsageError, match=r"is a run.*: leave --exact and --compute-dtype out"):
            serve.serve(ServeOptions(targets=(str(tmp_path),), **wrong), {})
    for targets, words in (((), "give the output_dir"), (("a", "b"), "2 of them, a, b: several need --tinker")):
        with pytest.raises(serve.UsageError, match=words):
            serve.serve(ServeOptions(targets=targets), {})


def test_recorded_episodes_are_written_at_the_end(parts, tmp_path, monkeypatch):
    _, held = parts
    written = []

    class Files:
        def __init__(self, directory, pad):
            written.append((directory, pad))
            self.add = "add"

        def end(self, episodes):
            written.append(episodes)

    for room in (serve, serve_tinker):
        monkeypatch.setattr(room, "EpisodeFiles", Files)
    assert serve.serve(ServeOptions(targets=("abc",), record=str(tmp_path)), {}) == 0
    assert (written, held["on_dropped"]) == ([(tmp_path, 3), "episodes"], "add")
    written.clear()
    monkeypatch.setattr(
        serve_tinker,
        "opened_store",
        lambda options, bases: simple(start=lambda loops: None, stop=lambda: None, problem=lambda: None),
    )
    monkeypatch.setattr(serve_tinker, "tinker_app", lambda service, *, keys, flags: "tinker")
    assert serve_tinker.serve(ServeOptions(targets=("abcd", "x"), record=str(tmp_path)), {serve.KEY: "tml-12345"}) == 0
    assert (written, held["on_dropped"]) == ([(tmp_path, 4), "episodes"], "add")  # of the first


def test_models_for_tinkers_clients_are_served_beside_the_first_ones_answers(parts, tmp_path, capsys, monkeypatch):
    noted, held = parts
    (tmp_path / "keys").write_text("tml-of-ours\n")
    service = simple(
        problem=lambda: None,
        start=lambda loops: noted.append(("begun", {name: loop.name for name, loop in loops.items()})),
        stop=lambda: noted.append(("ended",)),
    )
    asked = []
    monkeypatch.setattr(serve_tinker, "opened_store", lambda options, bases: asked.append(bases) or service)
    monkeypatch.setattr(serve_tinker, "tinker_app", lambda *args, **named: asked.append((args, named)) or "tinker")
    options = ServeOptions(
        targets=("m/one", "two"), tinker=True, keys=str(tmp_path / "keys"), compress=True, row_tokens=77, port=9
    )
    assert serve_tinker.serve(options, {serve.KEY: "tml-server"}) == 0
    bases, (args, named) = asked
    assert {name: (base.base.name, base.base.params, base.rules.limit) for name, base in bases.items()} == {
        "m/one": ("m/one", "params m/one", 77),
        "two": ("two", "params two", 77),
    }
    assert args == (service,)
    assert (named["keys"], named["flags"].compress) == (["tml-server", "tml-of-ours"], True)
    assert of(noted, "begun") == [("begun", {"m/one": "params m/one", "two": "params two"})]
    assert [each[1] for each in of(noted, "start")] == ["params m/one", "params two"]
    assert [each[1] for each in of(noted, "attach")] == ["params m/one", None]
    assert [each[0] for each in of(noted, "stop", "ended", "closed")] == ["stop", "stop", "ended", "closed"]
    ((_, (routers,), app),) = of(noted, "app")
    assert (routers, app["key"], app["bounds"].row_tokens) == (["router one"], "tml-server", 77)
    assert held["tokens"] == app["bounds"].recorded_tokens
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "m/one, two at http://here for tinker's clients, one at http://here/v1",
        *("key: that of FPPO_API_KEY", f"and 1 of {tmp_path / 'keys'}", "ctrl-C ends it", "stopped"),
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"targets": ("a", "b", "a")}, "a, b, a: a model is given twice"),
        ({"step": 1}, "leave --step and --follow out"),
        ({"follow": 0.5}, "leave --step and --follow out"),
        ({"targets": ("a", "{run}")}, "is a run: export it"),
        ({"targets": ()}, "give the output_dir of a run, or a model"),
    ],
)
def test_what_is_not_served_to_tinkers_clients_is_named(parts, tmp_path, changes, words):
    (tmp_path / "settings.toml").touch()
    changes = {k: tuple(x.format(run=tmp_path) for x in v) if k == "targets" else v for k, v in changes.items()}
    with pytest.raises(serve_tinker.UsageError, match=words):
        serve_tinker.serve(ServeOptions(**{"targets": ("a",), **changes}), {serve.KEY: "tml-server"})


# exports


@pytest.fixture
def exporting(monkeypatch):
    """What an export reads and writes."""
    noted: list[Any] = []

    def note(name, result=None):
        return lambda *given, **named: noted.append((name, given, named)) or result

    stubs = {
        "bare_model": lambda section, critic: simple(path=section.path, critic=critic),
        "params": note("params", "whole"),
        "load_tokenizer": lambda model, data: ("tokenizer", model.path),
        "policy_generation": lambda model, data, tokenizer: (model.path, data.prompt, *tokenizer) and "generation",
        "load_policy": note("begun", (simple(name="adapted policy"), None)),
        "adapted_critic": note("begun", (simple(name="adapted critic"), None)),
        "base_of_role": lambda section, role, model: simple(source=f"base of {role}"),
        "bases_of": lambda bases: bases,
        "check_bases": note("checked"),
        "widened": lambda model: f"widened {model.name}",
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(saved, name, stub)
    monkeypatch.setattr(saved.models, "save", note("save"))
    monkeypatch.setattr(saved.lora_files, "save", note("adapter"))
    return noted


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_an_export_is_of_the_roles_own_parameters(exporting, tmp_path, role):
    settings = tiny_run.settings(tmp_path, device="cpu")
    (tmp_path / "run" / "configs").mkdir(parents=True)
    saved.export(settings, tmp_path / "out", 4, role)
    path = tmp_path / "run" / "checkpoints" / "step_00000004"
    (_, (model, asked, place), how), (_, (written, whole, target), given) = exporting
    assert (asked, place, how) == (role, path, {"device": torch.device("cpu")})
    bare = tmp_path / "run" / "configs"
    assert model.path == str(bare / "actor")
    assert (model.critic is not None) == (role == "critic")
    assert (written, whole, target) == (model, "whole", tmp_path / "out")
    generation = "generation" if role == "actor" else None
    assert given == {"tokenizer": ("tokenizer", str(bare / "actor")), "generation_config": generation}
    with pytest.raises(ValueError, match=f"the run's {role} has no adapter: leave --merge out"):
        saved.export(settings, tmp_path / "out", 4, role, merge=True)


@pytest.mark.parametrize(("role", "merge"), [("actor", False), ("actor", True), ("critic", True), ("critic", False)])
def test_an_adapter_is_exported_as_it_is_or_in_its_base(exporting, tmp_path, role, merge):
    changes = {"model__lora__rank": 2, "model__lora__critic_rank": 2}
    settings = tiny_run.settings(tmp_path, device="cpu", seed=5, **changes)
    if role == "critic" and not merge:
        with pytest.raises(ValueError, match="has a value head, which PEFT's files cannot hold: give --merge"):
            saved.export(settings, tmp_path / "out", 4, role)
        return
    saved.export(settings, tmp_path / "out", 4, role, merge=merge)
    *begun, (_, (bases, path), _), (_, (model, asked, _), _), (kind, given, named) = exporting
    parts = settings.model, settings.critic, Key(settings.seed), LOCAL, torch.device("cpu")
    policy = ("begun", parts, {})
    assert begun[0] == policy
    assert begun[1:] == ([("begun", (*parts, simple(name="adapted policy")), {})] if role == "critic" else [])
    assert path == tmp_path / "run" / "checkpoints" / "step_00000004"
    assert (list(bases), asked) == ([role], role)
    name = "adapted policy" if role == "actor" else "adapted critic"
    assert model.name == name
    tokenizer = ("tokenizer", settings.model.path)
    if merge:
        assert (kind, given) == ("save", (f"widened {name}", "whole", tmp_path / "out"))
        assert named == {"tokenizer": tokenizer, "generation_config": "generation" if role == "actor" else None}
    else:
        assert (kind, given) == ("adapter", (model, "whole", tmp_path / "out"))
        assert named == {"base": "base of actor", "tokenizer": tokenizer}


def test_a_critic_that_is_none_or_no_model_is_not_exported(exporting, tmp_path):
    none = tiny_run.settings(tmp_path, algorithm__advantage="rloo", rollout__n=2)
    with pytest.raises(ValueError, match=r"the run has no critic: algorithm.advantage = 'rloo' trains none"):
        saved.export(none, tmp_path / "out", 4, "critic")
    reading = tiny_run.settings(tmp_path, critic__reads="confidence")
    with pytest.raises(ValueError, match=r"critic is not a model: with critic\.reads = 'confidence'"):
        saved.export(reading, tmp_path / "out", 4, "critic")


def test_a_run_is_read_from_its_own_configs_where_it_has_them(tmp_path):
    settings = tiny_run.settings(tmp_path, data__chat_template="t", data__chat=True)
    assert saved.bare(settings) is settings
    (tmp_path / "run" / "configs").mkdir(parents=True)
    own = tmp_path / "run" / "configs"
    found = saved.bare(settings)
    expected = {"model.path": str(own / "actor"), "model.critic_path": str(own / "critic"), "data.chat_template": None}
    assert {name: new for name, (_, new) in files.changes(files.to_dict(settings), found).items()} == expected
    none = tiny_run.settings(tmp_path, algorithm__advantage="rloo", rollout__n=2)
    assert saved.bare(none).model.critic_path is None
    adapted = tiny_run.settings(tmp_path, model__lora__rank=2)
    assert saved.bare(adapted) is adapted
    assert Path(found.model.path).name == "actor"
