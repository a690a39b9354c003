"""An engine's process that ends or hangs by itself in the middle of a generation, at the same step every time."""

import os
import signal

import attrs

from fppo.key import Key


@attrs.frozen
class Interrupting(Key):
    """The key with this seed; the process that draws by it gets the signal from itself after so many steps."""

    number: int
    steps: int
    drawn: list[int] = attrs.Factory(list)

    def uniform(self, rows, columns):
        self.drawn.append(len(rows))
        if len(self.drawn) > self.steps:
            os.kill(os.getpid(), self.number)
        return super().uniform(rows, columns)


def interrupted(generate, seen, *, steps, number=signal.SIGKILL):
    """A host's `generate`, interrupted after so many steps; `seen` gets the rows that were answered."""

    def run(request, on_answer):
        def noted(row, answer):
            seen.append(row)
            on_answer(row, answer)

        if request.forced is None:
            generate(attrs.evolve(request, key=Interrupting(request.key.seed, number, steps)), noted)
        else:  # the probe of a sync
            generate(request, on_answer)

    return run
