"""User functions in worker processes with time limits.

In: functions of samples, and time limits. Out: an `Outcome` for each sample, whatever the function does: raise, hang,
exit or crash. Messages are signed, and nothing of a damaged one is unpickled. Worker processes import this package, so
it imports no torch.
Begin with `runner.FunctionRunner`; `pool` has the processes, `process` their main function.
"""
