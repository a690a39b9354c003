"""PPO-family post-training of language models as pure functions over immutable state.

The modules are the namespaces: `from fppo import losses`. `fppo.train(...)` trains a model as the command `fppo train`
does, and `fppo.open(RUN)` looks into the record of a run. Importing this package imports nothing else.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fppo.commands.from_python import train as train
    from fppo.runs.recorded import open_run

    open = open_run
    __version__: str
else:

    def __getattr__(name: str) -> Any:
        """Import `open` and `train`, or look up the distribution's `__version__`, at first use, since all take a
        while."""
        if name == "open":
            from fppo.runs.recorded import open_run

            return open_run
        if name == "train":
            from fppo.commands.from_python import train

            return train
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import version

        return version(__name__)
