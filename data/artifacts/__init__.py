"""Artifacts, their records and lineage, and the checkpoint mirror."""
