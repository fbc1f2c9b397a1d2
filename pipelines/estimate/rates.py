"""Matmul speed of a core of the current machine, measured once per machine in a separate process so that torch is not loaded here."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import Field

from pedigree.configs.base.frozen import Dtype, Frozen, digest
from pedigree.data.artifacts import provenance
from pedigree.data.artifacts.artifacts import write_text
from pedigree.data.artifacts.assets import cache_folder
from pedigree.data.host import machine
from pedigree.data.store.untrusted import read_as

MOST_S = 120.0
"""Timeout; the measurement itself takes two seconds, plus the time to load torch."""


class Rates(Frozen):
    """Rates of one core, per second."""

    fp32: float = Field(gt=0)
    """Matmul operations."""
    bf16: float = Field(gt=0)
    bandwidth: float = Field(gt=0)
    """Bytes read from memory."""

    def of(self, dtype: Dtype, bf16_products: str) -> float:
        """Matmul operations, with bf16 products computed by `units` or through `fp32`."""
        return self.bf16 if (dtype, bf16_products) == ("bf16", "units") else self.fp32


def known() -> Rates | None:
    """Cached rates of this machine; None if never measured."""
    path = _place()
    return read_as(Rates.model_validate, path) if path else None


def measured() -> Rates | None:
    """Cached rates, measured now if necessary; None if torch cannot be loaded."""
    path, found = _place(), known()
    if found is not None or path is None:
        return found
    paths = provenance.python_path(provenance.CODE_ROOT)
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pedigree.stages.training.product_rate"]
    try:
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=MOST_S)
        found = Rates.model_validate(json.loads(answer.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    with suppress(OSError):  # caching is optional
        write_text(path, found.model_dump_json() + "\n")
    return found


def _place() -> Path | None:
    """Cache file for the rates of this kind of machine; None if torch is not installed."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return None
    limits = [os.environ.get(name) for name in machine.ONEDNN_LIMITS]
    made_of = [machine.cpu_name(), machine.instruction_sets(), limits, torch]
    return cache_folder() / "product-rates" / f"{digest(made_of)[:16]}.json"
