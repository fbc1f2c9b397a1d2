"""Whether texts are Jinja, before anything renders them."""

import re
from functools import lru_cache

MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Marks around assistant turns, which transformers adds to the language of chat templates."""


@lru_cache(maxsize=64)
def jinja_problem(text: str) -> str | None:
    """Why a text is no template, with its line; None if it is one. Filters must exist, unless a condition guards them."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).compile(MARKS.sub("", text), raw=True)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {(error.message or str(error)).rstrip('.')}"
    return None
