"""Tokenizer, chat template and ends of a response are the model's own, and those that the settings name."""

from __future__ import annotations

import itertools
import json

import attrs
import pytest
from transformers import AutoTokenizer, GenerationConfig

from fppo import models
from fppo.assembly import texts
from fppo.assembly.checks import TRAIN
from fppo.assembly.inputs import Inputs
from fppo.assembly.run import assemble
from fppo.data import stops
from fppo.key import Key
from fppo.quickstart import CHARACTERS, character_tokenizer, small_model
from fppo.runs import session
from tests import tiny_run

CHAT = (
    "{% if tools %}T{{ tools[0].name }}{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{% if enable_thinking %}?{% endif %}A{% endif %}"
)


@pytest.fixture
def task(tmp_path):
    """A tiny task whose model is one for chats, that ends its turns with <end>."""
    tiny_run.write_task(tmp_path)
    words = character_tokenizer(CHARACTERS + "TA?:asert")
    words.add_special_tokens({"additional_special_tokens": ["<end>", "<call>"]})
    words.chat_template = CHAT
    model = small_model(len(words), width=16, layers=1)
    models.save(model, models.init_params(model, Key(0)), tmp_path / "start", tokenizer=words)
    own = {"eos_token_id": [1, words.convert_tokens_to_ids("<call>")], "temperature": 0.7, "top_p": 0.8}
    (tmp_path / "start" / "generation_config.json").write_text(json.dumps(own))
    return tmp_path


@pytest.mark.slow
def test_a_response_ends_with_the_models_own_ends_and_the_turns(task):
    settings = tiny_run.settings(task, data__chat=True, rollout__stop=["5", "<call>", "1+2"])
    with assemble(settings) as assembly:
        sampling = assembly.program.rollout.sampling
        words = assembly.inputs.tokenizer
        ends = words.convert_tokens_to_ids(["<eos>", "<call>", "<end>", "5"])
        assert set(sampling.stop_token_ids) == set(ends)
        assert sampling.stop_texts.texts == (b"5", b"1+2")
    plain = Inputs(settings=tiny_run.settings(task))
    ends = plain.tokenizer.convert_tokens_to_ids(["<eos>", "<call>"])  # no chat, no turns
    assert plain.generation.eos_token_id == ends


@pytest.mark.slow
def test_an_export_keeps_how_the_model_is_sampled_and_what_ends_it(task):
    with assemble(tiny_run.settings(task, data__chat=True)) as assembly:
        session.export(assembly, assembly.run, task / "out")
    kept = GenerationConfig.from_pretrained(task / "out")
    words = AutoTokenizer.from_pretrained(task / "out")
    assert set(kept.eos_token_id) == set(words.convert_tokens_to_ids(["<eos>", "<call>", "<end>"]))
    assert (kept.temperature, kept.top_p) == (0.7, 0.8)


@pytest.mark.slow
def test_the_chat_template_gets_its_arguments_and_tools(task):
    (task / "tools.json").write_text(json.dumps([{"name": "1"}]))
    (task / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}=")

    def prompt(**changes):
        with assemble(tiny_run.settings(task, data__chat=True, **changes)) as assembly:
            drawn = assembly.draw(assembly.run.cursor)[0]
        row = drawn.tokens[0][drawn.attention_mask[0]].tolist()
        return assembly.inputs.tokenizer.decode(row), assembly.inputs.tokenizer

    text, _ = prompt()
    assert text.endswith("=A")
    assert prompt(data__chat_arguments={"enable_thinking": True})[0] == f"{text[:-1]}?A"
    assert prompt(data__tools=str(task / "tools.json"))[0] == f"T1{text}"
    own, words = prompt(data__chat_template=str(task / "own.jinja"))
    assert own == text.partition(":")[2][:-1] + "="
    assert words.chat_template == (task / "own.jinja").read_text()
    with pytest.raises(ValueError, match=r"does not read \['enable_thinkin'\]"):
        prompt(data__chat_arguments={"enable_thinkin": True})


