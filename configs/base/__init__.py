"""Building blocks of configs: strict models with stable hashes, YAML with line numbers, paths, licenses, user-facing errors."""
