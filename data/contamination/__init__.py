"""Detection of benchmark items in training rows."""
