"""PPO-family post-training of language models as pure functions over immutable state.

The modules are the namespaces: `from fppo import losses`. Importing this package imports none of them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """The `__version__` of the installed distribution, read at first use, since reading it takes a while."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import version

        return version(__name__)
