"""Python files that recipes name: which can be used alone."""

from pathlib import Path

import pytest

from pedigree.configs.base.python_files import problem_of_program

REWARD = "def reward(completions):\n    return []\n"


@pytest.mark.parametrize(
    ("line", "imported"),
    [
        ("import helpers", "helpers"),
        ("import numpy, package.part", "package.part"),
        ("from package import part", "package.part"),
        ("from rewards import mine", "rewards.mine"),
        ("import beside", "beside"),
        ("from . import beside", ".beside"),
        ("from ..helpers import one", "..helpers.one"),
        ("from helpers import *", "helpers.*"),
        ("def late():\n    from helpers import one", "helpers.one"),
        ("import json, numpy as np", None),  # `json.py` and `numpy` below the project are not what these import
        ("from empty import part", None),  # a folder without Python
        ("import datasets", None),
    ],
)
def test_a_file_that_imports_another_one_of_the_project_is_refused_because_only_its_own_hash_counts(
    tmp_path: Path, line: str, imported: str | None
) -> None:
    for name in ("helpers.py", "json.py", "package/__init__.py", "package/part.py", "rewards/beside.py", "empty/rows.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one = 1\n")
    (tmp_path / "rewards/mine.py").write_text(f"{line}\n{REWARD}")
    found = problem_of_program(tmp_path, "rewards/mine.py", "reward")
    told = f"rewards/mine.py imports {imported} from the project, but is hashed and given to jobs alone: copy what it needs into "
    assert found == (f"{told}rewards/mine.py" if imported else None)
