"""Results of commands as JSON. A result is a frozen dataclass, the table of a command shows it, and its fields make the `--json` document.

docs/cli.md describes the documents, generated from the results. Renaming a field or changing its meaning requires a new `SCHEMA_VERSION`;
adding a field does not.
"""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import Field, PlainSerializer, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from pedigree.configs.language.compile import overrides_of
from pedigree.configs.language.graph import Graph

SCHEMA_VERSION = 1
T = TypeVar("T")


@dataclass(frozen=True)
class Opaque:
    """Annotation of a field that pydantic takes as it is, so that it builds no schema of its type."""

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        return core_schema.any_schema()


Hidden = Annotated[T, Opaque(), Field(exclude=True)]
"""Field of a result that its document omits."""
ONE_WORD = PlainSerializer(lambda text: text.replace(" ", "_"))


def rounded(digits: int) -> PlainSerializer:
    """Annotation of a number, or None, that its document rounds."""
    return PlainSerializer(lambda value: None if value is None else round(value, digits))


def document(command: str, result: Any, graph: Graph | None = None) -> dict[str, Any]:
    """The JSON document of a command's result, about a recipe if it has one."""
    head = {"recipe": graph.recipe, "source": graph.source, "overrides": overrides_of(graph)} if graph else {}
    return {"schema_version": SCHEMA_VERSION, "command": command, **head, **TypeAdapter(type(result)).dump_python(result, mode="json")}
