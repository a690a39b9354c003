"""Laws of exact engines: log-probs with the bits of a training pass, whatever rows are sampled or trained together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import torch
from torch import Tensor

from fppo.laws._search import Law, LawExample, check

if TYPE_CHECKING:  # models import transformers, which the other laws do not need
    from fppo.batch import Rollout
    from fppo.rollout.embedded import EmbeddedEngine
    from fppo.rollout.engine import Ask

SIZES = ((1, 1), (1, 3), (2, 2), (3, 5), (5, 18))  # prompts, and the most tokens of each
SEEDS = 4
_LONGEST = 12  # tokens of a response
# options of `Sampling`, by an example's seed
_SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"n": 2},
    {"temperature": 0.7, "top_k": 4, "n": 3},
    {"greedy": True},
    {"temperature": 1.6, "n": 3},
)
_PASSES = ((None, None), (1, None), (3, None), (None, 40))  # rows of a micro-batch, or tokens


class ExactCase(NamedTuple):
    """An engine and its parameters, which the laws of exact engines take in the place of a function."""

    engine: EmbeddedEngine
    params: Mapping[str, Tensor]


def _ask(example: LawExample) -> Ask:
    from fppo.batch import Column, Prompts
    from fppo.key import Key
    from fppo.rollout.engine import Ask, Sampling

    tokens, mask = example.inputs["tokens"], example.inputs["mask"]
    seed = int(example.extras["seed"])
    texts = Column([""] * len(tokens))
    prompts = Prompts(
        tokens=tokens,
        attention_mask=mask,
        row_ids=torch.arange(len(tokens)),
        ids=texts,
        ground_truth=texts,
        source=texts,
        extras=texts,
    )
    stops = () if seed % 2 else (int(tokens[mask].max()),)
    how = _SAMPLINGS[seed % len(_SAMPLINGS)]
    return Ask(prompts, Sampling(max_tokens=_LONGEST, stop_token_ids=stops, **how), Key(seed))


def _differ(rows: Rollout, log_probs: Tensor) -> str | None:
    """Describe the first token whose log-prob is not bit-equal to `log_probs` [B, T]; None if all are."""
    own = rows.rollout_log_probs
    wrong = (own.to(log_probs.dtype) != log_probs) & rows.response_mask
    if not wrong.any():
        return None
    row, place = (int(x) for x in wrong.nonzero()[0])
    count, total = int(wrong.sum()), int(rows.response_mask.sum())
    pair = f"{float(own[row, place]):.9g} by the engine and {float(log_probs[row, place]):.9g} by the pass"
    return f"{count} of {total} log-probs differ, as that of token {place} of row {row}: {pair}"


def _pass(
    case: ExactCase, rows: Rollout, ask: Ask, size: int | None, budget: int | None, *, share: bool = False
) -> Tensor:
    """The log-probs [B, T] of a training pass over the rows, cut into micro-batches of `size` rows or `budget` tokens,
    at the temperature of `ask`. `share`: common prefixes of rows are computed once."""
    from fppo.steps import Forward, MicroBatching, compute_log_probs

    engine = case.engine
    size = len(rows.tokens) if size is None and budget is None else size
    forward = Forward(engine.model, engine.kernels, engine.mesh, share_prompts=share)
    cut = MicroBatching(size=size, token_budget=budget)
    return compute_log_probs(
        dict(case.params), rows, forward=forward, micro_batching=cut, temperature=ask.sampling.temperature
    )


def _one_pass(case: Any, example: LawExample, generator: torch.Generator) -> str | None:
    ask = _ask(example)
    rows = case.engine.generate(case.params, ask)
    return _differ(rows, _pass(case, rows, ask, None, None))


def _cuts(case: Any, example: LawExample, generator: torch.Generator) -> str | None:
    from fppo.batch import rows as rows_of

    ask = _ask(example)
    rollout = case.engine.generate(case.params, ask)
    for size, budget in _PASSES:
        order = torch.randperm(len(rollout.tokens), generator=generator).tolist()
        rows = rows_of(rollout, order)
        if reason := _differ(rows, _pass(case, rows, ask, size, budget)):
            cut = f"{size} rows" if size else f"{budget} tokens" if budget else "all rows"
            return f"in passes of {cut}, in the order {order}, {reason}"
    return None


def _shared(case: Any, example: LawExample, generator: torch.Generator) -> str | None:
    ask = _ask(example)
    rows = case.engine.generate(case.params, ask)
    return _differ(rows, _pass(case, rows, ask, None, None, share=True))


def _company(case: Any, example: LawExample, generator: torch.Generator) -> str | None:
    ask = _ask(example)
    rollout = case.engine.generate(case.params, ask)
    alone = {"max_rows": 1, "prefill_tokens": 1}
    few = {"max_rows": 4, "prefill_tokens": 8}
    for how in (alone, few):
        other = attrs.evolve(case.engine, **how).generate(case.params, ask)
        words = f"{how['max_rows']} rows at a time, of {how['prefill_tokens']} prompt tokens a pass"
        if not torch.equal(other.tokens, rollout.tokens):
            return f"{words}: other tokens are drawn"
        if reason := _differ(other, rollout.rollout_log_probs):
            return f"{words}: {reason.replace('the pass', 'the engine with all rows')}"
    return None


_LAWS = (
    Law("one pass", "the engine's log-probs are those of a pass over its rows, bit for bit", _one_pass),
    Law("any pass", "so they are whatever rows a pass takes together, and in any order", _cuts),
    Law("shared prompts", "so they are in a pass that computes prompts once for all their responses", _shared),
    Law("company", "a row's tokens and log-probs do not depend on the rows that are sampled with it", _company),
)


def _example(vocabulary: int, longest: int, rows: int, width: int, seed: int) -> LawExample:
    """Left-padded prompts of tokens below `vocabulary`; all but the first may be short."""
    generator = torch.Generator().manual_seed(1000 * rows + 100 * width + seed)
    width = min(width, longest - _LONGEST)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    lengths[0] = width
    mask = torch.arange(width) >= width - lengths
    tokens = torch.randint(vocabulary, (rows, width), generator=generator).where(mask, 0)
    return LawExample({"tokens": tokens, "mask": mask}, {"seed": torch.tensor(seed)}, torch.ones(rows, width))


def check_exact(
    engine: EmbeddedEngine,
    params: Mapping[str, Tensor] | None = None,
    *,
    sizes: Sequence[tuple[int, int]] = SIZES,
    seeds: int = SEEDS,
) -> None:
    """Check that log-probs of an engine's rollouts are bit-equal to a training pass with its kernels, for any prompts,
    cache, passes and order of rows, greedy and sampled.

    `params` are the model's parameters; None: random ones. `sizes` are (number of prompts, most tokens of each). The
    training pass is that of `steps.compute_log_probs`, packed. Raises LawViolation with the prompts that show a
    difference.
    """
    from fppo import models
    from fppo.key import Key
    from fppo.models.lengths import longest_row

    model = engine.model
    if params is None:
        params = models.init_params(model, Key(0))
    longest = longest_row(model.config) or getattr(model.config, "max_position_embeddings", None) or 1 << 20
    check(
        ExactCase(engine, params),  # type: ignore[arg-type]  # what the laws are of
        _LAWS,
        partial(_example, model.config.vocab_size, longest),
        sizes=sizes,
        seeds=seeds,
        name=f"EmbeddedEngine of {model.config.model_type!r}",
    )
