"""Studies of parts rather than runs: kernels, other trainers' losses, bias, and the memory and time of a run ahead.

In: names of functions and operations, files of other trainers, or a run's settings. Out: tables, charts and JSON.
Begin with `ablate`, `audit`, `bias` or `plan`: each is a package with a command of its name.
"""
