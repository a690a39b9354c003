"""The loop: what a run is, its stages, one step, and what trains, evaluates and replays it."""
