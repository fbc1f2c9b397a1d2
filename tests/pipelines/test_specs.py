"""What a job is asked for, as the code that it began with reads it."""

import json
from pathlib import Path
from typing import Any

import pytest

from pedigree.configs.language.execution import Numerics, Placement
from pedigree.pipelines.jobs.scratch_state import SPEC, read_spec, write_spec
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
