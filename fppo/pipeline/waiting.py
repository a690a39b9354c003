"""Batches that wait for their step, as checkpoints hold them."""

from __future__ import annotations

import json

import attrs

from fppo.batch import Column, Scored, Shared
from fppo.metrics import Metrics
from fppo.tree import replace, state


@state
class Waiting:
    """A batch that was made before its step, with the metrics of sampling and scoring it."""

    scored: Scored  # without the rows' inputs
    metrics: Metrics
    inputs: Shared | None = None

    @staticmethod
    def of(scored: Scored, metrics: Metrics) -> Waiting:
        """Store a batch as a checkpoint gives it back, with objects converted to JSON and back. Raises ValueError for
        objects that do not fit JSON."""
        inputs, plain = scored.inputs, replace(scored, inputs=None)
        columns = {f.name: getattr(plain, f.name) for f in attrs.fields(Scored)}
        as_json = {name: _as_json(name, x) for name, x in columns.items() if isinstance(x, Column)}
        return Waiting(
            scored=replace(plain, **as_json), metrics=metrics, inputs=None if inputs is None else Shared.of(inputs)
        )

    def batch(self) -> Scored:
        """The stored batch, with the image and video inputs of its rows put back."""
        return self.scored if self.inputs is None else replace(self.scored, inputs=self.inputs.column())


def _as_json(name: str, column: Column) -> Column:
    try:
        return Column(json.loads(json.dumps(list(column))))
    except TypeError as error:
        raise ValueError(f"a batch cannot wait for its step: an object of {name} does not fit JSON: {error}") from error
