"""Resources available to a process: physical cores, memory, instruction sets. Reads Linux's files, without libraries.

Each function takes the root of `proc` and `sys`, and uses whatever is readable, because containers hide much of it.
"""

import os
import platform
from collections.abc import Collection, Iterator
from pathlib import Path

from pedigree.configs.language.execution import Numerics

ROOT = Path("/")
GIB = 1 << 30
INSTRUCTION_SETS = (
    "avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16", "asimd", "sve", "sve2", "bf16", "svebf16",
)  # fmt: skip
"""Instruction sets that determine how libraries multiply matrices, and so round sums; Linux's names, x86 then aarch64."""
BF16_UNITS = ("avx512_bf16", "amx_bf16", "bf16", "svebf16")
"""Instruction sets that multiply bf16 in hardware, as in vLLM and in torch's capabilities."""
SLOW_ON_INTEL = "avx512_bf16"
"""Without AMX, Intel's multiplies bf16 more slowly than fp32: SFT takes 1.5 times as long (benchmarks/results/bf16-products.json)."""
ONEDNN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of either variable that keep oneDNN from using `BF16_UNITS`."""
LOW_MEMORY = 0.1
"""Free share of memory below which an unexplained kill may have been an out-of-memory kill."""


def cores(root: Path = ROOT, allowed: Collection[int] | None = None) -> int:
    """Physical cores available to this process, at least one, by its affinity and cgroup quotas.

    Hyper-threads share multipliers, so two of them count as one core. `allowed`: CPUs that it may use; by default from the kernel.
    """
    cpus = os.sched_getaffinity(0) if allowed is None else set(allowed)
    physical = len({_siblings(root, cpu) & cpus for cpu in cpus})
    quotas = [quota for folder in _groups(root) if (quota := _quota(folder)) is not None]
    return max(1, int(min([physical, *quotas])))


def memory(root: Path = ROOT) -> int | None:
    """Memory limit in bytes, of the machine or of the tightest cgroup; None if unknown."""
    limits = [number for folder in _groups(root) for name in ("memory.max", "memory.limit_in_bytes") if (number := _number(folder / name))]
    total = _meminfo(root, "MemTotal")
    return min([total, *limits]) if total else min(limits, default=None)


def free_memory_share(root: Path = ROOT) -> float:
    """Free share of the memory of the machine or of a cgroup, whichever is tightest; 1.0 if unknown."""
    total, available = _meminfo(root, "MemTotal"), _meminfo(root, "MemAvailable")
    shares = [1.0 if total is None or available is None else available / total]
    for folder in _groups(root):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit and used is not None:
            shares.append(1 - used / limit)
    return round(min(shares), 3)


def instruction_sets(root: Path = ROOT) -> tuple[str, ...]:
    """The processor's subset of `INSTRUCTION_SETS`."""
    flags = _cpuinfo(root, "flags", "Features").split()
    return tuple(known for known in INSTRUCTION_SETS if known in flags)


def cpu_name(root: Path = ROOT) -> str:
    """The processor's name; on Arm, which has no names, implementer and part numbers."""
    numbers = ", ".join(f"{name} {value}" for name in ("CPU implementer", "CPU part") if (value := _cpuinfo(root, name)))
    return _cpuinfo(root, "model name") or numbers or platform.processor()


def cpu_model(root: Path = ROOT) -> str | None:
    """Family, model and stepping of an x86 processor; None for others, whose names are specific."""
    fields = [(name, _cpuinfo(root, f"cpu {name}" if name == "family" else name)) for name in ("family", "model", "stepping")]
    return ", ".join(f"{name} {value}" for name, value in fields) if all(value for _, value in fields) else None


def has_gpu(root: Path = ROOT) -> bool:
    """Whether the kernel offers a GPU: NVIDIA's, AMD's, or that of WSL."""
    return any((root / "dev").glob("nvidia[0-9]*")) or any((root / "dev" / name).exists() for name in ("kfd", "dxg"))


def has_bf16_units(root: Path = ROOT) -> bool:
    """Whether the processor has units that multiply bf16 faster than fp32, and libraries may use them."""
    if any(os.environ.get(name, "").upper() in WITHOUT_BF16 for name in ONEDNN_LIMITS):
        return False
    units = {name for name in instruction_sets(root) if name in BF16_UNITS}
    return bool(units - {SLOW_ON_INTEL} if _cpuinfo(root, "vendor_id") == "GenuineIntel" else units)


def has_amx(root: Path = ROOT) -> bool:
    """Whether the processor has tiles for matrices (AMX)."""
    return "amx_tile" in instruction_sets(root)


def settled(numerics: Numerics) -> Numerics:
    """The numerics with machine-dependent settings resolved. GPUs always have bf16 units, whatever a profile sets for CPUs."""
    if numerics.bf16_products != "auto" and numerics.device == "cpu":
        return numerics
    units = numerics.device == "cuda" or has_bf16_units()
    return numerics.model_copy(update={"bf16_products": "units" if units else "fp32"})


def _siblings(root: Path, cpu: int) -> frozenset[int]:
    """The CPUs on the same physical core as this one."""
    listed = _lines(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        spans = [[int(end) for end in span.split("-")] for span in listed[0].split(",")]
    except (IndexError, ValueError):
        return frozenset({cpu})
    return frozenset({cpu}.union(*(range(span[0], span[-1] + 1) for span in spans)))


def _groups(root: Path) -> Iterator[Path]:
    """Folders of the process's cgroups (v1 and v2) and their ancestors, any of which may have a limit.

    In a container the path may be hidden, or a host path that is not mounted; the mount itself is then the container's cgroup.
    """
    mounted = root / "sys/fs/cgroup"
    yield from (mounted, *(mounted / controller for controller in ("cpu", "memory")))
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        mounts = [mounted / name for name in (controllers, *controllers.split(","))] if controllers else [mounted, mounted / "unified"]
        for mount in dict.fromkeys(mounts):
            folder = mount / path.strip().lstrip("/")
            yield from (place for place in (folder, *folder.parents) if place.is_relative_to(mount) and place.is_dir())


def _quota(folder: Path) -> float | None:
    """CPU quota of a cgroup in CPUs, or None."""
    limit, _, period = next(iter(_lines(folder / "cpu.max")), "max").partition(" ")
    numbers = (limit, period) if limit.isdigit() else [_first(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    if not all(number.isdigit() and int(number) for number in numbers):  # `max` or -1 means no limit
        return None
    return int(numbers[0]) / int(numbers[1])


def _meminfo(root: Path, name: str) -> int | None:
    """A field of `/proc/meminfo` in bytes."""
    found = next((line.split()[1] for line in _lines(root / "proc/meminfo") if line.startswith(f"{name}:")), "")
    return 1024 * int(found) if found.isdigit() else None


def _cpuinfo(root: Path, *names: str) -> str:
    """The first CPU's value of the first field with one of these names; empty if there is none."""
    fields = (line.partition(":") for line in _lines(root / "proc/cpuinfo"))
    return next((value.strip() for name, _, value in fields if name.strip() in names), "")


def _number(path: Path) -> int | None:
    found = _first(path)
    return int(found) if found.isdigit() else None


def _first(path: Path) -> str:
    return next(iter(_lines(path)), "").strip()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
