"""Any command → its output as an artifact."""
