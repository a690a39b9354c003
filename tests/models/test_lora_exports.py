"""Every type of model that runs: an exported adapter is loaded by PEFT and by transformers with the merged model's
logits, or it is known before the run that PEFT's files cannot hold it."""

from __future__ import annotations

import copy
import importlib
import random
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import settings
from transformers import AutoConfig
from transformers.utils import logging

from fppo import models
from fppo.key import Key
from fppo.models import Lora, lora, lora_files
from fppo.models.probe import Probe, make_probe, probe_rows
from tests.models import families, hybrids

peft = pytest.importorskip("peft")

ROOT = Path(__file__).parent.parent.parent
CONFIGS = families.CONFIGS | families.EXPERTS | families.OWN | families.CHANGED | hybrids.HYBRIDS
# dense models, mixtures with dense and shared layers, stacks [in, out] and without gates, and layers with states
FEW = ("qwen2", "gpt2", "mixtral", "glm4_moe", "gpt_oss", "qwen3_next", "nemotron_h")
# types of whose linear layers PEFT adapts only some
MERGED = {"falcon_h1", "falcon_mamba", "jamba", "laguna", "mamba", "mamba2", "nemotron_h"}
_SMALL = {  # what makes default configs of mixtures large
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group"), 1),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
}


def ran() -> list[str]:
    """The types that run with adapters, by the table of docs/results/families.md."""
    rows = re.findall(r"^\| `([\w-]+)` \|(.*)\|$", (ROOT / "docs" / "results" / "families.md").read_text(), re.M)
    return [kind for kind, cells in rows if [x.strip() for x in cells.split("|")][:4:3] == ["yes", "yes"]]


def drawn() -> list[str]:
    """A third of the types that run with adapters, other ones when what exports an adapter or what reads it changes.
    `--hypothesis-profile thorough` takes all of them."""
    kinds = ran()
    if settings.get_current_profile_name() == "thorough":
        return kinds
    seed = Path(lora_files.__file__).read_text() + transformers.__version__ + peft.__version__
    return sorted(random.Random(seed).sample(kinds, len(kinds) // 3))


def default_probe(kind: str, monkeypatch: pytest.MonkeyPatch) -> Probe:
    """The small random instance of a type by its default config, as the table has it, with few experts."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    shortened = importlib.import_module("kinds.verdicts").shortened
    config = AutoConfig.for_model(kind)
    text = config.get_text_config()
    whole = text.to_dict()
    few: dict[str, Any] = {name: size for name, size in _SMALL.items() if name in whole}
    few |= {name: [few[name]] * len(whole[name]) for name in few if isinstance(whole[name], list)}
    section = next((name for name, x in vars(config).items() if x is text), None)
    try:
        return make_probe(models.build(shortened(kind, {section: few} if section else few)))
    except Exception:  # a config that does not fit its other sizes
        return make_probe(models.build(shortened(kind)))


def logits(module: Any, probe: Probe) -> torch.Tensor:
    with torch.no_grad():
        return module.eval()(input_ids=probe_rows(probe)[0][None], use_cache=False).logits[0]


def noisy(adapter: models.Params) -> models.Params:
    generator = torch.Generator().manual_seed(0)
    return {name: x + 0.2 * torch.randn(x.shape, generator=generator) for name, x in adapter.items()}


def hold(probe: Probe, targets: tuple[str, ...], place: Path) -> str | None:
    """Export an adapter of these targets, and load it by PEFT, by transformers and as the start of a run; the reason
    why that cannot be."""
    model, adapter = lora.adapt(probe.model, probe.params, Lora(2, 3.0, targets), key=Key(0))
    adapter = noisy(adapter)
    if (text := lora_files.obstacle(model)) is not None:
        with pytest.raises(ValueError, match=re.escape(text)):
            lora_files.save(model, adapter, place / "own", base="somewhere")
        return text
    lora_files.save(model, adapter, place / "own", base="somewhere")
    expected = copy.deepcopy(probe.plain)
    expected.load_state_dict(lora.merged(model, adapter), strict=False)
    expected.tie_weights()
    wanted = logits(expected, probe)
    assert (wanted - logits(probe.plain, probe)).abs().max() > 0.01
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*(missing|unexpected).*keys.*")
        theirs = peft.PeftModel.from_pretrained(copy.deepcopy(probe.plain), str(place / "own"))
    torch.testing.assert_close(logits(theirs, probe), wanted, rtol=1e-3, atol=1e-3)
    loaded = copy.deepcopy(probe.plain)
    loaded.load_adapter(str(place / "own"))
    torch.testing.assert_close(logits(loaded, probe), wanted, rtol=1e-3, atol=1e-3)
    theirs.save_pretrained(place / "theirs", save_embedding_layers=False)
    for name in ("own", "theirs"):
        again, fresh = lora.adapt(probe.model, probe.params, lora_files.read_config(place / name), key=Key(1))
        back = lora_files.load(again, place / name, like=fresh)
        assert back.keys() == adapter.keys()
        assert all(torch.equal(back[each], x) for each, x in adapter.items())
    return None


def hold_each(probe: Probe, place: Path) -> None:
    """All linear layers; each kind of stacks of experts alone; and what is in the last layer."""
    linear = lora.linear_weights(probe.model)
    stacks = dict.fromkeys(".".join(x.split(".")[-2:]) for x in linear if len(probe.model.shapes[x]) == 3)
    ends = [end.removesuffix(".weight") for end in stacks]
    last = f"{probe.model.prefix}{probe.model.layers[-1]}.*"
    for number, targets in enumerate([("all-linear",), *((end,) for end in ends), (last,)]):
        refused = hold(probe, targets, place / str(number))
        known = probe.model.whole_config.model_type in MERGED
        assert refused is None or (known and re.search("PEFT does( not adapt|, too)", refused)), (targets, refused)
        assert refused is not None or not known or targets != ("all-linear",)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FEW, *(pytest.param(x, marks=pytest.mark.slow) for x in CONFIGS if x not in FEW)])
def test_an_exported_adapter_is_what_was_trained_or_known_to_be_none(name, tmp_path, unwarned):
    hold_each(make_probe(models.build(CONFIGS[name])), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", drawn())
def test_so_it_is_for_types_of_the_table(kind, tmp_path, monkeypatch, unwarned):
    hold_each(default_probe(kind, monkeypatch), tmp_path)


@pytest.fixture
def unwarned():
    """Without the warnings of transformers' configs and loaders."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)
