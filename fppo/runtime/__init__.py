"""Where a program runs: the mesh, and what a run writes and reads."""
