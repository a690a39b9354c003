"""Gated activations (Shazeer, 2020, arXiv:2002.05202): activation(gate) * up, as SwiGLU and GeGLU."""
