"""Best-of-n distillation: of n responses to each prompt the policy imitates the best, by the supervised step."""

from functools import partial

import attrs
import torch
import tyro

from fppo import data, metrics, quickstart, rewards
from fppo.batch import Scored, narrow, rows
from fppo.key import Key
from fppo.pipeline import RunState, evaluate
from fppo.rollout import Ask, EmbeddedEngine, Sampling
from fppo.steps import Demonstrations, Forward, Loop, MicroBatching, UpdateSupervised, adamw, init_state


def best_of(scored: Scored, n: int) -> Scored:
    """The best of every `n` rows, which answer one prompt; the first of those that are equally good."""
    first = torch.arange(0, len(scored.scores), n)
    return rows(scored, first + scored.scores.view(-1, n).argmax(1))


def main(seed: int = 0, steps: int = 20, warm_up: int = 600, batch: int = 512, n: int = 8) -> None:
    key = Key(seed)
    tokenizer, model, params = quickstart.warmed_up(key, steps=warm_up)
    prompts, held_out = quickstart.prompt_sets(tokenizer)
    policy, adam = Forward(model), adamw(lambda step: 3e-4, weight_decay=0.0)
    engine = EmbeddedEngine(model=model, kernels=policy.kernels, pad_token_id=0)
    sampling = Sampling(n=n, max_tokens=4, stop_token_ids=(1,))
    score = partial(rewards.score, reward=rewards.RewardRunner(rewards.exact_match), tokenizer=tokenizer)
    loop = Loop(mini_batch_size=batch // n, micro_batching=MicroBatching(size=batch), epochs=2)
    tests, greedy = [*data.batches(held_out, 512)], attrs.evolve(sampling, greedy=True, n=1)
    actor, cursor = init_state(params, adam), data.DataCursor()
    for step in range(steps):
        place = key.fold("step", step)
        asked, cursor = data.next_batch(prompts, cursor, size=batch // n, key=key.fold("data"))
        scored, _ = score(engine.generate(actor.params, Ask(asked, sampling, place.fold("rollout"))))
        best = best_of(scored, n)
        batch_key, examples = place.fold("actor"), narrow(Demonstrations, best)
        actor, _ = UpdateSupervised(forward=policy, loop=loop, optimizer=adam)(actor, examples, key=batch_key)
        print(f"step {step + 1}/{steps}  reward {scored.scores.mean():.3f}  of the best {best.scores.mean():.3f}")
    for name, state in {"before": init_state(params, adam), "after": actor}.items():
        report = evaluate(RunState(actor=state, key=key), batches=tests, engine=engine, sampling=greedy, score=score)
        print(f"held out, {name}: {metrics.report(report)['val-core/addition/reward/mean@1']:.3f}")


if __name__ == "__main__":
    tyro.cli(main)
