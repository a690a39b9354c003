"""Held-out metrics by measure: the reward first, then each of its terms."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import attrs

REWARD = "reward"
_NAME = re.compile(r"val-(core|aux)/(.+)/(mean@\d+|(?:best|maj)@\d+/mean)")
_OTHER = re.compile(r"val[^/]*/(?:(.+)/)?([^/]+)/(mean@\d+|mean|(?:best|maj)@\d+/mean)|val[^/]*/(?:(.+)/)?(accuracy)")


@attrs.frozen
class HeldOut:
    """A metric of an evaluation: its name in the log, and the three parts of that name."""

    metric: str
    source: str
    """Where the prompts are from."""
    measure: str
    """The measured number: "reward", a term of it, or a further number of a term as "term/number"."""
    kind: str
    """The statistic over the responses to a prompt: "mean@8", "best@8", "maj@8"."""

    @property
    def is_mean(self) -> bool:
        """Whether the statistic is the mean over all responses."""
        return not self.kind.startswith(("best@", "maj@"))

    @property
    def responses(self) -> int:
        """The k of mean@k, best@k and maj@k; 1 for a plain mean."""
        return int(self.kind.partition("@")[2] or 1)


def held_out(metrics: Iterable[str]) -> list[HeldOut]:
    """The held-out metrics among names of metrics: the reward's first, then other measures'; means first.

    Measures, and sources within them, keep the order of `metrics`. The prompts' sources are those with a reward; a name
    SOURCE/MEASURE belongs to the longest matching source, since both may hold slashes.
    """
    names = list(metrics)
    matches = {name: match for name in names if (match := _NAME.fullmatch(name))}
    sources = {
        place.removesuffix(f"/{REWARD}")
        for level, place, kind in (match.groups() for match in matches.values())
        if level == "core" and place.endswith(f"/{REWARD}") and kind.startswith("mean@")
    }
    found = []
    for name in names:
        if match := matches.get(name):
            found.append(_split(name, match[2], match[3].removesuffix("/mean"), sources))
        elif match := _OTHER.fullmatch(name):
            kind = "mean" if match[3] is None else match[3].removesuffix("/mean")
            found.append(HeldOut(name, match[1] or match[4] or "", match[2] or match[5], kind))
    measures = list(dict.fromkeys(each.measure for each in found))
    rank = {measure: (measure != REWARD, "/" in measure, place) for place, measure in enumerate(measures)}
    return sorted(found, key=lambda each: (rank[each.measure], not each.is_mean))


def _split(name: str, measured: str, kind: str, sources: Iterable[str]) -> HeldOut:
    """The metric `name` of fppo's own evaluation, of which `measured` is SOURCE/MEASURE. For an unknown source the
    measure is the part after the last slash."""
    source = max((x for x in sources if measured.startswith(f"{x}/")), key=len, default=measured.rpartition("/")[0])
    return HeldOut(name, source, measured[len(source) :].removeprefix("/"), kind)


def rewards(metrics: Iterable[str]) -> list[HeldOut]:
    """The mean rewards on held-out prompts by source; without any reward the means of the first measure."""
    means = [each for each in held_out(metrics) if each.is_mean]
    return [each for each in means if each.measure == means[0].measure]


def shown(metrics: Mapping[str, float | None]) -> list[tuple[str, float]]:
    """(label, number) of an evaluation, means over the sources: the reward, its terms, its best@n and maj@n, then
    further numbers of terms.

    The first term is left out where it equals the reward, as for a reward of one function.
    """
    found = held_out(metrics)
    most = max((each.responses for each in found), default=1)
    values: dict[str, list[float]] = {}
    for each in found:
        best = each.measure == found[0].measure and each.responses == most
        if (value := metrics[each.metric]) is not None and (each.is_mean or best):
            values.setdefault(each.measure if each.is_mean else each.kind, []).append(value)
    for label in repeated(values):
        del values[label]
    first = sorted(values, key=lambda label: (label != found[0].measure, "/" in label, "@" in label))
    return [(label, sum(values[label]) / len(values[label])) for label in first]


def sources(metrics: Iterable[str]) -> list[str]:
    """The sources of the held-out prompts, in order."""
    return list(dict.fromkeys(each.source for each in rewards(metrics)))


def repeated(measures: Mapping[str, object]) -> list[str]:
    """A list with the first term of the reward, if its numbers equal the reward's; else empty. `measures` has the
    numbers by measure, in the order of `held_out`."""
    terms = [name for name in measures if name != REWARD and "@" not in name][:1]
    return [name for name in terms if measures[name] == measures.get(REWARD)]
