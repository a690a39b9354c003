"""A run on disk: what is written to its directory, and how it goes on after a stop.

In: settings, an assembly, and records of steps. Out: checkpoints, metrics.jsonl, samples, evaluations, digests, and the
state from which a run goes on bit for bit.
Begin with `session.run_training`; `starts` records each start, `loggers` where metrics go.
"""
