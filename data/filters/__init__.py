"""Which rows are kept."""
