"""Rollouts from what engines drew, against loops over rows and tokens."""

from __future__ import annotations

import attrs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import batch as batches
from fppo.batch import Scored
from fppo.data.stops import StopTexts
from fppo.key import Key
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.records import Response, rollout_of, widened
from tests.rollout.test_embedded import make_prompts

LETTERS = tuple(bytes([97 + token % 5]) for token in range(20))
SAMPLINGS = st.sampled_from(
    [Sampling(), Sampling(stop_token_ids=(3, 5)), Sampling(stop_texts=StopTexts((b"ab", b"d"), LETTERS))]
)


def ended(tokens, sampling):
    """The length of a response among these tokens, and whether it stopped."""
    for end in range(1, len(tokens) + 1):
        said = b"".join(LETTERS[token] for token in tokens[:end])
        texts = () if sampling.stop_texts is None else (b"ab", b"d")
        if tokens[end - 1] in sampling.stop_token_ids or any(text in said for text in texts):
            return end, True
    return len(tokens), False


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=3),
    st.integers(1, 2),
    SAMPLINGS,
    st.booleans(),
    st.integers(0, 9),
)
def test_a_rollout_has_what_was_drawn_up_to_each_rows_end(rows, n, sampling, routed, seed):
    g = torch.Generator().manual_seed(seed)
    prompts, limits = make_prompts([size for size, _ in rows], seed=seed, extra=1), [most for _, most in rows]
    ask = Ask(prompts, attrs.evolve(sampling, n=n, max_tokens=6), Key(0), version=8, limits=torch.tensor(limits))
    count, before = n * len(rows), prompts.tokens.shape[1]
    drawn = torch.randint(0, 20, (count, 6), generator=g)
    answers = []
    for row in range(count):
        own, places = drawn[row, : limits[row // n]], torch.arange(limits[row // n])
        answer = Response.of(own, -own / 4.0 - places, -own / 2.0 - places, sampling)
        prompt = prompts.tokens[row // n][prompts.attention_mask[row // n]]
        ran = torch.cat([prompt, answer.tokens + 100])[:-1]
        answers.append(answer._replace(experts=ran[:, None, None].to(torch.uint8) if routed else None))
    rollout = rollout_of(ask, answers, pad_token_id=19, device=torch.device("cpu"))
    assert rollout.row_ids.tolist() == [x * n + j for x in prompts.row_ids.tolist() for j in range(n)]
    assert rollout.versions.tolist() == [8] * count
    for row in range(count):
        length, stopped = ended(drawn[row, : limits[row // n]].tolist(), sampling)
        rest = rollout.response_mask.shape[1] - length
        own = drawn[row, :length]
        assert rollout.tokens[row].tolist() == [*prompts.tokens[row // n].tolist(), *own.tolist(), *[19] * rest]
        assert rollout.response_mask[row].tolist() == [True] * length + [False] * rest
        seen = [*prompts.attention_mask[row // n].tolist(), *rollout.response_mask[row].tolist()]
        assert rollout.attention_mask[row].tolist() == seen
        places = torch.arange(length)
        nothing = torch.zeros(rest)
        assert torch.equal(rollout.rollout_log_probs[row], torch.cat([-own / 4.0 - places, nothing]))
        assert torch.equal(rollout.sampling_log_probs[row], torch.cat([-own / 2.0 - places, nothing]))
        assert rollout.finish[row] == ("stop" if stopped else "length")
        assert rollout.groups[row] == prompts.row_ids[row // n]
        if routed:
            ran = [x if there else 0 for x, there in zip(prompts.tokens[row // n].tolist(), seen, strict=False)]
            ran += [x + 100 for x in own.tolist()] + [0] * rest
            ran[before + length - 1] = ran[before + length - 2]  # the last one does not run
            assert rollout.routed[row, :, 0, 0].tolist() == ran
    assert routed or rollout.routed is None


@settings(max_examples=32)
@given(st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_a_wider_rollout_has_each_token_where_it_was(left, right, whole):
    """Every column of tokens is padded: those that a rollout always has, and those that it may have."""
    prompts = make_prompts((2, 3))
    ask = Ask(prompts, Sampling(stop_token_ids=(3,)), Key(0))
    tokens = torch.tensor([[7, 3, 8], [9, 9, 9]])
    rows = [Response.of(own, -own / 2.0, -own / 3.0, ask.sampling) for own in tokens]
    rollout = rollout_of(ask, rows, pad_token_id=0, device=torch.device("cpu"))
    numbers = torch.arange(1, 7).view(2, 3)
    if whole:
        rollout = attrs.evolve(
            rollout,
            token_versions=numbers.int(),
            turn_rewards=numbers / 4.0,
            turn_ids=numbers.int(),
            routed=torch.arange(1, 13).view(2, 6, 1, 1).to(torch.uint8),
        )
        more = {"scores": torch.ones(2), "named_scores": {}, "teacher_log_probs": numbers / 5.0}
        rollout = batches.extend(Scored, rollout, **more)
    wide = widened(rollout, 3 + left, 3 + right, 5)
    blank = {"tokens": 5, "turn_ids": -1}
    of_rows = 0
    for field in attrs.fields(type(rollout)):
        old, new = getattr(rollout, field.name), getattr(wide, field.name)
        if not isinstance(old, torch.Tensor) or old.ndim < 2:
            assert new is old or torch.equal(new, old), field.name
            continue
        of_rows += 1
        begin = left if field.name in ("tokens", "attention_mask", "routed") else 0
        end = new.shape[1] - right
        assert new.shape[1] == old.shape[1] + begin + right, field.name
        assert torch.equal(new[:, begin:end], old), field.name
        assert (new[:, :begin] == blank.get(field.name, 0)).all()
        assert (new[:, end:] == blank.get(field.name, 0)).all()
    assert of_rows == (10 if whole else 5)
    assert len(batches.concat([wide, wide]).tokens) == 4
