"""What a process may use of its machine: physical cores, memory, instruction sets. Linux's files are read, no library is loaded.

Each function takes the folder below which `proc` and `sys` are, and goes by what it can read: containers hide much of it.
"""

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from configs.language.execution import Numerics

ROOT = Path("/")
GIB = 1 << 30
INSTRUCTION_SETS = (
    "avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16", "asimd", "sve", "sve2", "bf16", "svebf16",
)  # fmt: skip
"""Those by which libraries choose how they multiply matrices, and so how sums are rounded; x86, then aarch64, as Linux names them."""
BF16_UNITS = ("avx512_bf16", "amx_bf16", "bf16", "svebf16")
"""Those that multiply bf16 in hardware, the ones that vLLM and torch's list of capabilities go by."""
ONEDNN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
"""What either variable may limit oneDNN to, so that it leaves those alone."""


def cores(root: Path = ROOT, allowed: Collection[int] | None = None) -> int:
    """Physical cores that this process can keep busy, at least one: of its affinity, no more than the quota of its control groups.

    Two hyper-threads share the units that multiply, so they count as one core.

    Args:
        root: below it are `proc` and `sys`.
        allowed: numbers of the CPUs that the process may run on; asked of the kernel where None.
    """
    cpus = os.sched_getaffinity(0) if allowed is None else set(allowed)
    physical = len({_siblings(root, cpu) & cpus for cpu in cpus})
    quotas = [quota for folder in _groups(root) if (quota := _quota(folder)) is not None]
    return max(1, int(min([physical, *quotas])))


def memory(root: Path = ROOT) -> int | None:
    """Bytes of the machine, or of the tightest of the process's control groups; None where nothing tells."""
    limits = [number for folder in _groups(root) for name in ("memory.max", "memory.limit_in_bytes") if (number := _number(folder / name))]
    total = _meminfo(root)
    return min([total, *limits]) if total else min(limits, default=None)


def instruction_sets(root: Path = ROOT) -> tuple[str, ...]:
    """Those of `INSTRUCTION_SETS` that the processor has."""
    for line in _lines(root / "proc/cpuinfo"):
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return tuple(known for known in INSTRUCTION_SETS if known in flags.split())
    return ()


def has_bf16_units(root: Path = ROOT) -> bool:
    """Whether the processor multiplies bf16 itself, and libraries may use that."""
    limited = any(os.environ.get(name, "").upper() in WITHOUT_BF16 for name in ONEDNN_LIMITS)
    return not limited and not set(BF16_UNITS).isdisjoint(instruction_sets(root))


def settled(numerics: Numerics) -> Numerics:
    """The numerics with what they leave to the machine that computes. GPUs have units for bf16, whatever a profile says of CPUs."""
    if numerics.bf16_products != "auto" and numerics.device == "cpu":
        return numerics
    units = numerics.device == "cuda" or has_bf16_units()
    return numerics.model_copy(update={"bf16_products": "units" if units else "fp32"})


def _siblings(root: Path, cpu: int) -> frozenset[int]:
    """The CPUs that are one physical core with this one."""
    listed = _lines(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        spans = [[int(end) for end in span.split("-")] for span in listed[0].split(",")]
    except (IndexError, ValueError):
        return frozenset({cpu})
    return frozenset({cpu}.union(*(range(span[0], span[-1] + 1) for span in spans)))


def _groups(root: Path) -> Iterator[Path]:
    """The folders of the process's control groups, of versions 1 and 2, with all that they are in: any of them may have a limit.

    In a container the path may be that of the host, of which nothing is mounted, or hidden; the mount itself is the container's group then.
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
    """CPUs' worth of time that a control group may take, or None."""
    limit, _, period = next(iter(_lines(folder / "cpu.max")), "max").partition(" ")
    numbers = (limit, period) if limit.isdigit() else [_first(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    if not all(number.isdigit() and int(number) for number in numbers):  # `max`, or -1: no limit
        return None
    return int(numbers[0]) / int(numbers[1])


def _meminfo(root: Path) -> int | None:
    total = next((line.split()[1] for line in _lines(root / "proc/meminfo") if line.startswith("MemTotal:")), "")
    return 1024 * int(total) if total.isdigit() else None


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
