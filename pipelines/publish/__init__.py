"""Reports, model cards, exports, git commits, and named models."""
