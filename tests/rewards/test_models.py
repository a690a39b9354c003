"""A reward model's score is transformers' own number at the last real token, however rows are padded, cut or spread."""

from __future__ import annotations

import json
import shutil
from functools import partial

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from fppo import metrics, models, rewards
from fppo.assembly import rewards as loading_rewards
from fppo.assembly import texts
from fppo.batch import Column, Rollout
from fppo.data.examples import MESSAGES
from fppo.key import Key
from fppo.quickstart import CHARACTERS, character_tokenizer, small_model
from fppo.rewards import models as reward_models
from fppo.rewards.models import encode, load_reward_model, model_reward
from fppo.runtime import fsdp
from fppo.runtime.mesh import LOCAL, Sharding
from fppo.runtime.offload import Lane, OnHost, to_host
from fppo.runtime.simulate import simulate
from fppo.steps.micro_batching import MicroBatching
from fppo_kernels.table import Kernels
from tests import tiny_run
from tests.models.families import CONFIGS
from tests.rewards.scorers import reward_model_of

HEADS = {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}
CPU = torch.device("cpu")
END = 2


def classifier(family: str, head: str, directory, *, labels: int = 1, seed: int = 0, pad: int | None = 0):
    """transformers' module with a classification head, with weights that are far from zero, and saved."""
    config = type(CONFIGS[family])(**{**CONFIGS[family].to_dict(), "num_labels": labels, "pad_token_id": pad})
    module = HEADS[head].from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    module.save_pretrained(directory)
    return module


def random_rollout(seed: int, rows: int = 5, *, prompt: int = 4, response: int = 6) -> Rollout:
    """Rows padded on both sides; some cut at the limit, some ended; observations inside some responses."""
    g = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, prompt + 1, (rows,), generator=g)
    responses = torch.randint(1, response + 1, (rows,), generator=g)
    column = torch.arange(prompt + response)
    attended = (column >= prompt - prompts[:, None]) & (column < prompt + responses[:, None])
    tokens = torch.randint(3, 31, attended.shape, generator=g)
    ended = torch.rand(rows, generator=g) < 0.5
    last = prompt + responses - 1
    tokens[torch.arange(rows), last] = torch.where(ended, END, tokens[torch.arange(rows), last])
    garbage = torch.randint(0, 31, attended.shape, generator=g)  # whatever stands in the padding
    mask = attended[:, prompt:] & (torch.rand(rows, response, generator=g) < 0.7)
    zeros, ids = torch.zeros(mask.shape), torch.arange(rows)
    return Rollout(
        tokens=tokens.where(attended, garbage),
        attention_mask=attended,
        response_mask=mask,
        rollout_log_probs=zeros,
        sampling_log_probs=zeros,
        row_ids=ids,
        groups=ids,
        versions=torch.zeros_like(ids),
        finish=Column("stop" if x else "length" for x in ended.tolist()),
        ids=Column(map(str, range(rows))),
        ground_truth=Column([None] * rows),
        source=Column(["test"] * rows),
        extras=Column([{}] * rows),
    )


@torch.no_grad()
def expected_scores(module, head: str, rollout: Rollout, label: int = 0) -> torch.Tensor:
    """Row by row, without padding: a sequence's logit, or its last token's."""
    actual = []
    for tokens, attended in zip(rollout.tokens, rollout.attention_mask):
        logits = module(tokens[attended][None]).logits[0]
        actual.append((logits if head == "sequence" else logits[-1])[label])
    return torch.stack(actual)


def reward(loaded, *, size: int = 2, mesh=LOCAL):
    model, params = loaded
    batching = MicroBatching(size=size)
    return model_reward(params, model=model, kernels=Kernels.named(), mesh=mesh, micro_batching=batching)


