"""A judge is asked what the template says, its scores are what it answers, and neither ranks nor batches matter."""

from __future__ import annotations

import re

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import batch as batches
from fppo import metrics, models, rewards
from fppo.assembly import rewards as loading_rewards
from fppo.assembly import texts
from fppo.assembly.inputs import Inputs
from fppo.batch import Column
from fppo.data.examples import MESSAGES
from fppo.key import Key
from fppo.pipeline import PromptByFeedback
from fppo.quickstart import CHARACTERS, bpe_tokenizer, character_tokenizer, small_model
from fppo.rewards.judge import LanguageJudge, question_of
from fppo.rewards.question import score_in
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Sampling
from fppo.rollout.records import Response, rollout_of
from fppo.runtime.mesh import LOCAL, Sharding
from fppo.runtime.simulate import simulate
from fppo_kernels.table import Kernels
from tests import tiny_run
from tests.rewards.samples import NONE, Letters, rollout, sample
from tests.rewards.scorers import judge_of

CPU = torch.device("cpu")
BYTES = bpe_tokenizer(["Score: 1"], size=300)


class Answering:
    """An engine that answers each question with `answer(question)`, and remembers the questions."""

    def __init__(self, answer, tokenizer=BYTES) -> None:
        self.answer, self.tokenizer, self.asked, self.lengths = answer, tokenizer, [], []

    def generate(self, params, ask):
        rows = zip(ask.prompts.tokens, ask.prompts.attention_mask, strict=True)
        questions = [row[mask].tolist() for row, mask in rows]
        self.lengths += map(len, questions)
        texts = [self.tokenizer.decode(ids) for ids in questions]
        self.asked += texts
        answers = [torch.tensor([*self.tokenizer(self.answer(text))["input_ids"], 1]) for text in texts]
        rows = [Response.of(ids, torch.zeros(len(ids)), torch.zeros(len(ids)), ask.sampling) for ids in answers]
        return rollout_of(ask, rows, pad_token_id=0, device=CPU)


def judge(engine, **changes) -> LanguageJudge:
    defaults = {
        "engine": engine,
        "params": {},
        "tokenizer": BYTES,
        "rollout_tokenizer": Letters(),
        "template": "{prompt}|{response}|{ground_truth}",
        "pattern": r"Score: (-?\d+)",
        "sampling": Sampling(max_tokens=8, stop_token_ids=(1,), greedy=True),
        "key": Key(0),
        "chat": False,
    }
    return LanguageJudge(**(defaults | changes))


def test_it_is_asked_what_the_template_says_and_scored_by_its_answer():
    engine = Answering(lambda text: {"b": "7 of 10. Score: 7 ", "d": "Score: 1, no: Score: -2", "f": "good"}[text[2]])
    rewarded = judge(engine)
    rows = rollout(["a", "c", "e"], ["b", "d", "f"], ["x{y}", 3, "z"])
    scores, report, known, said = rewarded(rows)
    assert engine.asked == ["a|b|x{y}", "c|d|3", "e|f|z"]
    assert scores[:2].tolist() == [7.0, -2.0]
    assert known.tolist() == [True, True, False]
    assert said == ["7 of 10. Score: 7 ", "Score: 1, no: Score: -2", "good"]
    scores_by_mesh = metrics.report(report)
    assert scores_by_mesh == {"reward/judge_unparsed": 1.0, "reward/judge_truncated": 0.0}
    total = rewards.weighted_sum({"judge": rewarded, "exact": rewards.exact_match}, {"judge": 0.5})
    with rewards.RewardRunner(total) as runner:
        scored, noted = rewards.score(rows, reward=runner, tokenizer=Letters())
    assert scored.scores.tolist() == [3.5, -1.0, NONE]
    noted = metrics.report(noted)
    assert noted["reward/judge_unparsed"] == 1.0
    assert noted["reward/judge"] == pytest.approx(5 / 2)
    assert noted["reward/unscored"] == 1.0
    seen = []
    told = PromptByFeedback(
        fn=lambda group, i: seen.append(group.each[i].feedback), encode=list, tokenizer=Letters(), limit=9
    )
    told(attrs.evolve(scored, groups=torch.tensor([0, 0, 1])))
    assert seen == [{"judge": text} for text in said]


def test_a_question_without_words_is_an_empty_text():
    """As a template of the response alone makes it of an empty response: the end token is what texts begin after."""
    engine = Answering(lambda text: "Score: 1")
    scores, *_ = judge(engine, template="{response}")(rollout(["a", "a"], ["", "b"], [0, 0]))
    assert engine.asked == [BYTES.eos_token, "b"]
    assert scores.tolist() == [1.0, 1.0]


