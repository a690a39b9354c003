"""A critic that sees the ground truth: its values and updates are those of prompts that begin with it."""

import inspect

import pytest
import torch

from fppo import tree
from fppo.assembly.run import assemble
from fppo.batch import Column
from fppo.data import with_truth
from fppo.pipeline import ppo_step
from fppo.settings.files import SettingsError
from fppo.steps import Forward, MicroBatching, compute_values, update_critic
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
                ids = torch.tensor(run.tokenizer.encode(truth), device=batch.tokens.device)
                one = tree.replace(
                    tree.map(lambda x, row=row: x[row : row + 1], batch),
                    tokens=torch.cat([ids, batch.tokens[row]])[None],
                    attention_mask=torch.cat([torch.ones_like(ids).bool(), batch.attention_mask[row]])[None],
                )
                forward = Forward(run.critic_model)
                values = compute_values(run.run.critic.params, one, forward=forward, micro_batching=MicroBatching(1))
                torch.testing.assert_close(values[0], batch.values[row], atol=1e-5, rtol=1e-5)
            bound = inspect.unwrap(run.program.update_critic).keywords
            shown = with_truth(batch, encode=run.tokenizer.encode, limit=3)
            key = run.run.key.fold("step", 0).fold("critic")
            names = ("forward", "loop", "optimizer", "loss_fn")
            expected, _ = update_critic(run.run.critic, shown, key=key, **{name: bound[name] for name in names})
            assert tree.digest(after.critic) == tree.digest(expected)
    assert told[0].tokens.equal(told[3].tokens)
    assert told[0].old_log_probs.equal(told[3].old_log_probs)
    assert not told[0].values.equal(told[3].values)


def test_a_critic_that_reads_no_tokens_is_not_shown_any(tmp_path):
    tiny_run.write_task(tmp_path)
    with pytest.raises(SettingsError, match=r"critic\.privileged = 3"):
        tiny_run.settings(tmp_path, critic__privileged=3, critic__reads="confidence")
