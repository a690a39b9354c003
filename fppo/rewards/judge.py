"""A language model as a reward: it answers a question about each response, and its answer contains the score."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from typing import Any

import attrs
import torch
from torch import Tensor

from fppo import batch as batches
from fppo import data, metrics, tree
from fppo.batch import Prompts, Rollout
from fppo.data.chat import encode_chat
from fppo.data.examples import MESSAGES
from fppo.data.messages import text_of
from fppo.data.tokenizers import encode_text, within
from fppo.key import Key
from fppo.metrics import Metrics
from fppo.rewards.question import pattern_problem, score_in, template_problem
from fppo.rewards.scoring import samples_of
from fppo.rollout.engine import Ask, Engine, Sampling
from fppo.rollout.spread import merged_shares
from fppo.runtime.mesh import AXES, LOCAL, Mesh, gather_objects, place_on
from fppo.steps.ranks import collect, deal
from fppo.workers.sample import Sample


def _no_problem(find: Any) -> Any:
    def check(_: object, attribute: attrs.Attribute, value: Any) -> None:
        problem = find(value if isinstance(value, str) else value.pattern)
        if problem is not None:
            raise ValueError(f"{attribute.name} = {value!r}: {problem}")

    return check


@attrs.frozen(kw_only=True)
class LanguageJudge:
    """A reward of the rollout: `engine` answers, with `params`, a question about each response.

    The question is `template` with {prompt}, {response} and {ground_truth} filled in, with `chat` through the chat
    template of `tokenizer`; `rollout_tokenizer` decodes the rollout. A question of more than `max_prompt_tokens` loses
    its middle. The score is the number in the group of the last match of `pattern` in the answer; without a match the
    response has no score. The answer is also what the judge says about the response. Answers depend on the key, the
    row's id and the question alone. On a `mesh` all ranks hold all rows; each scores a share of the rows, and all get
    all scores and answers. Ranks that differ on the axes `together` alone use the engine jointly, for the union of
    their shares. Question tokens from `vocabulary` on, the rows of the model's embedding, are left out.
    """

    engine: Engine
    params: Mapping[str, Tensor]
    tokenizer: Any
    rollout_tokenizer: Any
    template: str = attrs.field(validator=_no_problem(template_problem))
    pattern: re.Pattern[str] = attrs.field(converter=re.compile, validator=_no_problem(pattern_problem))
    sampling: Sampling
    key: Key
    max_prompt_tokens: int = 4096
    chat: bool = True
    vocabulary: int | None = None
    mesh: Mesh = LOCAL
    together: tuple[str, ...] = ()
    reward_kind = "tensor"
    reward_name = "judge"

    def __call__(self, rollout: Rollout) -> tuple[Tensor, Metrics, Tensor, list[str]]:
        """Scores [B] float64; the numbers of answers without a score and of cut questions, as metrics; the rows with a
        score, bool [B]; the answers."""
        shares = deal(len(rollout.tokens), self.mesh)
        own = shares[place_on(self.mesh, AXES)]
        # ranks without a row ask one question and drop the answer: engines gather parameters by collectives
        asked = merged_shares(shares, self.mesh, self.together) or [0]
        verdicts, answers = self._verdicts(batches.rows(rollout, asked))
        places = [asked.index(row) for row in own]
        every = collect(verdicts[places].to(rollout.tokens.device), shares, self.mesh, AXES)
        said = gather_objects([answers[place] for place in places], self.mesh, AXES, rollout.tokens.device)
        texts = dict(zip(chain(*shares), chain(*said), strict=True))
        scores, unparsed, cut = every.unbind(1)
        report: Metrics = {
            "reward/judge_unparsed": metrics.total(unparsed.sum()),
            "reward/judge_truncated": metrics.total(cut.sum()),
        }
        return scores, report, unparsed == 0, [texts[row] for row in range(len(texts))]

    def _verdicts(self, rollout: Rollout) -> tuple[Tensor, list[str]]:
        """For each row its score (0 for an answer without one), 1 for an answer without a score, and 1 for a cut
        question, float64 [B, 3]; and the answers."""
        questions = [self._encoded(sample) for sample in samples_of(rollout, self.rollout_tokenizer)]
        limit, head = self.max_prompt_tokens, self.max_prompt_tokens // 2
        kept = [ids if len(ids) <= limit else [*ids[:head], *ids[head - limit :]] for ids in questions]
        answers = self._answers(self._prompts(kept, rollout))
        scores = [score_in(answer, self.pattern, cut=cut) for answer, cut in answers]
        rows = [(score or 0.0, score is None, len(ids) > limit) for score, ids in zip(scores, questions, strict=True)]
        return torch.tensor(rows, dtype=torch.float64), [answer for answer, _ in answers]

    def _encoded(self, sample: Sample) -> list[int]:
        ids = self._tokens_of(sample)
        ids = ids if self.vocabulary is None else within(ids, self.vocabulary)
        return ids or [self.tokenizer.eos_token_id]

    def _tokens_of(self, sample: Sample) -> list[int]:
        text = question_of(self.template, sample)
        if not self.chat:
            return encode_text(self.tokenizer, text)
        return encode_chat(self.tokenizer, [{"role": "user", "content": text}], sampled=True)

    def _prompts(self, questions: list[list[int]], rollout: Rollout) -> Prompts:
        pad = self.tokenizer.eos_token_id  # masked, so any will do
        prompts = data.collate(data.prompt_set(questions, pad_token_id=pad), range(len(questions)))
        return tree.replace(prompts, row_ids=rollout.row_ids.cpu())

    def _answers(self, prompts: Prompts) -> list[tuple[str, bool]]:
        """The texts of the answers, and whether each was cut."""
        answers = self.engine.generate(self.params, Ask(prompts, self.sampling, self.key))
        mask = answers.response_mask.cpu()
        tokens = answers.tokens[:, -mask.shape[1] :].cpu()
        keywords = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        texts = [self.tokenizer.decode(row[keep].tolist(), **keywords) for row, keep in zip(tokens, mask, strict=True)]
        return [(text, finish == "length") for text, finish in zip(texts, answers.finish, strict=True)]


def question_of(template: str, sample: Sample) -> str:
    """Fill the template with a sample's texts; a chat becomes the text of its messages, with their roles if there are
    several."""
    messages = sample.extras.get(MESSAGES) or ()
    prompt = "\n\n".join(f"{m['role']}: {text_of(m)}" for m in messages)
    if len(messages) == 1:
        prompt = text_of(messages[0])
    return template.format(prompt=prompt or sample.prompt, response=sample.response, ground_truth=sample.ground_truth)
