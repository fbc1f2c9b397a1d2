"""How long commands take: one entry per processor, the latest."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import times

pytestmark = pytest.mark.unit
CPU: dict[str, Any] = {"cpu": "AMD EPYC", "cpu_model": [25, 17], "cores": 2, "instruction_sets": ["avx2", "avx512_bf16"]}


@pytest.mark.parametrize("other", [{"cpu_model": [23, 1]}, {"cores": 8}, {"instruction_sets": ["avx2"]}])
def test_a_command_has_the_latest_time_of_each_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]) -> None:
    """One vendor's name stands for processors with and without bf16 units."""
    runs = iter([(CPU, 100), (CPU | other, 900), (CPU, 50)])

    def measured(command: list[str]) -> dict[str, Any]:
        hardware, seconds = next(runs)
        return {"command": " ".join(command), "seconds": seconds, "teraoperations": 1.0, "hardware": hardware}

    monkeypatch.setattr(times, "TIMES", tmp_path / "times")
    monkeypatch.setattr(times, "measured", measured)
    for _ in range(3):
        times.main(["make", "test"])
    found = json.loads((tmp_path / "times" / "make-test.json").read_text())
    assert [(one["hardware"], one["seconds"]) for one in found] == [(CPU | other, 900), (CPU, 50)]
