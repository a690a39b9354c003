"""A run on disk: what is written to its directory, and how it goes on after a stop."""
