"""What all tests share: no telemetry, no hub, one thread, an order, GPU tests only where there is a GPU."""

import atexit
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from unit_guard import unit_test
from waiting import deadline, slowness

os.environ |= {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "GIT_CONFIG_GLOBAL": os.devnull,  # the user's may sign commits, or have hooks
    "HF_HUB_OFFLINE": "1",
    "NO_PROXY": "127.0.0.1,localhost",
    "OMP_NUM_THREADS": "1",  # tensors are so small that threads only wait for each other; what tests start has settings of its own
    "PEDIGREE_PREFECT": "never",  # whoever runs the tests may have a server; `test_flow` starts its own
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "no_proxy": "127.0.0.1,localhost",
}
os.environ.pop("AWS_PROFILE", None)
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


UNIT = ("configs", "data", "stages/core", "stages/verifiers", "test_architecture.py", "test_docs.py")
"""Folders and files of unit tests; a file elsewhere joins them by `pytestmark = pytest.mark.unit`."""
PROCESSES = tuple(f"stages/verifiers/test_{name}.py" for name in ("extraction", "hostile_answers", "maths", "sandbox"))
"""Files in these folders that are no unit tests: algebra and programs are checked in processes of their own."""
NOT_UNIT = ("integration", "slow", "nightly", "gpu")


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def has_unit_tests(path: Path) -> bool:
    name, text = path.relative_to(ROOT / "tests").as_posix(), path.read_text()
    if name.startswith(UNIT):
        return name not in PROCESSES and "pytestmark = pytest.mark.integration\n" not in text
    return "pytestmark = pytest.mark.unit\n" in text


def pytest_configure(config: pytest.Config) -> None:
    slowness(getattr(config.option, "numprocesses", None) or 1)  # workers and the processes of tests inherit it


@pytest.fixture(autouse=True, scope="module")
def models_multiply_in_the_same_way_in_every_file() -> Iterator[None]:
    """A model that a test loads changes how this process multiplies bf16 matrices on a CPU without units for them."""
    yield
    if "pedigree.stages.training.products" in sys.modules:
        sys.modules["pedigree.stages.training.products"].through_fp32(False)


@pytest.fixture(autouse=True, scope="module")
def starved_verifiers_get_time() -> None:
    """Algebra has a time limit of seconds, and a program of a model ten times its processor time: no answer may count as wrong only
    because this machine is busy. Tests of these limits set their own."""
    limits = {"maths": {"SECONDS": deadline(60)}, "minerva": {"SECONDS": deadline(60)}, "sandbox": {"SLACK": 600, "STARTUP_SECONDS": 600}}
    for name, given in limits.items():
        if module := sys.modules.get(f"pedigree.stages.verifiers.{name}"):
            vars(module).update(given)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """To import all files would take longer than the unit tests run."""
    if config.option.markexpr == "unit" and collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        return not has_unit_tests(collection_path) or None
    return None


def left_out(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Nightly cases, unless all are asked for or they are named."""
    if os.environ.get("PEDIGREE_TEST_ALL") or any("::" in name for name in config.args):
        return []
    return [item for item in items if item.get_closest_marker("nightly")]


def mark_unit_tests(items: list[pytest.Item]) -> None:
    unit = {path for path in {item.path for item in items} if has_unit_tests(path)}
    for item in items:
        if item.path in unit and not any(item.get_closest_marker(name) for name in NOT_UNIT):
            item.add_marker("unit")


def allowed_time(item: pytest.Item) -> float:
    """In seconds, on a quiet machine."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0] if marker else item.config.getini("timeout"))


def longest_first(items: list[pytest.Item]) -> None:
    """A worker takes whole files: a long one at the end would leave the others without work. Long ones are those that may take longer
    than others, then those with the most slow cases."""
    slow, allowed = Counter(item.path for item in items if is_slow(item)), Counter[Path]()
    for item in items:
        allowed[item.path] = max(allowed[item.path], allowed_time(item))
    items.sort(key=lambda item: (slow[item.path] == 0, -allowed[item.path], -slow[item.path]))


@pytest.hookimpl(tryfirst=True)  # before `-m unit` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if left := left_out(config, items):
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]
    mark_unit_tests(items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        longest_first(items)
    else:
        items.sort(key=is_slow)
    for item in items:
        item.add_marker(pytest.mark.timeout(deadline(allowed_time(item))), append=False)
    if not Path("/dev/nvidia0").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def guarded(item: pytest.Item) -> AbstractContextManager[None]:
    return unit_test() if item.get_closest_marker("unit") else nullcontext()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    with guarded(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with guarded(item):
        return (yield)
