"""What a job is asked for, as the code that it began with reads it."""

import json
from pathlib import Path
from typing import Any

import pytest

from pedigree.configs.language.execution import Numerics, Placement
from pedigree.configs.methods.external import ENDED
from pedigree.data.artifacts.artifacts import write_text
from pedigree.pipelines.jobs.scratch_state import SPEC, checkpoints_here, read_spec, write_spec
from pedigree.stages.job.spec import JobSpec

EMPTY: dict[str, Any] = {"config": {}, "inputs": {}, "source_files": {}, "code": ""}
ASKED = JobSpec(address="lab/sft", kind="sft", version=1, key="k", numerics=Numerics(), placement=Placement(), **EMPTY)


@pytest.mark.parametrize(("way", "named"), [("auto", False), ("fp32", True)])
def test_code_that_knows_no_way_to_multiply_bf16_is_not_told_one(tmp_path: Path, way: str, named: bool) -> None:
    spec = ASKED.model_copy(update={"numerics": Numerics(bf16_products=way), "asked": Numerics(bf16_products=way)})
    write_spec(tmp_path, spec)
    written = json.loads((tmp_path / SPEC).read_text())
    assert [("bf16_products" in written[part]) for part in ("numerics", "asked")] == [named, named]
    assert read_spec(tmp_path) == spec


@pytest.mark.parametrize(
    ("resume", "found"),
    [
        (None, [[], [], [], ["output"]]),
        (["{checkpoint}"], [[], [], ["checkpoint-10"], ["output"]]),
        ([], [[], ["output"], ["checkpoint-10"], ["output"]]),
    ],
)
def test_what_a_command_has_left_is_something_to_resume_from_if_it_can(tmp_path: Path, resume: Any, found: list[list[str]]) -> None:
    """Nothing, an incomplete checkpoint, complete ones, the output of a command that has ended."""
    config = {"command": ["a"], "output": "report", "resume": resume}
    write_spec(tmp_path, ASKED.model_copy(update={"kind": "external", "config": config}))
    output = tmp_path / "output"
    seen = [checkpoints_here(tmp_path)]
    (output / "checkpoint-10").mkdir(parents=True)
    seen.append(checkpoints_here(tmp_path))
    for name in ("checkpoint-9", "checkpoint-10"):
        write_text(output / name / "trainer_state.json", "{}")
    seen.append(checkpoints_here(tmp_path))
    write_text(tmp_path / ENDED, "{}")
    assert [*seen, checkpoints_here(tmp_path)] == found
