"""A pedigree as a self-contained HTML page, styled like the report."""

import json
from typing import Any

from pedigree.configs.language.kinds import recorded_kind
from pedigree.pipelines.lineage.ancestry import Pedigree
from pedigree.pipelines.publish.charts import Box, graph_svg
from pedigree.pipelines.publish.report import filled, numerics_text
from pedigree.pipelines.publish.shown_stages import code_text, metric_lines
from pedigree.pipelines.quantities import size


def lineage_page(pedigree: Pedigree) -> str:
    """Render the ancestry graph and its records as HTML."""
    made = pedigree.parents_first()
    names = _names(made)
    return filled(
        "lineage.html.jinja",
        name=pedigree.address,
        record=pedigree.record,
        id=pedigree.id,
        graph=graph_svg([_box(found, names) for found in made], f"Ancestry of {pedigree.address}"),
        rows=[_row(found, names) for found in reversed(made)],
    )


def _names(made: list[Pedigree]) -> dict[str, str]:
    """Id → name on the page: the stage name if all share one recipe, with an id prefix where names collide."""
    one = len({found.address.partition("/")[0] for found in made}) == 1
    short = {found.id: found.address.rpartition("/")[2] if one else found.address for found in made}
    values = list(short.values())
    return {identifier: name if values.count(name) == 1 else f"{name} {identifier[:6]}" for identifier, name in short.items()}


def _box(found: Pedigree, names: dict[str, str]) -> Box:
    parents = tuple(dict.fromkeys(given.producer for given in found.record.inputs))
    hover = "\n".join([f"{found.address} ({found.record.kind} → {found.record.type})", *metric_lines(found.record)])
    return Box(id=found.id, name=names[found.id], kind=found.record.kind, parents=parents, hover=hover)


def _row(found: Pedigree, names: dict[str, str]) -> dict[str, Any]:
    record, attempts = found.record, found.run.attempts
    return {
        "name": names[found.id],
        "family": recorded_kind(record.kind).family,
        "kind": f"{record.kind} v{record.version}",
        "parents": ", ".join(f"{given.port}: {names[given.producer]}" for given in record.inputs),
        "record": record,
        "id": found.id,
        "size": size(sum(entry.size for entry in record.files)),
        "made": (attempts[-1].ended_at or "") if attempts else "",
        "commit": code_text(found.run.code),
        "numerics": numerics_text(found.run),
        "config": json.dumps(record.config, indent=1, sort_keys=True, ensure_ascii=False),
    }
