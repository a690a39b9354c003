"""A vLLM without a model, for what stands around one: it schedules rows, moves them in its batch, and asks for draws.

Its logits are a function of a version and of all ids of a row. A prompt may come in chunks, of which each is followed
by a draw that counts for nothing.
"""

from __future__ import annotations

import copy
import enum
import random
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import attrs
import torch

from tests.modules import imported_anew

SIZE = 31


class Move(enum.Enum):
    UNIDIRECTIONAL = 0
    SWAP = 1


class OutputKind(enum.Enum):
    FINAL_ONLY = 0
    DELTA = 1


class Record:
    """An object of whatever keywords it gets."""

    def __init__(self, *names, **fields):
        vars(self).update(fields, names=names)


MODULES = {
    "vllm": {"LLM": None, "SamplingParams": Record},
    "vllm.config": {"set_current_vllm_config": None},
    "vllm.distributed": {"cleanup_dist_env_and_memory": None},
    "vllm.lora": {},
    "vllm.lora.lora_model": {"LoRAModel": None},
    "vllm.lora.peft_helper": {"PEFTHelper": None},
    "vllm.lora.request": {"LoRARequest": Record},
    "vllm.model_executor": {},
    "vllm.model_executor.model_loader": {},
    "vllm.model_executor.model_loader.reload": {"finalize_layerwise_reload": None, "initialize_layerwise_reload": None},
    "vllm.sampling_params": {"RequestOutputKind": OutputKind},
    "vllm.v1": {},
    "vllm.v1.sample": {},
    "vllm.v1.sample.logits_processor": {"LogitsProcessor": object, "MoveDirectionality": Move},
}
WORKER = "fppo.rollout.vllm.worker"


def worker_of(patch, **own):
    """The module of what runs inside vLLM, which imports it, for as long as the patch lasts; `own` replaces what vLLM
    has under these names."""
    for name, fields in MODULES.items():
        made = ModuleType(name)
        made.__spec__ = ModuleSpec(name, None)
        vars(made).update({key: own.get(key, value) for key, value in fields.items()})
        patch.setitem(sys.modules, name, made)
    return imported_anew(patch, WORKER)


def logits_of(version, ids):
    """Logits [V] float32 of a version of the weights behind some ids."""
    number = version + 7 * len(ids)
    for i, token in enumerate(ids):
        number = (number * 31 + (i + 3) * token) % 1_000_003
    return 2 * torch.randn(SIZE, generator=torch.Generator().manual_seed(number))


@attrs.define(eq=False)
class _Row:
    name: str
    prompt: list[int]
    params: Record
    lora: Record | None
    chunks: int
    output: list[int] = attrs.field(factory=list)
    told: int = 0
    done: bool = False


