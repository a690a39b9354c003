"""A server that is killed at any moment: its clients go on by themselves, and end with an undisturbed one's bits."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading

import pytest
import tinker
import torch
from tinker import types
from tinker.types.tensor_data import TensorData

from fppo.serve.server import bound_socket
from tests import tiny_run

KEY = "tml-given-key"
STEPS = 8
WAIT = 300.0  # seconds beyond any answer, even of a server that starts again: the client itself asks for ever
PORTS = range(20_000, 30_000)  # which no connection of another process gets while the server is down


def loop(url, at_step):
    """Reinforcement learning with seeded samples; the log-probs of a text at its end, and the checkpoint's address."""
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    trainer = service.create_lora_training_client("start", rank=2, seed=0).result(WAIT)
    for step in range(STEPS):
        at_step(step)
        sampler = trainer.save_weights_and_get_sampling_client().result(WAIT)
        params = types.SamplingParams(max_tokens=4, seed=step, stop=[])
        found = sampler.sample(types.ModelInput.from_ints([3, 4, 5]), 2, params).result(WAIT).sequences
        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints([3, 4, 5, *each.tokens[:-1]]),
                loss_fn_inputs={
                    "target_tokens": TensorData.from_torch(torch.tensor([4, 5, *each.tokens])),
                    "logprobs": TensorData.from_torch(torch.tensor([0.0, 0.0, *each.logprobs])),
                    "advantages": TensorData.from_torch(torch.tensor([0.0, 0.0, *[1.0 - index] * 4])),
                },
            )
            for index, each in enumerate(found)
        ]
        passed, stepped = (
            trainer.forward_backward(data, "ppo"),
            trainer.optim_step(types.AdamParams(learning_rate=1e-2)),
        )
        passed.result(WAIT)
        stepped.result(WAIT)
    path = trainer.save_state("end").result(WAIT).path
    service.close("success").result(WAIT)
    return path


def is_free(port):
    with contextlib.suppress(ValueError), bound_socket("127.0.0.1", port):
        return True
    return False


class Server:
    """A process that serves, again on the same port after it was killed."""

    def __init__(self, folder, store):
        self.port = next(port for port in random.sample(PORTS, 100) if is_free(port))
        self.folder, self.store, self.one_kill = folder, store, threading.Lock()
        self.process = self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        command = [sys.executable, "-m", "fppo", "serve", "start", "--tinker", "--device", "cpu"]
        command += ["--port", str(self.port), "--store", str(self.store)]
        environment = {**os.environ, "FPPO_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, text=True)

    def ready(self):
        for line in self.process.stdout:
            if "ctrl-C" in line:
                return
        raise AssertionError("the server ended")

    def kill(self):
        with self.one_kill:
            self.end(self.process.kill)
            self.process = self.start()
            self.ready()

    def end(self, how):
        how()
        self.process.wait()
        self.process.stdout.close()


def weights_of(store, path):
    """The bytes of a checkpoint's tensors."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    session, _, number = run.split(":")
    (file,) = (store / "checkpoints" / f"{session}.{number}" / kind / name).rglob("*.safetensors")
    return file.read_bytes()


@pytest.mark.slow
def test_a_server_that_is_killed_at_random_moments_loses_no_step(tmp_path):
    """Killed five times, some tenths of a second into a step: while it samples, is sent data, trains, saves."""
    tiny_run.write_task(tmp_path)
    ends, draw = [], random.Random(0)
    for name, kills in (("alone", ()), ("killed", (0, 2, 3, 5, 7))):
        server = Server(tmp_path, tmp_path / name)
        timers = []

        def at_step(step, kills=kills, server=server, timers=timers):
            if step in kills:
                timers.append(threading.Timer(draw.random() * 0.3, server.kill))
                timers[-1].start()

        try:
            server.ready()
            path = loop(server.url, at_step)
            for timer in timers:
                timer.join()
            ends.append(weights_of(tmp_path / name, path))
        finally:
            with server.one_kill:
                server.end(server.process.terminate)
        assert len(timers) == len(kills)
    assert ends[0] == ends[1]
