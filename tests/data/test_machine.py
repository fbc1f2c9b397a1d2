"""Cores, memory and instruction sets that a process may use, from folders made as Linux has them."""

import json
from pathlib import Path

import pytest

from pedigree.data.artifacts import provenance
from pedigree.data.artifacts.run_record import Hardware
from pedigree.data.host import machine

GIB = machine.GIB


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def topology(pairs: dict[int, str]) -> dict[str, str]:
    return {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": siblings for cpu, siblings in pairs.items()}


SMT = topology({0: "0,4", 1: "1,5", 2: "2,6", 3: "3,7", 4: "0,4", 5: "1,5", 6: "2,6", 7: "3,7"})
ADJACENT = topology({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"})
V1 = "5:memory:/pod/it\n4:cpu,cpuacct:/pod/it\n0::/"
CPU, MEMORY = "sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "allowed", "expected"),
    [
        (SMT, range(8), 4),  # two hyper-threads are one core
        (ADJACENT, range(4), 2),
        (SMT, [0, 4], 1),
        (SMT, [0, 1, 6], 3),  # whose siblings belong to others
        ({}, range(6), 6),  # a container without /sys
        (topology({0: "what", 1: ""}), range(2), 2),
    ],
)
def test_cores_are_physical_ones_of_the_affinity(tmp_path, files, allowed, expected):
    assert machine.cores(write(tmp_path, files), allowed) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "300000 100000"}, 3),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 4),
        # what is above it bounds, too
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "250000 100000"}, 2),
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "20000 100000"}, 1),  # below one core
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "6400000 100000"}, 4),  # more than there are
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "200000 0"}, 4),
        # the host's path, of which a container sees its own group alone
        ({"proc/self/cgroup": "0::/kubepods/pod7/x", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
        ({"sys/fs/cgroup/cpu.max": "200000 100000"}, 2),  # where the process cannot see its groups
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/unified/a/cpu.max": "200000 100000"}, 2),
        ({"proc/self/cgroup": V1, f"{CPU}/pod/it/cpu.cfs_quota_us": "200000", f"{CPU}/pod/it/cpu.cfs_period_us": "100000"}, 2),
        ({"proc/self/cgroup": V1, f"{CPU}/pod/cpu.cfs_quota_us": "350000", f"{CPU}/pod/cpu.cfs_period_us": "100000",
          f"{CPU}/pod/it/cpu.cfs_quota_us": "-1", f"{CPU}/pod/it/cpu.cfs_period_us": "100000"}, 3),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/x", "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "100000",
          "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000"}, 1),
    ],
)  # fmt: skip
def test_a_quota_bounds_the_cores(tmp_path, files, expected):
    assert machine.cores(write(tmp_path, SMT | files), range(8)) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/meminfo": "MemTotal:       16000000 kB\nMemFree: 1 kB"}, 16_000_000 * 1024),
        ({"proc/meminfo": "MemTotal:       16000000 kB", "proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/memory.max": "max"},
         16_000_000 * 1024),
        ({"proc/meminfo": "MemTotal:       16000000 kB", "proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/memory.max": str(4 * GIB)},
         4 * GIB),
        ({"proc/meminfo": "MemTotal:       16000000 kB", "proc/self/cgroup": V1,
          f"{MEMORY}/pod/it/memory.limit_in_bytes": str(2 * GIB), f"{MEMORY}/memory.limit_in_bytes": "9223372036854771712"}, 2 * GIB),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": str(3 * GIB)}, 3 * GIB),
        ({"proc/meminfo": "MemTotal:       16000000 kB", "sys/fs/cgroup/memory.max": str(3 * GIB)}, 3 * GIB),
        ({"proc/meminfo": "MemTotal:       16000000 kB", "sys/fs/cgroup/memory/memory.limit_in_bytes": str(3 * GIB)}, 3 * GIB),
        ({}, None),
    ],
)  # fmt: skip
def test_memory_is_the_least_of_machine_and_control_groups(tmp_path, files, expected):
    assert machine.memory(write(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1.0),
        ({"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 250 kB"}, 0.25),
        ({"proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 250 kB", "sys/fs/cgroup/memory.max": "4000",
          "sys/fs/cgroup/memory.current": "3600"}, 0.1),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/b/memory.current": "10",
          "sys/fs/cgroup/a/memory.max": "4000", "sys/fs/cgroup/a/memory.current": "3900"}, 0.025),  # the limit above it is the tight one
    ],
)  # fmt: skip
def test_the_free_share_of_memory_is_that_of_the_tightest_limit(tmp_path, files, expected):
    assert machine.free_memory_share(write(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("cpuinfo", "expected", "units"),
    [
        ("flags\t\t: fpu sse2 avx2 fma bmi2\nbugs\t: x", ("avx2", "fma"), False),
        ("processor : 0\nflags : avx512f amx_bf16 amx_tile avx2 avx512_bf16",
         ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"), True),
        ("vendor_id\t: GenuineIntel\nflags\t\t: avx2 avx512_bf16 amx_bf16", ("avx2", "avx512_bf16", "amx_bf16"), True),
        ("vendor_id\t: GenuineIntel\nflags\t\t: avx2 avx512_bf16", ("avx2", "avx512_bf16"), False),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: avx2 avx512_bf16", ("avx2", "avx512_bf16"), True),
        ("Features\t: fp asimd i8mm bf16", ("asimd", "bf16"), True),
        ("", (), False),
    ],
)  # fmt: skip
def test_instruction_sets_that_decide_how_matrices_are_multiplied(tmp_path, cpuinfo, expected, units):
    write(tmp_path, {"proc/cpuinfo": cpuinfo})
    assert machine.instruction_sets(tmp_path) == expected and machine.has_bf16_units(tmp_path) == units


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nmodel name\t: A processor @ 2.0GHz\nmodel name\t: another", "A processor @ 2.0GHz"),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd0c", "CPU implementer 0x41, CPU part 0xd0c"),
    ],
)
def test_processors_of_different_models_have_different_names(tmp_path, cpuinfo, name):
    assert machine.cpu_name(write(tmp_path, {"proc/cpuinfo": cpuinfo})) == name


