"""Write rows as a stage's payload and validate them against the expectations of their type."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pedigree.data.artifacts.artifacts import write_json
from pedigree.data.expectations.output import RowWriter
from pedigree.stages.job.job import Job
from pedigree.stages.verifiers import check


def written(
    job: Job, artifact_type: str, sizes: Sequence[int], make: Callable[[slice], Iterable[Sequence[Mapping[str, Any]]]]
) -> dict[str, Any]:
    """Write the payload and `validation.json`; return the verdict of the expectations.

    Args:
        job: the stage's job.
        artifact_type: type of the rows.
        sizes: characters of each row, see `records.bulk_of`.
        make: returns the rows of a slice, in blocks.

    Raises:
        ValidationError: rows violate an expectation.
    """
    into = RowWriter(job.out, artifact_type, check)
    for done in into.write(sizes, make):
        job.doing("writing rows", done, len(sizes), "rows")
    with job.busy("checking rows"):
        verdict = into.verdict()
    write_json(job.evidence / "validation.json", verdict)
    return verdict
