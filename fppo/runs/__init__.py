"""A run on disk: the files of its directory, and resuming from them.

In: settings, an assembly, and records of steps. Out: checkpoints, metrics.jsonl, samples, evaluations, digests, and the
state from which a run resumes bit for bit. Begin with `session.run_training`; `starts` records the settings of each
start, `loggers` the metrics.
"""
