"""PPO with a critic as a plain loop: the quickstart's task, and the functions that one step of it is.

`ppo_arithmetic.py` trains the same through `pipeline.train`, and ends with the same bits.
"""

import tyro

from fppo import advantages, data, losses, metrics, models, quickstart, rewards, steps
from fppo.batch import Annotated, Experience, extend
from fppo.key import Key
from fppo.rollout import Ask, EmbeddedEngine, Sampling


def ppo(key: Key, count: int, warm_up: int, batch: int) -> tuple[steps.TrainState, steps.TrainState]:
    """The actor and the critic after `count` steps of `batch` sequences each."""
    tokenizer, model, params = quickstart.warmed_up(key, steps=warm_up)
    critic_model, critic_params = models.as_critic(model, params, key)
    prompts, _ = quickstart.prompt_sets(tokenizer)
    policy, value = steps.Forward(model), steps.Forward(critic_model)
    micro = steps.MicroBatching(size=batch)
    loop = steps.Loop(mini_batch_size=batch // 4, micro_batching=micro, epochs=2)
    rates = (steps.schedule("linear", lr, total_steps=count * 8) for lr in (3e-4, 1e-3))  # 8 updates per step
    slow, fast = (steps.adamw(rate, betas=(0.9, 0.99), weight_decay=0.0) for rate in rates)
    actor, critic = steps.init_state(params, slow), steps.init_state(critic_params, fast)
    update_actor = steps.UpdateActor(forward=policy, loss_fn=losses.ppo_clip, loop=loop, optimizer=slow)
    update_critic = steps.UpdateCritic(forward=value, loop=loop, optimizer=fast)
    engine = EmbeddedEngine(model=model, kernels=policy.kernels, pad_token_id=0)
    sampling = Sampling(max_tokens=4, stop_token_ids=(1,))
    reward = rewards.RewardRunner(rewards.exact_match)
    cursor = data.DataCursor()
    for step in range(count):
        place = key.fold("step", step)
        asked, cursor = data.next_batch(prompts, cursor, size=batch, key=key.fold("data"))
        rollout = engine.generate(actor.params, Ask(asked, sampling, place.fold("rollout"), version=actor.step))
        scored, _ = rewards.score(rollout, reward=reward, tokenizer=tokenizer)
        mask = scored.response_mask
        old = steps.compute_log_probs(actor.params, scored, forward=policy, micro_batching=micro)
        values = steps.compute_values(critic.params, scored, forward=value, micro_batching=micro)
        annotated = extend(Annotated, scored, old_log_probs=old, values=values)
        outcome = advantages.token_rewards(scored.scores, mask)
        advantage, returns = advantages.gae(outcome, values, mask, gamma=1.0, lam=1.0)
        advantage = advantages.whiten(advantage, mask)
        rows = extend(Experience, annotated, token_rewards=outcome, advantages=advantage, returns=returns)
        critic, _ = update_critic(critic, rows, key=place.fold("critic"))
        actor, report = update_actor(actor, rows, key=place.fold("actor"))
        loss = metrics.report(report)["actor/pg_loss"]
        print(f"step {step + 1}/{count}  reward {scored.scores.mean():.3f}  loss {loss:.4f}")
    return actor, critic


def main(seed: int = 0, steps: int = 40, warm_up: int = 600, batch: int = 512) -> None:
    ppo(Key(seed), steps, warm_up, batch)


if __name__ == "__main__":
    tyro.cli(main)
