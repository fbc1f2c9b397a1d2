"""Whether texts are Jinja, before anything renders them."""

import re
from functools import lru_cache

MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Marks around assistant turns, which transformers adds to the language of chat templates."""


@lru_cache(maxsize=64)
def jinja_problem(text: str) -> str | None:
    """Why a text is no template, with its line; None if it is one. Names of variables are free, those of filters and tests are not."""
    from jinja2 import Environment, TemplateSyntaxError
    from jinja2.nodes import Filter, Test

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(MARKS.sub("", text))
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    for kind, known in ((Filter, environment.filters), (Test, environment.tests)):
        for node in tree.find_all(kind):
            if node.name not in known:
                return f"line {node.lineno}: there is no {kind.__name__.lower()} {node.name!r}"
    return None
