"""Sources → one validated, filtered, mixed set of rows."""
