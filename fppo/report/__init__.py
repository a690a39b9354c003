"""Pictures and pages of a run."""
