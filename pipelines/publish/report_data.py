"""What a report shows of data stages: counts, win rates of judgments, contamination, and validation verdicts."""

from collections.abc import Mapping
from typing import Any

from pedigree.configs.base.frozen import Frozen
from pedigree.configs.language.kinds import kind_of, sources_of
from pedigree.configs.language.stated_sources import generators_of, licences_of
from pedigree.configs.rows.datasets import title
from pedigree.data.expectations import results
from pedigree.data.expectations.results import finding
from pedigree.pipelines.publish.attribution import brought
from pedigree.pipelines.publish.shown_stages import Stage

MOST_POLICIES = 12
"""Maximum policies in one win-rate table."""
EXAMPLES_SHOWN = 5
"""Failing rows shown per expectation; the evidence has more."""


def counts(stage: Stage) -> dict[str, Any]:
    """Rows read, dropped by reason, and kept, with their sources and lengths."""
    found = stage.evidence("counts.json")
    drops: dict[str, int] = dict(found.get("drops", {}))
    for source in found.get("per_source", []):
        for reason, count in source.get("left_out", {}).items():
            drops[reason] = drops.get(reason, 0) + count
    read = "not recorded"
    if found:
        read = f"{found['read']:,}" + (f" answers to {found['prompts']:,} prompts" if "prompts" in found else "")
        turns = ", ".join(f"{count:,} with {rule}" for rule, count in found.get("out_of_turn", {}).items())
        read += f" ({turns})" if turns else ""
    lengths = stage.evidence("statistics.json").get("all", {})
    return {
        "name": stage.shown,
        "type": stage.node.output,
        "read": read,
        "drops": sorted(drops.items(), key=lambda pair: (-pair[1], pair[0])),
        "kept": found.get("kept", stage.metrics.get("rows", "")),
        "sources": ", ".join(f"{count} {name}{_origin(stage.node.config, name)}" for name, count in found.get("sources", {}).items()),
        "lengths": {unit: _lengths(lengths.get(unit, {})) for unit in ("characters", "tokens")},
    }


def _origin(config: Frozen, name: str) -> str:
    """License and generators of the rows with one source name, in parentheses; empty for procedural rows."""
    sources = sources_of(kind_of(config).name, config.model_dump(mode="json"))
    titles = sorted({str(title(source)) for source in brought(sources, name)})
    licences, generators = licences_of(config), generators_of(config)
    stated = sorted({licence for one in titles for licence in licences.get(one, ())})
    writers = sorted({writer for one in titles for writer in generators.get(one, ())})
    return f" ({' or '.join(stated)}{'; written by ' if writers else ''}{', '.join(writers)})" if stated else ""


def _lengths(found: Mapping[str, int]) -> str:
    """Median, 99th percentile, and maximum per row; empty if not counted."""
    return f"{found['p50']:,} / {found['p99']:,} / {found['max']:,}" if "p50" in found else ""


def win_rates(stage: Stage) -> dict[str, Any] | None:
    """Win-rate matrix with one row and one column per policy; None if there are no or too many policies."""
    found = stage.evidence("win_rates.json") or []
    cells = {(one["policy"], one["against"]): one for one in found}
    policies = list(dict.fromkeys(policy for one in found for policy in (one["policy"], one["against"])))
    if not 2 <= len(policies) <= MOST_POLICIES:
        return None
    rows = [{"policy": one, "cells": [cells.get((one, other)) for other in policies]} for one in policies]
    return {"name": stage.shown, "policies": policies, "rows": rows}


def contamination(stage: Stage) -> dict[str, Any]:
    """Overlap counts per benchmark, and the removed rows with their matching text."""
    report = stage.evidence("report.json")
    rows = [
        {
            "benchmark": label,
            "items": found["items"],
            "items overlapped": found["items_overlapped"],
            "share": f"{found['share_overlapped']:.1%}",
            "rows removed": found["rows_removed"],
            "items waived": found.get("items_waived", 0),
        }
        for label, found in report.get("benchmarks", {}).items()
    ]
    note = f"{report['removed']} of {report['read']} rows removed" if report else "evidence/report.json is missing"
    if report.get("planted_leaks"):
        note += f"; {report['leaks_found']} of {report['planted_leaks']} planted leaks found"
    if "paraphrases" in report:
        alike = sum(found["rows"] for found in report["paraphrases"].values())
        note += f"; {alike} rows resemble an item by embedding and may not be copies (evidence/paraphrases.jsonl)"
    if "questions" in report:
        note += f"; a judge compared {report['pairs']} row-item pairs in {report['questions']} questions"
        note += f", {sum(report['unanswered'].values())} of them without a verdict (evidence/rephrased.jsonl)"
    examples = [{"verdict": "removed", **row} for row in stage.evidence_rows("manifest.jsonl")]
    examples.sort(key=lambda row: row["verdict"] not in ("removed", "waived"))
    return {"name": stage.shown, "note": note, "rows": rows, "examples": examples}


def validation(stage: Stage) -> dict[str, Any] | None:
    """Verdict of a stage that validated its rows, and the expectations of its recipe with examples of failing rows."""
    verdict = stage.metrics.get("validation")
    if not isinstance(verdict, dict):
        return None
    found = verdict.get("expectations", verdict.get("results", []))
    failed = [str(result.get("expectation", result.get("type"))) for result in found if not result.get("success")]
    of_recipe = [_held(entry) for entry in stage.evidence("validation.json").get("expectations", []) if "severity" in entry]
    return {
        "name": stage.shown,
        "success": bool(verdict.get("success")),
        "count": len(found),
        "failed": ", ".join(failed),
        "of_recipe": of_recipe,
        "warned": any(not entry["success"] for entry in of_recipe),
    }


def _held(entry: Mapping[str, Any]) -> dict[str, Any]:
    examples = [[example["id"], example["place"], example["value"]] for example in entry.get("examples", [])]
    return {"title": results.title(entry), "found": finding(entry), "success": entry["success"], "examples": examples[:EXAMPLES_SHOWN]}