def test_chats_are_asked_about_with_their_own_words():
    one = [{"role": "user", "content": "how?"}]
    two = [{"role": "system", "content": "be {kind}"}, *one]
    base = sample("so", "t")
    assert question_of("{prompt}/{response}/{{{ground_truth}}}", base) == "?/so/{t}"
    assert question_of("{prompt}", sample("so", "t", **{MESSAGES: one})) == "how?"
    assert question_of("{prompt}", sample("so", "t", **{MESSAGES: two})) == "system: be {kind}\n\nuser: how?"
    call = {"type": "function", "function": {"name": "find", "arguments": {"q": "é"}}}
    parts = [{"type": "image"}, {"type": "text", "text": "see"}]
    three = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
    ]
    shown = 'user: <image>see\n\nassistant: hm\nfind({"q": "é"})'
    assert question_of("{prompt}", sample("so", "t", **{MESSAGES: three})) == shown
    tokenizer = bpe_tokenizer(["Score: 1"], size=300)
    tokenizer.chat_template = "<{{ messages[0]['content'] }}>{% if add_generation_prompt %}A:{% endif %}"
    engine = Answering(lambda text: "Score: 1", tokenizer)
    judge(engine, tokenizer=tokenizer, chat=True)(rollout(["a"], ["b"], ["c"]))
    assert engine.asked == ["<a|b|c>A:"]


def test_long_questions_lose_their_middle_and_are_counted():
    engine = Answering(lambda text: "Score: 1")
    rewarded = judge(engine, template="abcdefgh{response}", max_prompt_tokens=5)
    _, report, *_ = rewarded(rollout(["a", "a"], ["xyz", "xyz"], [0, 0]))
    assert engine.lengths == [5, 5]
    assert engine.asked[0] == "abxyz"
    assert metrics.report(report)["reward/judge_truncated"] == 2.0
    _, report, *_ = judge(engine, template="ab{response}", max_prompt_tokens=5)(rollout(["a"], ["xyz"], [0]))
    assert engine.asked[-1] == "abxyz"
    assert metrics.report(report)["reward/judge_truncated"] == 0.0


def test_a_question_has_tokens_of_the_models_own_alone_before_it_is_cut():
    """None that the embedding lacks is asked, nor counted as too long."""
    ids = BYTES("abcdexyz")["input_ids"]
    assert len(ids) == 8
    engine = Answering(lambda text: "Score: 1")
    rewarded = judge(engine, template="{response}", max_prompt_tokens=5, vocabulary=ids[5])
    _, report, *_ = rewarded(rollout(["q"] * 3, ["abxcydze", "bx", "xyx"], [0] * 3))
    assert engine.asked == ["abcde", "b", BYTES.eos_token]  # without any it is an empty text
    assert metrics.report(report)["reward/judge_truncated"] == 0.0
    _, report, *_ = judge(engine, template="{response}", max_prompt_tokens=4, vocabulary=ids[5])(
        rollout(["q"] * 2, ["abxcydze", "xxabxyxyx"], [0] * 2)
    )
    assert engine.asked[3:] == ["abde", "ab"]
    assert metrics.report(report)["reward/judge_truncated"] == 1.0


def test_an_answer_is_read_as_it_was_written_but_for_special_tokens():
    """A score of 0 is one."""
    engine = Answering(lambda text: {"b": "really ? Score: 3", "c": "really ? Score: 0"}[text[2]])
    rewarded = judge(engine, pattern=r"really \? Score: (\d+)$")
    scores, report, known, _ = rewarded(rollout(["a", "a"], ["b", "c"], [0, 0]))
    assert scores.tolist() == [3.0, 0.0]
    assert known.tolist() == [True, True]
    assert metrics.report(report)["reward/judge_unparsed"] == 0.0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 3", 3.0),
        ("Score: 3 Score: -4.5", -4.5),
        ("score: 3", None),
        ("", None),
        ("Score: 1e999", None),
        ("Score: nan", None),
        ("Score:", None),
    ],
)
def test_scores_in_answers(text, score):
    assert score_in(text, re.compile(r"Score: (-?[\w.]+)?")) == score


def test_what_is_no_template_or_pattern_is_refused():
    for changes, text in (
        ({"template": "{prompt}"}, "template = '{prompt}': lacks {response}"),
        ({"template": "{response} {reply}"}, r"has the fields \['reply'\]"),
        ({"template": "{response"}, "not a template"),
        ({"pattern": "Score"}, "has 0 groups"),
        ({"pattern": "(Score): (.*)"}, "has 2 groups"),
    ):
        with pytest.raises(ValueError, match=text):
            judge(None, **changes)


# on a real engine


def embedded(mesh=LOCAL, *, temperature=0.0, **changes):
    tokenizer = character_tokenizer("0123456789|abcdefghijklmnopqrstuvwxyz")
    whole = small_model(len(tokenizer), width=16, layers=1)
    model = models.place(whole, mesh)
    g = torch.Generator().manual_seed(3)
    params = {n: x + 0.5 * torch.randn(x.shape, generator=g) for n, x in models.init_params(whole, Key(0)).items()}
    engine = EmbeddedEngine(model=model, kernels=Kernels.named(), pad_token_id=0, max_rows=3, mesh=mesh)
    sampling = Sampling(max_tokens=6, stop_token_ids=(1,), greedy=not temperature, temperature=temperature or 1.0)
    defaults = {"tokenizer": tokenizer, "pattern": r"(\d)", "template": "{response}|{prompt}", "sampling": sampling}
    params = models.own_params(model, params, mesh)
    return judge(engine, params=params, mesh=mesh, together=engine.together, **(defaults | changes))


