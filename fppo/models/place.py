"""Place models on tensor, expert and pipeline axes, and check that the ranks together compute the model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from fppo.models import probe as probes
from fppo.models.experts import Dispatched, dispatched
from fppo.models.heads import embedding_name, logits_of, output_head, vocabulary_head
from fppo.models.inner import OWN
from fppo.models.model import Model, Params, build, packed_attention
from fppo.models.narrow import find_cuts, narrow, with_whole_heads
from fppo.models.regions import BlockSeam, EmbeddingSeam, Region, WidthSeam, replace
from fppo.models.run import hidden_states
from fppo.models.spans import layer_spans, stage_layout, staged, unstaged
from fppo.models.states import check_rows_whole
from fppo.models.vision_pass import place_images
from fppo.runtime import fsdp
from fppo.runtime.layout import Cut, Layout
from fppo.runtime.mesh import Mesh
from fppo.runtime.parts import dtypes_of, whole_tensors
from fppo.runtime.simulate import simulate
from fppo_kernels import collectives
from fppo_kernels.attention.sdpa import sdpa
from fppo_kernels.collectives import Axis
from fppo_kernels.padding import make_lengths


@attrs.frozen(eq=False)
class Narrowed:
    """A model prepared for a tensor axis of `ranks` ranks, before a rank is chosen: the `narrower` model of a rank, the
    `cuts` of its parameters, and those of the widths that `norms` average over."""

    model: Model
    narrower: Model
    cuts: Mapping[str, Cut]
    norms: Mapping[str, Cut]  # paths of norms over a cut width, with its cut; the norms are whole on every rank
    ranks: int

    def layout(self, axis: Axis) -> Layout:
        """The layout of the parameters on this rank of a tensor axis of `ranks` ranks."""
        return Layout(self.model.shapes, self.cuts, _added_once(self.model, self.cuts), axis.rank, axis.size)

    def on(self, axis: Axis) -> Model:
        """The model of this rank of a tensor axis of `ranks` ranks."""
        skeleton, region, layout = copy.deepcopy(self.narrower.skeleton), Region(axis), self.layout(axis)
        for path, cut in self.norms.items():
            replace(skeleton, path, lambda norm, cut=cut: WidthSeam(norm, region, cut))
        for path in _cut_blocks(self.narrower, self.cuts):
            replace(skeleton, path, lambda block: BlockSeam(block, region))
        name = embedding_name(self.narrower)
        first, _ = self.cuts[name].runs(axis.rank)[0]
        path = name.removeprefix(self.narrower.prefix).removesuffix(".weight")
        replace(skeleton, path, lambda embedding: EmbeddingSeam(embedding, region, first))
        placed = attrs.evolve(
            self.model,
            skeleton=skeleton,
            shapes=layout.shapes,
            constants=self.narrower.constants,
            layout=layout,
            unplaced=self.model,
        )
        placed._copies.kept = (OWN, None), {False: skeleton}  # this thread's own already
        return placed


def narrowed(model: Model, ranks: int) -> Narrowed:
    """Prepare a model for a tensor axis of `ranks` ranks. Raises ValueError as `place` does."""
    if model.layout is not None:
        raise ValueError("the model is placed on a tensor axis already")
    check_rows_whole(model.whole_config, {"tensor": ranks})
    small = narrow(model.whole_config, ranks)
    try:
        narrower = build(small, model.head, outputs=model.outputs, trust_remote_code=model.trust_remote_code)
        narrower = with_whole_heads(narrower, model)
        cuts = find_cuts(model.shapes, narrower.shapes, model.config)
        _check_blocks(model, cuts)
    except Exception as error:  # a class may raise any exception for sizes that do not fit
        kind = f"model type {model.config.model_type!r}"
        raise ValueError(f"fppo cannot run {kind} on a tensor axis of {ranks} ranks: {error}") from error
    norms = _norms(narrower, cuts)
    within = tuple(f"{model.prefix}{path}." for path in norms)
    cuts = {name: cut for name, cut in cuts.items() if not name.startswith(within)}
    return Narrowed(model, narrower, cuts | _vocabulary_cuts(model, ranks), norms, ranks)


@attrs.frozen(eq=False)
class Prepared:
    """A model prepared for the tensor and expert axes of a mesh, before a rank is chosen: the slow part of `place`,
    done once for all ranks and for all meshes with these axes' sizes."""

    model: Model
    narrowed: Narrowed | None = None
    dispatched: Dispatched | None = None

    def layout(self, mesh: Mesh, cuts: Sequence[range] | None = None) -> Layout | None:
        """The layout of the parameters on this rank of the mesh, None if all are whole. `cuts` are the layers of each
        pipeline stage, as in `on`."""
        layout, pipeline = None if self.narrowed is None else self.narrowed.layout(mesh["tensor"]), mesh["pipeline"]
        if self.dispatched is not None:
            layout = self.dispatched.layout(mesh["expert"], layout)
        if pipeline.size == 1:
            return layout
        spans = layer_spans(self.model, pipeline.size * mesh.virtual_stages) if cuts is None else cuts
        return stage_layout(self.model, layout, pipeline, spans)

    def on(self, mesh: Mesh, cuts: Sequence[range] | None = None) -> Model:
        """The model of this rank of the mesh. `cuts` are the layers of each pipeline stage; None: chosen so that the
        stages have equal work."""
        tensor, pipeline = mesh["tensor"], mesh["pipeline"]
        placed = None if self.narrowed is None else self.narrowed.on(tensor)
        if self.dispatched is not None:
            placed = self.dispatched.on(mesh["expert"], placed, tensor)
        placed = placed or self.model
        if pipeline.size == 1:
            return placed
        return staged(placed, pipeline, virtual_stages=mesh.virtual_stages, cuts=cuts)

    def like(self, model: Model) -> Prepared:
        """This preparation for a model that differs only in its compute dtype, recomputation or the like."""
        narrower, fewer = self.narrowed, self.dispatched
        return Prepared(
            model,
            None if narrower is None else attrs.evolve(narrower, model=model),
            None if fewer is None else attrs.evolve(fewer, model=model),
        )


