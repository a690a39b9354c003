"""The product of a linear layer: x @ weight.T + bias."""
