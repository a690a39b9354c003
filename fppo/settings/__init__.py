"""Settings: frozen classes that check themselves, read from files and the command line. Nothing here imports torch.

In: TOML and flags. Out: `TrainSettings`, or every problem at once, each with its place, its value and what to do. The
keywords of functions that settings name are read from the functions' source.
Begin with `train` and `files.load`; `tables` names the functions, `checks` has conflicts between them.
"""
