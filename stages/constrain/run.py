"""Add verifiable constraints to prompts, for training precise instruction following. No model is involved.

    payload/rows-*.parquet     prompts in input order; the id is the original prompt's plus `/constrained`
    evidence/counts.json       prompts read and kept, and why the others were dropped
    evidence/constraints.json  how often each IFEval instruction was added, and the number of prompts by number of constraints
    evidence/parents.parquet   the original of each prompt
    evidence/samples.jsonl     the first prompts with their constraints
    evidence/validation.json

All prompts are read twice; only a few bytes of each stay in memory.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pedigree.configs.judging.constraining import Constrain, load_constraints
from pedigree.data.artifacts.artifacts import write_json, write_rows
from pedigree.data.records import parents, records
from pedigree.data.records.records import Prompt
from pedigree.data.records.scattered import Scattered
from pedigree.stages.core.added_constraints import PART, constrained
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job, only
from pedigree.stages.job.output_rows import written

SHOWN = 20


@dataclass
class FirstPass:
    """Results of the first pass."""

    sizes: list[int] = field(default_factory=list)
    """Characters of each input prompt, see `records.bulk_of`."""
    kept: list[tuple[int, int]] = field(default_factory=list)
    """(place, characters including constraints) of each kept prompt."""
    drops: Counter[str] = field(default_factory=Counter)
    added: Counter[str] = field(default_factory=Counter)
    """Constraints by instruction."""
    numbers: Counter[int] = field(default_factory=Counter)
    """Number of added constraints → prompts."""
    shown: list[Prompt] = field(default_factory=list)

    def note(self, row: Mapping[str, Any], made: Prompt | str) -> None:
        self.sizes.append(records.bulk_of(row))
        if isinstance(made, str):
            self.drops[made] += 1
            return
        self.kept.append((len(self.sizes) - 1, records.bulk_of(made)))
        mine = _instructions(made)[len(_instructions(row)) :]
        self.added.update(mine)
        self.numbers[len(mine)] += 1
        self.shown += [made] if len(self.shown) < SHOWN else []


def run(config: Constrain, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Add constraints to every prompt that can take them.

    Raises:
        StageError: fewer than `min_rows` are left; the message counts the reasons.
    """
    pool, rules = only(inputs, "prompts"), load_constraints()
    found = FirstPass()
    for row in records.stream(pool.payload):
        job.doing("drawing constraints", len(found.sizes), 0, "rows")
        found.note(row, constrained(row, config, rules))
    drops = dict(sorted(found.drops.items()))
    write_json(job.evidence / "counts.json", {"read": len(found.sizes), "kept": len(found.kept), "drops": drops})
    by_number = {str(number): count for number, count in sorted(found.numbers.items())}
    counted = {"added": dict(sorted(found.added.items())), "with": by_number}
    write_json(job.evidence / "constraints.json", counted)
    write_rows(job.evidence / "samples.jsonl", found.shown)
    if len(found.kept) < config.min_rows:
        raise StageError(
            f"{len(found.kept)} prompts < min_rows {config.min_rows} of {len(found.sizes)} ({drops}): use prompts without other "
            "verifiers, lower min_constraints, list more instructions, or lower min_rows"
        )
    by_position = Scattered.of(pool, found.sizes)
    places, sizes = zip(*found.kept, strict=True)

    def row_of(place: int, rows: Mapping[int, Mapping[str, Any]]) -> Any:
        return constrained(rows[place], config, rules)

    verdict = written(job, "prompt", places, sizes, lambda places: by_position.lookup(places, Prompt), lambda place: [place], row_of)
    made = (row["id"] for row in records.stream(job.out / "payload", ("id",)))
    parents.write(job.evidence, ((name, [name.removesuffix(f"/{PART}")]) for name in made))
    total = sum(number * count for number, count in found.numbers.items())
    return {"rows": len(found.kept), "prompts": len(found.sizes), "dropped": drops, "constraints": total, **counted, "validation": verdict}


def _instructions(row: Mapping[str, Any]) -> list[str]:
    """Ids of a prompt's IFEval instructions; empty without an IFEval verifier."""
    return [one["id"] for one in (row["verifier"] or {}).get("instructions", ())]
