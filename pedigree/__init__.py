"""Pedigree: end-to-end LLM post-training whose every model carries the record of how it was made."""
