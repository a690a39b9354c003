"""User functions in processes with limits. Worker processes import this package, so nothing here imports torch.

In: functions of samples, limits of time. Out: an `Outcome` for each sample, whatever the function does: raise, hang,
exit or crash. Messages are signed, and nothing of a damaged one is unpickled.
Begin with `runner.FunctionRunner`; `pool` has the processes, `process` what they run.
"""
