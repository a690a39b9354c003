"""The quickstart's task: its sums, tokenizers, demonstrations and files, and the settings of its run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from fppo import models, quickstart, tree
from fppo.key import Key
from fppo.quickstart import Addition, addition
from fppo.settings import files
from fppo.steps.forward import Forward


def test_sums_are_all_of_two_digits_a_tenth_of_them_held_out():
    train, test = quickstart.sums()
    both = [(s.a, s.b) for s in (*train, *test)]
    assert len(both) == len({*both}) == 90 * 90
    assert {*both} == {(a, b) for a in range(10, 100) for b in range(10, 100)}
    assert len(test) == pytest.approx(810, abs=3 * 27)
    assert len(quickstart.sums(held_out=0.5)[1]) == pytest.approx(4050, abs=200)
    assert {*test} <= {*quickstart.sums(held_out=0.5)[1]}
    assert quickstart.sums() == (train, test)


@pytest.mark.parametrize(
    ("a", "b", "answer", "mistake"),
    [(27, 35, "62", "52"), (12, 34, "46", "46"), (99, 99, "198", "188"), (50, 60, "110", "110")],
)
def test_a_mistake_forgets_to_carry(a, b, answer, mistake):
    one = Addition(a, b)
    assert (one.prompt, one.answer, one.mistake) == (f"{a}+{b}=", answer, mistake)


def test_a_tokenizer_of_characters_has_one_for_each():
    words = quickstart.character_tokenizer("ab+")
    assert words.get_vocab() == {"<pad>": 0, "<eos>": 1, "<unk>": 2, "a": 3, "b": 4, "+": 5}
    assert words.encode("ab+x") == [3, 4, 5, 2]
    assert words.decode([3, 5, 4]) == "a+b"
    assert (words.pad_token_id, words.eos_token_id, len(quickstart.character_tokenizer())) == (0, 1, 15)


@pytest.mark.parametrize("alone", ["", "=x"])
def test_digits_and_what_stands_alone_are_tokens_one_by_one(alone):
    texts = ["12=12xx ab=ab 34=34xx"] * 20
    words = quickstart.bpe_tokenizer(texts, size=300, alone=alone)
    assert len(words) <= 300
    pieces = [str(words.decode([token])) for token in words.encode(texts[0])]
    assert "".join(pieces) == texts[0]
    single = {x for x in pieces if len(x) == 1}
    joined = "".join(x for x in pieces if len(x) > 1)
    assert {*"1234"} <= single
    assert not {*"1234", *alone} & {*joined}
    assert alone or {"=", "x"} & {*joined}
    assert words.decode(words.encode("é∑ 9")) == "é∑ 9"
    assert (words.pad_token_id, words.eos_token_id) == (0, 1)


def test_a_small_model_is_as_large_as_it_is_asked_to_be():
    config = quickstart.small_model(19, width=24, layers=3, positions=77).whole_config
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (19, 24, 48)
    assert (config.num_hidden_layers, config.max_position_embeddings) == (3, 77)
    assert (config.pad_token_id, config.eos_token_id, config.bos_token_id) == (0, 1, None)
    assert (config.num_attention_heads, config.num_key_value_heads, config.tie_word_embeddings) == (4, 2, True)
    assert quickstart.small_model(19, compute_dtype=torch.bfloat16).compute_dtype == torch.bfloat16


def demonstrated(monkeypatch, **changes):
    """The batches of a warm-up, and how they are imitated."""
    kept = {}

    def imitate(params, batches, **how):
        kept.update(how, params=params, batches=list(batches))
        return "imitated"

    monkeypatch.setattr(addition, "imitate", imitate)
    rates = []
    real = addition.schedule
    monkeypatch.setattr(addition, "schedule", lambda *args, **how: rates.append((args, how)) or real(*args, **how))
    words = quickstart.character_tokenizer()
    forward = Forward(quickstart.small_model(len(words), width=16, layers=1))
    given = {"steps": 3, "batch_size": 40, "lr": 0.25, "on_step": print} | changes
    train = [Addition(a, b) for a in (17, 28) for b in (15, 49, 80)]
    assert quickstart.warm_up(forward, "params", train, Key(5), tokenizer=words, **given) == "imitated"
    assert rates == [(("linear", 0.25), {"total_steps": 3, "warmup_steps": 30})]
    assert (kept["params"], kept["on_step"], kept["micro_batching"].size) == ("params", print, given["batch_size"])
    assert kept["forward"] is forward
    shown = []
    for batch in kept["batches"]:
        width = batch.response_mask.shape[1]
        assert torch.equal(batch.response_mask, batch.attention_mask[:, -width:])
        rows = []
        for tokens, seen in zip(batch.tokens, batch.attention_mask, strict=True):
            whole = tokens[seen].tolist()
            assert (tokens[~seen] == words.pad_token_id).all()
            assert (whole[-1], words.eos_token_id in whole[:-1]) == (words.eos_token_id, False)
            prompt, _, answer = words.decode(whole[:-1]).partition("=")
            assert int(seen[-width:].sum()) == len(answer) + 1
            rows.append((prompt, answer))
        shown.append(rows)
    return train, shown


def test_demonstrations_are_of_the_sums_and_as_often_wrong_as_they_should_be(monkeypatch):
    train, batches = demonstrated(monkeypatch)
    known = {f"{s.a}+{s.b}": s for s in train}
    assert [len(rows) for rows in batches] == [40] * 3
    assert batches[0] != batches[1] != batches[2] != batches[0]
    rows = [row for each in batches for row in each]
    assert {prompt for prompt, _ in rows} == {*known}
    of_carry = [(known[prompt], answer) for prompt, answer in rows if known[prompt].mistake != known[prompt].answer]
    assert all(answer in (s.answer, s.mistake) for s, answer in of_carry)
    wrong = sum(answer == s.mistake for s, answer in of_carry) / len(of_carry)
    assert wrong == pytest.approx(0.75, abs=0.15)
    for share, wanted in ((0.0, "answer"), (1.0, "mistake")):
        for rows in demonstrated(monkeypatch, mistakes=share)[1]:
            assert all(answer == getattr(known[prompt], wanted) for prompt, answer in rows)
    assert demonstrated(monkeypatch)[1] == batches


@pytest.fixture
def warmed(monkeypatch):
    """A warm-up that is short, and what it was given."""
    asked = []

    def warm_up(forward, params, train, key, *, tokenizer, steps, on_step):
        asked.append((key, steps, on_step, len(train), tree.digest(params)))
        return tree.map(lambda x: x + 1.0, params)

    monkeypatch.setattr(addition, "warm_up", warm_up)
    return asked


def test_the_files_of_a_task_are_a_warm_model_and_the_sums(tmp_path, warmed):
    train, test = quickstart.sums()
    quickstart.prepare(tmp_path / "new" / "task", 7, steps=11, on_step=print)
    key = Key(7).fold("quickstart")
    model = quickstart.small_model(15)
    begun = models.init_params(model, key.fold("init"))
    assert warmed == [(key, 11, print, len(train), tree.digest(begun))]
    place = tmp_path / "new" / "task"
    _, params = models.load(place / quickstart.MODEL)
    assert tree.digest(dict(params)) == tree.digest(tree.map(lambda x: x + 1.0, begun))
    assert AutoTokenizer.from_pretrained(place / quickstart.MODEL).encode("1+") == [4, 13]
    for name, sums in ((quickstart.TRAIN, train), (quickstart.TEST, test)):
        rows = [json.loads(line) for line in (place / name).read_text().splitlines()]
        assert rows == [{"prompt": s.prompt, "answer": s.answer, "source": "addition"} for s in sums]


def test_prompts_have_the_right_answers_as_their_truth():
    words = quickstart.character_tokenizer()
    for found, sums in zip(quickstart.prompt_sets(words), quickstart.sums(), strict=True):
        assert list(found.ground_truths) == [s.answer for s in sums]
        assert [words.decode(ids) for ids in found.tokens[:50]] == [s.prompt for s in sums[:50]]
        assert {*found.sources} == {"addition"}


def test_the_run_trains_on_its_files_and_is_evaluated_on_the_held_out():
    found = quickstart.settings(Path("here"), 5)
    assert (found.output_dir, found.seed, found.model.path) == ("here", 5, f"here/{quickstart.MODEL}")
    assert (found.data.path, found.data.eval_path) == ((f"here/{quickstart.TRAIN}",), (f"here/{quickstart.TEST}",))
    assert (found.data.source, found.reward.functions) == ("source", ("exact_match",))
    assert found.data.max_prompt_tokens == max(len(s.prompt) for s in quickstart.sums()[0])
    assert found.rollout.max_tokens == max(len(s.answer) for s in quickstart.sums()[0]) + 1
    assert [x.optimizer.lr for x in (found.actor, found.critic)] == [3e-4, 3e-3]
    files.check(found)
