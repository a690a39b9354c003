"""PPO-family post-training of language models as pure functions over immutable state.

The modules are the namespaces: `from fppo import losses`. Importing this package imports none of them.
"""
