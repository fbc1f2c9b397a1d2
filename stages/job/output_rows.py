"""Rows that a stage makes of others: written as its payload, and held against what is expected of such rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from data.artifacts.artifacts import write_json
from data.expectations.output import RowWriter
from stages.job.job import Job
from stages.verifiers import check


def written(
    job: Job, artifact_type: str, sizes: Sequence[int], make: Callable[[slice], Iterable[Sequence[Mapping[str, Any]]]]
) -> dict[str, Any]:
    """Writes the payload and `validation.json`; returns the verdict of the expectations.

    Args:
        job: of the stage.
        artifact_type: what the rows are.
        sizes: characters of each row, see `records.bulk_of`.
        make: gives the rows of a part of them, in blocks.

    Raises:
        ValidationError: rows break an expectation.
    """
    into = RowWriter(job.out, artifact_type, check)
    for done in into.write(sizes, make):
        job.doing("writing rows", done, len(sizes), "rows")
    with job.busy("checking rows"):
        verdict = into.verdict()
    write_json(job.evidence / "validation.json", verdict)
    return verdict
