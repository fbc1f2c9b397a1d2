"""Secret detection in text. Only the kind of a secret is reported, never its value."""

import os
import re
from collections.abc import Mapping

PATTERNS = {
    "an AWS access key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "an AWS secret key": r"(?i)aws_?secret_?(?:access_?)?key\W{1,5}[A-Za-z0-9/+=]{40}",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,})",
    "a GitLab token": r"\bglpat-[A-Za-z0-9_-]{20,}",
    "a Google API key": r"\bAIza[0-9A-Za-z_-]{35}",
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}\b",
    "a Slack token": r"\bxox[abeprs]-[A-Za-z0-9-]{10,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password in a URL": r"(?i)\b[a-z][a-z0-9+.-]*://(?:[^\s/:@]*:[^\s/@:{}$<>]+@|\S*[?&](?:password|passwd|token|secret|api_?key)=[^\s&{}$<>]+)",
    # a changed line of a patch, unless the value is a variable, a placeholder, a special token of a model, or a path
    "a password or key in a file of settings": (
        r"(?m)^[+-](?:export )?[A-Z0-9_]*(?:TOKEN|KEY|SECRET|PASSWORD|AUTH_STRING)=(?![\"']?[$<{\[/])\S{8}"
    ),
}
NAMES = re.compile(r"(?i)(?:TOKEN|KEY|SECRET|PASSWORD|AUTH_STRING)$")
"""Name endings of environment variables with secret values."""
SHORTEST = 8
"""Minimum length in characters: shorter values would match ordinary words."""


def secret_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables whose names mark their values as secret."""
    return {name: value for name, value in environment.items() if NAMES.search(name) and len(value) >= SHORTEST}


def find_secrets(text: str, variables: Mapping[str, str] | None = None) -> list[str]:
    """Kinds of secrets that the text appears to contain, sorted; empty if none."""
    found = [kind for kind, pattern in PATTERNS.items() if re.search(pattern, text)]
    for name, value in (secret_variables() if variables is None else variables).items():
        if value in text:
            found.append(f"the value of the environment variable {name}")
    return sorted(found)
