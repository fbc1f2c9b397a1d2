"""Convert records to standard formats as JSON values: SLSA provenance for all artifacts, Croissant for datasets.

In-toto Statement v1, https://in-toto.io/Statement/v1; SLSA Provenance v1, https://slsa.dev/provenance/v1; Croissant 1.0,
http://mlcommons.org/croissant/1.0.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from pedigree.pipelines.lineage.ancestry import Pedigree

ROW_FILES = {"@type": "cr:FileSet", "@id": "row-files", "name": "row-files", "includes": "rows-*.parquet"}
ENCODINGS = {
    ".parquet": "application/vnd.apache.parquet",
    ".jsonl": "application/jsonlines",
    ".json": "application/json",
    ".csv": "text/csv",
}
CROISSANT_TERMS = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "dct": "http://purl.org/dc/terms/",
    "sc": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "rai": "http://mlcommons.org/croissant/RAI/",
} | {
    term: f"cr:{term}"
    for term in (
        "citeAs", "column", "extract", "field", "fileProperty", "fileObject", "fileSet", "format", "includes", "isLiveDataset",
        "jsonPath", "key", "md5", "parentField", "path", "recordSet", "references", "regex", "repeated", "replace", "separator",
        "source", "subField", "transform",
    )
}  # fmt: skip
"""The `@context` required by Croissant 1.0."""


# --- SLSA --------------------------------------------------------------------------------------------------------------


def slsa(pedigree: Pedigree) -> dict[str, Any]:
    """Unsigned in-toto statement with an artifact's files, stage, inputs, code, and lock files.

    An input's content hash covers (path, sha256) of its files, so it has its own digest name, `pedigreeContent`; the files are listed
    too.
    """
    record, run, attempts = pedigree.record, pedigree.run.as_json(), pedigree.run.attempts
    environment = run.get("environment", {})
    versions = {"python": environment.get("python", "unknown"), **environment.get("libraries", {})}
    metadata = {"invocationId": pedigree.id}
    for name, time in (("startedOn", attempts[0].started_at), ("finishedOn", attempts[-1].ended_at)) if attempts else ():
        metadata |= {name: time.replace("+00:00", "Z")} if time else {}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": entry.path, "digest": {"sha256": entry.sha256}} for entry in record.files],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:pedigree:stage:v1",
                "externalParameters": {"kind": record.kind, "version": record.version, "config": record.config},
                "internalParameters": {name: run.get(name, {}) for name in ("numerics", "environment", "hardware")},
                "resolvedDependencies": [*_inputs(pedigree), *_sources(pedigree), *_code(pedigree)],
            },
            "runDetails": {
                "builder": {"id": "urn:pedigree:runner:v1", "version": versions},
                "metadata": metadata,
                "byproducts": [{"name": "record.json", "annotations": {"id": pedigree.id, "key": record.key, "content": record.content}}],
            },
        },
    }


def _inputs(pedigree: Pedigree) -> list[dict[str, Any]]:
    return [
        {
            "name": f"{given.port}/{given.label}",
            "uri": f"urn:pedigree:artifact:{given.producer}",
            "digest": {"pedigreeContent": given.content},
            "annotations": {"files": {entry.path: entry.sha256 for entry in pedigree.of(given.producer).record.files}},
        }
        for given in pedigree.record.inputs
    ]


def _sources(pedigree: Pedigree) -> list[dict[str, Any]]:
    locks = pedigree.run.environment.locks
    files = {**pedigree.record.source_files, **{f"requirements/{name}": found for name, found in locks.items()}}
    return [{"name": name, "digest": {"sha256": found}} for name, found in sorted(files.items())]


def _code(pedigree: Pedigree) -> list[dict[str, Any]]:
    """The distinct commits of all attempts."""
    codes = [attempt.code for attempt in pedigree.run.attempts if attempt.code and attempt.code.commit]
    found = []
    for code in dict.fromkeys(codes):
        state = {name: getattr(code, name) for name in ("dirty", "patch_sha256") if getattr(code, name)}
        entry = {"name": "code", "uri": f"swh:1:rev:{code.commit}", "digest": {"gitCommit": code.commit}}
        found.append(entry | ({"annotations": state} if state else {}))
    return found


# --- Croissant ---------------------------------------------------------------------------------------------------------


def croissant(pedigree: Pedigree, rows: Iterable[Mapping[str, Any]], licences: Iterable[str] = ()) -> dict[str, Any]:
    """JSON-LD for a dataset artifact; its fields are inferred from all rows. The publisher must add `creator` and `url`, which records do
    not contain.
    """
    record = pedigree.record
    ends = [attempt.ended_at for attempt in pedigree.run.attempts if attempt.ended_at]
    name = pedigree.address.replace("/", "-")
    files = pedigree.row_files()
    lies_in = {"fileObject": {"@id": files[0]}} if len(files) == 1 else {"fileSet": {"@id": ROW_FILES["@id"]}}
    fields = [_field("rows", None, key, shape, lies_in) for key, shape in _shape_of(rows)["keys"].items()]
    described = f"Rows of type {record.type}, made by a {record.kind} stage (version {record.version}) of Pedigree."
    return {
        "@context": dict(sorted(CROISSANT_TERMS.items())),
        "@type": "sc:Dataset",
        "name": name,
        "description": described,
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "identifier": pedigree.id,
        "version": f"{record.version}.0.0",
        **({"license": sorted(licences)} if licences else {}),
        **({"datePublished": ends[-1]} if ends else {}),
        "distribution": [
            {
                "@type": "cr:FileObject",
                "@id": entry.path,
                "name": entry.path,
                "contentUrl": entry.path,
                "contentSize": f"{entry.size} B",
                "encodingFormat": ENCODINGS.get(entry.path[entry.path.rfind(".") :], "application/octet-stream"),
                "sha256": entry.sha256,
            }
            for entry in record.files
        ]
        + ([] if len(files) == 1 else [ROW_FILES | {"encodingFormat": ENCODINGS[".parquet"]}]),
        "recordSet": [{"@type": "cr:RecordSet", "@id": "rows", "name": "rows", "field": fields}],
    }


def _shape_of(values: Iterable[Any]) -> dict[str, Any]:
    """Inferred shape of a field: `types` of scalars, `keys` of mappings, `repeated` for lists."""
    shape: dict[str, Any] = {"types": set(), "keys": {}, "repeated": False}
    for value in values:
        _widen(shape, value)
    return shape


def _widen(shape: dict[str, Any], value: Any) -> None:
    if isinstance(value, list):
        shape["repeated"] = True
        for item in value:
            _widen(shape, item)
    elif isinstance(value, Mapping):
        for key in sorted(value):
            _widen(shape["keys"].setdefault(key, _shape_of(())), value[key])
    elif value is not None:
        shape["types"].add(type(value))


def _field(parent: str, column: str | None, key: str, shape: Mapping[str, Any], lies_in: Any, path: str = "") -> dict[str, Any]:
    """A field; nested fields are addressed by a JSON path within their column. `lies_in` references the file or files."""
    source: dict[str, Any] = {**lies_in, "extract": {"column": column or key}}
    if column:
        source["transform"] = {"jsonPath": path}
    found: dict[str, Any] = {"@type": "cr:Field", "@id": f"{parent}/{key}", "name": f"{parent}/{key}".removeprefix("rows/")}
    found |= {"repeated": True} if shape["repeated"] else {}
    if shape["keys"]:
        prefix = f"{path}." if path else ""
        return found | {
            "subField": [
                _field(f"{parent}/{key}", column or key, name, inner, lies_in, prefix + name)
                for name, inner in sorted(shape["keys"].items())
            ]
        }
    return found | {"dataType": _data_type(shape["types"]), "source": source}


def _data_type(types: set[type]) -> str:
    if types and types <= {bool}:
        return "sc:Boolean"
    if types and types <= {int}:
        return "sc:Integer"
    return "sc:Float" if types and types <= {int, float} else "sc:Text"
