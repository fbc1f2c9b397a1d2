"""What looks like a secret in a text: well-known forms of tokens, keys and passwords. Kinds are told, never values."""

import re

PATTERNS = {
    "AWS access key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,})",
    "Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}\b",
    "API key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "password in a URL": r"\b[a-z][a-z0-9+.-]*://[^\s/:@]+:[^\s/@]+@",
}


def find_secrets(text: str) -> list[str]:
    """Kinds of secrets that the text seems to hold, sorted; empty: none."""
    return [kind for kind, pattern in sorted(PATTERNS.items()) if re.search(pattern, text)]
