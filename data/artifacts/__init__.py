"""Artifacts, the records that prove them, and checkpoints mirrored to a store."""
