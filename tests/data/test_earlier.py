"""Responses are kept for drafts: the newest of each prompt, all different, within a bound."""

import torch

from fppo import data, metrics
from fppo.batch import Column, Prompts, Rollout, extend, repeat
from fppo.data import DataCursor, KeepResponses
from fppo.data.earlier import with_earlier, with_responses
from fppo.key import Key
from fppo.runtime import checkpoint

NAMES = ["a", "b\nc", "d e"]


def prompts_of(names):
    tokens = torch.full((len(names), 2), 9)
    return Prompts(
        tokens=tokens,
        attention_mask=torch.ones_like(tokens, dtype=torch.bool),
        row_ids=torch.arange(len(names)),
        ids=Column(names),
        ground_truth=Column([None] * len(names)),
        source=Column(["s"] * len(names)),
        extras=Column([{}] * len(names)),
    )


def rollout_of(responses):
    """Rows of these responses, lists of tokens by prompt, the same number for each."""
    n, width = len(next(iter(responses.values()))), max(len(row) for rows in responses.values() for row in rows)
    rows = repeat(prompts_of([*responses]), n)
    every = [row for own in responses.values() for row in own]
    tokens = torch.tensor([[9, 9, *row, *[0] * (width - len(row))] for row in every])
    mask = torch.tensor([[place < len(row) for place in range(width)] for row in every])
    whole = torch.cat([rows.attention_mask, mask], 1)
    none = torch.zeros(mask.shape)
    columns = {"tokens": tokens, "attention_mask": whole, "response_mask": mask, "groups": rows.row_ids}
    columns |= {"rollout_log_probs": none, "sampling_log_probs": none, "versions": rows.row_ids}
    return extend(Rollout, rows, finish=Column(["stop"] * len(every)), **columns)


def read(kept, names=NAMES):
    return list(with_earlier(prompts_of(names), kept).earlier)


def test_the_newest_responses_of_each_prompt_are_kept_all_different():
    first = with_responses((), rollout_of({"a": [[1, 2, 70000], [3, 4]], "b\nc": [[5], [5]]}))
    assert read(first) == [[[1, 2, 70000], [3, 4]], [[5]], []]
    second = with_responses(first, rollout_of({"d e": [[6], [7, 8]], "a": [[3, 4], [3]]}))
    assert read(second) == [[[3, 4], [3]], [[5]], [[6], [7, 8]]]
    many = with_responses(second, rollout_of({"a": [[i] for i in (1, 1, 2, 3, 4, 5)]}))
    assert read(many) == [[[1], [2], [3], [4]], [[5]], [[6], [7, 8]]]


def test_prompts_that_have_not_come_for_longest_are_forgotten():
    kept = Column()
    for name in ("a", "b\nc", "a", "d e"):
        kept = with_responses(kept, rollout_of({name: [[1, 2, 3]]}), most=6)
    assert read(kept) == [[[1, 2, 3]], [], [[1, 2, 3]]]
    assert read(with_responses(kept, rollout_of({"a": [[1]]}), most=2)) == [[[1]], [], []]


def test_the_cursor_carries_them_and_a_checkpoint_holds_them(tmp_path):
    def learn(cursor, scored):
        return cursor, {"own": metrics.total(1)}

    dataset = data.prompt_set([[1], [2]], pad_token_id=0)
    plain, after = data.next_batch(dataset, DataCursor(), size=1, key=Key(0), shuffle=False)
    assert plain.earlier is None
    cursor, report = KeepResponses(learn)(after, rollout_of({"0": [[4, 5]]}))
    assert [*report] == ["own"]
    checkpoint.begin_save({"run": {"cursor": cursor}}, tmp_path, 1).wait()
    for template in (DataCursor(earlier=Column()), DataCursor()):
        optional = (".earlier",)
        found = checkpoint.load({"run": {"cursor": template}}, tmp_path, 1, optional=optional)["run"]["cursor"]
        assert found.earlier == (cursor.earlier if template.earlier is not None else None)
    drawn, cursor = data.next_batch(dataset, cursor, size=3, key=Key(0), shuffle=False)
    assert list(drawn.earlier) == [[], [[4, 5]], []]
    assert (cursor.epoch, cursor.position) == (2, 0)
    assert read(cursor.earlier, ["0"]) == [[[4, 5]]]
