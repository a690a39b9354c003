"""The command serve --tinker: models for tinker's and OpenAI's clients on one port, until ctrl-C; and refusals."""

from __future__ import annotations

import json
import urllib.request

import openai
import pytest
import tinker
from tinker import types

from fppo.commands import cli
from tests import tiny_run
from tests.serve.test_command import served
from tests.serve.tinker.test_client import STEP, theirs

KEY = "tml-given-key"


@pytest.mark.slow
def test_models_are_served_to_both_kinds_of_clients(tmp_path, capsys, monkeypatch):
    tiny_run.write_task(tmp_path)
    monkeypatch.chdir(tmp_path)

    def visit(url):
        with tinker.ServiceClient(base_url=url, api_key=KEY) as service:
            trainer = service.create_lora_training_client("start", rank=2, seed=0).result()
            trainer.forward_backward(theirs(0), "importance_sampling").result()
            trainer.optim_step(STEP).result()
            tied = trainer.save_weights_external("files").result().path
            plain = service.create_lora_training_client("start", rank=2, train_unembed=False).result()
            path = plain.save_weights_external("files").result().path
            rest = tinker.RestClient(base_url=url, api_key=KEY)
            files = {
                name: rest.get_external_weights_urls(each).result().urls
                for name, each in (("tied", tied), ("peft", path))
            }
            with urllib.request.urlopen(files["peft"]["adapter_config.json"]) as answer:
                assert json.load(answer)["r"] == 2
            tokenizer = trainer.get_tokenizer()
            sampler = trainer.save_weights_and_get_sampling_client().result()
            assert sampler.get_tokenizer().encode("1+2=") == tokenizer.encode("1+2=")
            prompt = types.ModelInput.from_ints(tokenizer.encode("1+2="))
            sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        client.completions.create(model="start", prompt="1+2=", max_tokens=3)
        return files

    arguments = ["start", "--tinker", "--store", "store"]
    status, files = served(arguments, visit, {"FPPO_API_KEY": KEY})
    assert status == 0
    printed = capsys.readouterr().out
    assert "start at http://127.0.0.1:" in printed
    assert KEY not in printed
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= set(files["peft"])
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files["tied"])
    assert (tmp_path / "store" / "server.log").exists()


@pytest.mark.parametrize(
    ("arguments", "key", "text"),
    [
        (["{model}", "{model}"], None, "--tinker"),
        (["{model}", "{model}", "--tinker"], None, "given twice"),
        (["{model}", "--tinker", "--follow", "3"], None, "--follow"),
        (["{model}", "--tinker"], "secret-key", "tml-"),
        (["{model}", "--tinker", "--keys", "nowhere"], None, "nowhere"),
        (["--tinker"], None, "give"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path, capsys, monkeypatch, arguments, key, text):
    tiny_run.write_task(tmp_path)
    if key is not None:
        monkeypatch.setenv("FPPO_API_KEY", key)
    words = [word.format(model=tmp_path / "start") for word in arguments]
    assert cli.main(["serve", *words, "--port", "0", "--store", str(tmp_path / "store")]) == 2
    assert text in capsys.readouterr().err
