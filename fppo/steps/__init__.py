"""Steps: compositions of models, losses, kernels and mesh that take state and return state."""
