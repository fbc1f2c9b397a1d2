"""The rows that stages exchange, in columns."""
