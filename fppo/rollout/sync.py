"""Transfer of weights from the trainer to an engine: whole tensors in buckets, with a digest of each.

    for bucket in renamed(reshard(params, model.shapes, mesh, bucket_bytes=1 << 28), rename):
        ...  # bucket.tensors, bucket.digests

The engine digests the tensors that it received; `compare` names the tensors that went wrong on the way.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
import xxhash
from torch import Tensor

from fppo.runtime import digests
from fppo.runtime.layout import Layout
from fppo.runtime.mesh import CUTTING_AXES, Mesh, all_reduce, device_of
from fppo.runtime.parts import dtypes_of, whole_tensors
from fppo.tree import Away

Rename = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
DigestMethod = Literal["bytes", "sums"]  # the source of a digest; both sides of a sync must use the same


class SyncError(RuntimeError):
    """Error for an engine that does not hold the weights that it was sent."""


class Bucket(NamedTuple):
    """Whole tensors under the engine's names, and the digest of each as sent, computed by `method`."""

    tensors: dict[str, Tensor]
    digests: dict[str, str]
    method: DigestMethod


class CopyOrigin(NamedTuple):
    """The source of a copy of parameters: the leaves (tensors or handles) and their version."""

    version: int
    leaves: dict[str, weakref.ref[Any]]

    @staticmethod
    def of(params: Mapping[str, Any], version: int) -> CopyOrigin:
        """The origin of a copy of these parameters."""
        return CopyOrigin(version, {name: weakref.ref(x) for name, x in params.items()})

    def matches(self, params: Mapping[str, Any], version: int) -> bool:
        """Whether the copy is of these very leaves, at this version: a tensor that was written into has a newer
        version. Handles are immutable, so that their version does not matter."""
        fixed = all(isinstance(x, Away) for x in params.values())
        same = (fixed or self.version == version) and self.leaves.keys() == params.keys()
        return same and all(self.leaves[name]() is x for name, x in params.items())


def digest(x: Tensor, method: DigestMethod | None = None) -> str:
    """Digest a tensor's dtype, shape and bytes to 128 bits, in hexadecimal.

    "bytes" (the default on a CPU) is XXH3 of all bytes, read on the host. "sums" (the default elsewhere) computes the
    sums of `runtime.digests` on the tensor's device. Neither withstands chosen collisions, unlike `tree.digest`, which
    takes some twenty times as long as XXH3.
    """
    what = f"{x.dtype} {tuple(x.shape)} ".encode()
    words = digests.words_of(x)
    if (method or digest_method([x])) == "bytes":
        hasher = xxhash.xxh3_128(what)
        hasher.update(words.cpu().view(torch.uint8).numpy().data)
    else:
        hasher = hashlib.blake2b(what, digest_size=16)
        hasher.update(digests.block_sums(words).cpu().numpy().tobytes())
    return hasher.hexdigest()


def digest_method(tensors: Iterable[Tensor]) -> DigestMethod:
    """The digest method for these tensors: "bytes" if all of them are on the host, else "sums"."""
    return "bytes" if all(x.device.type == "cpu" for x in tensors) else "sums"


def reshard(
    params: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    mesh: Mesh | None = None,
    *,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
    only: Iterable[str] | None = None,
    exact: Collection[str] = (),
    layout: Layout | None = None,
) -> Iterator[Bucket]:
    """Yield whole parameters in buckets, in order: all, or those in `only`. Floating-point ones are cast to `dtype`,
    except for names in `exact`.

    Digests use the method of `digest_method`. A bucket takes at most `bucket_bytes` of additional memory, or a single
    larger tensor; whole parameters without a cast are not copied. On a mesh that cuts parameters (over tensor and
    pipeline axes by the model's `layout`) buckets are gathered: every rank must consume all of them, and all get the
    same.
    """
    mesh = mesh or Mesh.local()
    whole_shapes = shapes if layout is None else layout.whole
    dtypes = dtypes_of(params, mesh)
    wanted = set(dtypes) if only is None else set(only)
    names = [name for name in (params if layout is None else whole_shapes) if name in wanted]
    kinds = {name: sent_dtype(name, dtypes[name], dtype, exact) for name in names}
    how = digest_method(params.values())
    params = {name: x.detach() for name, x in params.items()}
    budget = bucket_bytes // 3 if mesh.cuts else bucket_bytes  # a gather holds its pieces, the buffer and the result
    sizes = {name: whole_shapes[name].numel() * kinds[name].itemsize for name in names}
    for piece in pieces(sizes, budget):
        whole = whole_tensors(params, piece, mesh, shapes=shapes, layout=layout, dtypes=kinds)
        yield Bucket(whole, {name: digest(x, how) for name, x in whole.items()}, how)


def sent_dtype(name: str, own: torch.dtype, dtype: torch.dtype | None, exact: Collection[str]) -> torch.dtype:
    """The dtype in which a parameter is sent: `dtype` for floating-point ones not in `exact`, else its `own`."""
    return dtype if dtype is not None and own.is_floating_point and name not in exact else own