class StandInEngine:
    """The engine inside: rows in places of a batch, of which at most `max_rows` draw."""

    def __init__(self, processor, dice, *, max_rows, limit, cached=0):
        self.processor, self.dice, self.max_rows, self.cached = processor, dice, max_rows, cached
        self.version = 0
        self.waiting, self.places, self.every, self.forgotten, self.adapters = [], [], [], 0, []
        self.model_config = SimpleNamespace(max_model_len=limit)
        self.engine_core = SimpleNamespace(
            engine_core=SimpleNamespace(model_executor=SimpleNamespace(is_failed=False)), shutdown=lambda: None
        )

    def add_request(self, name, prompt, params, lora_request=None):
        assert name not in [row.name for row in (*self.waiting, *self.places) if row and not row.done]
        self.adapters.append(lora_request and lora_request.names)
        ids = list(prompt["prompt_token_ids"])
        params = copy.deepcopy(params)  # as vLLM clones them
        self.waiting.append(_Row(name, ids, params, lora_request, self.dice.randint(0, 2)))
        self.every.append(self.waiting[-1])

    def abort_request(self, names):
        assert not isinstance(names, str)
        for row in (*self.waiting, *self.places):
            if row is not None and row.name in names:
                row.done = True
        self.waiting = [row for row in self.waiting if not row.done]

    def has_unfinished_requests(self):
        return bool(self.waiting) or any(row is not None and not row.done for row in self.places)

    def reset_encoder_cache(self):
        self.forgotten += 1

    def _moved(self):
        """The changes of the batch, as vLLM tells them: places left, places taken, and then moves."""
        removed = [i for i, row in enumerate(self.places) if row is not None and row.done]
        for i in removed:
            self.places[i] = None
        added, moved = [], []
        while self.waiting and sum(row is not None for row in self.places) < self.max_rows:
            row = self.waiting.pop(0)
            free = [i for i, other in enumerate(self.places) if other is None]
            index = free[0] if free else len(self.places)
            self.places[index : index + 1] = [row]
            added.append((index, row.params, row.prompt, row.output))
        while None in self.places:
            if self.places[-1] is None:
                self.places.pop()
                continue
            hole = self.places.index(None)
            moved.append((len(self.places) - 1, hole, Move.UNIDIRECTIONAL))
            self.places[hole] = self.places.pop()
        if len(self.places) > 1 and self.dice.random() < 0.5:
            a, b = self.dice.sample(range(len(self.places)), 2)
            self.places[a], self.places[b] = self.places[b], self.places[a]
            moved.append((a, b, Move.SWAP))
        if not (removed or added or moved):
            return None
        return SimpleNamespace(batch_size=len(self.places), removed=removed, added=added, moved=moved)

    def step(self):
        self.processor.update_state(self._moved())
        rows = list(self.places)
        if not rows:
            return []
        noise = torch.Generator().manual_seed(len(rows))
        each = [
            torch.randn(SIZE, generator=noise) if row.chunks else logits_of(self.version, [*row.prompt, *row.output])
            for row in rows
        ]
        tokens = self.processor.apply(torch.stack(each)).argmax(-1).tolist()
        outputs = []
        for row, token in zip(rows, tokens, strict=True):
            if row.chunks:
                row.chunks -= 1
                continue
            row.output.append(token)
            row.done = len(row.output) == row.params.max_tokens or token in row.params.stop_token_ids
            if row.params.output_kind is OutputKind.FINAL_ONLY and not row.done:
                continue
            new = row.output[row.told :]
            row.told = len(row.output)
            first = len(row.output) == 1
            outputs.append(
                SimpleNamespace(
                    request_id=row.name,
                    outputs=[SimpleNamespace(token_ids=new)],
                    finished=row.done,
                    prompt_token_ids=row.prompt,
                    num_cached_tokens=min(self.cached, len(row.prompt) - 1) if first else 0,
                )
            )
        self.dice.shuffle(outputs)
        return outputs


class StandIn:
    """`vllm.LLM` of one worker."""

    def __init__(self, worker, *, seed=0, max_rows=4, limit=64, cached=0):
        self.processor = worker.KeyedDraws(None, torch.device("cpu"), False)
        self.llm_engine = StandInEngine(
            self.processor, random.Random(seed), max_rows=max_rows, limit=limit, cached=cached
        )
        self.worker = worker.Extension()
        self.worker.rank = 0
        processors = SimpleNamespace(non_argmax_invariant=[object(), self.processor])
        self.worker.model_runner = SimpleNamespace(input_batch=SimpleNamespace(logitsprocs=processors))
        self.resets, self.calls = 0, []

    def collective_rpc(self, method, args=()):
        self.calls.append(method)
        return [getattr(self.worker, method)(*args)]

    def reset_prefix_cache(self):
        self.resets += 1
        return True


def host_of(local, llm):
    """`LocalHost` around a vLLM that runs."""
    host = local.LocalHost.__new__(local.LocalHost)
    host._llm, host.limit = llm, llm.llm_engine.model_config.max_model_len
    host._rows, host._had, host._adapter = {}, {}, None
    return host
