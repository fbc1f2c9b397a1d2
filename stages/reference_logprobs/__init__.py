"""Policy + preferences → log-probabilities of the reference."""
