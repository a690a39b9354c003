"""vLLM as an engine: its processes, how weights reach it, and how its draws follow our keys."""