def prepare(model: Model, mesh: Mesh) -> Prepared:
    """Prepare a model for a mesh's axis sizes. Raises ValueError as `place` does."""
    if model.frozen is not None or model.forms:
        raise ValueError(
            "a model is placed before it is quantised or adapted: place the plain one, and adapt the result"
        )
    tensor, expert = mesh["tensor"].size, mesh["expert"].size
    return Prepared(
        model,
        None if tensor == 1 else narrowed(model, tensor),
        None if expert == 1 else dispatched(model, expert),
    )


def place(model: Model, mesh: Mesh) -> Model:
    """The model of this rank of the mesh: on a tensor axis a narrower model on cuts of the parameters, on a pipeline
    axis the layers of its stages, on an expert axis some of the experts, which the tensor axis does not cut.
    `own_params` selects its parameters from whole ones. Place a model once.

    Raises ValueError with all sizes that the tensor or expert axis does not divide; for a model that cannot be cut, or
    is adapted; and for fewer layers than stages.
    """
    return prepare(model, mesh).on(mesh)


def place_beside(model: Model, other: Model, mesh: Mesh) -> Model:
    """Place a model that was made from the tensors of `other`, a placed model, with the pipeline stages of `other`.
    Raises ValueError as `place` does."""
    stages = mesh["pipeline"].size * mesh.virtual_stages
    cuts = layer_spans((other.unplaced or other).plain, stages) if other.spans else None
    return prepare(model, mesh).on(mesh, cuts)


def own_params(model: Model, params: Params, mesh: Mesh) -> Params:
    """This rank's parts of whole parameters of a placed model; the parameters themselves if nothing is cut."""
    layout = model.layout
    if layout is not None:
        params = {name: layout.take(name, x).detach().clone() for name, x in params.items() if layout.holds(name)}
    return fsdp.shard(params, mesh, model.cuts)


