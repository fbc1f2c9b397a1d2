"""Running recipes: the flow, `ensure(stage)`, the DVC ledger, launchers, lineage, the command line."""
