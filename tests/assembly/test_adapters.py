"""Adapters on their bases: what is loaded, quantised and drawn for each, with stand-ins for models and their files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from fppo import models, tree
from fppo.assembly import adapters
from fppo.key import Key
from fppo.models import lora
from fppo.models.adapted import Lora
from fppo.quickstart import small_model
from fppo.runtime.mesh import LOCAL
from fppo.settings.learning import CriticSettings
from fppo.settings.model import LoraSettings, ModelSettings

CPU = torch.device("cpu")
KEY = Key(3)
PLAIN = ModelSettings(path="p")
ADAPTED = ModelSettings(path="p", lora=LoraSettings(rank=2, alpha=8.0, targets=("q_proj",), base="int8", critic_rank=5))
SPEC, OF_CRITIC = Lora(2, 8.0, ("q_proj",), "standard"), Lora(5, 8.0, ("q_proj",), "standard")
CRITIC = CriticSettings()


@pytest.fixture
def log(monkeypatch) -> list[Any]:
    """The calls of what loads, quantises and adapts, each of whose results says what it was made of."""
    calls: list[Any] = []

    def noting(name: str, result: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            calls.append((name, args, named))
            return result(*args, **named) if callable(result) else result

        return call

    monkeypatch.setattr(adapters, "load_actor", noting("actor", ("model", "params")))
    monkeypatch.setattr(adapters, "load_critic", noting("critic", ("critic model", "critic params")))
    monkeypatch.setattr(adapters, "on_device", noting("device", lambda params, device: f"{params} there"))
    monkeypatch.setattr(adapters, "_quantised_base", noting("base", ("coded model", "coded params")))
    monkeypatch.setattr(adapters, "_on_base", noting("on base", ("shared model", "shared params")))
    monkeypatch.setattr(adapters, "reader_params", noting("reader", "reader params"))
    monkeypatch.setattr(adapters, "bare_model", noting("bare", lambda section, critic=None: (section, critic)))
    monkeypatch.setattr(adapters.lora, "check_adapted", noting("check", None))
    monkeypatch.setattr(adapters.lora, "adapt", noting("adapt", ("adapted", "factors")))
    monkeypatch.setattr(adapters.lora, "without_base", noting("without", lambda model, spec: (model, spec)))
    monkeypatch.setattr(adapters.lora_files, "load", noting("files", "factors of files"))
    monkeypatch.setattr(adapters.lora_files, "read_config", noting("config", lambda path: ("of files", path)))
    return calls


def test_a_policy_without_an_adapter_has_all_of_its_parameters(log):
    assert adapters.load_policy(PLAIN, CRITIC, KEY, LOCAL, CPU) == ("model", "params there")
    assert log == [("actor", (PLAIN, CRITIC, LOCAL), {}), ("device", ("params", CPU), {})]


def test_a_policys_adapter_is_fresh_on_its_base(log):
    assert adapters.load_policy(ADAPTED, CRITIC, KEY, LOCAL, CPU) == ("adapted", "factors")
    assert log == [
        ("actor", (ADAPTED, CRITIC, LOCAL), {}),
        ("check", ("model", SPEC), {}),
        ("base", ("int8", "model", "params", LOCAL, CPU), {}),
        ("device", ("coded params", CPU), {}),
        ("adapt", ("coded model", "coded params there", SPEC), {"key": KEY.fold("adapter"), "mesh": LOCAL}),
    ]


def test_a_policys_adapter_may_come_from_files(log):
    own = attrs.evolve(ADAPTED, lora=attrs.evolve(ADAPTED.lora, rank=0, path="there"))
    assert adapters.load_policy(own, CRITIC, KEY, LOCAL, CPU) == ("adapted", "factors of files")
    assert log[-1] == ("files", ("adapted", Path("there")), {"mesh": LOCAL, "like": "factors"})
    assert ("check", ("model", ("of files", Path("there"))), {}) in log


@pytest.mark.parametrize("reads", ["confidence", "hidden"])
def test_a_critic_that_is_no_model_has_parameters_alone(log, reads):
    critic = CriticSettings(reads=reads)
    assert adapters.adapted_critic(ADAPTED, critic, KEY, LOCAL, CPU, "policy") == (None, "reader params there")
    assert log == [("reader", (ADAPTED, critic, KEY.fold("critic")), {}), ("device", ("reader params", CPU), {})]


def test_a_critic_without_an_adapter_is_loaded_whole(log):
    of_policy = attrs.evolve(ADAPTED, lora=attrs.evolve(ADAPTED.lora, critic_rank=0))
    for section in (PLAIN, of_policy):
        log.clear()
        found = adapters.adapted_critic(section, CRITIC, KEY, LOCAL, CPU, "policy")
        assert found == ("critic model", "critic params there")
        assert log == [("critic", (section, CRITIC, KEY, LOCAL), {}), ("device", ("critic params", CPU), {})]


@pytest.mark.parametrize(
    ("path", "beside", "shared"), [(None, True, True), ("p", True, True), ("c", True, False), (None, False, False)]
)
def test_a_critics_adapter_stands_on_the_policys_base_where_that_is_the_same(log, path, beside, shared):
    section = attrs.evolve(ADAPTED, critic_path=path)
    policy: Any = "policy" if beside else None
    assert adapters.adapted_critic(section, CRITIC, KEY, LOCAL, CPU, policy) == ("adapted", "factors")
    model, params = ("shared model", "shared params") if shared else ("coded model", "coded params")
    made = [("on base", (section, CRITIC, "policy", KEY, LOCAL), {})]
    own = [
        ("critic", (section, CRITIC, KEY, LOCAL), {}),
        ("base", ("int8", "critic model", "critic params", LOCAL, CPU), {}),
    ]
    drawn = {"key": KEY.fold("critic's adapter"), "mesh": LOCAL}
    assert log == [
        *(made if shared else own),
        ("device", (params, CPU), {}),
        ("adapt", (model, f"{params} there", OF_CRITIC), drawn),
    ]


def test_a_model_that_is_elsewhere_has_the_shape_of_what_is_trained(log):
    assert adapters.shape_of(PLAIN) == (PLAIN, None)
    assert adapters.shape_of(PLAIN, CRITIC) == (PLAIN, CRITIC)
    assert adapters.shape_of(ADAPTED) == ((ADAPTED, None), SPEC)
    assert adapters.shape_of(ADAPTED, CRITIC) == ((ADAPTED, CRITIC), OF_CRITIC)
    none = attrs.evolve(ADAPTED, lora=attrs.evolve(ADAPTED.lora, critic_rank=0))
    assert adapters.shape_of(none, CRITIC) == (none, CRITIC)
    assert adapters.policy_model(PLAIN, CRITIC, KEY, LOCAL, CPU) == (PLAIN, None)
    assert adapters.policy_model(ADAPTED, CRITIC, KEY, LOCAL, CPU) == "adapted"


@pytest.mark.parametrize(
    ("role", "critic_path", "source"), [("actor", "c", "p"), ("critic", "c", "c"), ("critic", None, "p")]
)
@pytest.mark.parametrize("codes", [False, True])
def test_a_base_is_named_by_its_files_its_digest_and_its_dtype(monkeypatch, role, critic_path, source, codes):
    monkeypatch.setattr(adapters.bases, "base_kind", lambda model: "int8" if codes else None)
    frozen = SimpleNamespace(digest="d", params={"a": torch.ones(1, dtype=torch.bfloat16)}, lora=SPEC)
    forms = {"w": SimpleNamespace(dtype=torch.float16)} if codes else {}
    model: Any = SimpleNamespace(frozen=frozen, forms=forms)
    section = attrs.evolve(ADAPTED, critic_path=critic_path)
    found = adapters.base_of_role(section, role, model)
    assert found is not None
    assert (found.source, found.digest) == (source, "d")
    assert found.dtype == ("int8 and float16" if codes else "bfloat16")
    assert found.adapter == "rank 2, alpha 8, standard scaling, of q_proj"
    plain: Any = SimpleNamespace(frozen=None)
    assert adapters.base_of_role(section, role, plain) is None
    assert adapters.base_of_role(section, role, None) is None
    assert adapters.bases_of({"actor": found, "critic": None}) == {"actor": found}
    assert adapters.bases_of({"actor": None}) is None


@pytest.mark.parametrize("kind", ["float", "int8", "nf4"])
def test_a_base_is_quantised_where_it_is_asked_for(monkeypatch, kind):
    monkeypatch.setattr(adapters.bases, "quantise", lambda *args, **named: (args, named))
    model: Any = "model"
    params: Any = "params"
    found = adapters._quantised_base(kind, model, params, LOCAL, CPU)
    named = {"mesh": LOCAL, "device": CPU}
    assert found == (("model", "params") if kind == "float" else (("model", "params", kind), named))


@pytest.fixture
def on_files(monkeypatch):
    """An adapted policy of a small model on its base, whose directory has the value head of the list."""
    model = small_model(15, width=16, layers=1)
    policy, _ = lora.adapt(model, models.init_params(model, Key(1)), SPEC, key=KEY, mesh=LOCAL)
    asked: list[Any] = []
    heads: list[Any] = [{}]
    monkeypatch.setattr(adapters, "directory_of", lambda path, name: (path, name))
    monkeypatch.setattr(adapters, "read_value_head", lambda at, dtype: asked.append((at, dtype)) or heads[0])
    bare = models.build(model.config, "value", outputs=1, checkpoint_layers=True)
    monkeypatch.setattr(adapters, "bare_model", lambda section, critic: asked.append((section, critic)) or bare)
    return policy, heads, asked


@pytest.mark.parametrize("again", [None, False, True, "selective"])
@pytest.mark.parametrize("stored", [True, False])
def test_a_critic_on_the_policys_base_has_its_tensors_and_a_head_of_its_own(on_files, again, stored):
    policy, heads, asked = on_files
    head = {"score.weight": torch.full((1, 16), 2.0), "score.bias": torch.ones(1)}
    heads[0] = head if stored else {}
    critic = CriticSettings(checkpoint_layers=again)
    model, params = adapters._on_base(ADAPTED, critic, policy, KEY, LOCAL)
    assert asked == [(ADAPTED, critic), (("p", "model.path"), torch.float32)]
    assert (model.head, model.checkpoint_layers) == ("value", True if again is None else again)
    fresh = models.init.init_value_head(model, KEY.fold("value head"))
    base = lora.frozen_of(policy).params
    own = {name: x for name, x in params.items() if name not in base}
    assert tree.digest(own) == tree.digest(head if stored else fresh)
    assert {name: x for name, x in params.items() if name in base} == {n: base[n] for n in model.shapes if n in base}
    assert params.keys() == set(model.shapes)
    heads[0] = {**head, "score.weight": torch.ones(2, 16)}
    with pytest.raises(ValueError, match=r"has other outputs than the critic: \['score.weight has shape \[2, 16\]'\]"):
        adapters._on_base(ADAPTED, critic, policy, KEY, LOCAL)


def test_a_critic_on_a_base_in_codes_has_the_same_codes(on_files, monkeypatch):
    policy, *_ = on_files
    coded = attrs.evolve(policy, forms={"w": SimpleNamespace(dtype=torch.bfloat16)})
    asked: list[Any] = []
    monkeypatch.setattr(adapters.bases, "base_kind", lambda of: "nf4" if of is coded else None)
    monkeypatch.setattr(adapters.bases, "in_codes", lambda model, *how: asked.append(how) or model)
    adapters._on_base(ADAPTED, CRITIC, coded, KEY, LOCAL)
    assert asked == [("nf4", torch.bfloat16)]


@pytest.mark.parametrize("privileged", [0, 2])
@pytest.mark.parametrize("reads", ["confidence", "hidden"])
def test_a_critic_that_is_no_model_has_the_outputs_of_its_head_for_each_member(monkeypatch, reads, privileged):
    for name in ("confidence", "hidden"):
        monkeypatch.setattr(adapters, f"init_{name}", lambda *args, name=name, **shape: (name, args, shape))
    monkeypatch.setattr(adapters, "bare_model", lambda section: section)
    monkeypatch.setattr(adapters, "hidden_width", lambda model: ("width", model))
    loss = attrs.evolve(CRITIC.loss, name="two_hot", keywords={"bins": 21})
    critic = attrs.evolve(CRITIC, reads=reads, ensemble=3, privileged=privileged, loss=loss)
    shape = {"members": 3, "outputs": 21, "signs": adapters.TRUTH_SIGNS if privileged else 0}
    args = (KEY,) if reads == "confidence" else (KEY, ("width", PLAIN))
    assert adapters.reader_params(PLAIN, critic, KEY) == (reads, args, shape)