def whole_params(
    model: Model,
    params: Mapping[str, Tensor],
    mesh: Mesh,
    *,
    names: Iterable[str] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> Params:
    """Gather the whole parameters `names` (None: all) from the parts on all ranks of the mesh, by collectives and
    without gradients. `params` are this rank's parts.

    `dtypes` has the dtype of the result for each parameter of the model, also those of other ranks' layers. None: each
    keeps its dtype, which the ranks first tell each other.
    """
    kinds = dtypes_of(params, mesh) if dtypes is None else dtypes
    wanted = set(kinds if names is None else names)
    order = [name for name in model.kept_shapes if name in wanted]
    return whole_tensors(params, order, mesh, shapes=model.all_shapes, layout=model.layout, dtypes=kinds)


def tensor_axis(model: Model, mesh: Mesh) -> Axis:
    """The mesh's tensor axis if it cuts the model and no expert axis does; else an axis of one rank."""
    cut = model.layout is not None and mesh["expert"].size == 1
    return mesh["tensor"] if cut else Axis()


def tensor_parts(model: Model, params: Mapping[str, Tensor], mesh: Mesh) -> tuple[Model, Params]:
    """The model cut over its `tensor_axis` alone, with all layers, and this rank's parts of all parameters, gathered
    over the other axes by collectives, without gradients. Without such an axis model and parameters are whole."""
    layout = model.layout
    if layout is None or tensor_axis(model, mesh).size == 1:
        return model.unplaced or model, whole_params(model, params, mesh)
    parts = {name: layout.shape(name) for name in layout.whole}
    as_whole = attrs.evolve(model, layout=attrs.evolve(layout, whole=parts, cuts={}))
    return unstaged(model), whole_params(as_whole, params, mesh)


def _check_blocks(model: Model, cuts: Mapping[str, Cut]) -> None:
    """Raise ValueError for a layer with a block (attention, MLP) of which `cuts` has no parameter: every rank would
    compute the whole of it. A layer without any matrix raises too."""
    for path in model.layers:
        start = f"{model.prefix}{path}."
        names = [name for name in model.shapes if name.startswith(start)]
        blocks = dict.fromkeys(n[len(start) :].split(".")[0] for n in names if len(model.shapes[n]) > 1)
        whole = [block for block in blocks if not any(name.startswith(f"{start}{block}.") for name in cuts)]
        if whole or not blocks:
            what = " and ".join(whole) or "anything"
            raise ValueError(f"fewer heads and narrower inner widths do not make {what} of {path} smaller")


def _norms(narrower: Model, cuts: Mapping[str, Cut]) -> dict[str, Cut]:
    """Find the norms that average over a width which the tensor axis cuts. Returns the cut of that width by the norm's
    path in the skeleton.

    A module is such a norm if its own parameters are all vectors, and these are cut themselves, or are as long as the
    uncut output of the projection of the same name (OLMoE's q_norm, over all heads of q_proj; k_norm likewise).
    """
    found = {}
    for path, module in narrower.skeleton.named_modules():
        vectors = dict(module.named_parameters(recurse=False))
        if not vectors or list(module.children()) or any(x.dim() != 1 for x in vectors.values()):
            continue
        own = cuts.get(f"{narrower.prefix}{path}.{next(iter(vectors))}")
        projection = cuts.get(f"{narrower.prefix}{path.removesuffix('_norm')}_proj.weight")
        if own is not None:
            found[path] = own
        elif projection is not None and sum(projection.segments) == len(next(iter(vectors.values()))):
            found[path] = projection
    return found


def _cut_blocks(narrower: Model, cuts: Mapping[str, Cut]) -> list[str]:
    """The paths of blocks, direct children of layers like attention or MLP, that have cut parameters."""
    starts = {f"{narrower.prefix}{path}.": path for path in narrower.layers}
    owners = {
        f"{path}.{name[len(start) :].split('.')[0]}"
        for name in cuts
        for start, path in starts.items()
        if name.startswith(start)
    }
    return sorted(owners)


def _vocabulary_cuts(model: Model, ranks: int) -> dict[str, Cut]:
    """The cuts of the rows of the embeddings and of the vocabulary head."""
    names = {embedding_name(model), *(vocabulary_head(model) if model.head == "lm" else ())}
    return {name: Cut(0, ranks, (model.shapes[name][0],)) for name in names if name in model.shapes}


def _added_once(model: Model, cuts: Mapping[str, Cut]) -> frozenset[str]:
    """The names of whole biases whose weights are cut. Ranks sum their shares of the product, so only one of them adds
    such a bias."""
    ends = ((".bias", ".weight"), ("_bias", ""))
    weights = {name: name[: -len(end)] + rest for name in model.shapes for end, rest in ends if name.endswith(end)}
    return frozenset(name for name, weight in weights.items() if name not in cuts and weight in cuts)


@torch.no_grad()
def check_placed(model: Model, ranks: int) -> None:
    """Compare a model cut over a simulated tensor axis with the model itself, as small random instances.

    Raises ValueError that names the model type if logits differ or its code fails on slices of the tokens.
    """
    check_rows_whole(model.whole_config, {"tensor": ranks})
    kind, probe = model.config.model_type, probes.make_probe(model, heads=(4, 2, None))
    heads, key_heads = _heads(probe.model)
    replicated = _heads(model)[1] % ranks != 0
    fitting = [n for n in (2, 4, 3, heads) if heads % n == 0 and (key_heads % n != 0) == replicated]
    few = (fitting or [2])[0]
    whole = {name: x.double() for name, x in probe.params.items()}  # kernels in float32 refuse some widths
    rows = probes.probe_rows(probe)
    lengths = [len(row) for row in rows]
    lengths.append(-sum(lengths) % few or few)
    tokens = torch.cat([*rows, rows[0].new_zeros(lengths[-1])])
    inputs = [*(probe.inputs_of(row) for row in rows), None]
    images, positions = place_images(
        probe.model, inputs, tokens, torch.cat([torch.arange(n) for n in lengths]), lengths
    )
    attend = packed_attention(sdpa, make_lengths(lengths))

    cut = narrowed(probe.model, few)

    def run(mesh: Mesh) -> Tensor:
        placed = probe.model if mesh["tensor"].size == 1 else cut.on(mesh["tensor"])
        params = own_params(placed, whole, mesh)
        hidden = hidden_states(placed, params, tokens, positions, attend=attend, received=images)
        return logits_of(output_head(placed, params), collectives.all_gather(hidden, mesh["tensor"]))

    (expected,) = simulate({"tensor": 1}, run)
    try:
        logits = torch.cat(simulate({"tensor": few}, run), 1)
    except Exception as error:
        raise ValueError(
            f"fppo cannot run model type {kind!r} on a tensor axis of {ranks} ranks: its code fails where each rank "
            f"has a slice of the tokens: {type(error).__name__}: {error}"
        ) from error
    if (wrong := probes.difference(logits, expected)) is not None:
        raise ValueError(
            f"fppo cannot run model type {kind!r} on a tensor axis of {ranks} ranks: cut over {few}, a small random "
            f"model of this kind gives logits that differ by {wrong:.2g} from those of the whole one"
        )


@torch.no_grad()
def check_dispatched(model: Model, ranks: int, *, tensor: int = 1) -> None:
    """Compare a model cut over a simulated expert axis, one row per rank, with the model itself, as small random
    instances; with `tensor` > 1 a tensor axis of two ranks cuts the rest.

    Raises ValueError that names the model type if logits differ or its code fails.
    """
    kind, probe = model.config.model_type, probes.make_probe(model, heads=(4, 2, None) if tensor > 1 else (2, 4, None))
    few, slices = 2 if ranks % 2 == 0 else ranks, min(tensor, 2)
    whole, rows = {name: x.double() for name, x in probe.params.items()}, probes.probe_rows(probe)
    sizes = {"expert": few, "tensor": slices}
    words = f"fppo cannot run model type {kind!r} on an expert axis of {ranks} ranks"
    words += f" and a tensor axis of {tensor}" if tensor > 1 else ""

    def logits(placed: Model, params: Params, row: Tensor, axis: Axis) -> Tensor:
        fill = row[: -len(row) % slices]
        attend = packed_attention(sdpa, make_lengths([len(row), len(fill)] if len(fill) else [len(row)]))
        positions = torch.cat([torch.arange(len(row)), torch.arange(len(fill))])
        hidden = hidden_states(placed, params, torch.cat([row, fill]), positions, attend=attend)
        return logits_of(output_head(placed, params), collectives.all_gather(hidden, axis))[: len(row)]

    expected = [logits(probe.model, whole, row, Axis()) for row in rows]
    try:
        cut = prepare(probe.model, Mesh({name: Axis(size) for name, size in sizes.items()}))

        def run(mesh: Mesh) -> Tensor:
            placed, row = cut.on(mesh), rows[mesh["expert"].rank % len(rows)]
            return logits(placed, own_params(placed, whole, mesh), row, mesh["tensor"])

        found = simulate(sizes, run)
    except Exception as error:
        raise ValueError(
            f"{words}: its code fails where each rank has some of the experts: {type(error).__name__}: {error}"
        ) from error
    for rank, got in enumerate(found):
        own = expected[rank // slices % len(rows)]
        columns = Cut(1, slices, (own.shape[1],)).take(own, rank % slices)
        if (wrong := probes.difference(got, columns)) is not None:
            raise ValueError(
                f"{words}: cut over {few}, a small random model of this kind gives logits that differ by {wrong:.2g} "
                "from those of the whole one"
            )


@torch.no_grad()
def check_staged(model: Model) -> None:
    """Compare a model cut into two stages, run one after the other, with the model itself, as small random instances.
    Raises ValueError that names the model type if logits differ or its code fails on a stage."""
    kind, probe = model.config.model_type, probes.make_probe(model)
    params = {name: x.double() for name, x in probe.params.items()}
    rows = probes.probe_rows(probe)
    tokens, lengths = torch.cat(rows), [len(row) for row in rows]
    images, positions = place_images(
        probe.model,
        [probe.inputs_of(row) for row in rows],
        tokens,
        torch.cat([torch.arange(length) for length in lengths]),
        lengths,
    )
    attend = packed_attention(sdpa, make_lengths(lengths))
    whole = hidden_states(probe.model, params, tokens, positions, attend=attend, received=images)
    expected = logits_of(output_head(probe.model, params), whole)
    words = f"fppo cannot run model type {kind!r} on a pipeline axis"
    try:
        hidden = None
        for stage in range(2):
            placed = staged(probe.model, Axis(2, stage))
            own = {name: params[name] for name in placed.shapes}
            received = images if hidden is None else hidden
            hidden = hidden_states(placed, own, tokens, positions, attend=attend, received=received)
        assert hidden is not None
        logits = logits_of(output_head(placed, own), hidden)
    except Exception as error:  # a class may raise any exception
        raise ValueError(f"{words}: its code fails on some of its layers: {type(error).__name__}: {error}") from error
    if (wrong := probes.difference(logits, expected)) is not None:
        raise ValueError(
            f"{words}: more than hidden states passes between its layers, or its norms are in an unknown position: cut "
            f"into two stages, a small random model of this kind gives logits that differ by {wrong:.2g}"
        )


def _heads(model: Model) -> tuple[int, int]:
    """The numbers of the model's query heads and key heads."""
    heads = model.config.num_attention_heads
    return heads, getattr(model.config, "num_key_value_heads", None) or heads
