"""Configs of datasets: sources, filters, mixtures, expectations, decontamination."""
