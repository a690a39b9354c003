"""PPO with actor and critic on ranks of their own, which update at the same time, under one controller."""

from functools import partial
from tempfile import TemporaryDirectory

import tyro

from fppo import advantages, data, losses, models, quickstart, rewards
from fppo.fleet import HERE, Group, Here, at_once, cluster, on
from fppo.key import Key
from fppo.pipeline import Passes, PolicyPass, Program, RunState, ValuePass, stages, train
from fppo.rollout import EmbeddedEngine, PlacedEngine, Sampling
from fppo.runs import loggers
from fppo.steps import Forward, Loop, MicroBatching, UpdateActor, UpdateCritic, adamw, init_state, schedule


def actor(here: Here, path: str, loop: Loop, steps: int) -> dict:
    model, params = models.load(path, mesh=here.mesh)
    forward, adam = Forward(model, mesh=here.mesh), adamw(schedule("linear", 3e-4, total_steps=8 * steps))
    engine = EmbeddedEngine(model=model, kernels=forward.kernels, pad_token_id=0, mesh=here.mesh)
    update = UpdateActor(forward=forward, loss_fn=losses.ppo_clip, loop=loop, optimizer=adam)
    log_probs = PolicyPass(forward=forward, micro_batching=loop.micro_batching)
    return {"state": init_state(params, adam), "update": update, "log_probs": log_probs, "generate": engine.generate}


def critic(here: Here, path: str, loop: Loop, steps: int) -> dict:
    model, params = models.load(path, "value", key=Key(1), mesh=here.mesh)
    forward, adam = Forward(model, mesh=here.mesh), adamw(schedule("linear", 1e-3, total_steps=8 * steps))
    update = UpdateCritic(forward=forward, loop=loop, optimizer=adam)
    values = ValuePass(forward=forward, micro_batching=loop.micro_batching)
    return {"state": init_state(params, adam), "update": update, "values": values}


def main(place: str = "local", steps: int = 20, batch: int = 512, warm_up: int = 600) -> None:
    key, loop = Key(0), Loop(mini_batch_size=batch // 4, micro_batching=MicroBatching(size=batch), epochs=2)
    with TemporaryDirectory() as path, cluster(place) as there:
        tokenizer, model, params = quickstart.warmed_up(key, steps=warm_up)
        models.save(model, params, path, tokenizer=tokenizer)
        prompts, _ = quickstart.prompt_sets(tokenizer)
        score = partial(rewards.score, reward=rewards.RewardRunner(rewards.exact_match), tokenizer=tokenizer)
        with Group("actor", there.ranks()) as a, Group("critic", there.ranks()) as c:
            p, v = (g.call(fn, HERE, path, loop, steps, stays=True) for g, fn in ((a, actor), (c, critic)))
            passes = Passes(policy=on(a, p["log_probs"]), reference=on(a, p["log_probs"]), values=on(c, v["values"]))
            engine, sampling = PlacedEngine(a, p["generate"]), Sampling(max_tokens=4, stop_token_ids=(1,))
            program = Program(
                rollout=stages.RollOut(engine=engine, sampling=sampling),
                score=stages.Score(score=score),
                annotate=stages.Annotate(passes=passes, together=at_once),
                estimate=stages.Estimate(advantage_fn=advantages.gae, max_tokens=4, whiten=True),
                update_actor=on(a, p["update"], stays=(0,)),
                update_critic=on(c, v["update"], stays=(0,)),
                together=at_once,
            )
            draw = partial(data.next_batch, prompts, size=batch, key=key.fold("data"))
            run, log = RunState(actor=p["state"], critic=v["state"], key=key), loggers.PlainConsole(steps)
            train(run, program=program, draw=draw, steps=steps, donate=True, observers=[loggers.observer([log])])


if __name__ == "__main__":
    tyro.cli(main)
