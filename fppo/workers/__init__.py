"""User functions in processes with limits. Worker processes import this package, so nothing here imports torch."""
