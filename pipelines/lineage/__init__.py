"""Ancestry of artifacts: records, queries, comparison, verification, and standard formats."""
