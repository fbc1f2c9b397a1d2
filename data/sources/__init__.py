"""Row sources: files, object stores, the hub, rules, programs."""
