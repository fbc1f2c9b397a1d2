"""The `pedigree` command line."""
