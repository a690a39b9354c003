"""Where the weights of each model are, in which dtype and how they run: stand-ins note what loads and builds them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from fppo.assembly import parts
from fppo.key import Key
from fppo.models.model import Model
from fppo.quickstart import small_model
from fppo.runtime.mesh import LOCAL
from fppo.settings.learning import CriticSettings
from fppo.settings.model import LoraSettings, ModelSettings
from tests.assembly.log import Log

PARTS: Any = parts
BARE = small_model(15, width=16, layers=1)
KEY = Key(3)
SECTION = ModelSettings(
    path="p",
    compute_dtype="bfloat16",
    checkpoint_layers="selective",
    trust_remote_code=True,
    config={"rope_theta": 3.0},
    compile_layers=True,
    ref_dtype="bfloat16",
)
HOW = {"checkpoint_layers": "selective", "trust_remote_code": True, "config": {"rope_theta": 3.0}}
PARAMS = {"w": torch.ones(2, dtype=torch.float32)}


@attrs.frozen
class Seeing:
    """A model with a part for images that may learn."""

    compile_layers: bool = False
    vision: Any = None
    frozen: Any = None


@attrs.frozen
class Vision:
    trains: bool = True


@pytest.fixture
def log(monkeypatch):
    """What is called, and models whose parts for images learn."""
    found = Log(monkeypatch, PARTS)
    for name in ("directory_of", "config_place"):
        monkeypatch.setattr(PARTS, name, lambda path, setting: (path, setting))
    found.stub("config_of")
    monkeypatch.setattr(
        PARTS, "value_head_of", lambda loss: SimpleNamespace(outputs=21 if loss.name == "two_hot" else 1)
    )
    of_models = Log(monkeypatch, PARTS.models)
    of_models.stub("build", Seeing(vision=Vision()))
    of_models.stub("load", (Seeing(vision=Vision()), PARAMS))
    return SimpleNamespace(parts=found, models=of_models)


def loaded(log: Any) -> Any:
    """The only model that is loaded: where from, and how."""
    args, named = log.models.calls.pop("load")[0]
    assert named.pop("mesh") is LOCAL
    assert {name: named.pop(name) for name in ("trust_remote_code", "config")} == {
        name: HOW[name] for name in ("trust_remote_code", "config")
    }
    return args, named


DTYPES: dict[str | None, torch.dtype | None] = {
    None: torch.bfloat16,
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("path", [None, "c"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", ["mse", "two_hot"])
def test_a_critic_is_built_and_loaded_as_its_sections_say(log, freeze, path, dtype, loss):
    section = attrs.evolve(SECTION, critic_path=path, freeze_vision=freeze)
    usual = CriticSettings()
    critic = attrs.evolve(usual, compute_dtype=dtype, loss=attrs.evolve(usual.loss, name=loss))
    outputs = 21 if loss == "two_hot" else 1
    place = ("c", "model.critic_path") if path else ("p", "model.path")
    as_set = Seeing(compile_layers=True, vision=Vision(trains=not freeze))
    assert PARTS.bare_model(section, critic) == as_set
    assert log.parts.of("config_of") == ((section, place), {})
    own = {"outputs": outputs, "compute_dtype": DTYPES[dtype]}
    how = {name: HOW[name] for name in ("checkpoint_layers", "trust_remote_code")}
    assert log.models.of("build") == (("<config_of>", "value"), {**own, **how})
    for again in (None, True, False):
        found = PARTS.load_critic(section, attrs.evolve(critic, checkpoint_layers=again), KEY, LOCAL)
        assert found == (as_set, PARAMS)
        recomputed = "selective" if again is None else again
        more = {"key": KEY.fold("value head"), "checkpoint_layers": recomputed, "dtype": torch.float32}
        assert loaded(log) == ((place, "value"), {**own, **more})


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_policy_and_a_teacher_are_built_and_loaded_as_their_section_says(log, freeze, compiled):
    section = attrs.evolve(SECTION, teacher_path="t", freeze_vision=freeze, compile_layers=compiled)
    section = attrs.evolve(section, teacher_dtype="float32")
    as_set = Seeing(compile_layers=compiled, vision=Vision(trains=not freeze))
    assert PARTS.bare_model(section) == as_set
    assert log.parts.of("config_of") == ((section, ("p", "model.path")), {})
    how = {name: HOW[name] for name in ("checkpoint_layers", "trust_remote_code")}
    built = {"outputs": 1, "compute_dtype": torch.bfloat16, **how}
    assert log.models.of("build") == (("<config_of>", "lm"), built)
    assert PARTS.load_actor(section, CriticSettings(), LOCAL) == (as_set, PARAMS)
    common = {"compute_dtype": torch.bfloat16, "checkpoint_layers": "selective"}
    assert loaded(log) == ((("p", "model.path"),), {**common, "dtype": torch.float32})
    for dtype in ("float32", "bfloat16"):
        of_teacher = attrs.evolve(
            section, teacher_dtype=dtype, ref_dtype="float32" if dtype == "bfloat16" else "bfloat16"
        )
        assert PARTS.load_teacher(of_teacher, LOCAL) == (as_set, PARAMS)
        assert loaded(log) == ((("t", "model.teacher_path"),), {**common, "dtype": getattr(torch, dtype)})


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("critic_path", [None, "p", "c"])
def test_what_adapters_stand_on_is_as_wide_as_its_passes(log, used, critic_path):
    adapter = LoraSettings(rank=2 if used else 0)
    section = attrs.evolve(SECTION, lora=adapter, critic_path=critic_path)
    PARTS.load_actor(section, CriticSettings(), LOCAL)
    assert loaded(log)[1]["dtype"] == (torch.bfloat16 if used else torch.float32)
    PARTS.load_critic(section, CriticSettings(), KEY, LOCAL)
    shared = used and critic_path != "c"
    assert loaded(log)[1]["dtype"] == (torch.bfloat16 if shared else torch.float32)
    PARTS.load_actor(section, CriticSettings(compute_dtype="float32"), LOCAL)
    assert loaded(log)[1]["dtype"] == (torch.bfloat16 if used and not shared else torch.float32)


CASES = list(itertools.product([None, "r"], [True, False], ["none", "fresh", "files"], ["start", "base"]))


@pytest.mark.parametrize(("path", "beside", "adapter", "begins"), CASES)
def test_a_reference_is_the_policy_as_it_begins_or_a_model_of_its_own(monkeypatch, log, path, beside, adapter, begins):
    of_files = "there" if adapter == "files" else None
    spec = LoraSettings(rank=2 if adapter == "fresh" else 0, path=of_files, reference=begins)
    section = attrs.evolve(SECTION, ref_path=path, lora=spec, teacher_dtype="float32")
    monkeypatch.setattr(PARTS.lora, "base_of", lambda model: ("base", model))
    model: Any = Seeing(frozen=None if adapter == "none" else "base")
    monkeypatch.setattr(PARTS, "state_dtype", lambda of, name, dtype: dtype if (of, name) == (model, "w") else None)
    found, params = PARTS.load_reference(section, LOCAL, (model, PARAMS) if beside else None)
    if beside and path is None:
        assert "load" not in log.models.calls
        if adapter != "none" and (adapter == "fresh" or begins == "base"):
            assert (found, params) == (("base", model), {})
            return
        assert found is model
        assert params["w"].dtype == (torch.bfloat16 if adapter == "none" else torch.float32)
        assert params["w"].data_ptr() != PARAMS["w"].data_ptr()
        assert params["w"].tolist() == [1, 1]
        return
    setting = "model.path" if path is None else "model.ref_path"
    how = {"compute_dtype": torch.bfloat16, "checkpoint_layers": "selective", "dtype": torch.bfloat16}
    assert loaded(log) == (((path or "p", setting),), how)
    own = Seeing(compile_layers=True, vision=Vision(trains=True))
    assert found == (model if beside and adapter == "none" else own)
    assert params is PARAMS


def test_a_text_model_has_no_images_to_learn_from():
    assert isinstance(BARE, Model)
    found = PARTS._as_set(BARE, attrs.evolve(SECTION, compile_layers=True))
    assert (found.vision, found.compile_layers) == (None, True)