def test_a_model_by_its_name_on_the_hub_has_what_its_files_say(task, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(task / name.partition("/")[2]))
    found = []
    for path in (str(task / "start"), "someone/start"):
        inputs = Inputs(settings=tiny_run.settings(task, data__chat=True, model__path=path))
        words, size = inputs.tokenizer, texts.vocabulary_size_of(inputs.settings.model)
        found.append((words.get_vocab(), words.chat_template, inputs.generation.to_dict(), inputs.sampling, size))
    assert found[0] == found[1]
    assert found[0][2]["top_p"] == 0.8


@pytest.mark.slow
def test_a_tokenizer_from_elsewhere_and_a_config_that_differs(task):
    other = AutoTokenizer.from_pretrained(task / "start")
    other.save_pretrained(task / "words")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (task / "start" / name).unlink()
    with pytest.raises(ValueError, match=r"model\.path: .* holds no tokenizer"), assemble(tiny_run.settings(task)):
        pass
    elsewhere = {"model__tokenizer": str(task / "words"), "model__config": {"max_position_embeddings": 77}}
    with assemble(tiny_run.settings(task, **elsewhere)) as assembly:
        assert assembly.model.config.max_position_embeddings == 77
        session.export(assembly, assembly.run, task / "out")
    assert AutoTokenizer.from_pretrained(task / "out").get_vocab() == other.get_vocab()
    wrong = elsewhere | {"model__config": {"max_positions": 77}}
    refused = pytest.raises(ValueError, match=r"model\.config: .* has no \['max_positions'\]")
    with refused, assemble(tiny_run.settings(task, **wrong)):
        pass


def test_an_evaluation_has_its_own_sampling(task):
    words = AutoTokenizer.from_pretrained(task / "start")
    own = {"temperature": 0.5, "top_p": 0.4, "top_k": 0, "min_p": 0.0, "max_tokens": 9, "stop": ["9"], "n": 2}
    settings = tiny_run.settings(task, rollout__stop=["5"], rollout__top_k=3, rollout__min_p=0.2, eval=own)
    asked = texts.eval_sampling_of(settings.eval, settings.rollout, words, GenerationConfig(eos_token_id=1))
    assert (asked.temperature, asked.top_p, asked.top_k, asked.max_tokens, asked.n) == (0.5, 0.4, 0, 9, 2)
    assert asked.min_p == 0.0
    assert asked.stop_texts.texts == (b"9",)
    assert not asked.greedy
    common = tiny_run.settings(task, rollout__stop=["5"])
    plain = texts.eval_sampling_of(common.eval, common.rollout, words, GenerationConfig())
    assert (plain.greedy, plain.max_tokens, plain.stop_texts.texts) == (True, 3, (b"5",))


def test_an_evaluation_samples_as_training_but_for_what_it_says(task):
    words, generation = AutoTokenizer.from_pretrained(task / "start"), GenerationConfig(eos_token_id=1)
    trained = {"temperature": 0.9, "top_k": 4, "top_p": 0.8, "min_p": 0.1, "n": 2, "max_tokens": 6, "stop": ["5"]}
    settings = tiny_run.settings(task, rollout=trained)
    changes = (
        *({}, {"top_k": 2, "max_tokens": 5}, {"top_p": 0.5, "stop": ["7"]}, {"top_k": 0, "stop": ["7", "8"]}),
        *({"min_p": 0.0}, {"min_p": 0.3, "max_tokens": 5}),
    )
    for temperature, n, own in itertools.product((0.0, 0.7, 1.0), (1, 3), changes):
        held_out = attrs.evolve(settings.eval, temperature=temperature, n=n, **own)
        found = texts.eval_sampling_of(held_out, settings.rollout, words, generation)
        whole = trained | own | {"n": n, "temperature": temperature or 1.0}
        assert {name: getattr(found, name) for name in whole if name != "stop"} | {"greedy": found.greedy} == {
            **{name: x for name, x in whole.items() if name != "stop"},
            "greedy": temperature == 0.0,
        }
        assert found.stop_texts.texts == tuple(text.encode() for text in whole["stop"])
        rollout = attrs.evolve(settings.rollout, **own, n=n, temperature=whole["temperature"])
        assert found.stop_token_ids == texts.sampling_of(rollout, words, generation).stop_token_ids


