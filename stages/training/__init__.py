"""Models in training: loading, forward passes, DeepSpeed, checkpoints, policy updates."""
