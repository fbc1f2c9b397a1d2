"""Records, artifacts, sources, filters, decontamination, chat templates, expectations."""
