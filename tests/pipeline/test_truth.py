"""The critic beside the exact values, held against a walk over every prefix by hand."""

from types import SimpleNamespace

import attrs
import pytest
import torch

from fppo import data, metrics, models, quickstart
from fppo.assembly.checks import EVALUATE
from fppo.assembly.inputs import Inputs
from fppo.assembly.run import assemble
from fppo.batch import Prompts, narrow
from fppo.data import collate
from fppo.pipeline.truth import Compared, _pointing, one_answer, right_answers
from fppo.rollout.engine import Ask, Sampling
from fppo.settings.files import SettingsError
from tests import tiny, tiny_run

DISCOUNTS = {"algorithm__advantage__gamma": 0.9, "algorithm__advantage__lam": 0.5}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    tiny_run.write_task(directory, rows=6)
    return directory


def after(model, params, tokens):
    """The output for the token after these, of which none is padding."""
    tokens = torch.tensor([tokens], device=next(iter(params.values())).device)
    places, mask = torch.arange(tokens.shape[1], device=tokens.device)[None], torch.ones_like(tokens).bool()
    hidden = models.hidden_states(model, params, tokens, places, attend=models.padded_attention(mask))
    return models.heads.logits_of(models.output_head(model, params), hidden[0, -1].float())


@pytest.mark.slow
def test_it_is_the_difference_to_the_probability_of_the_answer(task):
    settings = tiny_run.settings(task, eval__exact_values=True, rollout__temperature=0.7, **DISCOUNTS)
    with assemble(settings) as assembly:
        run, end = assembly.run, assembly.inputs.tokenizer.eos_token_id
        beside = []
        found = metrics.report(assembly.evaluate(run, keep_compared=beside.append))
        engine, sampling = (getattr(assembly.program.rollout, name) for name in ("engine", "sampling"))
        truths, values, pointing = [], [], []
        held_out = Inputs(settings=settings, trains=False).need(*EVALUATE).held_out
        for number, asked in enumerate(data.batches(held_out, 8)):
            ask = Ask(asked, attrs.evolve(sampling, n=1), run.key.fold("truth", number), version=0)
            rollout = engine.generate(run.actor.params, ask)
            for row, truth in enumerate(asked.ground_truth):
                prompt = asked.tokens[row][asked.attention_mask[row]].tolist()
                answer = [*assembly.inputs.tokenizer.encode(truth), end]
                said = rollout.tokens[row, asked.tokens.shape[1] :][rollout.response_mask[row]].tolist()
                for response in (answer, said):
                    before = len(truths)
                    for t in range(len(response)):
                        value = float(response[:t] == answer[:t] and t < len(answer))
                        for s in range(t, len(answer)):
                            logits = after(assembly.model, run.actor.params, prompt + answer[:s])
                            value *= (logits / 0.7).softmax(0)[answer[s]].item() * (0.9 if s > t else 1.0)
                        truths.append(value)
                        values.append(after(assembly.critic_model, run.critic.params, prompt + response[:t]).item())
                v, u = ([*x[before:], 0.0] for x in (truths, values))
                reward = [0.0] * (len(said) - 1) + [float(said == answer)]
                steps = range(len(said))
                real = [reward[t] + 0.9 * v[t + 1] - v[t] for t in steps]
                delta = [reward[t] + 0.9 * u[t + 1] - u[t] for t in steps]
                gae = [sum(0.45 ** (s - t) * delta[s] for s in range(t, len(said))) for t in steps]  # 0.9 * lam
                pointing += zip(real, gae, strict=True)
    truth, value = torch.tensor(truths, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)
    mse, variance = (truth - value).square().mean(), truth.var(unbiased=False)
    expected = {"mse": mse, "variance": variance, "r2": 1 - mse / variance}
    for name, number in expected.items():
        assert found[f"critic/true/{name}"] == pytest.approx(number.item(), rel=1e-3), name
    assert len(set(truths)) > 10
    real, gae = torch.tensor(pointing, dtype=torch.float64).unbind(1)
    assert found["critic/true/cosine"] == pytest.approx(torch.cosine_similarity(real, gae, dim=0).item(), abs=1e-3)
    clear = real.abs() >= 1e-3
    assert found["critic/true/sign"] == pytest.approx((real * gae > 0)[clear].double().mean().item())
    assert 0 < clear.sum() < len(clear)
    shown = [beside[0].exact_advantages, beside[0].advantages]
    flat = torch.stack([x[beside[0].rollout.response_mask] for x in shown], 1).double().cpu()
    torch.testing.assert_close(flat, torch.stack([real, gae], 1), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"algorithm__advantage": "grpo", "rollout__n": 2}, "a critic"),
        ({"reward__overlong_buffer": 1}, "exact_match alone"),
        ({"rollout__top_p": 0.9}, "all tokens"),
        ({"rollout__stop": ("4",)}, "no text ends"),
    ],
)
def test_what_has_no_one_right_answer_is_refused(task, changes, text):
    with pytest.raises(SettingsError, match=f"eval.exact_values = True.*{text}"):
        tiny_run.settings(task, eval__exact_values=True, **changes)


