"""A policy trained through verifiers' own runner, unchanged: `vf-eval` plays all episodes of a step.

verifiers 0.4 is in an environment of its own, whose `vf-eval` is the program; it names episodes by X-Session-ID.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import attrs
import tyro

from fppo import advantages, data, models, pipeline, quickstart
from fppo.key import Key
from fppo.rewards.environment import environment_reward
from fppo.rollout import Sampling
from fppo.runs import loggers
from fppo.serve import AgentEngine, texts_of
from fppo.serve.agents import PlayedEpisode
from fppo.steps import Loop, MicroBatching, adamw

HOW = "--no-push --no-rich --model policy --env.agent.harness.id null --env.agent.runtime.type subprocess"


@attrs.frozen
class VerifiersRunner:
    """Plays the first tasks of a taskset, n times each; use it as an agent."""

    program: str
    taskset: str
    n: int

    def __enter__(self):
        return self

    def __exit__(self, *error):  # it holds nothing
        pass

    def play(self, rows, urls, key, base):
        with tempfile.TemporaryDirectory() as place:
            own = ["--output-dir", place, "-n", str(len(rows) // self.n), "-r", str(self.n), "--client.base-url", base]
            command = [self.program, self.taskset, "--client.api-key-var", "KEY", *HOW.split(), *own]
            subprocess.run(command, env=os.environ | {"KEY": key}, check=True, stdout=subprocess.DEVNULL)
            lines = [line for file in Path(place).rglob("traces.jsonl") for line in file.read_text().splitlines()]
        traces = sorted((json.loads(line)["traces"][0] for line in lines), key=lambda x: x["task"]["data"]["idx"])
        scores = [sum(x["score"] * x["weight"] for x in trace["rewards"].values()) for trace in traces]
        return [PlayedEpisode(x, {}, not t["ok"], t["id"]) for x, t in zip(scores, traces, strict=True)]


def main(program: str, taskset: str, steps: int = 2, tasks: int = 2, n: int = 4) -> None:
    tokenizer = quickstart.bpe_tokenizer(["user assistant find 0 1 2 3 4 5 6 7 8 9"] * 3, size=280)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
    model = quickstart.small_model(len(tokenizer), positions=128)
    policy, prompts = (model, models.init_params(model, Key(0))), data.prompt_set([[2]] * tasks, tokenizer)
    loop = Loop(mini_batch_size=tasks * n, micro_batching=MicroBatching(size=64))
    how = {"sampling": Sampling(n=n, max_tokens=16), "batch_size": tasks * n, "advantage": advantages.rloo}
    how |= {"loop": loop, "optimizer": adamw(lambda step: 1e-3, weight_decay=0.0)}
    made = pipeline.pieces(policy, tokenizer, prompts, reward=environment_reward, **how)
    texts, player = texts_of(tokenizer, vocabulary=len(tokenizer)), VerifiersRunner(program, taskset, n)
    with AgentEngine(made.engine, player, texts, pad_token_id=0) as engine:
        program_of = attrs.evolve(made.program, rollout=attrs.evolve(made.program.rollout, engine=engine))
        console = loggers.observer([loggers.PlainConsole(steps)])
        pipeline.train(made.run, program=program_of, draw=made.draw, steps=steps, observers=[console])


if __name__ == "__main__":
    tyro.cli(main)
