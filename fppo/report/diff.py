"""The first difference of two runs and its size, by their logged metrics, and digests and sketches of their states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from fppo.batch import Annotated, Experience, Prompts, Rollout, Scored
from fppo.pipeline.replay import Difference, DifferingLeaf, first_difference
from fppo.report.remains import DIGESTS
from fppo.runs import bits, jsonl, origins, starts
from fppo.runs.loggers import METRICS

SHOWN = 5  # metrics, and leaves, named at most
_UNLIKE = ("timing_s/", "perf/")  # metrics that differ between any two runs
_EVALUATED = ("val-", "critic/true/")  # metrics of steps with an evaluation
_ROUNDING = 1e-6
_WHERE = ("output_dir", "resume")  # settings of a run's location
_DRAWN = "the drawing of prompts"
_STAGES = (_DRAWN, "gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
_OF_BATCH: Mapping[str, str] = MappingProxyType(  # the stage that makes each field of a batch
    {
        field.name: stage
        for record, stage in ((Experience, "adv"), (Annotated, "old_log_prob"), (Scored, "reward"), (Rollout, "gen"))
        for field in attrs.fields(record)
    }
    | {field.name: _DRAWN for field in attrs.fields(Prompts) if field.name not in ("tokens", "attention_mask")}
    | {"ref_log_probs": "ref", "values": "values", "kl": "adv"}
)
_OF_STATE: Mapping[str, str] = MappingProxyType(  # and of the state after a step
    {"kl": "adv", "ahead": "gen", "critic": "update_critic"}
    | dict.fromkeys(("actor", "teacher", "entropy"), "update_actor")
)


@attrs.frozen
class Diff:
    """The comparison of two runs in lines, and whether they differ in a common step."""

    lines: list[str]
    differs: bool


@attrs.frozen
class _RecordedRun:
    """A run's metrics and digests by step, and the settings of its last start."""

    path: Path
    metrics: Mapping[int, Mapping[str, Any]]
    digests: Mapping[int, Mapping[str, Any]]
    settings: Mapping[str, Any]

    @property
    def steps(self) -> set[int]:
        return {*self.metrics, *self.digests}


def diff(first: Path, second: Path) -> Diff:
    """Compare the common steps of two runs, by digests of batches and states, and by metrics.

    Raises ValueError for a directory without a run, and for runs without a common step.
    """
    a, b = _read(first), _read(second)
    common = sorted(a.steps & b.steps)
    if not common:
        held = " and ".join(f"{run.path} holds steps {jsonl.spans(run.steps)}" for run in (a, b))
        raise ValueError(f"the runs have no step in common: {held}")
    lines = [*_settings(a, b), *_alone(a, b), *_evaluated_alone(common, a, b)]
    rounded: dict[int, Difference] = {}  # differences in columns that metrics alone read
    for step in common:
        difference = _difference(step, a, b)
        if difference is not None and difference.is_of_metrics(a.settings.get("model.compute_dtype", "float32")):
            rounded[step] = difference
            continue
        found = [*_digests(difference, step, a, b), *_metrics(step, a, b)]
        if found:
            equal = [each for each in common if each < step and each not in rounded]
            before = f"equal in steps {jsonl.spans(equal)}" if equal else "no step before is equal"
            found = [f"the first step to differ is {step} ({before})", *found, *_grounds(step, a, b)]
            return Diff([*lines, *_rounded(rounded), *found], True)
    equal = [step for step in common if step not in rounded]
    same = [f"equal in steps {jsonl.spans(equal)}, {_extent(equal, a, b)}"] if equal else []
    grounds = _grounds(min(rounded), a, b) if rounded else ()
    return Diff([*lines, *_rounded(rounded), *grounds, *same], bool(rounded))


def _rounded(differences: Mapping[int, Difference]) -> Iterator[str]:
    """A line on steps that differ by rounding alone, in columns that only metrics are computed from; no line without
    such steps."""
    if differences:
        sizes = {x.leaf: x.size for each in differences.values() for x in each.leaves}
        shown = ", ".join(f"{leaf} (by {size})" for leaf, size in [*sizes.items()][:SHOWN])
        text = "a rounding that metrics alone read, for the states after them are equal, bit for bit"
        yield f"steps {jsonl.spans({*differences})} differ in {shown}: {text}"


def _read(path: Path) -> _RecordedRun:
    metrics, digests = (
        {line["step"]: line for line in jsonl.read(path / name, on_damage=lambda _: None) if "step" in line}
        for name in (METRICS, DIGESTS)
    )
    if not metrics and not digests:
        raise ValueError(f"{path} holds no {METRICS} and no {DIGESTS} with a step; give the output_dir of a run")
    return _RecordedRun(path, metrics, digests, starts.last(path))


def _settings(a: _RecordedRun, b: _RecordedRun) -> Iterator[str]:
    names = [name for name in {**a.settings, **b.settings} if name not in _WHERE]
    unlike = [name for name in names if a.settings.get(name) != b.settings.get(name)]
    if unlike:
        shown = ", ".join(f"{name} {a.settings.get(name)!r} and {b.settings.get(name)!r}" for name in unlike)
        yield f"settings that differ: {shown}"


def _alone(a: _RecordedRun, b: _RecordedRun) -> Iterator[str]:
    for run, other in ((a, b), (b, a)):
        if left := run.steps - other.steps:
            yield f"{run.path} alone has steps {jsonl.spans(left)}"


