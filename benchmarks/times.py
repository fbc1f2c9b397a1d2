"""Time a command: in seconds, and in operations of matrix products that this machine could have computed meanwhile.

    python -m benchmarks.times make demo
    python -m benchmarks.times make test

`results/times/COMMAND.json` has one entry per processor; for `make demo` also with the seconds of each stage. `python -m benchmarks.table`
then shows it in docs/benchmarks.md.
"""

import json
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, Watch, rounded
from pedigree.data.artifacts.artifacts import read_run
from pedigree.data.artifacts.provenance import hardware
from pedigree.stages.training import product_rate

TIMES = RESULTS / "times"
DEMO = RESULTS.parents[1] / "artifacts" / "demo"


def stage_seconds(recipe: Path) -> dict[str, float]:
    """The seconds of the stages that run in one go, by name, longest first."""
    runs = {path.parent.name: read_run(path) for path in recipe.glob("*/run.json")}
    found = {name: run.attempts[0].seconds for name, run in runs.items() if len(run.attempts) == 1}
    return dict(sorted(((name, seconds) for name, seconds in found.items() if seconds), key=lambda one: -one[1]))


def processor(hardware: dict[str, Any]) -> list[Any]:
    """What tells processors apart: one vendor's name stands for many of them."""
    return [hardware.get(part) for part in ("cpu", "cpu_model", "cores", "instruction_sets")]


def measured(command: list[str]) -> dict[str, Any]:
    """Run a command and time it."""
    watch, place, began = Watch(), hardware(), time.monotonic()
    subprocess.run(command, check=True)
    seconds, rates = time.monotonic() - began, product_rate.main()
    peak = place["cores"] * max(rates["fp32"], rates["bf16"])
    return {
        "command": shlex.join(command),
        "seconds": round(seconds),
        "teraoperations": rounded(seconds * peak / 1e12),
        "machine": watch.read() | {"gflops": round(peak / 1e9)},
        "hardware": place,
        "date": datetime.now(UTC).date().isoformat(),
    }


def main(command: list[str]) -> None:
    if not command:
        sys.exit(__doc__)
    found = measured(command)
    if command == ["make", "demo"]:
        found["stages"] = stage_seconds(DEMO)
    path = TIMES / f"{'-'.join(command)}.json"
    before = json.loads(path.read_text()) if path.exists() else []
    others = [one for one in before if processor(one["hardware"]) != processor(found["hardware"])]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps([*others, found], indent=1, sort_keys=True) + "\n")
    print(f"{found['command']}: {found['seconds']} s, in which products of matrices take {found['teraoperations']:g} teraoperations")


if __name__ == "__main__":
    main(sys.argv[1:])
