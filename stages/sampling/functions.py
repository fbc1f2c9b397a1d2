"""Functions of the project that score answers, for the stages that do."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any

from pedigree.configs.methods.reward_terms import RewardProgram
from pedigree.stages.job.job import Job
from pedigree.stages.verifiers.reward_programs import Answered, RewardFunction, Value

TOGETHER = 64
"""Prompts whose answers are in memory together, and which an `async` function of a trusted file gets together."""


@contextmanager
def opened(
    programs: Iterable[RewardProgram], verifiers: Iterable[Mapping[str, Any] | None], job: Job, without: Collection[str] = ()
) -> Iterator[dict[str, RewardFunction]]:
    """Name → function of each program, which runs until the end of the block. The record is marked for trusted files.

    Args:
        verifiers: of all prompts.
        without: columns that the answers lack.

    Raises:
        PedigreeError: a function cannot be used.
    """
    programs = [*programs]
    known = [*verifiers] if programs else []
    with ExitStack() as stack:
        functions = {}
        for term in programs:
            beat = partial(job.doing, f"rewarding by {term.called}")
            functions[term.called] = RewardFunction(term, job.source_files[term.path], known, job.numerics.threads, beat, without)
            stack.callback(functions[term.called].close)
            if term.trusted:
                job.note(f"{term.path} ran outside the sandbox (trusted: true)")
        yield functions


def values_of(function: RewardFunction, groups: Iterable[Sequence[Answered]]) -> Iterator[list[Value]]:
    """The values of each group, the answers to one prompt; groups are read as they are needed."""
    left = iter(groups)
    while part := list(islice(left, TOGETHER)):
        yield from function.values(part)
