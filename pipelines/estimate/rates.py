"""How fast a core of the machine that plans multiplies matrices. A process of its own measures it once for all clones of the machine, as
nothing here loads torch."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import Field, ValidationError

from configs.base.frozen import Dtype, Frozen, digest
from data.artifacts import provenance
from data.artifacts.artifacts import write_text
from data.artifacts.assets import cache_folder
from data.host import machine
from data.store.untrusted import ArtifactError, read_json

MOST_S = 120.0
"""The measurement takes two seconds, and loading torch some more."""


class Rates(Frozen):
    """Of one core, a second."""

    fp32: float = Field(gt=0)
    """Operations in products of matrices."""
    bf16: float = Field(gt=0)
    bandwidth: float = Field(gt=0)
    """Bytes that are read from memory."""

    def of(self, dtype: Dtype, bf16_products: str) -> float:
        """Operations, with products of bf16 computed by `units` or through `fp32`."""
        return self.bf16 if (dtype, bf16_products) == ("bf16", "units") else self.fp32


def known() -> Rates | None:
    """As they were measured on this machine; None where they never were."""
    path = _place()
    try:
        return Rates.model_validate(read_json(path)) if path else None
    except (ArtifactError, ValidationError, OSError):
        return None


def measured() -> Rates | None:
    """The same, measured now where they never were; None where torch cannot be loaded."""
    path, found = _place(), known()
    if found is not None or path is None:
        return found
    paths = os.pathsep.join([str(provenance.CODE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "stages.training.product_rate"]
    try:
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=MOST_S)
        found = Rates.model_validate(json.loads(answer.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    with suppress(OSError):  # a plan needs no cache
        write_text(path, found.model_dump_json() + "\n")
    return found


def _place() -> Path | None:
    """Where the rates of such a machine lie; None where torch is not installed."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return None
    limits = [os.environ.get(name) for name in machine.ONEDNN_LIMITS]
    made_of = [provenance.cpu_name(), machine.instruction_sets(), limits, torch]
    return cache_folder() / "product-rates" / f"{digest(made_of)[:16]}.json"
