"""Print a version's section of the changelog, as the notes of its release: `python docs/release.py v0.2.0`."""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes(tag: str, version: str, changelog: str) -> str:
    """The section's text.

    Raises:
        SystemExit: the tag is not the version of the package, or the changelog has no section for it, or one without its date.
    """
    if tag != f"v{version}":
        sys.exit(f"the tag is {tag}, but pyproject.toml has version {version}: the tag must be v{version}")
    if f"\n## {version} (unreleased)" in changelog:
        sys.exit(f"CHANGELOG.md says that {version} is unreleased: write its date, `## {version} (date)`")
    found = re.search(rf"^## {re.escape(version)} .*?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if not found:
        sys.exit(f"CHANGELOG.md has no section for {version}: add `## {version} (date)`")
    return found[1].strip()


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    print(notes(sys.argv[1], project["version"], (ROOT / "CHANGELOG.md").read_text()))
