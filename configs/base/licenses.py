"""Licences of models and data that come from outside: how they are written, and what the well-known ones ask of whoever hands on what
was made from them. A reading aid and no legal advice: what counts is the text of the licence.
"""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

UNKNOWN = "unknown"
SHAPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*(?: (?:AND|OR|WITH) [A-Za-z0-9][A-Za-z0-9.+-]*)*")
LONGEST = 100

CONDITIONS = {
    "notice": "keep the notices of copyright and licence",
    "attribution": "name the authors, link the licence, say what was changed",
    "share-alike": "hand on what is made from it under the same licence",
    "naming": "name it as its terms ask (`Built with Llama`), and ask Meta before serving hundreds of millions of users",
    "use-restrictions": "keep to the uses that its terms allow, and bind everybody you hand it to",
    "no-derivatives": "hand on nothing that is made from it",
    "non-commercial": "no commercial use",
}
"""What licences ask for, the strictest last."""


def _table() -> dict[str, tuple[str, ...]]:
    creative_commons = {
        "": ("attribution",),
        "-sa": ("attribution", "share-alike"),
        "-nd": ("attribution", "no-derivatives"),
        "-nc": ("attribution", "non-commercial"),
        "-nc-sa": ("attribution", "share-alike", "non-commercial"),
        "-nc-nd": ("attribution", "no-derivatives", "non-commercial"),
    }
    found: dict[str, tuple[str, ...]] = dict.fromkeys(("apache-2.0", "mit", "bsd", "bsd-2-clause", "bsd-3-clause", "isc"), ("notice",))
    found |= dict.fromkeys(("cc0-1.0", "pddl-1.0", "pddl", "unlicense"), ())
    found |= {f"cc-by{kind}-{version}": asks for kind, asks in creative_commons.items() for version in ("2.0", "2.5", "3.0", "4.0")}
    found |= dict.fromkeys(("odc-by", "odc-by-1.0"), ("attribution",))
    found |= dict.fromkeys(("odbl", "odbl-1.0"), ("attribution", "share-alike"))
    found |= {
        f"{family}{version}{ending}": ("notice", "share-alike")
        for family, versions in {"gpl": ("-2.0", "-3.0"), "agpl": ("-3.0",), "lgpl": ("-2.1", "-3.0")}.items()
        for version in versions
        for ending in ("", "-only", "-or-later")
    } | dict.fromkeys(("gpl", "lgpl"), ("notice", "share-alike"))
    rails = ("openrail", "openrail++", "bigscience-openrail-m", "creativeml-openrail-m", "bigcode-openrail-m", "bigscience-bloom-rail-1.0")
    found |= dict.fromkeys(rails, ("notice", "use-restrictions"))
    llamas = ("llama2", "llama3", "llama3.1", "llama3.2", "llama3.3", "llama4")
    found |= dict.fromkeys(llamas, ("notice", "naming", "use-restrictions"))
    return found | {"gemma": ("notice", "use-restrictions")}


TABLE = _table()
"""Identifier of SPDX or of the Hugging Face hub, in small letters → conditions."""


def licence(value: str) -> str:
    """An identifier in the hub's small letters, or an SPDX expression in SPDX's own.

    Raises:
        ValueError: it is neither, nor a name that could be one.
    """
    if value.lower() == UNKNOWN or value.lower() in TABLE:
        return value.lower()
    if not SHAPE.fullmatch(value) or len(value) > LONGEST:
        raise ValueError(
            f"{value[:LONGEST]!r} is no licence: write its identifier of SPDX (`CC-BY-4.0`), an SPDX expression (`MIT AND CC-BY-4.0`), "
            "its identifier on the Hugging Face hub (`llama3.1`), or leave it out where it is unknown"
        )
    from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

    try:
        found = str(canonicalize_license_expression(value))
    except InvalidLicenseExpression:  # the hub and others have names of their own
        return value
    return found if " " in found or found.startswith("LicenseRef-") else found.lower()


def conditions(name: str) -> tuple[str, ...] | None:
    """What a licence asks for, by the names of `CONDITIONS`; of an expression, what any of its parts asks for. None: not in the table."""
    parts = [part.lower() for part in re.split(r" (?:AND|OR) ", re.sub(r" WITH \S+", "", name))]
    if any(part not in TABLE for part in parts):
        return None
    asked = {condition for part in parts for condition in TABLE[part]}
    return tuple(condition for condition in CONDITIONS if condition in asked)


Licence = Annotated[str, AfterValidator(licence), Field(exclude=True)]
"""A field that says under which licence something is handed on. It is no identity: it stands in no dump, so that stating it, or putting
it right, makes no stage stale."""