@pytest.mark.parametrize(
    ("most", "rows"),
    [
        (4, [[5, 9], [5, 6, 7, 9]]),
        (3, [[5, 9], [5, 6, 7]]),  # no room for the end
        (2, [[5, 9], []]),  # longer than a response can be
    ],
)
def test_a_right_answer_has_its_end_where_there_is_room(most, rows):
    tokenizer = quickstart.character_tokenizer()
    prompts = collate(data.prompt_set(["1+4=", "5"], tokenizer, ground_truths=[" 5", "567 "]), range(2))
    rows = [[9 if x == 9 else tokenizer.convert_tokens_to_ids(str(x)) for x in row] for row in rows]
    sampling = Sampling(max_tokens=most, stop_token_ids=(9,))
    tokens, mask = right_answers(prompts, tokenizer=tokenizer, sampling=sampling)
    assert [row[own].tolist() for row, own in zip(tokens, mask, strict=True)] == rows
    assert tokens.shape == mask.shape == (2, max(map(len, rows)))


def test_advantages_of_the_answer_itself_discount_the_next_value():
    """Each of its three tokens has the probability 1/2: values of 0.9^2/8, 0.9/4 and 1/2."""
    asked, answer = narrow(Prompts, tiny.experience(0, 1)), torch.tensor([[3, 4, 5]])
    every = torch.ones_like(answer, dtype=torch.bool)
    rollout = SimpleNamespace(tokens=torch.cat([asked.tokens, answer], 1), response_mask=every)
    half = SimpleNamespace(log_probs=torch.full(answer.shape, 0.5, dtype=torch.float64).log())
    _, said = one_answer(asked, rollout, lambda rows: half, answers=lambda prompts: (answer, every), gamma=0.9)
    assert said.values[0].tolist() == pytest.approx([0.10125, 0.225, 0.5])
    assert said.advantages[0].tolist() == pytest.approx([0.9 * 0.225 - 0.10125, 0.9 * 0.5 - 0.225, 1 - 0.5])


def test_only_clear_advantages_have_a_sign_to_agree_with():
    mask = torch.ones(1, 4, dtype=torch.bool)
    rollout = SimpleNamespace(response_mask=mask)
    real, guess = torch.tensor([[0.5, -0.5, 1e-4, -1e-4]]), torch.tensor([[0.1, 0.2, 0.3, -0.3]])
    report = metrics.report(_pointing([Compared(rollout, guess, real, guess, real)]))
    assert report["critic/true/sign"] == 0.5  # of the first two
    assert report["critic/true/cosine"] == pytest.approx(torch.cosine_similarity(real, guess).item())
