"""Row filters and deduplication."""
