"""fppo's extension inside vLLM: it draws tokens by keys, and loads weights with digests as proof. Imports vllm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
from vllm.lora.lora_model import LoRAModel  # pyright: ignore[reportMissingImports]
from vllm.lora.peft_helper import PEFTHelper  # pyright: ignore[reportMissingImports]
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.v1.sample.logits_processor import (  # pyright: ignore[reportMissingImports]
    LogitsProcessor,
    MoveDirectionality,
)

from fppo.fleet.codec import PackedTree, tensors_of, tree_of
from fppo.fleet.shared import Memory
from fppo.key import Key, uniforms
from fppo.rollout.engine import Sampling
from fppo.rollout.sampling import Draws, draw
from fppo.rollout.sync import DigestMethod, digest
from fppo.rollout.vllm.adapter import lost_modules
from fppo.rollout.vllm.host import Answer

ROW = "fppo_row"  # in a request's extra_args: the row of the rollout it answers, or a `DrawnRow`


class Job(NamedTuple):
    """A rollout to draw; with `forced`, the tokens are given, and only their log-probs are computed."""

    sampling: Sampling
    key: Key
    row_ids: Tensor  # [B]
    forced: Tensor | None = None  # [B, T]
    offset: int = 0  # added to the positions of draws


class DrawnRow(NamedTuple):
    """How to draw a row of turns (`LocalHost.turn`), which is part of no rollout."""

    number: int
    key: Key
    row: int
    position: int  # of the first draw
    sampling: Sampling  # per token


class _Step(NamedTuple):
    places: np.ndarray  # [R], in the flat [B, T]
    tokens: Tensor
    log_probs: Tensor
    sampling_log_probs: Tensor


class KeyedDraws(LogitsProcessor):
    """A logits processor that draws each token as the embedded engine does, by the key, the row's number and the
    position. The token's logit is then set to infinity, so that vLLM's own greedy choice finds it. Both kinds of
    log-probs come from the logits that were drawn from."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        del vllm_config, is_pin_memory
        self._device = device
        self._live: dict[int, tuple[Any, Sequence[int]]] = {}  # by place in the batch: row, tokens so far
        self._job: Job | None = None
        self._steps: list[_Step] = []
        self._turn: list[tuple[int, int, int, float, float]] = []  # draws of rows of turns
        self._columns = (np.empty(0), np.empty(0), np.empty(0))

    def is_argmax_invariant(self) -> bool:
        return False

    def begin(self, job: Job | None) -> None:
        """Begin a rollout, or turns (no job), and forget earlier draws."""
        self._turn = []
        if job is None:
            self._job = None
            return
        width = job.sampling.max_tokens
        count = len(job.row_ids) * width
        self._job = job._replace(row_ids=job.row_ids.to(self._device), forced=_moved(job.forced, self._device))
        self._steps = []
        self._columns = (np.full(count, -1, np.int64), np.zeros(count, np.float32), np.zeros(count, np.float32))

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._live.pop(index, None)
        for index, params, _, output in batch_update.added:
            self._live.pop(index, None)
            row = (params.extra_args or {}).get(ROW)
            if row is not None:
                self._live[index] = (row, output)
        for source, target, direction in batch_update.moved:
            moved, other = self._live.pop(source, None), self._live.pop(target, None)
            if moved is not None:
                self._live[target] = moved
            if direction == MoveDirectionality.SWAP and other is not None:
                self._live[source] = other

    def apply(self, logits: Tensor) -> Tensor:
        if not self._live:
            return logits
        if self._job is None:
            return self._drawn_apart(logits)
        sampling, key, row_ids, forced, offset = self._job
        places = sorted(self._live)
        rows = [self._live[place][0] for place in places]
        positions = [len(self._live[place][1]) for place in places]
        index = torch.tensor([rows, positions, places], device=logits.device)
        own = logits if len(places) == len(logits) else logits[index[2]]
        if forced is None:
            drawn = draw(own, key.uniform(row_ids[index[0]], offset + index[1][:, None])[:, 0], sampling)
        else:
            drawn = _forced(own, forced[index[0], index[1]], sampling)
        flat = np.array(rows) * sampling.max_tokens + np.array(positions)
        self._steps.append(_Step(flat, *drawn))
        logits[index[2], drawn.tokens] = torch.inf
        return logits

    def _drawn_apart(self, logits: Tensor) -> Tensor:
        """Draw for rows of turns, which have no job, each by its own key; rows with equal sampling settings are drawn
        in one call. Returns the logits, with infinity at the drawn tokens."""
        kinds: dict[Sampling, list[int]] = {}
        for place, (row, _) in sorted(self._live.items()):
            kinds.setdefault(row.sampling, []).append(place)
        for sampling, places in kinds.items():
            own = [(self._live[place][0], len(self._live[place][1])) for place in places]
            columns = torch.tensor([[row.position + had] for row, had in own], device="cpu")
            numbers = uniforms([row.key for row, _ in own], [row.row for row, _ in own], columns)[:, 0]
            index = torch.tensor(places, device=logits.device)
            drawn = draw(logits[index], numbers.to(logits.device), sampling)
            values = zip(*(x.tolist() for x in drawn), strict=True)
            self._turn += [(row.number, had, *new) for (row, had), new in zip(own, values, strict=True)]
            logits[index, drawn.tokens] = torch.inf
        return logits

    def drawn(self) -> list[tuple[int, int, int, float, float]]:
        """The draws for rows of turns since the last call: each row's number, the place in its response, the token, and
        its two log-probs."""
        turn, self._turn = self._turn, []
        return turn

    def take(self, row: int, length: int) -> Answer:
        """Copy the tokens and the two kinds of log-probs that a row has drawn. `row` is the row's index in the batch of
        `begin`, and `length` the number of its tokens, now that it has ended. The draws stay until the next `begin`.
        Only for a rollout; see `drawn` for turns."""
        assert self._job is not None
        if self._steps:  # later steps win: a chunk of a prompt is followed by a draw too, which counts for nothing
            places = np.concatenate([step.places for step in self._steps])
            for column, pieces in zip(
                self._columns, zip(*(step[1:] for step in self._steps), strict=True), strict=True
            ):
                column[places] = torch.cat(pieces).cpu().numpy()
            self._steps = []
        start = row * self._job.sampling.max_tokens
        return Answer(*(column[start : start + length].copy() for column in self._columns))


