"""Licenses of external models and datasets: their spelling, and the conditions that well-known licenses put on redistributing derived work.

A reading aid, not legal advice: only the text of the license is binding.
"""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

UNKNOWN = "unknown"
SHAPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*(?: (?:AND|OR|WITH) [A-Za-z0-9][A-Za-z0-9.+-]*)*")
LONGEST = 100

CONDITIONS = {
    "notice": "keep the copyright and license notices",
    "attribution": "name the authors, link the license, state what was changed",
    "share-alike": "distribute derived work under the same license",
    "naming": "name it as its terms require (`Built with Llama`), and ask Meta before serving hundreds of millions of users",
    "use-restrictions": "use it only as its terms allow, and pass those terms on to every recipient",
    "no-derivatives": "do not distribute derived work",
    "non-commercial": "no commercial use",
}
"""Conditions of licenses, strictest last."""


CC_CONDITIONS = {"sa": "share-alike", "nd": "no-derivatives", "nc": "non-commercial"}
GNU = ("gpl-2.0", "gpl-3.0", "agpl-3.0", "lgpl-2.1", "lgpl-3.0")
RAILS = ("openrail", "openrail++", "bigscience-openrail-m", "creativeml-openrail-m", "bigcode-openrail-m", "bigscience-bloom-rail-1.0")
TABLE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("apache-2.0", "mit", "bsd", "bsd-2-clause", "bsd-3-clause", "isc"), ("notice",)),
    **dict.fromkeys(("cc0-1.0", "pddl-1.0", "pddl", "unlicense"), ()),
    **{
        f"cc-by{kind}-{version}": ("attribution", *(CC_CONDITIONS[part] for part in kind.split("-")[1:]))
        for kind in ("", "-sa", "-nd", "-nc", "-nc-sa", "-nc-nd")
        for version in ("2.0", "2.5", "3.0", "4.0")
    },
    **dict.fromkeys(("odc-by", "odc-by-1.0"), ("attribution",)),
    **dict.fromkeys(("odbl", "odbl-1.0"), ("attribution", "share-alike")),
    **dict.fromkeys((f"{name}{ending}" for name in GNU for ending in ("", "-only", "-or-later")), ("notice", "share-alike")),
    **dict.fromkeys(("gpl", "lgpl"), ("notice", "share-alike")),
    **dict.fromkeys((*RAILS, "gemma"), ("notice", "use-restrictions")),
    **dict.fromkeys(("llama2", "llama3", "llama3.1", "llama3.2", "llama3.3", "llama4"), ("notice", "naming", "use-restrictions")),
}
"""SPDX or Hugging Face Hub identifier, lower case → conditions."""
HUB = frozenset(
    """apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m afl-3.0 artistic-2.0
    bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0
    cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0
    cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2
    agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc lppl-1.3c ms-pl mpl-2.0 odc-by odbl openrail++ osl-3.0 postgresql ofl-1.1
    ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 gemma unknown""".split()
)
"""Identifiers that the Hub takes as the `license` of a card (huggingface_hub issue 4218); it refuses an upload with any other."""


def licence(value: str) -> str:
    """Normalize a license: a lower-case Hub identifier, or an SPDX expression in SPDX spelling.

    Raises:
        ValueError: not a plausible license identifier or expression.
    """
    if value.lower() == UNKNOWN or value.lower() in TABLE:
        return value.lower()
    if not SHAPE.fullmatch(value) or len(value) > LONGEST:
        raise ValueError(
            f"{value[:LONGEST]!r} is not a license: write an SPDX identifier (`CC-BY-4.0`), an SPDX expression (`MIT AND CC-BY-4.0`), or a "
            "Hugging Face Hub identifier (`llama3.1`), or omit the field if the license is unknown"
        )
    from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

    try:
        found = str(canonicalize_license_expression(value))
    except InvalidLicenseExpression:  # the Hub and others use their own names
        return value
    return found if " " in found or found.startswith("LicenseRef-") else found.lower()


def conditions(name: str) -> tuple[str, ...] | None:
    """Conditions of a license, as keys of `CONDITIONS`; for an expression, those of all its parts. None if not in the table."""
    parts = [part.lower() for part in re.split(r" (?:AND|OR) ", re.sub(r" WITH \S+", "", name))]
    if any(part not in TABLE for part in parts):
        return None
    found = {condition for part in parts for condition in TABLE[part]}
    return tuple(condition for condition in CONDITIONS if condition in found)


Licence = Annotated[str, AfterValidator(licence), Field(exclude=True)]
"""License under which something is distributed. It is excluded from dumps and therefore from identity: stating or correcting a license does
not make a stage stale."""
