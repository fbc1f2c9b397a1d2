"""Pure functions: losses, advantages, log-probabilities, verifiers, statistics."""
