"""What all tests share: no telemetry, no hub, one thread, an order, GPU tests only where there is a GPU."""

import atexit
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import slowness

os.environ |= {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # tensors are so small that threads only wait for each other; what tests start has settings of its own
    "PEDIGREE_PREFECT": "never",  # whoever runs the tests may have a server; `test_flow` starts its own
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "VLLM_NO_USAGE_STATS": "1",
}
# What tests start holds slots of its own: neither other tests nor real runs of this machine wait for it.
os.environ["PEDIGREE_SLOTS"] = tempfile.mkdtemp(prefix="pedigree-test-slots-")
atexit.register(shutil.rmtree, os.environ["PEDIGREE_SLOTS"], ignore_errors=True)
ROOT = Path(__file__).resolve().parents[1]
# A shell starts what runs in its background with Ctrl-C ignored, and all our children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under `nohup`; what has a handler is not handed down
    signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(autouse=True)
def no_test_leaves_anything_behind() -> Iterator[None]:
    """Trainers in this process put into the environment what torchrun would, and an engine that nothing be compiled: jobs of later
    tests would take themselves for ranks, and compile nothing. Those of a fixture that several tests share have done so before."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


LONGEST = [
    "test_chain", "test_rehearsals", "test_training", "test_rlvr", "test_mirroring", "test_flow", "test_policy_update", "test_reproduce",
    "test_two_machines", "test_moved", "test_interrupted_jobs", "test_running", "test_changes_under_a_run", "test_lease", "test_attempts",
]  # fmt: skip
"""Files that take minutes, the longest first."""


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def pytest_configure() -> None:
    slowness()  # workers and the processes of tests inherit it


def left_out(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Nightly cases, unless all are asked for or they are named."""
    if os.environ.get("PEDIGREE_TEST_ALL") or any("::" in name for name in config.args):
        return []
    return [item for item in items if item.get_closest_marker("nightly")]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if left := left_out(config, items):
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]
    if "PYTEST_XDIST_WORKER" in os.environ:  # a file is one worker's: a long one at the end would leave the others without work
        slow = Counter(item.path.stem for item in items if is_slow(item))
        order = LONGEST + [name for name, _ in slow.most_common()]
        items.sort(key=lambda item: order.index(item.path.stem) if item.path.stem in order else len(order))
    else:
        items.sort(key=is_slow)
    if not Path("/dev/nvidia0").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
