"""vLLM as an engine: its processes, the transfer of weights, and draws by fppo's keys."""
