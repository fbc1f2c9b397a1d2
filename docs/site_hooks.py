"""Hooks of the site (`mkdocs.yml`): the pages of the kinds of stages, and tables as on GitHub."""

import re
from pathlib import Path
from typing import Any


def on_config(config: Any) -> None:
    """Add the page of every kind of stage to the navigation, which then needs no change for a new kind."""
    (reference,) = (pages for section in config["nav"] for title, pages in section.items() if title == "Reference")
    (stages,) = (entry["Stages"] for entry in reference if isinstance(entry, dict))
    docs = Path(config["docs_dir"])
    stages += sorted(page.relative_to(docs).as_posix() for page in (docs / "stages").glob("*.md"))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """In a table's code, GitHub requires a backslash before a pipe and removes it; Python-Markdown requires none and would show it."""
    return re.sub(r"^\|.*", lambda row: re.sub(r"`.*?`", lambda code: code[0].replace("\\|", "|"), row[0]), markdown, flags=re.MULTILINE)
