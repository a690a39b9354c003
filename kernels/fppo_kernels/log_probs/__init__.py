"""Log-probs of labels, entropy and the sum of squared probabilities, from hidden states and a head."""
