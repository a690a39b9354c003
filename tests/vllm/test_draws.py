"""Which row of a rollout each row of vLLM's logits is, however vLLM moves them; no engine is started."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here")

from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from fppo.key import Key
from fppo.rollout.engine import Sampling
from fppo.rollout.sampling import draw
from fppo.rollout.vllm import worker

SWAP, OVER = MoveDirectionality.SWAP, MoveDirectionality.UNIDIRECTIONAL
SAMPLING = Sampling(temperature=0.7, max_tokens=3)
NUMBERS = torch.tensor([40, 7, 23, 5])


def processor_of(*rows, **job):
    """A processor whose batch holds these rows of the rollout, and the tokens of each so far."""
    keyed = worker.KeyedDraws(None, torch.device("cpu"), False)
    keyed.begin(worker.Job(SAMPLING, Key(3), NUMBERS, **job))
    outputs = {row: [] for row in rows}
    update(keyed, added=[(place, asked(row), [], outputs[row]) for place, row in enumerate(rows)])
    return keyed, outputs


def asked(row):
    return SimpleNamespace(extra_args={worker.ROW: row})


def update(processor, *, size=4, removed=(), added=(), moved=()):
    processor.update_state(BatchUpdate(batch_size=size, removed=removed, added=added, moved=moved))


def chosen(processor, logits):
    """The token that vLLM's greedy choice finds in each row."""
    return processor.apply(logits.clone()).argmax(-1).tolist()


def expected(logits, rows, position=0):
    uniforms = Key(3).uniform(NUMBERS[list(rows)], torch.tensor([position]))[:, 0]
    return draw(logits[: len(rows)], uniforms, SAMPLING).tokens.tolist()


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        ({}, (0, 1, 2, 3)),
        ({"moved": [(0, 3, SWAP), (1, 3, SWAP)]}, (3, 0, 2, 1)),
        ({"removed": [1, 3], "moved": [(2, 1, OVER)]}, (0, 2)),
        ({"removed": [0], "added": [(0, asked(1), [], [])], "moved": [(0, 1, SWAP)]}, (1, 1, 2, 3)),
        ({"removed": [3, 2], "moved": [(1, 0, OVER)]}, (1,)),
    ],
    ids=["as-they-came", "swapped", "moved", "replaced", "over-another"],
)
def test_draws_are_those_of_the_row_wherever_it_stands(change, rows):
    logits = torch.randn(len(rows), 61, generator=torch.Generator().manual_seed(1))
    for offset in (0, 5):
        processor, _ = processor_of(0, 1, 2, 3, offset=offset)
        update(processor, size=len(rows), **change)
        assert chosen(processor, logits) == expected(logits, rows, offset)


def test_rows_that_are_not_of_the_rollout_are_left_alone():
    logits = torch.randn(3, 61, generator=torch.Generator().manual_seed(1))
    processor, _ = processor_of(2, 3)
    other = SimpleNamespace(extra_args=None)
    update(processor, added=[(1, other, [], []), (2, asked(0), [], [])])
    draws = processor.apply(logits.clone())
    assert torch.equal(draws[1], logits[1])
    assert draws.argmax(-1).tolist()[::2] == expected(logits[::2], (2, 0))


def test_answers_are_of_the_tokens_that_count_and_of_the_job_at_hand():
    processor, outputs = processor_of(1, 0)
    generator = torch.Generator().manual_seed(1)
    for position in range(3):
        chosen(processor, torch.randn(2, 61, generator=generator))  # drawn after a part of a prompt, or put off
        logits = torch.randn(2, 61, generator=generator)
        tokens = chosen(processor, logits)
        assert tokens == expected(logits, (1, 0), position)
        for row, token in zip((1, 0), tokens, strict=True):
            outputs[row].append(token)
    for row in (0, 1):
        assert processor.take(row, 3).tokens.tolist() == outputs[row]
        assert processor.take(row, 2).tokens.tolist() == outputs[row][:2]


def test_given_tokens_have_the_log_probs_of_the_temperature():
    forced = torch.tensor([[4, 9, 60], [0, 2, 33], [1, 1, 1], [8, 7, 6]])
    processor, outputs = processor_of(2, 0, forced=forced)
    logits = torch.randn(3, 2, 61, generator=torch.Generator().manual_seed(2))
    for position in range(3):
        assert chosen(processor, logits[position]) == forced[[2, 0], position].tolist()
        for output in outputs.values():
            output.append(0)
    whole = (logits / 0.7).log_softmax(-1)
    for place, row in enumerate((2, 0)):
        answer = processor.take(row, 3)
        wanted = whole[:, place].gather(1, forced[row][:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(answer.log_probs), wanted)
        torch.testing.assert_close(torch.from_numpy(answer.sampling_log_probs), wanted)
