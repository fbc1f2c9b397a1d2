"""What every config is made of: strict models with stable hashes, YAML with line numbers, paths, licenses, errors for people."""