def _moved(x: Tensor | None, device: torch.device) -> Tensor | None:
    return None if x is None else x.to(device)


def _forced(logits: Tensor, tokens: Tensor, sampling: Sampling) -> Draws:
    log_probs = (logits / sampling.temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return Draws(tokens, log_probs, log_probs)


class _Loading(NamedTuple):
    """Progress of a load: digests of tensors, names of filled parameters, and whether vLLM transfers the weights."""

    got: dict[str, str]  # digests
    filled: set[str]
    transfer: bool


class Extension:
    """Methods that each of vLLM's workers gets (`worker_extension_cls`)."""

    rank: int
    device: torch.device
    model_runner: Any
    vllm_config: Any
    fppo_memory: Mapping[str, Memory] = {}  # of the process that sends weights, by its path
    start_weight_update: Any
    finish_weight_update: Any

    def fppo_begin(self, job: Job | None) -> None:
        """Begin a rollout, or turns (no job)."""
        self._draws().begin(job)

    def fppo_drawn(self) -> list[tuple[int, int, int, float, float]] | None:
        """The draws of rows of turns since the last call."""
        drawn = self._draws().drawn()
        return drawn if self.rank == 0 else None

    def fppo_take(self, ended: Sequence[tuple[int, int]]) -> list[Answer] | None:
        """The answers of rows that ended, each with its length. All workers drew them; the first returns them."""
        draws = self._draws()
        return [draws.take(row, length) for row, length in ended] if self.rank == 0 else None

    def fppo_names(self, sent: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
        """The checkpoint names from which each module of the model is loaded; and for each of the names `sent`, the
        name that vLLM maps it to."""
        model = self.model_runner.get_model()
        mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
        rename = mapper and mapper.get_rename_mapper()
        return checkpoint_names(model), {name: (rename and rename.map_name(name)) or name for name in sent}

    def fppo_begin_load(self, method: DigestMethod, transfer: bool) -> None:
        """Prepare for weights, by `fppo_take_in` or by vLLM's own transfer engine, and digest them by `method`."""
        model = self.model_runner.get_model()
        loading = self._loading = _Loading({}, set(), transfer)
        load_weights = type(model).load_weights

        def recorded(stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            for name, x in stream:
                loading.got[name] = digest(x, method)
                yield name, x

        def load(stream: Iterable[tuple[str, Tensor]]) -> set[str]:
            filled = load_weights(model, recorded(stream)) or set()
            loading.filled.update(filled)
            return filled

        model.load_weights = load
        if transfer:
            self.start_weight_update()
        else:
            with set_current_vllm_config(self.vllm_config):
                initialize_layerwise_reload(model)

    def fppo_take_in(self, tensors: Mapping[str, Tensor]) -> None:
        """Load these weights from any device; they are digested on the worker's own."""
        here = {name: x.to(self.device) for name, x in tensors.items()}
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(here.items())

    def fppo_take_in_from(self, path: str, packed: PackedTree, spans: Sequence[tuple[int, int]]) -> None:
        """Load weights from another process's memory at `path`; large tensors are in the `spans` of bytes, (start,
        size) each."""
        if path not in self.fppo_memory:  # kept open: it is mapped, and pinned, once
            self.fppo_memory = {**self.fppo_memory, path: Memory.at(path)}
        arrays = self.fppo_memory[path].get(spans, self.device)
        self.fppo_take_in(tree_of(packed, tensors_of(packed, arrays, device=self.device)))

    def fppo_end_load(self) -> tuple[dict[str, str], list[str]]:
        """End a load. Returns the digest of each weight as it came, and the names of the parameters that vLLM did not
        fill."""
        model = self.model_runner.get_model()
        del model.load_weights
        if self._loading.transfer:
            self.finish_weight_update()
        else:
            with set_current_vllm_config(self.vllm_config):
                finalize_layerwise_reload(model, self.vllm_config.model_config)
            self.model_runner.reset_lora_state()
        _repack_shared(model, self._loading.filled)
        every = {_plain(name) for name, _ in model.named_parameters()}
        return self._loading.got, sorted(every - {_plain(name) for name in self._loading.filled})

    def fppo_take_adapter(
        self, number: int, config: Mapping[str, Any], factors: Mapping[str, Tensor]
    ) -> dict[str, str]:
        """Hold an adapter, and no other, under a new number. Returns the digest of each factor as it came.

        Raises ValueError for factors that vLLM would drop, since their modules cannot have any, and if vLLM then holds
        other factors.
        """
        manager: Any = self.model_runner.lora_manager._adapter_manager
        rename = getattr(manager.model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            number,
            {name: x.clone() for name, x in factors.items()},  # copies, since vLLM scales them in place
            PEFTHelper.from_dict(dict(config)),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=None if rename is None else rename.get_rename_mapper(),
        )
        places = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
        if lost := sorted(adapter.loras.keys() - places):
            raise ValueError(
                f"vLLM has no adapters of {lost[:5]}: leave them out of the adapter, or send merged weights"
            )
        came = {name: (x.lora_a.clone(), x.lora_b * x.scaling) for name, x in adapter.loras.items()}
        manager.remove_all_adapters()
        manager.add_adapter(adapter)
        manager.activate_adapter(number)
        slot = manager.lora_index_to_id.index(number)
        if lost := lost_modules(manager.modules, manager.packed_modules, came, slot):
            raise ValueError(f"vLLM holds other factors of {lost[:5]} than came")
        return {name: digest(x, "bytes") for name, x in factors.items()}

    def _draws(self) -> KeyedDraws:
        processors = self.model_runner.input_batch.logitsprocs.non_argmax_invariant
        return next(processor for processor in processors if isinstance(processor, KeyedDraws))


def _plain(name: str) -> str:
    """The name of a parameter without ".base_layer", which modules with room for an adapter put into it."""
    return name.replace(".base_layer.", ".")


def _repack_shared(model: Any, filled: Set[str]) -> None:
    """Prepare modules that share their weight with a loaded one again: vLLM prepares the loaded module alone, so that
    on a CPU a head tied to the embedding would keep the packed weights of the previous load."""
    holders: dict[int, list[tuple[bool, Any]]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and hasattr(getattr(module, "quant_method", None), "embedding"):
            holders.setdefault(weight.data_ptr(), []).append((_plain(f"{name}.weight") in filled, module))
    for sharers in holders.values():
        for was_filled, module in sharers:
            if not was_filled and any(other for other, _ in sharers):
                module.quant_method.process_weights_after_loading(module)


def checkpoint_names(model: Any) -> dict[str, list[str]]:
    """The checkpoint's names of the parameters in each module of a vLLM model; it fuses some (q, k and v; gate and up).

    Experts are left out: vLLM does not document how it stacks them.
    """
    packed: dict[str, list[str]] = {}
    for module in reversed([*model.modules()]):  # the model's own last; one that takes images may leave it to its parts
        packed |= getattr(module, "packed_modules_mapping", None) or {}
    names: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        if ".experts." in name:
            continue
        name = _plain(name)
        path = name.split(".")
        place = next((i for i, part in enumerate(path) if part in packed), None)
        own = [name]
        if place is not None:
            own = [".".join([*path[:place], part, *path[place + 1 :]]) for part in packed[path[place]]]
        names.setdefault(name.rpartition(".")[0], []).extend(own)
    return names