def pieces(sizes: Mapping[str, int], budget: int) -> Iterator[list[str]]:
    """Split names, in order, into groups of at most `budget` bytes; a larger item is a group by itself."""
    piece: list[str] = []
    total = 0
    for name, size in sizes.items():
        if piece and total + size > budget:
            yield piece
            piece, total = [], 0
        piece.append(name)
        total += size
    if piece:
        yield piece


def changed(
    params: Mapping[str, Tensor],
    last: Mapping[str, str],
    mesh: Mesh | None = None,
    *,
    frozen: Iterable[str] = (),
    names: Iterable[str] | None = None,
) -> tuple[set[str], dict[str, str]]:
    """The names of parameters whose digests differ from `last` on any rank, and this rank's current digests of its
    parts.

    Parameters in `frozen` count as unchanged once `last` has them. Every rank of the mesh must call. On a pipeline
    axis, whose ranks hold different parameters, `names` are the parameters of all stages.
    """
    mesh = mesh or Mesh.local()
    names = list(params if names is None else names)
    still = set(frozen) & set(last)
    digests = {name: last[name] if name in still else digest(x) for name, x in params.items()}
    flags = torch.tensor([digests.get(name) != last.get(name) for name in names], device=device_of(params))
    for axis in (mesh[name] for name in (*CUTTING_AXES, "shard", "pipeline") if name != "shard" or mesh.sharded):
        flags = all_reduce(flags.int(), axis) > 0
    return {name for name, differs in zip(names, flags.tolist(), strict=True) if differs}, digests


def hf_weight_loader(name: str, x: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Keep a parameter under its Hugging Face name, which most of vLLM's models load."""
    return ((name, x),)


def split_experts(name: str, x: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Split a stacked tensor of experts, as in transformers, into one per expert, as in checkpoints and vLLM."""
    prefix, _, kind = name.rpartition(".")
    if not prefix.endswith(".experts") or kind not in ("gate_up_proj", "down_proj"):
        return ((name, x),)
    names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    return (
        (f"{prefix}.{expert}.{part}.weight", piece)
        for expert, both in enumerate(x)
        for part, piece in zip(names, both.chunk(len(names)), strict=True)
    )


RENAMES: Mapping[str, Rename] = {"qwen2_moe": split_experts, "qwen3_moe": split_experts}


def dtensor_weight_loader(model_type: str, renames: Mapping[str, Rename] = RENAMES) -> Rename:
    """Look up how a family's parameters are renamed for its engine, in a table that users can extend:

    dtensor_weight_loader("mine", {**RENAMES, "mine": lambda name, x: [(name.replace("blocks", "layers"), x)]})
    """
    return renames.get(model_type, hf_weight_loader)


def targets(shapes: Mapping[str, torch.Size], rename: Rename) -> dict[str, list[str]]:
    """The engine's names for each parameter, computed without tensors."""
    if rename is hf_weight_loader:
        return {name: [name] for name in shapes}
    metas = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return {name: [new for new, _ in rename(name, x)] for name, x in metas.items()}


def renamed(buckets: Iterable[Bucket], rename: Rename) -> Iterator[Bucket]:
    """Rename, and possibly split, each tensor of the buckets by `rename`.

    Raises SyncError if two parameters get one name.
    """
    if rename is hf_weight_loader:
        yield from buckets
        return
    seen: set[str] = set()
    for bucket in buckets:
        tensors: dict[str, Tensor] = {}
        digests: dict[str, str] = {}
        for name, x in bucket.tensors.items():
            for new, part in rename(name, x):
                if new in seen:
                    raise SyncError(f"two parameters are renamed to {new}, one of them {name}")
                seen.add(new)
                tensors[new] = part
                digests[new] = bucket.digests[name] if part is x else digest(part, bucket.method)
        yield Bucket(tensors, digests, bucket.method)


def compare_names(expected: Iterable[str], sent: Iterable[str]) -> None:
    """Raise SyncError for names that an engine expects but would not be sent, or that it would be sent but does not
    know."""
    expected, sent = set(expected), set(sent)
    wrong = [
        f"{what}: {_some(sorted(names))}"
        for what, names in (("missing", expected - sent), ("unknown", sent - expected))
        if names
    ]
    if wrong:
        raise SyncError("the engine's model takes other parameters than it would be sent; " + "; ".join(wrong))


def compare(sent: Mapping[str, str], got: Mapping[str, str]) -> None:
    """Raise SyncError for tensors that were lost, added or changed in transfer, by name."""
    missing, unknown = sorted(sent.keys() - got.keys()), sorted(got.keys() - sent.keys())
    other = sorted(name for name in sent.keys() & got.keys() if sent[name] != got[name])
    wrong = [
        f"{what}: {_some(names)}"
        for what, names in (("missing", missing), ("unknown", unknown), ("changed on the way", other))
        if names
    ]
    if wrong:
        raise SyncError("the engine does not hold the weights it was sent; " + "; ".join(wrong))


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