@pytest.mark.parametrize("axis", ["replicate", pytest.param("sequence", marks=pytest.mark.slow)])
def test_a_model_reads_the_end_of_rows_above_its_bound_and_counts_them_once(axis, tmp_path):
    """As transformers scores the last so many tokens alone, on one rank and on two; or the first long row is named."""
    module, rollout = classifier("llama", "sequence", tmp_path), random_rollout(5, 8)
    lengths = rollout.attention_mask.sum(1)
    after = rollout.attention_mask.flip(1).cumsum(1).flip(1)
    model, params = load_reward_model(tmp_path)
    for limit in (1, 4, 7, 99):
        cut = attrs.evolve(rollout, attention_mask=rollout.attention_mask & (after <= limit))
        how = {"model": model, "kernels": Kernels.named(), "micro_batching": MicroBatching(size=2)}

        def scored(mesh, how=how, **bound):
            return model_reward(params, mesh=mesh, **how, **bound)(rollout)

        cutting = partial(scored, max_tokens=limit, over_long="truncate")
        for found, report in (cutting(LOCAL), *simulate({axis: 2}, cutting)):
            torch.testing.assert_close(found, expected_scores(module, "sequence", cut), rtol=1e-5, atol=1e-5)
            assert metrics.report(report) == {"reward/model_truncated": float((lengths > limit).sum())}
        if limit == 99:
            assert torch.equal(scored(LOCAL, max_tokens=limit), scored(LOCAL))
            continue
        first = int((lengths > limit).nonzero()[0])
        text = rf"max_tokens = {limit}: {first} has {lengths[first]} tokens .*truncate"
        with pytest.raises(ValueError, match=text):
            scored(LOCAL, max_tokens=limit)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["replicate", "sequence", "tensor"])