TEN = rollout(list("abcdefghij"), ["k", "lm", "n", "opq", "r", "s", "tu", "v", "w", "x"], list(range(10)))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_row_is_judged_alone_as_among_others_and_on_any_rank(temperature):
    rewarded = embedded(temperature=temperature)
    want, report, _, said = rewarded(TEN)
    assert len({*said}) > 2
    assert 0 < metrics.report(report)["reward/judge_unparsed"] < 10
    assert len(set(want.tolist())) > 2

    @given(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True))
    def check(rows):
        scores, *_, answers = rewarded(batches.rows(TEN, rows))
        assert torch.equal(scores, want[rows])
        assert answers == [said[row] for row in rows]

    check()
    others = rewarded(attrs.evolve(TEN, row_ids=TEN.row_ids + 10))[0]  # other rows, other draws
    assert torch.equal(others, want) == (temperature == 0)
    others = embedded(temperature=temperature, key=Key(1))(TEN)[0]
    assert torch.equal(others, want) == (temperature == 0)

    def on_rank(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding())
        return embedded(mesh, temperature=temperature)(TEN)

    for axes in ({"shard": 2}, {"shard": 3}, {"replicate": 2, "tensor": 2}):
        for scores, noted, _, answers in simulate(axes, on_rank):
            assert torch.equal(scores, want)
            assert answers == said
            assert metrics.report(noted) == metrics.report(report)
    few = batches.rows(TEN, [4])
    for scores, *_, answers in simulate({"shard": 2}, lambda m: embedded(m, temperature=temperature)(few)):
        assert torch.equal(scores, want[4:5])
        assert answers == said[4:5]


# from settings


@pytest.fixture
def task(tmp_path):
    tiny_run.write_task(tmp_path)
    tokenizer = character_tokenizer(CHARACTERS + "|")
    model = small_model(len(tokenizer), width=16, layers=1)
    params = {name: x + 0.3 for name, x in models.init_params(model, Key(1)).items()}
    models.save(model, params, tmp_path / "judge", tokenizer=tokenizer)
    return tmp_path


def settings_of(task, **changes):
    section = {"path": str(task / "judge"), "template": "{prompt}|{response}", "pattern": r"(\d)", "chat": False}
    section |= {"max_tokens": 5, "max_prompt_tokens": 20, "max_rows": 2} | changes
    return tiny_run.settings(task, **{f"reward__judge__{name}": value for name, value in section.items()})


@pytest.mark.slow
def test_the_settings_judge(task):
    tokenizer = character_tokenizer(CHARACTERS)
    scores_by_mesh = []
    for weight, offload in ((0.5, "none"), (2.0, "all")):
        settings = attrs.evolve(settings_of(task, weight=weight))
        settings = attrs.evolve(settings, model=attrs.evolve(settings.model, offload=offload))
        with judge_of(settings, texts.load_tokenizer(settings.model, settings.data)) as by_name:
            fn, factor = by_name["judge"]
            assert factor == weight
            rows = rollout(["a", "b"], ["c", "d"], ["1", "2"])
            tokens = tokenizer(["1+1=", "2+3="])["input_ids"]
            rows = attrs.evolve(
                rows, tokens=torch.tensor([[*ids[-1:], ids[0], 1] for ids in tokens]), extras=Column([{}, {}])
            )
            scores_by_mesh.append(fn(rows)[0])
    assert torch.equal(*scores_by_mesh)
    without = tiny_run.settings(task)
    with judge_of(without, tokenizer) as by_name:
        assert by_name == {}


def test_a_run_is_scored_by_its_judge_too(task):
    with loading_rewards.scoring(Inputs(settings=settings_of(task)), LOCAL, CPU) as scoring:
        assert [term.name for term in scoring.runner.terms] == ["exact_match", "judge"]


def test_a_judge_that_does_not_fit_is_refused(task):
    with (
        pytest.raises(ValueError, match=r"reward\.judge\.chat: the judge's tokenizer has no chat template"),
        judge_of(settings_of(task, chat=True), character_tokenizer()),
    ):
        pass
    for file in (task / "judge").glob("*token*"):
        file.unlink()
    with (
        pytest.raises(ValueError, match=r"reward\.judge\.path: .*judge holds no tokenizer"),
        judge_of(settings_of(task), character_tokenizer()),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"reward\.judge\.path: .*nowhere is not a directory with a model"),
        judge_of(settings_of(task, path=str(task / "nowhere")), character_tokenizer()),
    ):
        pass
    small = small_model(10, width=16, layers=1)
    models.save(small, models.init_params(small, Key(0)), task / "judge", tokenizer=character_tokenizer())
    with (
        pytest.raises(ValueError, match=r"the judge has 10 tokens, and the tokenizer's '.*' has the id 1\d"),
        judge_of(settings_of(task), character_tokenizer()),
    ):
        pass
