"""Which training rows share text with benchmark items."""
