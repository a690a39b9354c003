"""A critic that knows the ground truth: a model sees it before prompts, another one how responses agree with it."""

import json
from types import SimpleNamespace

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import tree
from fppo.assembly.run import assemble
from fppo.batch import Column
from fppo.data import truth_signs, with_teacher_prompt, with_truth
from fppo.key import Key
from fppo.pipeline import ppo_step
from fppo.pipeline.checks import innermost
from fppo.steps import (
    Forward,
    Loop,
    MicroBatching,
    UpdateConfidence,
    adamw,
    compute_values,
    confidence_values,
    hidden_values,
    init_confidence,
    init_state,
    schedule,
)
from fppo.steps.clock import at_step, between
from fppo.steps.critic import as_it_is
from tests import tiny, tiny_run


def test_the_truth_stands_in_front_of_each_prompt_and_all_else_stays():
    known = {"ab": [5, 6], "[1, 2]": [7, 8, 9], "": []}
    rows = tree.replace(tiny.experience(0, 3), ground_truth=Column(["ab", [1, 2], ""]))
    seen = with_truth(rows, encode=known.__getitem__, limit=2)
    for row, expected in enumerate([[5, 6], [7, 8], []]):
        before = rows.tokens[row][rows.attention_mask[row]].tolist()
        assert seen.tokens[row][seen.attention_mask[row]].tolist() == expected + before
    assert seen.tokens.shape == (3, 2 + rows.tokens.shape[1])
    again = tree.replace(seen, tokens=rows.tokens, attention_mask=rows.attention_mask)
    assert tree.digest(again) == tree.digest(rows)


@given(st.lists(st.lists(st.integers(5, 9), max_size=7), min_size=1, max_size=4), st.integers(0, 9))
def test_a_teacher_reads_its_own_prompt_before_the_same_response(texts, seed):
    """Prompts may be shorter or longer than the policy's; all other columns stay, and rows without one are refused."""
    rows = tree.replace(
        tiny.experience(seed, len(texts)), extras=Column({"teacher_prompt_ids": ids, "n": 1} for ids in texts)
    )
    width, prompt = max(map(len, texts)), rows.tokens.shape[1] - rows.response_mask.shape[1]
    seen = with_teacher_prompt(rows)
    assert seen.tokens.shape == seen.attention_mask.shape == (len(texts), width + rows.response_mask.shape[1])
    assert (seen.tokens.dtype, seen.attention_mask.dtype) == (torch.int64, torch.bool)
    for row, ids in enumerate(texts):
        gap = width - len(ids)
        assert seen.tokens[row, gap:width].tolist() == ids
        assert seen.attention_mask[row, :width].tolist() == [False] * gap + [True] * len(ids)
        assert seen.tokens[row, width:].equal(rows.tokens[row, prompt:])
        assert seen.attention_mask[row, width:].equal(rows.attention_mask[row, prompt:])
    again = tree.replace(seen, tokens=rows.tokens, attention_mask=rows.attention_mask)
    assert tree.digest(again) == tree.digest(rows)
    with pytest.raises(ValueError, match=r"drawn without data\.teacher_prompt"):
        with_teacher_prompt(tree.replace(rows, extras=Column([*rows.extras[:-1], {"n": 1}])))


@pytest.mark.slow
def test_a_run_shows_it_to_the_critic_alone(tmp_path):
    tiny_run.write_task(tmp_path)
    told = {}
    for limit in (0, 3):
        settings = tiny_run.settings(tmp_path, critic__privileged=limit, data__eval_path=())
        with assemble(settings) as run:
            after, batch, _ = ppo_step(run.run, program=run.program, draw=run.draw)
            told[limit] = batch
            if not limit:
                continue
            for row, truth in enumerate(batch.ground_truth):
                ids = torch.tensor(run.inputs.tokenizer.encode(truth), device=batch.tokens.device)
                one = tree.replace(
                    tree.map(lambda x, row=row: x[row : row + 1], batch),
                    tokens=torch.cat([ids, batch.tokens[row]])[None],
                    attention_mask=torch.cat([torch.ones_like(ids).bool(), batch.attention_mask[row]])[None],
                )
                forward = Forward(run.critic_model)
                values = compute_values(run.run.critic.params, one, forward=forward, micro_batching=MicroBatching(1))
                torch.testing.assert_close(values[0], batch.values[row], atol=1e-5, rtol=1e-5)
            update = innermost(run.program.update_critic)
            shown = with_truth(batch, encode=run.inputs.tokenizer.encode, limit=3)
            key = run.run.key.fold("step", 0).fold("critic")
            before = at_step(run.run.critic.clock, 0, settings.steps)
            before = tree.replace(run.run.critic, clock=before)
            expected, _ = attrs.evolve(update, view=as_it_is)(before, shown, key=key)
            assert tree.digest(after.critic) == tree.digest(tree.replace(expected, clock=between(expected.clock)))
    assert told[0].tokens.equal(told[3].tokens)
    assert told[0].old_log_probs.equal(told[3].old_log_probs)
    assert not told[0].values.equal(told[3].values)


