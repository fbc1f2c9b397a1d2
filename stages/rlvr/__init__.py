"""Policy + prompts with verifiers → policy."""
