"""Self-distillation with feedback (SDPO, arXiv:2601.20802) beside RLOO, at equal samples, on sums of two digits.

The model has imitated sums that mostly forget the carry and, behind "!", right ones. The checker says "!" of an error.
"""

from functools import partial
from statistics import mean, stdev
from types import SimpleNamespace

import attrs
import tyro

from fppo import advantages, data, losses, metrics, models, quickstart, rewards
from fppo.key import Key
from fppo.pipeline import PromptByFeedback, evaluate, iterate, pieces, self_taught
from fppo.rollout import Sampling
from fppo.steps import DistillTerm, Forward, Loop, MicroBatching, Top, adamw

SUMS = [quickstart.Addition(a, b) for a in range(10) for b in range(10)]
TOLD = [SimpleNamespace(prompt="!" + x.prompt, answer=x.answer, mistake=x.answer) for x in SUMS]
TOKENIZER, MICRO = quickstart.character_tokenizer(quickstart.CHARACTERS + "!"), MicroBatching(size=512)


def checker(sample: rewards.Sample) -> dict:
    return {"score": 1.0} if sample.response == sample.ground_truth else {"score": 0.0, "feedback": "!"}


def run(by: str, seed: int, start, steps: int, lr: float = 5e-4, decay: float = 0.99) -> list[float]:
    texts = [x.prompt for x in SUMS]
    prompts = data.prompt_set(texts, TOKENIZER, ground_truths=[x.answer for x in SUMS], sources="sums")
    given = {"reward": rewards.inline_reward(checker), "sampling": Sampling(max_tokens=3, n=4), "batch_size": 64}
    given |= {"loop": Loop(mini_batch_size=32, micro_batching=MICRO), "optimizer": adamw(lambda _: lr)}
    rule = partial(advantages.reverse_kl, coef=0.0) if by == "sdpo" else advantages.rloo
    own = pieces(start, TOKENIZER, prompts, **given, advantage=rule, key=Key(seed).fold("run"))
    if by == "sdpo":
        told = lambda group, i: "!" + group.prompt if group.each[i].feedback else None  # noqa: E731
        prompt = PromptByFeedback(fn=told, encode=lambda x: TOKENIZER.encode(str(x)), tokenizer=TOKENIZER, limit=16)
        term = DistillTerm(divergence=losses.jensen_shannon, whole=True)
        own = self_taught(own, prompt, decay=decay, distill=term, top=Top(len(TOKENIZER), len(TOKENIZER)))
    test, runs = attrs.evolve(own.sampling, greedy=True, n=1), iterate(own.run, program=own.program, draw=own.draw)
    how = {"batches": [*data.batches(prompts, 100)], "engine": own.engine, "sampling": test, "score": own.score}
    kept = [own.run, *(next(runs)[0] for _ in range(steps))][::2]
    return [metrics.report(evaluate(x, **how))["val-core/sums/reward/mean@1"] for x in kept]


def main(seeds: int = 5, first: int = 10, steps: int = 12, warm_up: int = 200, mistakes: float = 0.95):
    model, learn = quickstart.small_model(len(TOKENIZER), width=32, layers=1), partial(quickstart.warm_up, lr=1e-2)
    how = {"train": [*SUMS, *TOLD], "tokenizer": TOKENIZER, "steps": warm_up, "batch_size": 128, "mistakes": mistakes}
    begin = lambda key: learn(Forward(model), models.init_params(model, key.fold("init")), key=key, **how)  # noqa: E731
    starts = {seed: (model, begin(Key(seed))) for seed in range(first, first + seeds)}
    found = {by: [run(by, *each, steps) for each in starts.items()] for by in ("sdpo", "rloo")}
    found["more"] = [[a - b for a, b in zip(*each)] for each in zip(*found.values())]
    for by, rows in found.items():
        rows = [[*row, mean(row[1:])] for row in rows]
        print(by, *rows, *(f"{mean(x):.3f} +- {2.776 * stdev(x) / 5**0.5:.3f}" for x in zip(*rows)), sep="\n")


if __name__ == "__main__":
    tyro.cli(main)