@pytest.mark.parametrize(("head", "pad"), [("sequence", END), ("sequence", None), ("token", END)])
@pytest.mark.parametrize("share_prompts", [False, True])
def test_a_padding_token_that_ends_texts_is_read_where_transformers_reads_it(axis, head, pad, share_prompts, tmp_path):
    """Rows that end with it, hold it inside, or are nothing else, padded on both sides; a prompt's score, too."""
    module = classifier("llama", head, tmp_path, pad=pad)
    rollout = random_rollout(7, 8)
    tokens = rollout.tokens.clone()
    tokens[0:2, 2:4], tokens[0], tokens[2, 4:] = END, END, END
    tokens[4:, 3:5] = END
    tokens[1::2, :4] = tokens[::2, :4]  # two responses to each prompt
    attended = rollout.attention_mask.clone()
    attended[1::2, :4] = attended[::2, :4]
    rollout = attrs.evolve(rollout, tokens=tokens, attention_mask=attended, groups=torch.arange(8) // 2)
    want = expected_scores(module, head, rollout)

    def run(mesh):
        model, params = load_reward_model(tmp_path, mesh=mesh)
        batching = MicroBatching(size=8 // mesh["replicate"].size)
        how = {"kernels": Kernels.named(), "mesh": mesh, "share_prompts": share_prompts}
        return model_reward(params, model=model, micro_batching=batching, **how)(rollout)

    for scores in simulate({axis: 2}, run):
        torch.testing.assert_close(scores, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("head", HEADS)
def test_scores_are_those_of_transformers(family, head, tmp_path):
    module = classifier(family, head, tmp_path)
    scores = reward(load_reward_model(tmp_path))

    @given(st.integers(0, 2**31), st.integers(1, 6))
    def check(seed, rows):
        rollout = random_rollout(seed, rows)
        want = expected_scores(module, head, rollout)
        torch.testing.assert_close(scores(rollout), want, rtol=1e-5, atol=1e-5)
        # padded otherwise, it is the same
        wider = attrs.evolve(
            rollout,
            tokens=torch.nn.functional.pad(rollout.tokens, (3, 2), value=7),
            attention_mask=torch.nn.functional.pad(rollout.attention_mask, (3, 2)),
            response_mask=torch.nn.functional.pad(rollout.response_mask, (0, 2)),
        )
        torch.testing.assert_close(scores(wider), want, rtol=1e-5, atol=1e-5)

    check()


def test_padded_batches_of_transformers_agree(tmp_path):
    """Its own rule for the last token, by the id of padding, on rows padded with that id."""
    module = classifier("llama", "sequence", tmp_path)
    rollout = random_rollout(3)
    filled = rollout.tokens.where(rollout.attention_mask, 0)
    with torch.no_grad():
        want = module(filled, attention_mask=rollout.attention_mask.long()).logits[:, 0]
    torch.testing.assert_close(reward(load_reward_model(tmp_path))(rollout), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("stage", "axes"), [(1, ("replicate", "shard")), (3, ("replicate", "shard")), (3, ("shard", "sequence"))]
)
def test_shards_and_the_host_change_nothing(stage, axes, tmp_path):
    model, params = load_reward_model((classifier("qwen2", "token", tmp_path), tmp_path)[1])
    rollout = random_rollout(1, 5)
    want = reward((model, params))(rollout)
    on_host = OnHost(to_host(params), Lane(CPU))
    assert torch.equal(reward((model, on_host))(rollout), want)

    def on_rank(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding(stage=stage))
        return reward((model, fsdp.shard(params, mesh)), mesh=mesh)(rollout)

    for actual in simulate(dict.fromkeys(axes, 2), on_rank):
        torch.testing.assert_close(actual, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("share", ["auto", True, False])
def test_a_model_reads_rows_with_the_options_that_it_is_given(monkeypatch, share):
    """On a rank of two it has a share of them, those of one prompt together if passes share it."""
    model = models.build(small_model(31, width=16, layers=1).config, "value")
    rollout = random_rollout(5, 8, prompt=12, response=2)
    first = rollout.tokens[:4].repeat_interleave(2, 0)  # four prompts, with two responses each
    tokens = torch.cat([first[:, :12], rollout.tokens[:, 12:]], 1)
    whole = attrs.evolve(rollout, tokens=tokens, attention_mask=torch.ones_like(tokens, dtype=torch.bool))
    taken, kernels, batching = [], Kernels.named(attention="eager"), MicroBatching(size=3)

    def compute(params, own, *, forward, micro_batching):
        taken.append((params, forward, micro_batching))
        return own.tokens[:, -1].double()

    monkeypatch.setattr(reward_models, "compute_reward_scores", compute)
    how = {"model": model, "kernels": kernels, "micro_batching": batching, "share_prompts": share}
    shared, plain = [], reward_models.shares

    def dealt(*args):
        shared.append(plain(*args))
        return shared[-1]

    monkeypatch.setattr(reward_models, "shares", dealt)

    def on_rank(mesh):
        fn = model_reward({"name": "params"}, mesh=mesh, read=lambda rows: attrs.evolve(rows, tokens=tokens), **how)
        return fn(whole)

    for axes in ({"shard": 1}, {"shard": 2}):
        for scores in simulate(axes, on_rank):
            assert scores.tolist() == tokens[:, -1].tolist()
    for params, forward, micro_batching in taken:
        assert (params, micro_batching, forward.share_prompts) == ({"name": "params"}, batching, share)
        assert forward.model is model
        assert forward.kernels is kernels
    together = [[row // 2 for row in sorted(part)] for part in shared[-1]]
    assert all(sorted(part) == sorted({*part} | {*part}) or len({*part}) * 2 == len(part) for part in together)
    if share is not False:
        assert all(len({*part}) * 2 == len(part) for part in together)


@pytest.mark.slow
def test_one_of_several_labels(tmp_path):
    module = classifier("qwen3", "sequence", tmp_path, labels=3)
    config = json.loads((tmp_path / "config.json").read_text())
    config["id2label"], config["label2id"] = {"0": "bad", "1": "good", "2": "odd"}, {"bad": 0, "good": 1, "odd": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"num_labels = 3: name the label .*reward\.model\.label.*'bad', 'good', 'odd'"
    ):
        load_reward_model(tmp_path)
    with pytest.raises(ValueError, match=r"label = 'fine': .* has the labels \['bad', 'good', 'odd'\]"):
        load_reward_model(tmp_path, label="fine")
    rollout = random_rollout(2)
    for label in ("good", "1"):
        actual = reward(load_reward_model(tmp_path, label=label))(rollout)
        torch.testing.assert_close(actual, expected_scores(module, "sequence", rollout, 1), rtol=1e-5, atol=1e-5)
    config["id2label"] = {"2": "bad", "1": "odd", "0": "good"}  # a label is that of its number, in whatever order
    (tmp_path / "config.json").write_text(json.dumps(config))
    actual = reward(load_reward_model(tmp_path, label="bad"))(rollout)
    torch.testing.assert_close(actual, expected_scores(module, "sequence", rollout, 2), rtol=1e-5, atol=1e-5)
    config["id2label"], config["label2id"] = {"0": "1", "1": "0", "2": "odd"}, {"1": 0, "0": 1, "odd": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    actual = reward(load_reward_model(tmp_path, label="0"))(rollout)  # a name comes before a number
    torch.testing.assert_close(actual, expected_scores(module, "sequence", rollout, 1), rtol=1e-5, atol=1e-5)


@given(st.permutations([*enumerate("abcd")]), st.integers(0, 4))
def test_a_label_has_the_row_of_its_number_where_names_are_missing_or_in_another_order(names, count):
    named = dict(names[:count])
    labels = {named.get(row, str(row)): row for row in range(4)}
    found = {label: reward_models._label_row("m", named, label, 4) for label in labels}
    assert found == labels


def test_a_policy_is_no_reward_model(tmp_path):
    model = small_model(15, width=16, layers=1)
    models.save(model, models.init_params(model, Key(0)), tmp_path)
    with pytest.raises(ValueError, match=r"is not a reward model: .*'score\.weight'.*model\.embed_tokens\.weight"):
        load_reward_model(tmp_path)
    with pytest.raises(ValueError, match="is not a directory with a model"):
        load_reward_model(tmp_path / "nowhere")


def test_our_own_value_models_are_reward_models(tmp_path):
    policy = small_model(15, width=16, layers=1)
    model = models.build(policy.config, "value")
    params = {name: x + 0.1 for name, x in models.init_params(model, Key(0)).items()}
    models.save(model, params, tmp_path)
    rollout = attrs.evolve(random_rollout(4), tokens=random_rollout(4).tokens % 15)
    assert torch.equal(reward(load_reward_model(tmp_path))(rollout), reward((model, params))(rollout))


# tokenizers of their own

TEMPLATE = (
    "{% for m in messages %}{{ '=' if m['role'] == 'user' else '+' }}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}+{% endif %}"
)


def words(rows: list[tuple[str, str]], tokenizer, *, ended: bool = True, **columns) -> Rollout:
    """Prompts and responses of characters as the tokenizer has them."""
    prompts = [tokenizer(prompt)["input_ids"] for prompt, _ in rows]
    end = [tokenizer.eos_token_id] if ended else []
    responses = [tokenizer(response)["input_ids"] + end for _, response in rows]
    p, t = max(map(len, prompts)), max(map(len, responses))
    tokens = torch.tensor([[0] * (p - len(a)) + a + b + [0] * (t - len(b)) for a, b in zip(prompts, responses)])
    attended = torch.tensor(
        [[0] * (p - len(a)) + [1] * len(a + b) + [0] * (t - len(b)) for a, b in zip(prompts, responses)]
    ).bool()
    base = random_rollout(0, len(rows), prompt=p, response=t)
    mask = attended[:, p:]
    finish = Column(["stop" if ended else "length"] * len(rows))
    base = attrs.evolve(base, tokens=tokens, attention_mask=attended, response_mask=mask, finish=finish)
    return attrs.evolve(base, **{name: Column(items) for name, items in columns.items()})


def test_conversations_are_encoded_anew():
    policy, own = character_tokenizer(CHARACTERS), character_tokenizer("=+9876543210")
    rollout = words([("1+2=", "3"), ("12+1=", "13")], policy)
    texts = [[*own(text)["input_ids"], own.eos_token_id] for text in ("1+2=3", "12+1=13")]
    encoded = encode(rollout, tokenizer=policy, own=own, chat=False)
    assert [t[m].tolist() for t, m in zip(encoded.tokens, encoded.attention_mask)] == texts
    cut = words([("1+2=", "3"), ("12+1=", "13")], policy, ended=False)
    encoded = encode(cut, tokenizer=policy, own=own, chat=False)
    assert [t[m].tolist() for t, m in zip(encoded.tokens, encoded.attention_mask)] == [ids[:-1] for ids in texts]
    few = encode(cut, tokenizer=policy, own=own, chat=False, vocabulary=max(texts[0]))  # without the highest of these
    assert [t[m].tolist() for t, m in zip(few.tokens, few.attention_mask)] == [
        [token for token in ids[:-1] if token < max(texts[0])] for ids in texts
    ]
    own.chat_template = TEMPLATE
    asked = [{"role": "user", "content": "7"}, {"role": "assistant", "content": "8"}, {"role": "user", "content": "9"}]
    chats = words([("1+2=", "3"), ("12+1=", "13")], policy, extras=[{}, {MESSAGES: asked}])
    encoded = encode(chats, tokenizer=policy, own=own, chat=True)
    texts = [own(text)["input_ids"] for text in ("=1+2=+3", "=7+8=9+13")]
    assert [t[m].tolist() for t, m in zip(encoded.tokens, encoded.attention_mask)] == texts


def test_a_conversation_that_the_models_template_does_not_show_is_named_by_its_row():
    policy, own = character_tokenizer(CHARACTERS), character_tokenizer("=+9876543210")
    own.chat_template = "{% for m in messages %}{{ m.content if m.role in ('user', 'assistant') }}{% endfor %}"
    asked = [{"role": "tool", "content": "7"}, {"role": "user", "content": "9"}]
    rows = {"extras": [{}, {MESSAGES: asked}], "ids": ["a.jsonl:1", "a.jsonl:2"]}
    chats = words([("1+2=", "3"), ("12+1=", "13")], policy, **rows)
    with pytest.raises(ValueError, match=r"a\.jsonl:2: .*does not show the content of message 0, of the role 'tool'"):
        encode(chats, tokenizer=policy, own=own, chat=True)


def test_a_tokenizer_that_ends_texts_itself_ends_them_once(monkeypatch):
    policy, own = character_tokenizer(CHARACTERS), character_tokenizer("=+9876543210")
    rollout, plain = words([("1+2=", "3")], policy), reward_models.encode_text
    monkeypatch.setattr(reward_models, "encode_text", lambda *args: [*plain(*args), own.eos_token_id])
    encoded = encode(rollout, tokenizer=policy, own=own, chat=False)
    assert encoded.tokens[0].tolist() == [*own("1+2=3")["input_ids"], own.eos_token_id]


@pytest.mark.parametrize("stop", ["eos", "=", "text"])
def test_a_response_ends_for_the_model_by_whatever_ended_it(stop):
    """By a second stop token, as chat models have, or by a text that is no token of its own."""
    policy, own = character_tokenizer(CHARACTERS), character_tokenizer("=+9876543210")
    rollout = words([("1+2=", "3=")], policy, ended=stop == "eos")
    text = own("1+2=3=")["input_ids"]
    cut = encode(attrs.evolve(rollout, finish=Column(["length"])), tokenizer=policy, own=own, chat=False)
    assert cut.tokens[0].tolist() == text
    ended = encode(attrs.evolve(rollout, finish=Column(["stop"])), tokenizer=policy, own=own, chat=False)
    assert ended.tokens[0].tolist() == [*text, own.eos_token_id]


@pytest.fixture
def task(tmp_path):
    """A run on disk, and in `judge` a value model that reads the same characters in another order."""
    tiny_run.write_task(tmp_path)
    own = character_tokenizer("=+9876543210")
    model = models.build(small_model(len(own), width=16, layers=1).config, "value")
    params = {name: x + 0.1 * torch.randn(x.shape) for name, x in models.init_params(model, Key(1)).items()}
    models.save(model, params, tmp_path / "judge", tokenizer=own)
    return tmp_path


def loaded_reward(task, **changes):
    settings = tiny_run.settings(task, reward__model__path=str(task / "judge"), **changes)
    tokenizer = texts.load_tokenizer(settings.model, settings.data)
    (name, (fn, weight)), *others = reward_model_of(settings, tokenizer).items()
    assert (name, others) == ("reward_model", [])
    return fn, weight, tokenizer


@pytest.mark.slow
def test_a_tokenizer_in_the_models_directory_is_used_where_it_differs(task):
    fn, weight, policy = loaded_reward(task, reward__model__weight=0.5, reward__model__micro_batch_size=1)
    assert weight == 0.5
    loaded = load_reward_model(task / "judge")
    rollout = words([("1+2=", "3"), ("12+1=", "13")], policy)
    own = words([("1+2=", "3"), ("12+1=", "13")], character_tokenizer("=+9876543210"))
    torch.testing.assert_close(fn(rollout), reward(loaded)(own))
    assert not torch.allclose(fn(rollout), reward(loaded)(rollout))
    shutil.copy(task / "start" / "tokenizer.json", task / "judge" / "tokenizer.json")  # now it is the policy's
    torch.testing.assert_close(loaded_reward(task)[0](rollout), reward(loaded)(rollout))
    named = loaded_reward(task, reward__model__tokenizer=str(task / "start"))[0]
    torch.testing.assert_close(named(rollout), reward(loaded)(rollout))


@pytest.mark.slow
def test_a_chat_template_of_its_own_is_used(task):
    shutil.copy(task / "start" / "tokenizer.json", task / "judge" / "tokenizer.json")
    (task / "start" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (task / "judge" / "chat_template.jinja").write_text(TEMPLATE)
    fn, _, policy = loaded_reward(task, data__chat=True)
    rollout = words([("1+2=", "3")], policy, extras=[{MESSAGES: [{"role": "user", "content": "4+4="}]}])
    loaded = load_reward_model(task / "judge")
    torch.testing.assert_close(fn(rollout), reward(loaded)(words([("=4+4=", "+3")], policy, ended=False)))
    (task / "judge" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    torch.testing.assert_close(loaded_reward(task, data__chat=True)[0](rollout), reward(loaded)(rollout))


@pytest.mark.slow
def test_what_does_not_fit_is_said_before_any_work(task):
    with pytest.raises(ValueError, match=r"no chat template; give another \(reward\.model\.tokenizer\)"):
        loaded_reward(task, reward__model__chat=True)
    with pytest.raises(ValueError, match=r"reward\.model\.tokenizer: .*nowhere holds no tokenizer, none of"):
        loaded_reward(task, reward__model__tokenizer=str(task / "nowhere"))
    for file in (task / "judge").glob("*token*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"reward\.model\.chat = False: the reward model reads the policy's tokens"):
        loaded_reward(task, reward__model__chat=False)
    small = models.build(small_model(20, width=16, layers=1).config, "value")
    models.save(small, models.init_params(small, Key(0)), task / "judge")
    with pytest.raises(ValueError, match="the reward model has 20 tokens, but the policy has 15"):
        loaded_reward(task)
    models.save(small, models.init_params(small, Key(0)), task / "judge", tokenizer=character_tokenizer(CHARACTERS))
    loaded_reward(task)  # the same vocabulary, with embeddings for more
    big = character_tokenizer(CHARACTERS + "abcdefghij")
    big.save_pretrained(task / "judge")
    with pytest.raises(ValueError, match="the reward model has 20 tokens, and the tokenizer's 'j' has the id 24"):
        loaded_reward(task)
    more = character_tokenizer(CHARACTERS + "ab")
    more.add_tokens([f"<image {i}>" for i in range(9)], special_tokens=True)
    more.save_pretrained(task / "judge")
    loaded_reward(task)  # with tokens for what it does not see


def test_scores_join_the_other_rewards(task):
    fn, weight, policy = loaded_reward(task, reward__model__weight=-2.0)
    settings = tiny_run.settings(task)
    total = loading_rewards.reward_of(
        settings.reward, {"reward_model": (fn, weight)}, max_tokens=settings.rollout.max_tokens
    )
    rollout = words([("1+2=", "3"), ("12+1=", "13")], policy, ground_truth=["3", "x"])
    with rewards.RewardRunner(total) as runner:
        scored, _ = rewards.score(rollout, reward=runner, tokenizer=policy)
    torch.testing.assert_close(scored.scores, torch.tensor([1.0, 0.0]) - 2.0 * fn(rollout))
    bounded = {"reward__model__max_tokens": 1, "reward__model__over_long": "truncate"}
    assert metrics.report(loaded_reward(task, **bounded)[0](rollout)[1]) == {"reward/model_truncated": 2.0}
    with pytest.raises(ValueError, match="'exact_match' is given twice"):
        loading_rewards.reward_of(settings.reward, {"exact_match": (fn, 1.0)}, max_tokens=8)