def agreement(said, truth, t, mask):
    """The signs before token t, from lists."""
    if not mask[t]:
        return [0.0, 0.0]
    own = [x for x, there in zip(said[:t], mask[:t], strict=True) if there]
    places = range(len(own) - len(truth) + 1)
    within = bool(truth) and any(own[at : at + len(truth)] == truth for at in places)
    return [float(own == truth[: len(own)]), float(within)]


@given(st.data(), st.integers(1, 4), st.integers(1, 7), st.integers(1, 3))
def test_signs_of_the_truth_are_those_of_a_walk_along_the_response(data, rows, width, limit):
    tokens = st.integers(5, 6)  # of so few that they agree often
    said = data.draw(st.lists(st.lists(tokens, min_size=width, max_size=width), min_size=rows, max_size=rows))
    truths = data.draw(st.lists(st.lists(tokens, max_size=4), min_size=rows, max_size=rows))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width)))
    mask = mask.view(rows, width)
    prompt = torch.full((rows, 2), 5)
    batch = SimpleNamespace(
        tokens=torch.cat([prompt, torch.tensor(said)], 1),
        response_mask=mask,
        ground_truth=Column([json.dumps(truth) if number % 2 else truth for number, truth in enumerate(truths)]),
    )
    signs = truth_signs(batch, encode=json.loads, limit=limit)
    assert signs.dtype == torch.float32
    expected = [[agreement(said[b], truths[b][:limit], t, mask[b].tolist()) for t in range(width)] for b in range(rows)]
    assert signs.tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize("reads", ["confidence", pytest.param("hidden", marks=pytest.mark.slow)])
def test_a_critic_without_a_model_reads_how_responses_agree_with_it(tmp_path, reads):
    tiny_run.write_task(tmp_path)
    settings = tiny_run.settings(
        tmp_path, critic__privileged=3, critic__reads=reads, critic__ensemble=2, data__eval_path=()
    )
    with assemble(settings) as run:
        start = run.run.critic
        params = {name: x + 0.1 for name, x in start.params.items()}
        assembled = tree.replace(run.run, critic=tree.replace(start, params=params))
        _, batch, _ = ppo_step(assembled, program=run.program, draw=run.draw)
        assert batch.truth_signs.equal(truth_signs(batch, encode=run.inputs.tokenizer.encode, limit=3).to(batch.values))
        assert batch.truth_signs.any()
        mask, signs = batch.response_mask, batch.truth_signs
        if reads == "confidence":
            values = confidence_values(params, batch.old_log_probs, batch.entropy, mask, signs)
        else:
            values = hidden_values(params, batch.hidden, mask, signs)
        torch.testing.assert_close(values.mean(0), batch.values)
        blind = {name: x.clone() for name, x in params.items()}
        blind["in_weight"][..., -2:] = 0.0  # which then knows nothing of it
        again = tree.replace(run.run, critic=tree.replace(start, params=blind))
        _, other, _ = ppo_step(again, program=run.program, draw=run.draw)
        assert not other.values.equal(batch.values)


def test_its_update_learns_what_the_truth_alone_says():
    batch = tiny.experience(0, 64)
    mask = batch.response_mask
    generator = torch.Generator().manual_seed(1)
    signs = (torch.rand((*mask.shape, 2), generator=generator) < 0.5).float() * mask[..., None]
    flat = torch.zeros_like(batch.old_log_probs)
    params = init_confidence(Key(0), signs=2)
    batch = attrs.evolve(
        batch, old_log_probs=flat, entropy=flat, values=flat, returns=signs[..., 1].to(flat), truth_signs=signs
    )
    optimizer = adamw(schedule("constant", 0.01, total_steps=9), weight_decay=0.0)
    loop = Loop(mini_batch_size=16, micro_batching=MicroBatching(size=16), epochs=20)
    after, _ = UpdateConfidence(loop=loop, optimizer=optimizer)(init_state(params, optimizer), batch)
    values = confidence_values(after.params, flat, flat, mask, signs)
    assert (values - batch.returns)[mask].square().mean() < 0.02