def _evaluated_alone(common: Sequence[int], a: _RecordedRun, b: _RecordedRun) -> Iterator[str]:
    for run, other in ((a, b), (b, a)):
        both = [step for step in common if step in run.metrics and step in other.metrics]
        if left := {
            step for step in both if _is_evaluated(run.metrics[step]) and not _is_evaluated(other.metrics[step])
        }:
            yield f"{run.path} alone was evaluated in steps {jsonl.spans(left)}"


def _is_evaluated(line: Mapping[str, Any]) -> bool:
    return any(name.startswith(_EVALUATED) for name in line)


def _difference(step: int, a: _RecordedRun, b: _RecordedRun) -> Difference | None:
    """The difference in the digests of a step; None without any, and where the two cannot be compared."""
    one, other = a.digests.get(step), b.digests.get(step)
    if one is None or other is None or _kind(one) != _kind(other):
        return None
    return first_difference(step, one, other)


def _digests(difference: Difference | None, step: int, a: _RecordedRun, b: _RecordedRun) -> Iterator[str]:
    """Lines on the differences in a step's batch and in the state after it, with the earliest stage and the sizes."""
    if difference is None:
        return
    unlike = difference.leaves
    maker = min((_maker(x) for x in unlike), key=lambda stage: _STAGES.index(stage))
    own = [x for x in unlike if _maker(x) == maker]
    counts = [
        f"{sum(x.part == part for x in unlike)} of {len({**a.digests[step][part], **b.digests[step][part]})} {of}"
        for part, of in (("batch", "columns of its batch"), ("result", "leaves of the state after it"))
    ]
    shown = [x.leaf if x.size is None else f"{x.leaf} (by {x.size})" for x in own[:SHOWN]]
    more = f" and {len(own) - SHOWN} more" if len(own) > SHOWN else ""
    yield f"  first in what {maker} made: {', '.join(shown)}{more}"
    known = [x.size.relative for x in unlike if x.size is not None]
    most = f", by at most about {max(known):.0e} of their size" if known else ""
    yield f"  {' and '.join(counts)} differ{most}"


def _grounds(step: int, a: _RecordedRun, b: _RecordedRun) -> Iterator[str]:
    """A line on the grounds of bits (`bits.ground`) that differed when the two runs made a step."""
    found = [origins.load(run.path, max(step, 1)) for run in (a, b)]
    grounds = [{} if origin is None else origin.ground for origin in found]
    if all(grounds) and (others := bits.unlike(*grounds)):
        yield f"  bits of the two need not be equal: {'; '.join(others)}"


def _maker(differing: DifferingLeaf) -> str:
    """The stage that made a leaf; leaves that no stage changes belong to the drawing of prompts."""
    name = differing.leaf.removeprefix(".").partition("[")[0].partition(".")[0]
    return (_OF_BATCH if differing.part == "batch" else _OF_STATE).get(name, _DRAWN)


def _metrics(step: int, a: _RecordedRun, b: _RecordedRun) -> Iterator[str]:
    """Lines on the metrics of a step that differ, the largest relative differences first; metrics of an evaluation
    count if both runs made it."""
    one, other = a.metrics.get(step), b.metrics.get(step)
    if one is None or other is None:
        return
    left_out = _UNLIKE if _is_evaluated(one) == _is_evaluated(other) else (*_UNLIKE, *_EVALUATED)
    names = [name for name in {**one, **other} if not name.startswith(left_out) and name != "step"]
    unlike = [name for name in names if one.get(name, "nothing") != other.get(name, "nothing")]
    unlike.sort(key=lambda name: -_weight(one.get(name), other.get(name)))
    if unlike:
        shown = "; ".join(f"{x} {one.get(x, 'nothing')} and {other.get(x, 'nothing')}" for x in unlike[:SHOWN])
        sizes = [size for x in unlike if math.isfinite(size := _apart(one.get(x), other.get(x)))]
        most = f", by at most {max(sizes):.0e} (of numbers over 1: of their size)" if sizes else ""
        yield f"  {len(unlike)} of {len(names)} metrics differ{most}, as {shown}"


def _apart(x: Any, y: Any) -> float:
    """The difference of two numbers, relative to the larger one if that is over 1; inf for other values."""
    if not (isinstance(x, int | float) and isinstance(y, int | float)):
        return math.inf
    return abs(x - y) / max(abs(x), abs(y), 1.0)


def _weight(x: Any, y: Any) -> float:
    """The sort weight of two numbers that differ: the difference relative to the larger one, or to 1 at least if it is
    no more than rounding, as for metrics that should be 0."""
    apart = _apart(x, y)
    return apart if apart <= _ROUNDING or math.isinf(apart) else abs(x - y) / max(abs(x), abs(y))


def _extent(common: Sequence[int], a: _RecordedRun, b: _RecordedRun) -> str:
    """Describe how far these steps are equal: bit for bit, or by metrics alone."""
    both = [step for step in common if step in a.digests and step in b.digests]
    alike = [step for step in both if _kind(a.digests[step]) == _kind(b.digests[step])]
    if not alike:
        kinds = "digests of other kinds, as one process and several have" if both else "no digests of the same step"
        return f"by their metrics; they have {kinds}"
    rest = sorted({step for step in common if step} - set(alike))
    by = f", and by metrics alone in steps {jsonl.spans(rest)}" if rest else ""
    return f"bit for bit: batches, states and metrics{by}"


def _kind(line: Mapping[str, Any]) -> str:
    return line.get("kind", "blake2b")