def test_a_record_of_the_machine_names_its_instruction_sets_and_can_be_read():
    found = Hardware.model_validate_json(json.dumps(provenance.hardware()))
    assert found.instruction_sets == machine.instruction_sets() and found.cores == machine.cores()
    assert found.cpu_model == machine.cpu_model() and found.kernel_settings is not None


def test_settings_that_limit_kernels_are_recorded_unless_they_are_no_settings(monkeypatch):
    for name in provenance.KERNEL_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("MKL_CBWR", "AVX2\n/home/someone")
    assert provenance.hardware.__wrapped__()["kernel_settings"] == {"ONEDNN_MAX_CPU_ISA": "AVX2"}


def test_processors_of_one_name_have_different_models(tmp_path):
    cpuinfo = "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: {}\nmodel name\t: AMD EPYC\nstepping\t: 1\n"
    for model in (1, 17):
        assert (
            machine.cpu_model(write(tmp_path / str(model), {"proc/cpuinfo": cpuinfo.format(model)}))
            == f"family 25, model {model}, stepping 1"
        )
    assert machine.cpu_model(write(tmp_path / "arm", {"proc/cpuinfo": "CPU implementer\t: 0x41"})) is None


def test_this_machine_has_cores_and_memory():
    found = machine.memory()
    assert machine.cores() >= 1 and found is not None and found > GIB // 4


def test_bf16_units_that_onednn_may_not_use_count_for_nothing(tmp_path, monkeypatch):
    root = write(tmp_path, {"proc/cpuinfo": "flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16"})
    assert machine.has_bf16_units(root)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx512_core")
    assert not machine.has_bf16_units(root)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX")
    assert machine.has_bf16_units(root)
