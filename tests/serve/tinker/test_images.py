"""Images as chunks: read by the model's processor, trained on and sampled from, as tokens and inputs of fppo's are."""

from __future__ import annotations

import io

import attrs
import numpy as np
import pytest
import tinker
import torch
from PIL import Image
from tinker import types

from fppo import models
from fppo.data.images import ImageReader
from fppo.rollout.embedded import EmbeddedEngine
from fppo.serve.texts import texts_of
from fppo.serve.tinker import runs
from fppo.serve.tinker.data import Datum
from fppo.serve.tinker.losses import Loss
from fppo.serve.tinker.runs import Adapters, BaseModel
from fppo.serve.tinker.samples import SampleRules
from fppo.serve.tinker.service import ServedBase
from fppo_kernels.table import Kernels
from tests.assembly.test_images import write_task
from tests.data.processors import processor
from tests.serve.tinker.served import KEY, base, equal, served
from tests.serve.tinker.test_client import OURS, STEP

TOKEN = 3


def picture(seed):
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (12, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


@pytest.fixture(scope="module", params=["llava", "idefics3"])
def seeing(request, tmp_path_factory):
    """A base that takes images."""
    folder = tmp_path_factory.mktemp(request.param)
    write_task(folder, request.param)
    model, params = models.load(folder / "start")
    own = processor(request.param)
    size = len(own.tokenizer)
    rules = SampleRules(
        texts=texts_of(own.tokenizer, vocabulary=size, chat=False),
        stop_token_ids=(1,),
        limit=60,
        images=ImageReader(own, TOKEN),
    )
    return ServedBase(
        base=BaseModel("seeing", model, params, "nowhere", 60),
        engine=EmbeddedEngine(model=model, kernels=Kernels.named(), pad_token_id=0),
        rules=rules,
        write_tokenizer=own.tokenizer.save_pretrained,
    )


@pytest.mark.slow
def test_images_are_trained_on_and_sampled_from(tmp_path, seeing):
    reader = seeing.rules.images
    images = [picture(0), picture(1)]
    tokens, inputs = reader.joined([[8, 9], images[0], [10], images[1], [11, 12]])
    chunks = [
        types.EncodedTextChunk(tokens=[8, 9]),
        types.ImageChunk(data=images[0], format="png"),
        types.EncodedTextChunk(tokens=[10]),
        types.ImageChunk(data=images[1], format="png"),
        types.EncodedTextChunk(tokens=[11, 12]),
    ]
    targets = [0] * (len(tokens) - 1) + [13]
    weights = [0.0] * (len(tokens) - 1) + [1.0]
    with served(tmp_path, [seeing]) as host, tinker.ServiceClient(base_url=host.url, api_key=KEY) as service:
        trainer = service.create_lora_training_client("seeing", rank=2, seed=0).result()
        datum = types.Datum(
            model_input=types.ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": targets, "weights": weights}
        )
        found = trainer.forward_backward([datum], "cross_entropy").result()
        trainer.optim_step(STEP).result()
        run = runs.create_run(seeing.base, Adapters(rank=2, seed=0))
        own = Datum(torch.tensor(tokens), torch.tensor(targets), {"weights": torch.tensor(weights)}, inputs)
        run, outputs = runs.forward_backward(run, [own], Loss("cross_entropy"))
        run, _ = runs.optim_step(run, OURS)
        assert equal(host.params(trainer.model_id), run.state.params)
        assert torch.equal(found.loss_fn_outputs[0]["logprobs"].to_torch(), outputs.per_datum[0]["logprobs"])
        sampler = trainer.save_weights_and_get_sampling_client().result()
        whole = types.ModelInput(chunks=[*chunks, types.EncodedTextChunk(tokens=[13])])
        scored = sampler.compute_logprobs(whole).result()
        after = runs.forward(run, [own], Loss("cross_entropy")).per_datum[0]["logprobs"][-1].item()
        assert len(scored) == len(tokens) + 1
        assert scored[-1] == pytest.approx(after, abs=2e-5)


def test_images_that_cannot_be_read_are_refused_by_name(tmp_path, seeing):
    texts = types.EncodedTextChunk(tokens=[8])
    wrong = [
        ([types.ImageChunk(data=b"no image", format="png")], "image 1"),
        ([types.ImageChunk(data=picture(0), format="png", expected_tokens=1)], "1 were expected"),
        ([types.EncodedTextChunk(tokens=[TOKEN]), types.ImageChunk(data=picture(0), format="png")], "placeholder"),
        ([types.ImageAssetPointerChunk(format="png", location="/etc/passwd", expected_tokens=1)], "as bytes"),
    ]
    with served(tmp_path, [seeing, base()]) as host, tinker.ServiceClient(base_url=host.url, api_key=KEY) as service:
        sampler = service.create_sampling_client(base_model="seeing").result()
        for chunks, text in wrong:
            prompt = types.ModelInput(chunks=[texts, *chunks])
            with pytest.raises(tinker.RequestFailedError, match=text):
                sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()
        blind = service.create_sampling_client(base_model="tiny").result()
        image = types.ModelInput(chunks=[types.ImageChunk(data=picture(0), format="png")])
        with pytest.raises(tinker.RequestFailedError, match="text alone"):
            blind.sample(image, 1, types.SamplingParams(max_tokens=1)).result()


def test_a_prompt_with_images_is_read_alike_by_messages_and_by_parts(seeing):
    """For a processor whose images stand for placeholders alone."""
    if type(seeing.rules.images.processor).__name__ != "LlavaProcessor":
        pytest.skip("its images have tokens around them")
    reader = seeing.rules.images
    message = {
        "role": "user",
        "content": [{"type": "text", "text": "ab"}, {"type": "image"}, {"type": "text", "text": "c"}],
    }
    tokens, inputs = reader.encode([message], [picture(0)])
    first = tokens.index(TOKEN)
    last = len(tokens) - tokens[::-1].index(TOKEN)
    joined, others = reader.joined([tokens[:first], picture(0), tokens[last:]])
    assert joined == tokens
    assert others == inputs
    assert attrs.asdict(others, recurse=False).keys() == attrs.asdict(inputs, recurse=False).keys()
