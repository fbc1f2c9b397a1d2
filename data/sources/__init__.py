"""Where rows come from: files, stores, the hub, rules, programs."""
