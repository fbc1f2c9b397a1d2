"""One door each to DeepSpeed and vLLM."""
