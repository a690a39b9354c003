"""Self-distillation with feedback (SDPO, arXiv:2601.20802) beside RLOO, at equal samples, on sums of two digits.

The model has imitated sums of which most forget the carry and, behind the sign "!", right ones. The checker says "!" of
a wrong response; SDPO's teacher, an average of the policy's past, reads that word before the same response.
"""

from functools import partial
from statistics import mean, stdev

import attrs
import torch
import tyro

from fppo import advantages, data, losses, metrics, models, quickstart, rewards
from fppo.key import Key
from fppo.pipeline import PromptByFeedback, evaluate, iterate, pieces, self_taught
from fppo.rollout import Sampling
from fppo.steps import DistillTerm, Forward, Loop, MicroBatching, Top, adamw, demonstrations, imitate

SUMS = [quickstart.Addition(a, b) for a in range(10) for b in range(10)]
TOKENIZER, MICRO = quickstart.character_tokenizer(quickstart.CHARACTERS + "!"), MicroBatching(size=512)


def warmed_up(key: Key, steps: int):
    model, encode = quickstart.small_model(len(TOKENIZER), width=32, layers=1), TOKENIZER.encode

    def batch(step: int):
        draws = key.fold("draw", step).uniform(torch.arange(128), 3).tolist()
        rows = [(SUMS[int(u * len(SUMS))], told < 0.5, told < 0.5 or luck < 0.25) for u, told, luck in draws]
        asked = [encode("!" * told + x.prompt) for x, told, _ in rows]
        return demonstrations(asked, [[*encode(x.answer if ok else x.mistake), 1] for x, _, ok in rows], pad_token_id=0)

    how = {
        "forward": Forward(model),
        "optimizer": adamw(lambda step: 1e-2 * (1 - step / steps), weight_decay=0.0),
        "micro_batching": MICRO,
    }
    return model, imitate(models.init_params(model, key.fold("init")), map(batch, range(steps)), **how)


def checker(sample: rewards.Sample) -> dict:
    return {"score": 1.0} if sample.response == sample.ground_truth else {"score": 0.0, "feedback": "!"}


def told(group, number: int) -> str | None:
    said = group.each[number].feedback.values()
    return "".join(said) + group.prompt if said else None


def main(seeds: int = 5, steps: int = 8, every: int = 2, warm_up: int = 120, lr: float = 5e-4, decay: float = 0.95):
    texts, asked = [x.prompt for x in SUMS], {"ground_truths": [x.answer for x in SUMS], "sources": "sums"}
    prompts, found = data.prompt_set(texts, TOKENIZER, **asked), {"sdpo": [], "rloo": []}
    for by, seed, start in (
        (by, x, start) for x in range(seeds) for start in [warmed_up(Key(x), warm_up)] for by in found
    ):
        given = {"reward": rewards.inline_reward(checker), "sampling": Sampling(max_tokens=3, n=4), "batch_size": 64}
        given |= {"loop": Loop(mini_batch_size=32, micro_batching=MICRO), "optimizer": adamw(lambda _: lr)}
        rule = partial(advantages.reverse_kl, coef=0.0) if by == "sdpo" else advantages.rloo
        own = pieces(start, TOKENIZER, prompts, **given, advantage=rule, key=Key(seed).fold("run"))
        if by == "sdpo":
            prompt = PromptByFeedback(fn=told, encode=TOKENIZER.encode, tokenizer=TOKENIZER, limit=16)
            term, whole = DistillTerm(divergence=losses.jensen_shannon, whole=True), Top(len(TOKENIZER), len(TOKENIZER))
            own = self_taught(own, prompt, decay=decay, distill=term, top=whole)
        test, runs = attrs.evolve(own.sampling, greedy=True, n=1), iterate(own.run, program=own.program, draw=own.draw)
        how = {"batches": [*data.batches(prompts, 100)], "engine": own.engine, "sampling": test, "score": own.score}
        kept = [own.run, *(next(runs)[0] for _ in range(steps))][::every]
        found[by].append([metrics.report(evaluate(x, **how))["val-core/sums/reward/mean@1"] for x in kept])
        print(by, seed, *found[by][-1], flush=True)
    for by, rows in found.items():  # means, and half the widths of intervals of 95 % (Student's t, five seeds)
        print(by, *(f"{mean(x):.3f} +- {2.776 * stdev(x) / len(x) ** 0.5:.3f}" for x in zip(*rows, strict=True)))


if __name__ == "__main__":
    tyro.cli(main)
