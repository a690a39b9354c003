"""PPO-family post-training of language models as pure functions over immutable state.

The modules are the namespaces: `from fppo import losses`. `fppo.open(RUN)` looks into the record of a run. Importing
this package imports nothing else.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fppo.runs.recorded import open_run

    open = open_run
    __version__: str
else:

    def __getattr__(name: str) -> Any:
        """Import `open`, or look up the distribution's `__version__`, at first use, since both take a while."""
        if name == "open":
            from fppo.runs.recorded import open_run

            return open_run
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import version

        return version(__name__)