def test_what_tokens_add_to_a_text_is_computed_once(task, monkeypatch):
    """For training and evaluation: over a vocabulary of 150,000 it takes seconds."""
    asked, pieces = [], stops.token_pieces
    monkeypatch.setattr(stops, "token_pieces", lambda tokenizer: asked.append(1) or pieces(tokenizer))
    settings = tiny_run.settings(task, rollout__stop=["5"], eval__stop=["9", "7"])
    with assemble(settings) as assembly:
        inputs = assembly.program.rollout.sampling
    assert inputs.stop_texts.texts == (b"5",)
    assert len(asked) == 1


def rows():
    """Rows of a test's own."""
    for number in range(5):
        yield {"prompt": f"{number}+1=", "answer": str(number + 1)}


def descending(prompts, epoch, key):
    """A sampler of a test's own: all but the first prompt, from the last on."""
    assert key == Key(0).fold("data").fold("epoch", epoch)
    return range(len(prompts) - 1, 0, -1)


def beyond(prompts, epoch, key):
    return [len(prompts)]


@pytest.mark.slow
def test_rows_and_an_order_of_ones_own(task):
    own = {"data__path": [], "data__rows": f"{__name__}:rows", "data__sampler": f"{__name__}:descending"}
    sizes = {f"{name}__mini_batch_size": 3 for name in ("actor", "critic")} | {"rollout__batch_size": 3}
    with assemble(tiny_run.settings(task, **own, **sizes)) as assembly:
        first, cursor = assembly.draw(assembly.run.cursor)
        second, _ = assembly.draw(cursor)
        assert [*first.ground_truth, *second.ground_truth] == ["5", "4", "3", "2", "5", "4"]
    wrong = own | {"data__sampler": f"{__name__}:beyond"}
    refused = pytest.raises(ValueError, match=r"beyond' gave \[5\], which are no indices of 5 prompts")
    with refused, assemble(tiny_run.settings(task, **wrong)):
        pass


def test_a_token_that_the_model_lacks_and_no_prompt_uses(tmp_path):
    """As Gemma 3's token for images, in its models of text."""
    tiny_run.write_task(tmp_path)
    settings = tiny_run.settings(tmp_path)
    tokenizer = texts.load_tokenizer(settings.model, settings.data)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "start")
    assert max(tokenizer.get_vocab().values()) == texts.vocabulary_size_of(settings.model)
    assert len(Inputs(settings=settings).need(*TRAIN).prompts) == 24
    with (tmp_path / "test.jsonl").open("a") as file:
        file.write('{"prompt": "1+<image>", "answer": "1"}\n')
    with pytest.raises(ValueError, match=r"test\.jsonl:25: token id 15 is outside the model's vocabulary of 15"):
        Inputs(settings=settings).need(*TRAIN)


@pytest.mark.parametrize(
    ("own", "chat", "expected"),
    [(7, False, [7, 1]), ([7, 1], False, [7, 1]), ([7], True, [7, 1, "<end>"]), (None, False, 1)],
)
def test_what_ends_a_response_is_the_models_own_and_the_tokenizers_and_the_turns(task, own, chat, expected):
    """Each once, in this order."""
    (task / "start" / "generation_config.json").write_text(json.dumps({"eos_token_id": own}))
    inputs = Inputs(settings=tiny_run.settings(task, data__chat=chat))
    words = inputs.tokenizer
    ids = [words.convert_tokens_to_ids(x) if isinstance(x, str) else x for x in expected] if own else expected
    assert inputs.generation.eos_token_id == ids


def test_stop_tokens_of_the_settings_are_added_by_their_ids(task):
    settings = tiny_run.settings(task, rollout__stop_token_ids=[4, 6])
    words = texts.load_tokenizer(settings.model, settings.data)
    found = texts.sampling_of(settings.rollout, words, GenerationConfig(eos_token_id=9))
    assert set(found.stop_token_ids) == {1, 4, 6, 9}
