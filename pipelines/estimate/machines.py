"""Hardware of a profile, from the profile, a table of GPUs, or the current machine."""

import functools
import re
from dataclasses import dataclass, replace

from pedigree.configs.base.frozen import Dtype
from pedigree.configs.language.execution import GPUS, Gpu, Machine, Numerics
from pedigree.data.artifacts import provenance
from pedigree.data.host import machine as resources
from pedigree.data.host.machine import settled
from pedigree.pipelines.estimate.flops import CPU_UTILIZATION, speedup
from pedigree.pipelines.estimate.peak_memory import GIB
from pedigree.pipelines.estimate.rates import Rates

PATTERNS = {
    "a100": "a100-80gb", "h100.*pcie": "h100-pcie", "h100": "h100", "h200": "h200", "b200": "b200", "l40s": "l40s", "a10g": "a10g",
    "rtx ?4090": "rtx4090", r"\bl4\b": "l4",
}  # fmt: skip
"""Pattern in the driver's name of a GPU → its name in `GPUS`; the first that matches counts."""


@dataclass(frozen=True)
class Hardware:
    """One kind of machine; None where unknown."""

    device: str
    gpu_bytes: int | None = None
    peak: float | None = None
    """Operations per second of one GPU, or of the threads of one rank."""
    bandwidth: float | None = None
    """Memory bandwidth in bytes per second."""
    link: float | None = None
    """Bytes per second to another GPU of the node, in one direction."""
    gpus_per_node: int = 8
    host_bytes: int | None = None
    utilization: float = 0.3
    bandwidth_utilization: float = 0.5
    gpu: str | None = None
    """Its name in `GPUS`."""
    cpu: str | None = None
    cores: int | None = None

    @property
    def bytes_per_rank(self) -> int | None:
        return self.gpu_bytes if self.device == "cuda" else self.host_bytes

    def at(self, rates: Rates, dtype: Dtype, numerics: Numerics, ranks: int = 1) -> "Hardware":
        """This CPU with the speed of one rank's threads at these core rates; threads beyond the number of cores do not count."""
        times = speedup(max(1, min(numerics.threads, (self.cores or numerics.threads) // ranks)))
        return replace(self, peak=times * rates.of(dtype, settled(numerics).bf16_products), bandwidth=times * rates.bandwidth)


def hardware_of(device: str, machine: Machine) -> Hardware:
    """Hardware of a profile; the driver and kernel are queried only for what the profile does not specify."""
    host = int(machine.host_memory_gb * GIB) if machine.host_memory_gb else None
    if device == "cpu":
        cpu, cores = this_cpu()
        return Hardware(
            "cpu", gpus_per_node=1, host_bytes=host or this_memory(), cpu=cpu, cores=cores,
            utilization=machine.utilization if "utilization" in machine.model_fields_set else CPU_UTILIZATION,
            bandwidth_utilization=machine.bandwidth_utilization if "bandwidth_utilization" in machine.model_fields_set else 1.0,
        )  # fmt: skip
    name, table = machine.gpu, GPUS.get(machine.gpu or "")
    if not (machine.gpu or machine.gpu_memory_gb or machine.peak_tflops):
        name, table = this_gpu() or (None, None)
    memory = machine.gpu_memory_gb or (table.memory_gb if table else None)
    peak = machine.peak_tflops or (table.peak_tflops if table else None)
    bandwidth = machine.bandwidth_gbs or (table.bandwidth_gbs if table else None)
    return Hardware(
        "cuda",
        gpu_bytes=int(memory * GIB) if memory else None,
        peak=peak * 1e12 if peak else None,
        bandwidth=bandwidth * 1e9 if bandwidth else None,
        link=table.link_gbs * 1e9 if table and table.link_gbs else None,
        gpus_per_node=machine.gpus_per_node,
        host_bytes=host,
        utilization=machine.utilization,
        bandwidth_utilization=machine.bandwidth_utilization,
        gpu=name,
    )


def gpu_named(line: str) -> tuple[str | None, Gpu | None]:
    """Look up a GPU by a line of driver output (`NVIDIA H100 80GB HBM3, 81559 MiB, 550.54`), with the reported memory."""
    name = line.partition(",")[0].lower()
    memory = re.search(r"(\d+) MiB", line)
    gib = int(memory[1]) / 1024 if memory else None
    key = next((known for pattern, known in PATTERNS.items() if re.search(pattern, name)), None)
    if key == "a100-80gb" and gib and gib < 60:
        key = "a100-40gb"
    table = GPUS.get(key or "")
    if table is None:
        return None, Gpu(gib, 0, 0, 0) if gib else None
    return key, table._replace(memory_gb=gib or table.memory_gb)


@functools.cache
def this_gpu() -> tuple[str | None, Gpu] | None:
    """The GPU of the current machine; None if it has none."""
    lines = provenance.gpus()
    name, table = gpu_named(lines[0]) if lines else (None, None)
    return (name, table) if table else None


@functools.cache
def this_cpu() -> tuple[str | None, int]:
    """(CPU name, physical cores) of the current machine, as recorded by jobs."""
    return resources.cpu_name(), resources.cores()


@functools.cache
def this_memory() -> int | None:
    return resources.memory()
